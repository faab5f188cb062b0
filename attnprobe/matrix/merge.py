"""One document from several: the union of what was observed on one class of device.

Merging is commutative, associative and idempotent: it takes unions of sets, keeps them sorted by their
bytes, and derives nothing that it would have to take back. A case may have several results, one a run;
what they come to is derived on read (`settled`).

Rules of one id and one condition are one rule: of numbers it keeps the largest (a sum would count a
document twice that came in twice), of outputs all, and witness, counter-witnesses, rates and the backends
that are right together from the variant that rests on most. Everything else that differs is kept twice.

Documents are taken apart into lines of JSON, equal lines are one, and the result is put together from them:
a thousand scans fit into memory that would not hold their structs.
"""

from __future__ import annotations

import hashlib
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from io import BytesIO
from itertools import islice
from typing import Final

import msgspec
from msgspec import Struct, structs

import attnprobe
from attnprobe.config import Case, canonical
from attnprobe.errors import MatrixError
from attnprobe.matrix.schema import (
    OUTPUTS,
    SCHEMA,
    Backend,
    CaseRecord,
    DeviceRecord,
    Generator,
    Material,
    Matrix,
    Result,
    Rule,
    Run,
    compact,
)
from attnprobe.matrix.settled import DISPUTED, settled
from attnprobe.matrix.store import encode, parse_matrix
from attnprobe.verdict import Evidence

_CHUNK: Final = 4096
_OR: Final = "or"
_ENCODER: Final = msgspec.json.Encoder(order="deterministic")
_RESULT: Final = msgspec.json.Decoder(Result)
_AFTER_RUN: Final = re.compile(rb',"(?:outputs|kernel|detail)":')
_VERDICT: Final = b',"verdict":'
_MARK: Final = "@"


def merged(matrices: Iterable[tuple[str, Matrix]]) -> Matrix:
    """Return the union of documents; each comes with the name that errors give it.

    Raises:
        MatrixError: there is none, they are of different devices or builds, or one contradicts itself.
    """
    union = Union()
    for where, matrix in matrices:
        union.add(matrix, where)
    return parse_matrix(union.content(), "the merged matrix")


@dataclass
class _Merged:
    """What the documents so far say of one backend.

    `lines` are results without their run, each with the numbers of the runs that saw it.
    """

    probed: tuple[str, Backend] | None = None
    absent: Backend | None = None
    traits: dict[str, set[str]] = field(default_factory=dict)
    rules: dict[bytes, Rule] = field(default_factory=dict)
    lines: dict[bytes, int | list[int]] = field(default_factory=dict)

    def head(self, name: str) -> Backend:
        """Return the backend without its cases. Probed in one document is probed."""
        one = self.probed[1] if self.probed else self.absent
        assert one is not None
        return structs.replace(
            one,
            name=name,
            traits={trait: f" {_OR} ".join(sorted(parts)) for trait, parts in sorted(self.traits.items())},
            rules=tuple(sorted(self.rules.values(), key=_rule_order)),
            cases=(Result(id=f"{_MARK}{name}"),) if self.lines else (),
        )


class Union:
    """What several documents observed, together."""

    def __init__(self) -> None:
        """Begin with nothing."""
        self._class: tuple[str, DeviceRecord] | None = None
        self._devices: set[bytes] = set()
        self._runs: dict[tuple[bytes, bytes], int] = {}
        self._backends: defaultdict[str, _Merged] = defaultdict(_Merged)
        self._cases: dict[str, bytes] = {}
        self.documents = 0

    def add(self, matrix: Matrix, where: str) -> None:
        """Take a document in; `where` names it in errors.

        Raises:
            MatrixError: it is of another device or build than those before, or contradicts itself or them.
        """
        matrix = compact(matrix)
        self._check(matrix, where)
        devices = [canonical(device) for device in matrix.devices]
        numbers = []
        for run in matrix.runs:
            key = (canonical(structs.replace(run, device=0)), devices[run.device])
            numbers.append(self._runs.setdefault(key, len(self._runs)))
        self._devices.update(devices)
        for record in matrix.cases:
            line = canonical(record.case)
            if self._cases.setdefault(record.id, line) != line:
                raise MatrixError(
                    f"case {record.id} is not the same in all files",
                    why=f"an id is a hash of its case, and {where} has another than a file before it",
                    fix="`attnprobe validate FILE...` names the file",
                )
        for backend in matrix.backends:
            self._add_backend(backend, numbers, where)
        self.documents += 1

    def _check(self, matrix: Matrix, where: str) -> None:
        """Raise MatrixError where an index leads nowhere, and where the device is another."""
        known = {record.id for record in matrix.cases}
        lost = next(
            (
                f"run {i} is on no device"
                for i, run in enumerate(matrix.runs)
                if not 0 <= run.device < len(matrix.devices)
            ),
            "",
        )
        for backend in matrix.backends:
            if not {result.run for result in backend.cases} <= set(range(len(matrix.runs))):
                lost = f"a result on {backend.name} is of no run"
            if not {result.id for result in backend.cases} <= known:
                lost = f"a result on {backend.name} is of no case"
            if backend.status == "absent" and backend.cases:
                lost = f"{backend.name} is absent and has cases"
        if lost:
            raise MatrixError(
                f"{where} cannot be merged", why=lost, fix=f"`attnprobe validate {where}` lists every fault"
            )
        for device in matrix.devices:
            one = structs.replace(device, cores=0)
            first, other = self._class = self._class or (where, one)
            if one != other:
                raise MatrixError(
                    "matrices of different devices are not merged",
                    why=f"{first} is of {_differing(other, one)}, {where} of {_differing(one, other)}",
                    fix="merge the files of each kind of device on their own",
                )

    def _add_backend(self, backend: Backend, numbers: list[int], where: str) -> None:
        mine = self._backends[backend.name]
        if backend.status == "absent":
            bare = Backend(name="", status="absent", reason=backend.reason, materials=backend.materials)
            mine.absent = min(mine.absent or bare, bare, key=canonical)
        else:
            bare = Backend(name="", status="probed", materials=backend.materials)
            first, other = mine.probed = mine.probed or (where, bare)
            if other.materials != bare.materials:
                raise MatrixError(
                    f"{backend.name} was measured in different builds",
                    why=_difference(first, other.materials, where, bare.materials),
                    fix="merge the files of each build on their own",
                )
        for trait, value in backend.traits.items():
            mine.traits.setdefault(trait, set()).update(_alternatives(value))
        for rule in backend.rules:
            key = canonical([rule.id, rule.when, rule.verdict, rule.cases])
            mine.rules[key] = _joined(mine.rules.get(key, rule), rule)
        by_run: dict[int, list[Result]] = defaultdict(list)
        for result in backend.cases:
            by_run[result.run].append(result)
        for run, results in by_run.items():
            bare_results = results if run == 0 else [structs.replace(one, run=0) for one in results]
            _note(mine.lines, _ENCODER.encode_lines(bare_results).split(b"\n")[:-1], numbers[run])

    def content(self) -> bytes:
        """Return the bytes of the merged file.

        Raises:
            MatrixError: no document was added.
        """
        if not self.documents:
            raise MatrixError("there is nothing to merge", fix="name the files: attnprobe merge FILE...")
        skeleton, places = self._skeleton()
        digest = hashlib.sha256()
        for piece in self._filled(canonical(skeleton), places, file=False):
            digest.update(piece)
        skeleton = structs.replace(skeleton, digest=digest.hexdigest())
        content = BytesIO()  # joining would hold every piece twice
        content.writelines(self._filled(encode(skeleton), places, file=True))
        return content.getvalue()

    def disputes(self) -> int:
        """Return how many cases, over all backends, have results that contradict each other."""
        found = 0
        for backend in self._backends.values():
            found += sum(word == DISPUTED for word in settled(map(_RESULT.decode, backend.lines)).values())
        return found

    def counts(self) -> tuple[int, int]:
        """Return how many runs and cases there are."""
        return len(self._runs), len(self._cases)

    def _skeleton(self) -> tuple[Matrix, list[int]]:
        """Return the document with one mark in place of every long list, and the place of each run."""
        devices = sorted(self._devices)
        order = sorted(self._runs)
        places = [0] * len(order)
        for place, key in enumerate(order):
            places[self._runs[key]] = place
        runs = tuple(
            [
                structs.replace(msgspec.json.decode(run, type=Run), device=devices.index(device))
                for run, device in order
            ]
        )
        skeleton = Matrix(
            schema=SCHEMA,
            digest="",
            devices=tuple([msgspec.json.decode(device, type=DeviceRecord) for device in devices]),
            backends=tuple([self._backends[name].head(name) for name in sorted(self._backends)]),
            runs=runs,
            generator=Generator(name="attnprobe", version=attnprobe.__version__),
            cases=(CaseRecord(id=_MARK, case=Case()),) if self._cases else (),
        )
        return skeleton, places

    def _filled(self, skeleton: bytes, places: list[int], *, file: bool) -> Iterator[bytes]:
        """Yield the document, every mark replaced by its list; `file`: as `store.encode` lays it out."""
        for name in sorted(self._backends):
            lines = self._backends[name].lines
            if lines:
                mark = canonical(Result(id=f"{_MARK}{name}"))
                before, _, skeleton = skeleton.partition(mark)
                yield before
                yield from _between(_results(lines, places, file=file), b",\n        " if file else b",")
        if self._cases:
            mark = _shape(CaseRecord(id=_MARK, case=Case()), file=file)
            before, _, skeleton = skeleton.partition(mark)
            yield before
            yield from _between(self._records(file=file), b",\n    " if file else b",")
        yield skeleton

    def _records(self, *, file: bool) -> Iterator[bytes]:
        for case_id in sorted(self._cases):
            line = self._cases[case_id]
            if file:
                yield b'{"case":%b,"id":%b}' % (canonical(msgspec.json.decode(line)), canonical(case_id))
            else:
                yield b'{"id":%b,"case":%b}' % (canonical(case_id), line)


def _results(lines: dict[bytes, int | list[int]], places: list[int], *, file: bool) -> Iterator[bytes]:
    """Yield a line for every result and run, by id, then content, then run."""
    for line in sorted(lines):
        before, after = _keyed(line) if file else _halves(line)
        seen = lines[line]
        found = sorted({places[n] for n in seen}) if isinstance(seen, list) else (places[seen],)
        for place in found:
            yield b"%b%b%b" % (before, b',"run":%d' % place if place else b"", after)


def _halves(line: bytes) -> tuple[bytes, bytes]:
    """Return what stands before and after the run of a result, in the order of its fields."""
    # What comes before are an id and two words; no field name can stand in them with its quotes.
    found = _AFTER_RUN.search(line)
    at = found.start() if found else len(line) - 1
    return line[:at], line[at:]


def _keyed(line: bytes) -> tuple[bytes, bytes]:
    """Return what stands before and after the run of a result, its fields by name."""
    if line.count(b":") == 1:
        return line[:-1], line[-1:]  # only an id
    fields = msgspec.json.decode(line)
    whole = canonical(fields)
    at = whole.rfind(_VERDICT) if "verdict" in fields else len(whole) - 1
    return whole[:at], whole[at:]


def _shape(value: Struct, *, file: bool) -> bytes:
    """Return a value as the file has it, by key, or as the digest is over it, in the order of its fields."""
    return canonical(msgspec.to_builtins(value) if file else value)


def _between(items: Iterator[bytes], separator: bytes) -> Iterator[bytes]:
    """Yield what `separator.join` would return, in pieces of many items."""
    first = True
    while chunk := list(islice(items, _CHUNK)):
        yield separator.join(chunk if first else [b"", *chunk])
        first = False


def _note(lines: dict[bytes, int | list[int]], new: Iterable[bytes], run: int) -> None:
    """Add what a run saw."""
    for line in new:
        seen = lines.get(line)
        if seen is None:
            lines[line] = run
        elif isinstance(seen, list):
            seen.append(run)
        elif seen != run:
            lines[line] = [seen, run]


def _joined(one: Rule, other: Rule) -> Rule:
    """Return two variants of one rule as one; the order does not matter, nor does a third."""
    outputs = {*one.outputs, *other.outputs}
    known = [name for name in OUTPUTS if name in outputs]
    return structs.replace(
        max(one, other, key=_weight),
        outputs=tuple(known + sorted(outputs.difference(known))),
        failing=max(one.failing, other.failing),
        skipped=max(one.skipped, other.skipped),
        localised=one.localised or other.localised,
    )


def _weight(rule: Rule) -> tuple[bool, int, bytes]:
    """Return how much a variant of a rule rests on, of what `_joined` does not combine."""
    tried = 0 if rule.rates is None else rule.rates.inside_tried + rule.rates.outside_tried
    rest = structs.replace(rule, outputs=(), failing=0, skipped=0, localised=True)
    return rule.evidence is Evidence.MEASURED, tried, canonical(rest)


def _rule_order(rule: Rule) -> tuple[bytes, bytes]:
    return canonical(rule.when), canonical(rule)


def _alternatives(value: str) -> Iterator[str]:
    """Yield what stands between the "or" of a trait, as a scan that saw several wrote it."""
    words: list[str] = []
    for word in [*value.split(" "), _OR]:
        if word == _OR:
            yield " ".join(words)
            words = []
        else:
            words.append(word)


def _differing(one: DeviceRecord, other: DeviceRecord) -> str:
    """Return what of one device is not so on another."""
    said = []
    for name in DeviceRecord.__struct_fields__:
        value = getattr(one, name)
        if value != getattr(other, name):
            words = " ".join(value) if isinstance(value, tuple) else str(value)
            said.append(f"{name.replace('_', ' ')} {words or 'unsaid'}")
    return ", ".join(said)


def _difference(first: str, ours: tuple[Material, ...], where: str, theirs: tuple[Material, ...]) -> str:
    """Return which builds differ, and in which files."""
    here, there = ({one.name: one for one in every} for every in (ours, theirs))
    for name in sorted(here.keys() | there.keys()):
        if here.get(name) != there.get(name):
            return f"{_build(name, here)} in {first}, {_build(name, there)} in {where}"
    return f"{first} and {where} name them in another order"


def _build(name: str, every: dict[str, Material]) -> str:
    one = every.get(name)
    if one is None:
        return f"no {name}"
    return f"{name} {one.version}{f' ({one.digest})' if one.digest else ''}"
