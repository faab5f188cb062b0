"""What is known of a request to ensure: by which matrix, what is open, and where what was found goes."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from msgspec import Struct, structs

from attnprobe.config import AttentionConfig, canonical
from attnprobe.device.cpu import cpu_device
from attnprobe.errors import MatrixError, NoVerdictError, UsageError
from attnprobe.materials.source import FILE, file_material
from attnprobe.matrix.merge import merged
from attnprobe.matrix.schema import Backend, Material, Matrix
from attnprobe.matrix.store import data_directory, encode, read_matrix, write_atomically
from attnprobe.select import advisories
from attnprobe.select.explain import Candidate
from attnprobe.select.loading import find
from attnprobe.select.match import Live, MaterialOf, compare, here, material_difference
from attnprobe.select.selector import Selector

_SHOWN: Final = 3
"""Most open questions that are named."""


class Request(Struct, frozen=True):
    """What was asked for. `specs` are backends as the user names them, under the names that a matrix has."""

    configs: tuple[AttentionConfig, ...]
    specs: dict[str, str]
    time_limit: float
    wait_limit: float

    @property
    def digest(self) -> str:
        """Return what tells this request from another."""
        return hashlib.sha256(canonical([self.configs, self.specs])).hexdigest()


def known_to(request: Request) -> Selector | None:
    """Return the selector that leaves least open: of the file that `load` reads, or of what was ensured."""
    files = []
    with contextlib.suppress(NoVerdictError):
        files.append(find(here()))
    if own_file().is_file() and own_file() not in files:
        files.append(own_file())
    read = [(read_matrix(file), str(file)) for file in files]
    if has_gpu():
        # What was right on the CPU says nothing of a kernel for a GPU under the same name.
        read = [(m, source) for m, source in read if any(d.kind == "cuda" for d in m.devices)]
    found = [selector_of(matrix, source, request) for matrix, source in read]
    return min(found, key=lambda one: len(missing_from(one, request)), default=None)


def has_gpu() -> bool:
    """Whether the driver shows a GPU, which no scan runs on yet."""
    return any(device.kind == "cuda" for device in here().devices)


def selector_of(matrix: Matrix, source: str, request: Request) -> Selector:
    """Return the selector of a matrix; a callable that was asked for is here if its file is unchanged."""
    machine = here()
    match = compare(matrix, machine)
    files = {name: _file(spec) for name, spec in request.specs.items()}
    here_too = [
        backend.name
        for backend in matrix.backends
        if backend.name in match.materials
        and files.get(backend.name) is not None
        and not material_difference(backend, _with_file(machine, files[backend.name]))
    ]
    materials = {name: said for name, said in match.materials.items() if name not in here_too}
    return Selector(
        matrix,
        structs.replace(match, materials=materials),
        devices=(*machine.devices, *matrix.devices),
        installed=machine.material,
        advisories=advisories.read(),
        source=source,
    )


def _with_file(machine: Live, file: Material | None) -> MaterialOf:
    return lambda name: file if name == FILE else machine.material(name)


def missing_from(known: Selector | None, request: Request) -> list[tuple[int, Candidate]]:
    """Return what is neither proven nor denied: the number of the configuration, and the candidate."""
    if known is None:
        nothing = Candidate(backend="", status="unknown", reason="there is no matrix")
        return [(number, nothing) for number in range(len(request.configs))]
    # What is not installed any more, or a callable that was not named, cannot be probed.
    lost = {b.name for b in known.matrix.backends if b.name not in request.specs and _is_gone(b)}
    found = []
    for number, config in enumerate(request.configs):
        for one in known.select(config, backends=tuple(request.specs) or None).candidates:
            is_open = one.status in {"unknown", "unrefuted"} or one.expired
            if is_open and not one.absent and one.backend not in lost:
                found.append((number, one))
    return found


def _is_gone(backend: Backend) -> bool:
    material = here().material
    return ":" in backend.name or any(material(one.name) is None for one in backend.materials)


def still_open(left: Sequence[tuple[int, Candidate]]) -> str:
    """Return what is not known after probing, in words."""
    said = list(dict.fromkeys(f"{one.backend}: {one.reason}" for _, one in left))
    more = f" and {len(said) - _SHOWN} more" if len(said) > _SHOWN else ""
    return f"probed, and still not known: {'; '.join(said[:_SHOWN])}{more}"


def _file(spec: str) -> Material | None:
    """Return the file of a callable as a scan records it; None where the backend is no file."""
    path = Path(spec.rpartition(":")[0])
    try:
        return file_material(path) if path.suffix == ".py" else None
    except OSError:
        return None


def slug() -> str:
    """Return the name that files of the device have which is probed."""
    return cpu_device().slug


def own_file() -> Path:
    """Return the file for what no other matrix of the user can take."""
    return data_directory() / f"{slug()}.config.json"


def stored(known: Selector | None, fresh: Matrix, request: Request) -> tuple[Selector, str]:
    """Add to the user's matrix; return its selector, and why it could not be written."""
    if known is not None and _observed(fresh) <= _observed(known.matrix):
        return known, ""  # what stays unknown at every start must not grow the file at every start
    path, union = _united(known, fresh)
    try:
        write_atomically(path, encode(union))
    except UsageError as error:
        return selector_of(union, "", request), f"{error.what}: {error.why}"
    return selector_of(union, str(path), request), ""


def _observed(matrix: Matrix) -> set[bytes]:
    """Return what a matrix says of its backends, whichever run it is from."""
    heads = [structs.replace(backend, cases=(), rules=(), traits={}) for backend in matrix.backends]
    return {canonical(head) for head in heads} | {
        canonical([head, structs.replace(result, run=0)])
        for head, backend in zip(heads, matrix.backends, strict=True)
        for result in backend.cases
    }


def _united(known: Selector | None, fresh: Matrix) -> tuple[Path, Matrix]:
    """Return the file that takes what was found, and its new content.

    That is the file that `load` reads, if it is the user's own and of these builds; else one for what was
    ensured, which begins with what `load` reads, so that it does not stand before more than it holds.
    """
    found = ("the probe", fresh)
    path = own = own_file()
    parts = []
    if known is not None:
        parts.append((known.source, known.matrix))
        if Path(known.source).resolve().parent == data_directory().resolve():
            path = Path(known.source)
    if path == own and own.is_file():
        parts.append((str(own), read_matrix(own)))
    with contextlib.suppress(MatrixError):
        return path, merged([*parts, found])
    with contextlib.suppress(MatrixError):
        builds = {backend.name: backend.materials for backend in fresh.backends}
        mine = read_matrix(own)
        kept = [b for b in mine.backends if builds.get(b.name, b.materials) == b.materials]
        return own, merged([(str(own), structs.replace(mine, backends=tuple(kept))), found])
    return own, merged([found])
