"""An installed distribution as a material."""

from __future__ import annotations

import functools
import hashlib
from importlib import metadata

from attnprobe.matrix.schema import Material


@functools.lru_cache(maxsize=64)
def installed(name: str) -> Material | None:
    """Return the distribution of that name as installed here, or None.

    The digest is over the distribution's RECORD of its own code: the hash of every file in it, so two
    builds of one version differ. Compiled Python files are left out, as they come and go.
    """
    try:
        distribution = metadata.distribution(name)
    except metadata.PackageNotFoundError:
        return None
    record = distribution.read_text("RECORD") or ""
    lines = sorted(
        line
        for line in record.splitlines()
        if not line.partition(",")[0].endswith((".pyc", "INSTALLER", "REQUESTED", "direct_url.json"))
        and not line.startswith("..")
    )
    digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16] if lines else ""
    return Material(name=name, version=distribution.version, digest=digest)
