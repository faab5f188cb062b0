"""A user's own callable, named FILE.py:NAME or package.module:NAME, as a matrix knows it."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Final

from attnprobe.matrix.schema import Material

FILE: Final = "file"
"""The material that the file of a callable is."""


def backend_name(spec: str) -> str:
    """Return the name that a matrix gives a backend: a FILE.py:NAME without its directory and suffix."""
    place, colon, name = spec.rpartition(":")
    return f"{Path(place).stem}:{name}" if colon and place.endswith(".py") else spec


def file_material(path: Path) -> Material:
    """Return a file as a material: its name, and a digest of its content. Raises OSError."""
    digest = hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    return Material(name=FILE, version=path.name, digest=digest)
