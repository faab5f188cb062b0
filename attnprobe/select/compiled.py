"""A matrix in the form that answers: per axis and level the cases and the rules on it, as bits.

Bit i of an integer is case i (or rule i, over all backends); what lies on all levels of a query is one
AND per axis. Built once at load.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from typing import Final

from attnprobe.axes import AXIS, Level, levels_of
from attnprobe.config import Case
from attnprobe.errors import MatrixError
from attnprobe.matrix.schema import Backend, Matrix, Result, Rule
from attnprobe.report.words import dispute_text
from attnprobe.select.asked import Extent, Possible, can_meet, extent_of, numbers
from attnprobe.verdict import Evidence, Verdict

STRONGEST: Final = 3
"""The largest t for which coverage is looked at: scans are planned for triples."""


DENYING: Final = frozenset(verdict for verdict in Verdict if verdict.fails or verdict is Verdict.REFUSED)
"""Verdicts that take a backend away from a job."""


_CODES: Final = 256


class Table:
    """For each axis and level the items on it; `rest` are the items on every level that is not listed."""

    def __init__(self, rows: dict[str, dict[Level, int]], rest: dict[str, int], every: int) -> None:
        """Keep the bits."""
        self.rows = rows
        self.rest = rest
        self.every = every

    def on(self, axis: str, levels: Sequence[Level]) -> int:
        """Return the items on any of these levels of an axis."""
        row, rest = self.rows[axis], self.rest[axis]
        found = 0
        for level in levels:
            found |= row.get(level, rest)
        return found

    def matching(self, levels: Possible) -> int:
        """Return the items that lie on a possible level of every axis."""
        found = self.every
        for axis, possible in levels.items():
            if len(possible) == 1:
                found &= self.rows[axis].get(possible[0], self.rest[axis])
            else:
                found &= self.on(axis, possible)
            if not found:
                break
        return found


def bits_of(positions: Iterable[int], size: int) -> int:
    """Return the integer with these bits set."""
    array = bytearray(size // 8 + 1)
    for position in positions:
        array[position >> 3] |= 1 << (position & 7)
    return int.from_bytes(array, "little")


def column_bits(column: Sequence[Level]) -> dict[Level, int]:
    """Return for each level the integer whose bit i says that item i is on it."""
    codes: dict[Level, int] = {}
    coded = [codes.setdefault(level, len(codes)) for level in column]
    if len(codes) > _CODES:
        return {
            level: bits_of((i for i, c in enumerate(coded) if c == code), len(column))
            for level, code in codes.items()
        }
    # One byte an item, most significant first; a level's digits are then one translation away.
    text = bytes(reversed(coded))
    rows = {}
    for level, code in codes.items():
        digits = bytearray(b"0" * 256)
        digits[code] = ord("1")
        rows[level] = int(text.translate(digits), 2)
    return rows


class Cases:
    """All cases of a matrix, numbered."""

    def __init__(self, matrix: Matrix) -> None:
        """Number the cases and put each on its levels.

        Raises:
            MatrixError: an id that is not its case's: a field was taken from the case.
        """
        self.cases: list[Case] = [record.case for record in matrix.cases]
        self.ids: list[str] = [record.id for record in matrix.cases]
        self.number = {case_id: index for index, case_id in enumerate(self.ids)}
        self._extents: dict[int, Extent] = {}
        size = len(self.cases)
        dims_v: dict[int, list[int]] = defaultdict(list)
        for index, case in enumerate(self.cases):
            if case.id != self.ids[index]:
                raise MatrixError(
                    f"case {self.ids[index]} is not what its id says",
                    why=f"its fields hash to {case.id}",
                    fix="restore the file, or scan again",
                )
            dims_v[case.head_dim_v].append(index)
        found = [levels_of(case) for case in self.cases]
        rows = {axis: column_bits([at[axis] for at in found]) for axis in AXIS}
        self.table = Table(rows, dict.fromkeys(AXIS, 0), (1 << size) - 1)
        self._dims_v = {dim: bits_of(found, size) for dim, found in dims_v.items()}

    def extent(self, number: int) -> Extent:
        """Return how large a case is."""
        found = self._extents.get(number)
        if found is None:
            found = self._extents[number] = extent_of(self.cases[number])
        return found

    def with_dim_v(self, levels: Possible, dim_v: int | None) -> int:
        """Return the cases whose head dim of v is the asked one; equal head dims need no second look.

        A kernel for 192 and 128 says nothing of 192 and 96, though both are "smaller".
        """
        if levels["head_dim_v"] == ("equal",):
            return self.table.every
        return 0 if dim_v is None else self._dims_v.get(dim_v, 0)


def rule_table(rules: Sequence[Rule]) -> Table:
    """Return the table of rules. A level or an axis that this version does not know restricts nothing."""
    size = len(rules)
    every = (1 << size) - 1
    rows: dict[str, dict[Level, int]] = {}
    rest: dict[str, int] = {}
    for axis in AXIS.values():
        by_level: dict[Level, list[int]] = defaultdict(list)
        unrestricted = []
        for index, rule in enumerate(rules):
            levels = rule.when.get(axis.name, ())
            known = all(level in axis.levels or isinstance(level, int) for level in levels)
            if not levels or not known:
                unrestricted.append(index)
                continue
            for level in levels:
                by_level[level].append(index)
        free = bits_of(unrestricted, size)
        rows[axis.name] = {level: bits_of(found, size) | free for level, found in by_level.items()}
        rest[axis.name] = free
    return Table(rows, rest, every)


class Compiled:
    """What is known of one backend.

    `failing`: cases that deny their levels by themselves. `exact`: cases that deny their very numbers only,
    because a rule names them and passing cases share their levels. `passed`: cases that can prove. Of a case
    that several runs saw, any result denies; it proves only where none does, and no rule covers it.
    """

    def __init__(
        self, backend: Backend, cases: Cases, runs: Collection[int], *, several: bool = False
    ) -> None:
        """Sort a backend's results; `runs` are those whose results may prove, `several`: there are more runs.

        A rule covers no passed case of its own run, but it may cover those of another. Where a failing case
        shows that a rule is gone, what it covered is not known, and in a document of several runs nothing
        is proven.
        """
        self.name = backend.name
        self.backend = backend
        self._cases = cases
        self._several = several
        self.results: dict[int, Result] = {}
        passed, unseen = [], False
        for result in backend.cases:
            number = cases.number.get(result.id)
            verdict = result.verdict
            if verdict is Verdict.OK:
                if number is not None and result.evidence is Evidence.MEASURED and result.run in runs:
                    passed.append(number)
            elif verdict in DENYING:
                # A denial without its case: what it denies is not known.
                unseen = unseen or number is None
                if number is not None and not (number in self.results and verdict is Verdict.REFUSED):
                    self.results[number] = result
        size = len(cases.cases)
        denying = [rule for rule in backend.rules if rule.verdict in DENYING]
        named = [rule for rule in denying if rule.cases and all(i in cases.number for i in rule.cases)]
        # A rule whose exact cases are no longer there covers all of its `when` instead.
        by_name = {id(rule) for rule in named}
        self.rules = [rule for rule in denying if id(rule) not in by_name]
        self.named = {cases.number[case_id]: rule for rule in named for case_id in rule.cases}
        self.exact = bits_of(self.named, size)
        everything = bits_of(self.results, size)
        self.failing = everything & ~self.exact
        covered = self._covered()
        self.incomplete = unseen or bool(self.failing & ~covered)
        self.passed = bits_of(passed, size) & ~(self.exact | covered)
        if several and self.incomplete:
            self.passed = 0
        self._envelope: Extent | None = None

    def _covered(self) -> int:
        """Return the cases that lie under some rule."""
        covered = 0
        for rule in self.rules:
            covered |= self._under(rule)
        return covered

    def _under(self, rule: Rule) -> int:
        """Return the cases on the levels of a rule."""
        table = self._cases.table
        under = table.every
        for axis, levels in rule.when.items():
            known = AXIS[axis].levels if axis in AXIS else ()
            if levels and all(level in known or isinstance(level, int) for level in levels):
                under &= table.on(axis, levels)
        return under

    def rule_dispute(self, rule: Rule, cases: int) -> str:
        """Return which runs saw cases pass that a rule covers, of these cases; empty where none did."""
        if not self._several:
            return ""
        found = {self._cases.ids[number] for number in numbers(cases & self._under(rule))}
        passed = {r.id for r in self.backend.cases if r.verdict is Verdict.OK and r.id in found}
        return self._dispute({*passed, rule.witness}) if passed else ""

    def case_dispute(self, number: int) -> str:
        """Return which runs saw what of a case, where they contradict each other."""
        return self._dispute({self._cases.ids[number]}) if self._several else ""

    def _dispute(self, ids: Collection[str]) -> str:
        runs: dict[Verdict, set[int]] = defaultdict(set)
        for result in self.backend.cases:
            if result.id in ids and not result.verdict.neutral:
                runs[result.verdict].add(result.run)
        return f"; {dispute_text(runs)}" if len(runs) > 1 else ""

    @property
    def envelope(self) -> Extent:
        """Return the largest sizes that were measured ok."""
        if self._envelope is None:
            found = [self._cases.extent(number) for number in numbers(self.passed)]
            names = Extent.__struct_fields__
            self._envelope = Extent(*(max((getattr(e, name) for e in found), default=-1) for name in names))
        return self._envelope

    def strength(self, levels: Possible, right_dim_v: int) -> tuple[int, str]:
        """Return the largest t for which every t levels of a query meet in a passed case, and what misses.

        The second value names the first combination of t + 1 levels that no passed case shows.
        """
        table = self._cases.table
        items = []
        for axis, possible in levels.items():
            for level in possible:
                on = self.passed & table.on(axis, (level,))
                items.append((axis, level, on & right_dim_v if axis == "head_dim_v" else on))
        for axis, level, on in items:
            if not on:
                return 0, _words((axis, level))
        return self._wider(items, {axis for axis, possible in levels.items() if len(possible) == 1})

    @staticmethod
    def _wider(items: list[tuple[str, Level, int]], fixed: Collection[str]) -> tuple[int, str]:
        """Return strength 1 to 3 where every level is in a passed case. One AND a pair, one a triple.

        Levels that cannot meet are no combination of an open axis; those of two `fixed` ones are what a
        configuration that contradicts itself asks, and no case shows that.
        """
        pairs = []
        for index, (axis, level, on) in enumerate(items):
            row = []
            for later in range(index + 1, len(items)):
                other, beside, there = items[later]
                meet = can_meet((axis, level), (other, beside))
                if other == axis or not (meet or (axis in fixed and other in fixed)):
                    continue
                both = on & there if meet else 0
                if not both:
                    return 1, _words((axis, level), (other, beside))
                row.append((later, both))
            pairs.append(row)
        for index, row in enumerate(pairs):
            meeting = dict(row)
            for second, both in row:
                for third, _ in pairs[second]:
                    if third in meeting and not both & items[third][2]:
                        return 2, _words(items[index][:2], items[second][:2], items[third][:2])
        return STRONGEST, ""


def _words(*levels: tuple[str, Level]) -> str:
    return " with ".join(f"{axis} {level}" for axis, level in levels)
