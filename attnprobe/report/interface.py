"""What a format is, and how one is found by name: a module of this package that holds a `format_`."""

from __future__ import annotations

import functools
import importlib
import pkgutil
from typing import TYPE_CHECKING, Protocol

from attnprobe.errors import UsageError

if TYPE_CHECKING:
    from attnprobe.matrix.schema import Matrix


class Format(Protocol):
    """One way to print a matrix."""

    name: str

    def file(self, matrix: Matrix) -> bytes:
        """Return what `-o NAME:FILE` writes."""

    def text(self, matrix: Matrix, *, width: int, color: bool) -> str:
        """Return what standard output gets."""


@functools.lru_cache(maxsize=1)
def formats() -> dict[str, Format]:
    """Return all formats by name."""
    package = importlib.import_module("attnprobe.report")
    found = {}
    for module in pkgutil.iter_modules(package.__path__):
        one = getattr(importlib.import_module(f"attnprobe.report.{module.name}"), "format_", None)
        if one is not None:
            found[one.name] = one
    return dict(sorted(found.items()))


def format_named(name: str) -> Format:
    """Return a format by name, or raise UsageError with the names there are."""
    known = formats()
    if name not in known:
        raise UsageError(f"no format {name!r}", why=f"known are {', '.join(known)}")
    return known[name]
