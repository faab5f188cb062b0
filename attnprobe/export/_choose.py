"""Which case on which backend an export is about."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from msgspec import Struct

from attnprobe.errors import UsageError
from attnprobe.matrix.schema import Backend, DeviceRecord, Result, Run

if TYPE_CHECKING:
    from collections.abc import Iterable

    from attnprobe.config import Case
    from attnprobe.matrix.schema import Matrix

_SHOWN: Final = 8


class Subject(Struct, frozen=True, kw_only=True):
    """One case on one backend, with what the matrix knows of it. `right`: backends that pass it."""

    case: Case
    backend: Backend
    result: Result
    run: Run
    device: DeviceRecord
    right: tuple[str, ...]
    generator: str


def choose(matrix: Matrix, asked: str, backend: str | None, *, anything: bool) -> Subject:
    """Return what an id (of a case or of a rule, or the beginning of one) and a backend name.

    Raises:
        UsageError: nothing or several things begin like that, no such backend, a case that did not run
            on it or did not fail (unless `anything`), or several backends that did.
    """
    named = {b.name for b in matrix.backends}
    if backend is not None and backend not in named:
        raise UsageError(f"{backend} is not in this matrix", why=f"it has {', '.join(sorted(named))}")
    found = _identify(matrix, asked)
    witnesses = {b.name: r.witness for b in matrix.backends for r in b.rules if r.id == found}
    results = [
        (b, r)
        for b in matrix.backends
        for r in b.cases
        if r.id == (witnesses.get(b.name) if witnesses else found)
    ]
    chosen, result = _one(asked, results, backend, anything=anything)
    case = matrix.case(result.id)
    assert case is not None
    run = matrix.runs[result.run]
    return Subject(
        case=case,
        backend=chosen,
        result=result,
        run=run,
        device=matrix.devices[run.device],
        right=tuple(
            b.name for b in matrix.backends for r in b.cases if r.id == result.id and r.verdict == "ok"
        ),
        generator=f"{matrix.generator.name} {matrix.generator.version}",
    )


def _identify(matrix: Matrix, asked: str) -> str:
    """Return the one id of a case or a rule that is `asked` or begins with it."""
    known = {record.id for record in matrix.cases} | {r.id for b in matrix.backends for r in b.rules}
    if asked in known:
        return asked
    found = sorted(one for one in known if asked and one.startswith(asked))
    if not found:
        raise UsageError(
            f"no case and no rule {asked!r} in this matrix", fix="`attnprobe show MATRIX` prints case ids"
        )
    if len(found) > 1:
        raise UsageError(f"{asked!r} begins {len(found)} ids", why=_some(found), fix="write more digits")
    return found[0]


def _one(
    asked: str, results: list[tuple[Backend, Result]], backend: str | None, *, anything: bool
) -> tuple[Backend, Result]:
    """Return the one result that is meant."""
    if backend is not None:
        mine = [(b, r) for b, r in results if b.name == backend]
        if not mine:
            ran = _some(b.name for b, _ in results)
            raise UsageError(f"{asked} did not run on {backend}", why=f"it ran on {ran}")
        results = mine
    failing = [(b, r) for b, r in results if r.verdict.fails]
    if not failing and not anything:
        became = _some(f"{b.name}: {r.verdict.value}" for b, r in results)
        raise UsageError(
            f"{asked} did not fail", why=became, fix="--any writes a script all the same; name a --backend"
        )
    candidates = failing or results
    if len(candidates) > 1:
        names = _some(b.name for b, _ in candidates)
        what = "failed on" if failing else "ran on"
        raise UsageError(f"{asked} {what} {len(candidates)} backends", why=names, fix="choose by --backend")
    return candidates[0]


def _some(names: Iterable[str]) -> str:
    every = list(names)
    rest = f" and {len(every) - _SHOWN} more" if len(every) > _SHOWN else ""
    return ", ".join(every[:_SHOWN]) + rest
