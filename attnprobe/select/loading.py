"""Find the matrix for this machine, read it once, and check it.

The digest protects the document as a whole: a file of which anything was changed, added or taken away is
refused. What the digest covers is every field that this version knows.
"""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Final

from attnprobe.device.interface import Device
from attnprobe.errors import NoVerdictError
from attnprobe.matrix.store import data_directory, read_matrix
from attnprobe.select import advisories
from attnprobe.select.match import Live, assume, compare, here
from attnprobe.select.selector import Selector

LEVELS: Final = ("full", "standard", "quick", "config")
"""Levels of a scan from the widest on; a matrix file is named DEVICE.LEVEL.json, or DEVICE.BUILD.LEVEL.json
where there are several for one device."""


def load(  # noqa: PLR0913  # what a job may want to say of its machine, one each
    path: str | os.PathLike[str] | None = None,
    *,
    assume_device: bool = False,
    tolerate: Collection[str] = (),
    veto_expired: bool = True,
    live: Live | None = None,
    known: Collection[advisories.Advisory] | None = None,
) -> Selector:
    """Return the selector of a matrix file, compared with this machine.

    Without a path: `ATTNPROBE_MATRIX`, else the file for this device in the user's data directory, else the
    published one. `assume_device` answers as if on the machine of the matrix. Differences in `tolerate`d
    materials (such as "driver") do not expire anything. What was denied on another device or build stays
    denied; with `veto_expired` False it is only reported, as `unknown`. `known` are the advisories, by
    default those that come with attnprobe.

    All ranks of a job that loaded the same document have the same `Selector.digest`.

    Raises:
        NoVerdictError: there is no matrix for this machine.
        MatrixError: the file cannot be read, or was changed after it was written.
    """
    machine = live or here()
    file = find(machine) if path is None else Path(path)
    with _without_collector():
        matrix = read_matrix(file)
        match = assume(matrix) if assume_device else compare(matrix, machine, tolerate)
        return Selector(
            matrix,
            match,
            devices=matrix.devices if assume_device else (*machine.devices, *matrix.devices),
            installed=None if assume_device else machine.material,
            advisories=advisories.read() if known is None else tuple(known),
            source=str(file),
            veto_expired=veto_expired,
        )


@contextlib.contextmanager
def _without_collector() -> Iterator[None]:
    """Keep the garbage collector from walking a document that is being built; nothing of it is garbage."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def find(live: Live) -> Path:
    """Return the file that `load` reads.

    Raises:
        NoVerdictError: there is none for any device of this machine.
    """
    named = os.environ.get("ATTNPROBE_MATRIX")
    if named:
        return Path(named)
    places = (data_directory(), published())
    slugs = [Device(record, record.kind).slug for record in live.devices]
    for slug in slugs:
        for place in places:
            for level in LEVELS:
                files = [place / f"{slug}.{level}.json", *sorted(place.glob(f"{slug}.*.{level}.json"))]
                files = [file for file in files if file.is_file()]
                if len(files) > 1:
                    files = [file for file in files if _fits(file, live)] or files
                if files:
                    return files[0]
    raise NoVerdictError(
        f"there is no matrix for {' or '.join(record.name for record in live.devices) or 'this machine'}",
        why=f"neither in {places[0]} nor among the published ones",
        fix="attnprobe scan, or name a file: -m FILE, ATTNPROBE_MATRIX",
    )


def _fits(file: Path, live: Live) -> bool:
    """Whether something that was measured in a file counts with the builds that are here."""
    match = compare(matrix := read_matrix(file), live)
    return any(b.status == "probed" and not match.expired(b.name) for b in matrix.backends)


def published() -> Path:
    """Return the directory of published matrices: inside the package, or of the checkout it runs from."""
    package = Path(__file__).parents[1]
    inside = package / "_matrices"
    return inside if inside.is_dir() else package.parent / "matrices"
