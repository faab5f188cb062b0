"""The document `attnprobe.matrix/1`, as structs.

The file keeps each case once, in `cases`, and per backend only what happened to it; a verdict `ok`
measured in the first run is just the case's id. `expanded()` gives the shape for other programs, the one
that `attnprobe show --format json` prints: every backend's cases whole, with their levels. Both shapes are
the same document with the same digest, and both can be read.

Unknown fields are ignored on read: a reader that ignores a field may only become more cautious.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any, Final, Literal

import msgspec
from msgspec import Struct, structs

from attnprobe.axes import Level, levels_of
from attnprobe.config import Case, canonical
from attnprobe.verdict import Evidence, Verdict

SCHEMA: Final = "attnprobe.matrix/1"
OUTPUTS: Final = ("out", "lse", "dq", "dk", "dv", "dmask")
"""What a backend may return, in the order in which it is named."""


class Material(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An installed thing that verdicts rest on. `digest` is of the installed files' own record."""

    name: str
    version: str
    digest: str = ""
    architectures: tuple[str, ...] = ()


class DeviceRecord(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a device is, without what names one exemplar (no UUID, no host).

    Sizes in bytes; `sm` like "12.0"; `capabilities` the instruction sets of a CPU.
    """

    kind: Literal["cpu", "cuda"]
    name: str
    sm: str = ""
    smem_per_block_optin: int = 0
    cores: int = 0
    capabilities: tuple[str, ...] = ()


class CaseRecord(Struct, frozen=True, kw_only=True):
    """A case under its id."""

    id: str
    case: Case


class Result(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What became of a case on one backend. `run` is the index of the run in `Matrix.runs`.

    `case` is there only in the expanded shape.
    """

    id: str
    verdict: Verdict = Verdict.OK
    evidence: Evidence = Evidence.MEASURED
    run: int = 0
    outputs: tuple[str, ...] = ()
    kernel: str = ""
    detail: dict[str, Any] = {}
    case: Case | None = None


class Rates(Struct, frozen=True, kw_only=True):
    """How often random neighbours failed: `failed` of `tried`, inside and outside a rule."""

    inside_failed: int
    inside_tried: int
    outside_failed: int
    outside_tried: int


class Rule(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A smallest combination of axis values that fails or is refused.

    It covers a case whose level on every axis in `when` is listed, unless `cases` names the only ones.
    `witness` is a case id that shows it, `counter_witnesses` differ from it on one axis and pass.
    """

    id: str
    when: dict[str, tuple[Level, ...]]
    verdict: Verdict
    outputs: tuple[str, ...] = ()
    evidence: Evidence = Evidence.MEASURED
    witness: str = ""
    counter_witnesses: tuple[str, ...] = ()
    cases: tuple[str, ...] = ()
    failing: int = 0
    skipped: int = 0
    localised: bool = True
    reason: str = ""
    right: tuple[str, ...] = ()
    rates: Rates | None = None

    def covers(self, case_id: str, at: dict[str, Level]) -> bool:
        """Whether a case with this id and these levels falls under the rule."""
        if self.cases and case_id not in self.cases:
            return False
        return all(at.get(axis) in levels for axis, levels in self.when.items())


class Backend(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One backend: what was probed, or why it was not."""

    name: str
    status: Literal["probed", "absent"]
    reason: str = ""
    materials: tuple[Material, ...] = ()
    traits: dict[str, str] = {}
    rules: tuple[Rule, ...] = ()
    cases: tuple[Result, ...] = ()


class Run(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One scan. Times are UTC; everything that differs between two equal scans is in here.

    `strength`: 3 where every allowed triple of levels is in a case that ran, 2 for pairs, else less.
    """

    started: str
    finished: str
    level: str
    seed: int
    complete: bool
    strength: int
    planned: int
    executed: int
    skipped: int
    device: int = 0
    poison: str = ""
    guard: str = ""
    seconds: dict[str, float] = {}
    notes: tuple[str, ...] = ()


class Generator(Struct, frozen=True, kw_only=True):
    """The program that wrote the document."""

    name: str
    version: str


class Matrix(Struct, frozen=True, kw_only=True):
    """The document."""

    schema: str
    digest: str
    devices: tuple[DeviceRecord, ...]
    backends: tuple[Backend, ...]
    runs: tuple[Run, ...]
    generator: Generator
    cases: tuple[CaseRecord, ...] = ()

    def case(self, case_id: str) -> Case | None:
        """Return the case of an id, or None."""
        return next((record.case for record in self.cases if record.id == case_id), None)


def digest_of(matrix: Matrix) -> str:
    """Return the digest of a document: SHA-256 over its canonical bytes with an empty digest."""
    return hashlib.sha256(canonical(structs.replace(matrix, digest=""))).hexdigest()


def sealed(matrix: Matrix) -> Matrix:
    """Return the document sorted, with its digest.

    It is what a reader of the file gets: an empty tuple that was computed is in Python 3.10 another object
    than `()`, and msgspec leaves a field out only where it *is* its default.
    """
    matrix = msgspec.json.decode(msgspec.json.encode(matrix), type=Matrix)
    backends = tuple(
        structs.replace(
            backend,
            cases=tuple(sorted(backend.cases, key=lambda result: result.id)),
            traits=dict(sorted(backend.traits.items())),
        )
        for backend in sorted(matrix.backends, key=lambda backend: backend.name)
    )
    cases = tuple(sorted(matrix.cases, key=lambda record: record.id))
    ordered = structs.replace(matrix, backends=backends, cases=cases, digest="")
    return structs.replace(ordered, digest=digest_of(ordered))


def compact(matrix: Matrix) -> Matrix:
    """Return the document with every case in `cases` only, whichever shape it came in."""
    inside = {r.id: r.case for b in matrix.backends for r in b.cases if r.case is not None}
    if not inside:
        return matrix
    backends = tuple(
        structs.replace(b, cases=tuple([structs.replace(r, case=None) for r in b.cases]))
        for b in matrix.backends  # of a list: see sealed() on empty tuples
    )
    known = {record.id: record for record in matrix.cases}
    known |= {i: CaseRecord(id=i, case=case) for i, case in inside.items()}
    cases = tuple(sorted(known.values(), key=lambda record: record.id))
    return structs.replace(matrix, backends=backends, cases=cases)


def expanded(matrix: Matrix) -> dict[str, Any]:
    """Return the document with every backend's cases whole: id, levels, case and verdict."""
    document: dict[str, Any] = msgspec.to_builtins(matrix)
    known = {record.id: record.case for record in matrix.cases}
    del document["cases"]
    for backend, struct in zip(document["backends"], matrix.backends, strict=True):
        backend["cases"] = list(_whole(struct, known))
        backend.setdefault("rules", [])
    return document


def _whole(backend: Backend, known: dict[str, Case]) -> Iterator[dict[str, Any]]:
    for result in backend.cases:
        case = known[result.id]
        yield {
            "id": result.id,
            "at": levels_of(case),
            "case": msgspec.to_builtins(case),
            "verdict": result.verdict.value,
            "evidence": result.evidence.value,
            "run": result.run,
            "outputs": list(result.outputs),
            "kernel": result.kernel,
            "detail": result.detail,
        }
