"""The plan keeps its promises, counted here in other ways than the array was built."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Mapping
from typing import Final

import msgspec
import pytest
from msgspec import UNSET, structs

from attnprobe.axes import AXES, AXIS, CONSTRAINTS, WORK_CAP, At, Level, allowed, levels_of
from attnprobe.config import AttentionConfig, Case, canonical, config_of
from attnprobe.probe.moves import step
from attnprobe.probe.plan import (
    Plan,
    boundary_cases,
    covering_rows,
    described,
    plan,
    plan_of_configs,
    random_cases,
)

NAMES: Final = tuple(axis.name for axis in AXES)
Tuple = tuple[tuple[str, Level], ...]
Domains = Mapping[str, tuple[Level, ...]]

ALL_LEVELS: Final[Domains] = {axis.name: axis.levels for axis in AXES}
ORDINARY: Final[Domains] = {
    axis.name: tuple(level for level in axis.levels if level not in axis.special) for axis in AXES
}


def choices(axes: Iterable[str]) -> Iterable[tuple[Level, ...]]:
    return itertools.product(*(AXIS[name].levels for name in axes))


class Search:
    """Decides by exhaustion whether an allowed choice of all levels holds some given ones.

    Plain backtracking over the constrained axes. A partial choice is given up as soon as no allowed
    combination of one constraint agrees with it.
    """

    def __init__(self, domains: Domains) -> None:
        """Tabulate each constraint, and which of its combinations agree with a partial choice."""
        self._domains = domains
        self._tables: list[tuple[tuple[str, ...], list[tuple[Level, ...]]]] = [
            (constraint.axes, [levels for levels in choices(constraint.axes) if constraint.allows(*levels)])
            for constraint in CONSTRAINTS
        ]
        self._constrained = sorted(
            {name for axes, _ in self._tables for name in axes}, key=lambda name: len(ALL_LEVELS[name])
        )
        self._parts: dict[tuple[int, tuple[int, ...]], frozenset[tuple[Level, ...]]] = {}
        self._known: dict[Tuple, bool] = {}

    def possible(self, fixed: Tuple) -> bool:
        """Return whether some allowed choice within the domains holds `fixed`."""
        key = tuple(pair for pair in fixed if pair[0] in self._constrained)
        if key not in self._known:
            chosen = dict(key)
            left = {name: self._domains[name] for name in self._constrained if name not in chosen}
            self._known[key] = self._agrees(chosen) and self._complete(chosen, left, set(chosen))
        return self._known[key]

    def _complete(self, chosen: dict[str, Level], left: Domains, new: set[str]) -> bool:
        """Return whether the axes in `left` can be chosen too; `new` are those chosen since it was made."""
        if not left:
            assert all(c.allows(*(chosen[name] for name in c.axes)) for c in CONSTRAINTS)
            return True
        tied = {name for axes, _ in self._tables if new & set(axes) for name in axes}
        left = {
            name: tuple(level for level in levels if self._agrees({**chosen, name: level}, name))
            if name in tied
            else levels
            for name, levels in left.items()
        }
        name = min(left, key=lambda name: len(left[name]))
        rest = {other: levels for other, levels in left.items() if other != name}
        return any(self._complete({**chosen, name: level}, rest, {name}) for level in left[name])

    def _agrees(self, chosen: Mapping[str, Level], touched: str | None = None) -> bool:
        for number, (axes, table) in enumerate(self._tables):
            if touched is not None and touched not in axes:
                continue
            columns = tuple(index for index, name in enumerate(axes) if name in chosen)
            key = (number, columns)
            if key not in self._parts:
                self._parts[key] = frozenset(tuple(row[column] for column in columns) for row in table)
            if tuple(chosen[axes[column]] for column in columns) not in self._parts[key]:
                return False
        return True


@pytest.fixture(scope="module")
def anywhere() -> Search:
    return Search(ALL_LEVELS)


def tuples_of(rows: list[At], strength: int) -> dict[tuple[str, ...], set[tuple[Level, ...]]]:
    """Return which levels meet in the rows, for each choice of `strength` axes."""
    columns = {name: [row[name] for row in rows] for name in NAMES}
    return {
        names: set(zip(*(columns[name] for name in names), strict=True))
        for names in itertools.combinations(NAMES, strength)
    }


def uncovered(rows: list[At], strength: int, search: Search) -> list[Tuple]:
    """Return the possible tuples of levels that are in no row."""
    missing = []
    for names, met in tuples_of(rows, strength).items():
        for levels in choices(names):
            if levels not in met:
                fixed = tuple(zip(names, levels, strict=True))
                if search.possible(fixed):
                    missing.append(fixed)
    return missing


def rows_run(cases: tuple[Case, ...]) -> list[At]:
    return [levels_of(case) for case in cases]


def test_the_search_finds_what_exists_and_proves_what_does_not(anywhere: Search) -> None:
    for at in rows_run(tuple(random_cases(30, 1))):
        assert anywhere.possible(tuple(at.items()))
    # Ruled out by one constraint, by two together, and by a long chain of them.
    assert not anywhere.possible((("pass", "forward"), ("needs_grad", "q")))
    assert not anywhere.possible((("needs_grad", "mask"), ("layout", "varlen")))
    assert not anywhere.possible((("pass", "forward"), ("needs_grad", "mask"), ("dtype", "float16")))
    assert not anywhere.possible((("masked_rows", "false"), ("needs_grad", "mask")))
    assert not anywhere.possible((("seqlen_q", "1"), ("seqlen_kv", "0"), ("seqlen_order", "equal")))
    assert anywhere.possible((("seqlen_q", "1"), ("seqlen_kv", "0"), ("seqlen_order", "q-longer")))


@pytest.mark.parametrize("seed", [0, 11])
def test_quick_covers_every_allowed_pair(anywhere: Search, seed: int) -> None:
    quick = plan("quick", seed)
    assert uncovered(rows_run(quick.cases[: quick.strength_at[2]]), 2, anywhere) == []


def test_fewer_cases_than_promised_leave_pairs_uncovered(anywhere: Search) -> None:
    quick = plan("quick")
    assert uncovered(rows_run(quick.cases[: quick.strength_at[2] - 1]), 2, anywhere)


def test_standard_covers_every_allowed_triple(anywhere: Search) -> None:
    standard = plan("standard")
    missing = uncovered(rows_run(standard.cases[: standard.strength_at[3]]), 3, anywhere)
    assert missing == []


def test_every_row_is_allowed_and_none_is_there_twice() -> None:
    rows, pairs = covering_rows()
    assert all(allowed(row) for row in rows)
    assert len({tuple(row.items()) for row in rows}) == len(rows)
    assert 0 < pairs < len(rows)


@pytest.mark.parametrize("strength", [2, 3])
def test_a_tuple_is_covered_beside_no_special_level_but_its_own(strength: int) -> None:
    """Where a library refuses one special level, the tuples without it have still been measured.

    A row counts for a tuple only where every special level of the row is in the tuple. A tuple that no
    row covers so must be one that the constraints keep from it: searched for among ordinary levels.
    """
    rows, pairs = covering_rows()
    by_special: dict[tuple[str, ...], list[At]] = {}
    for row in rows if strength == 3 else rows[:pairs]:
        special = tuple(name for name in NAMES if row[name] in AXIS[name].special)
        by_special.setdefault(special, []).append(row)
    apart: dict[tuple[str, ...], set[tuple[Level, ...]]] = {}
    for special, alike in by_special.items():
        for names, met in tuples_of(alike, strength).items():
            if set(special) <= set(names):
                apart.setdefault(names, set()).update(met)
    search = Search(ORDINARY)
    wanting = []
    for names in itertools.combinations(NAMES, strength):
        for levels in choices(names):
            if levels not in apart[names]:
                fixed = tuple(zip(names, levels, strict=True))
                if search.possible(fixed):
                    wanting.append(fixed)
    assert wanting == []


@pytest.mark.parametrize("seed", [0, 1, 12345])
def test_cases_fall_on_exactly_the_levels_of_their_rows(seed: int) -> None:
    rows, pairs = covering_rows()
    cases = plan("standard", seed).cases
    boundary = {case.id for case in boundary_cases(seed)}
    by_rows = [case for case in cases if case.id not in boundary]
    assert cases[:pairs] == tuple(by_rows[:pairs])
    assert [levels_of(case) for case in by_rows] == [dict(row) for row in rows]
    assert all(case.work <= WORK_CAP for case in cases)
    assert all(case.seed == seed for case in cases)


@pytest.mark.parametrize("level", ["quick", "standard", "full"])
def test_a_plan_is_deterministic_and_names_each_case_once(level: str) -> None:
    one, again, other = plan(level, 3), plan(level, 3), plan(level, 4)
    assert one == again
    assert one.digest == again.digest
    assert one.digest != other.digest
    ids = [case.id for case in one.cases]
    assert len(set(ids)) == len(ids)
    assert not set(ids) & {case.id for case in other.cases}


def test_another_seed_visits_other_lengths_at_the_same_levels() -> None:
    one, other = plan("quick", 0).cases, plan("quick", 1).cases
    pairs = list(zip(one, other, strict=True))
    assert all(levels_of(a) == levels_of(b) for a, b in pairs)
    moved = sum((a.seqlen_q, a.seqlen_kv) != (b.seqlen_q, b.seqlen_kv) for a, b in pairs)
    assert moved > len(pairs) / 3


def test_levels_extend_each_other() -> None:
    quick, standard, full = (plan(level).cases for level in ("quick", "standard", "full"))
    assert standard[: len(quick)] == quick
    assert full[: len(standard)] == standard
    assert len(quick) < len(standard) / 4
    assert len(full) > len(standard) * 1.3


def test_full_has_a_random_share_that_changes_with_the_seed() -> None:
    size = len(plan("standard").cases)
    shares = [rows_run(plan("full", seed).cases[size:]) for seed in (0, 1)]
    assert shares[0] != shares[1]
    for share in shares:
        assert all(allowed(at) for at in share)
        for axis in AXES:
            assert {at[axis.name] for at in share} == set(axis.levels)


def test_strength_counts_what_ran() -> None:
    standard = plan("standard")
    pairs, triples = standard.strength_at[2], standard.strength_at[3]
    assert triples == len(standard.cases)
    executed = (0, 1, pairs - 1, pairs, triples - 1, triples, triples + 9)
    assert [standard.strength(count) for count in executed] == [0, 1, 1, 2, 2, 3, 3]
    quick = plan("quick")
    assert [quick.strength(count) for count in (0, pairs - 1, pairs, len(quick.cases))] == [0, 1, 2, 2]
    assert Plan("config", 0, (Case(),), {}).strength(1) == 1


def test_boundary_cases_straddle_tile_sizes() -> None:
    cases = boundary_cases(2)
    lengths = {case.seqlen_kv for case in cases}
    for tile in (16, 32, 64, 128, 256, 512):
        assert {tile - 1, tile + 1} <= lengths
    assert {case.dtype for case in cases} == {"float32", "bfloat16"}
    assert any(case.seqlen_q == 1 and case.mask == "causal-bottom-right" for case in cases)
    assert all(case.work <= WORK_CAP and case.seed == 2 for case in cases)
    assert all(allowed(levels_of(case)) for case in cases)
    assert {case.id for case in cases} <= {case.id for case in plan("standard", 2).cases}


ASKED: Final = [
    AttentionConfig(pass_="backward", dtype="bfloat16", head_dim=72, heads=4, heads_kv=2, seqlen_q=100),
    AttentionConfig(pass_="forward", dtype="float16", mask="causal-top-left", seqlen_q=33, batch=2),
    AttentionConfig(mask="float", masked_rows="-inf", seqlen_q=65, seqlen_kv=130, dropout=0.25),
    AttentionConfig(layout="varlen", batch=3, seqlen_q=48, mask="causal-bottom-right"),
    AttentionConfig(mask="window", window=7, seqlen_q=90, head_dim=40, head_dim_v=24),
]

# Axes that a step may move along, because a constraint ties them to its own.
TIED: Final = [{"seqlen_q", "seqlen_order"}, {"seqlen_kv", "seqlen_order"}, {"pass", "needs_grad"}]
TIED_BY_ORDER: Final = {"seqlen_q", "seqlen_kv", "seqlen_order"}


@pytest.mark.parametrize("asked", ASKED)
def test_a_plan_of_configs_runs_them_exactly_and_then_their_neighbours(asked: AttentionConfig) -> None:
    found = plan_of_configs([asked], seed=9)
    exact, *neighbours = found.cases
    for name in AttentionConfig.__struct_fields__:
        if (value := getattr(asked, name)) is not UNSET:
            assert getattr(exact, name) == value
    assert exact.seed == 9
    assert {case.seed for case in neighbours} == {9}
    at = levels_of(exact)
    reached = {}
    for axis in AXES:
        for level in axis.levels:
            moved = step(exact, axis.name, level)
            if moved is not None:
                reached[moved.id] = moved
    assert set(reached) - {exact.id} == {case.id for case in neighbours}
    assert len(neighbours) > 60
    for case in neighbours:
        after = levels_of(case)
        apart = {name for name in NAMES if after[name] != at[name]}
        assert allowed(after)
        assert len(apart) == 1 or apart in TIED or apart <= TIED_BY_ORDER
    # Every level that may stand beside the others was visited.
    for axis in AXES:
        for level in axis.levels:
            if level != at[axis.name] and allowed({**at, axis.name: level}):
                assert any(levels_of(case) == {**at, axis.name: level} for case in neighbours)


def test_a_plan_of_several_configs_runs_all_of_them_first() -> None:
    found = plan_of_configs(ASKED, seed=1)
    alone = [plan_of_configs([asked], seed=1) for asked in ASKED]
    assert list(found.cases[: len(ASKED)]) == [one.cases[0] for one in alone]
    assert {case.id for case in found.cases} == {case.id for one in alone for case in one.cases}
    assert found.strength(len(found.cases)) == 1


def test_a_config_asked_twice_runs_once() -> None:
    assert plan_of_configs([ASKED[0], ASKED[0]]).cases == plan_of_configs([ASKED[0]]).cases


def test_a_config_of_a_planned_case_is_that_case() -> None:
    case = plan("quick").cases[17]
    plain = structs.replace(case, data="gaussian", grad_out="contiguous", earlier="nothing")
    assert plan_of_configs([config_of(case)]).cases[0] == plain


def test_described_holds_what_is_needed_to_run_a_case_again() -> None:
    case = plan("quick", 4).cases[5]
    shown = json.loads(canonical(described(case)))
    assert shown["id"] == case.id
    assert shown["at"] == levels_of(case)
    assert msgspec.convert(shown["case"], Case) == case
