"""The axes partition cases, and each constraint excludes what its reason says."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Final, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnprobe import config
from attnprobe.axes import (
    AXES,
    AXIS,
    CONSTRAINTS,
    HEAD_DIMS,
    WORK_CAP,
    Constraint,
    Level,
    allowed,
    first_violated,
    head_dim_v,
    levels_of,
)
from attnprobe.config import Case
from attnprobe.lengths import LENGTHS, length_level, order, representatives

PLAIN: Final[dict[str, Level]] = {axis.name: axis.plain for axis in AXES}

IS_LENGTH: Final[dict[str, Callable[[int], bool]]] = {
    "0": lambda n: n == 0,
    "1": lambda n: n == 1,
    "odd": lambda n: n % 2 == 1 and 3 <= n <= 511,
    "even": lambda n: n % 2 == 0 and 2 <= n <= 510 and n % 32 != 0,
    "x32": lambda n: n % 128 in {32, 96} and n < 512,
    "x64": lambda n: n % 128 == 64 and n < 512,
    "x128": lambda n: n % 128 == 0 and 128 <= n < 512,
    "long": lambda n: n >= 512,
}


def field_is(field: str, test: Callable[[int], bool] | Level) -> Callable[[Case], bool]:
    def holds(case: Case) -> bool:
        value = getattr(case, field)
        return test(value) if callable(test) else bool(value == test)

    return holds


def literal(name: str) -> dict[Level, Callable[[Case], bool]]:
    field = "pass_" if name == "pass" else name
    return {level: field_is(field, level) for level in AXIS[name].levels}


def switch(test: Callable[[Case], bool], off: str, on: str) -> dict[Level, Callable[[Case], bool]]:
    return {off: lambda case: not test(case), on: test}


IS_LEVEL: Final[dict[str, dict[Level, Callable[[Case], bool]]]] = {
    **{
        name: literal(name)
        for name in (
            *("pass", "dtype", "head_dim", "mask", "masked_rows", "layout", "needs_grad"),
            *("data", "grad_out", "earlier"),
        )
    },
    "head_dim_v": {
        "equal": lambda c: c.head_dim_v == c.head_dim,
        "smaller": lambda c: c.head_dim_v < c.head_dim,
        "larger": lambda c: c.head_dim_v > c.head_dim,
    },
    "heads": {
        "equal": lambda c: c.heads == c.heads_kv,
        "grouped": lambda c: 1 < c.heads_kv < c.heads,
        "one-kv": lambda c: c.heads_kv == 1 < c.heads,
    },
    "batch": switch(lambda c: c.batch > 1, "one", "more"),
    "seqlen_q": {level: field_is("seqlen_q", test) for level, test in IS_LENGTH.items()},
    "seqlen_kv": {level: field_is("seqlen_kv", test) for level, test in IS_LENGTH.items()},
    "seqlen_order": {
        "equal": lambda c: c.seqlen_q == c.seqlen_kv,
        "q-shorter": lambda c: c.seqlen_q < c.seqlen_kv,
        "q-longer": lambda c: c.seqlen_q > c.seqlen_kv,
    },
    "dropout": switch(lambda c: c.dropout > 0, "off", "on"),
    "scale": switch(lambda c: c.scale is not None, "default", "custom"),
    "softcap": switch(lambda c: c.softcap > 0, "off", "on"),
    "alibi": switch(lambda c: c.alibi, "off", "on"),
    "deterministic": switch(lambda c: c.deterministic, "off", "on"),
}

LENGTH: Final = st.one_of(
    st.integers(0, 1200), st.integers(0, 1 << 31), st.sampled_from([32 * i for i in range(40)])
)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    heads_kv = draw(st.integers(1, 4))
    return Case(
        pass_=draw(st.sampled_from(get_args(config.Pass))),
        dtype=draw(st.sampled_from(get_args(config.Dtype))),
        head_dim=draw(st.sampled_from(HEAD_DIMS)),
        head_dim_v=draw(st.integers(1, 640)),
        heads=heads_kv * draw(st.integers(1, 4)),
        heads_kv=heads_kv,
        batch=draw(st.integers(1, 9)),
        seqlen_q=draw(LENGTH),
        seqlen_kv=draw(LENGTH),
        mask=draw(st.sampled_from(get_args(config.Mask))),
        masked_rows=draw(st.sampled_from(get_args(config.MaskedRows))),
        dropout=draw(st.sampled_from([0.0, 1e-9, 0.2, 0.999])),
        scale=draw(st.sampled_from([None, 0.125, 1.0])),
        softcap=draw(st.sampled_from([0.0, 5.0])),
        alibi=draw(st.booleans()),
        layout=draw(st.sampled_from(get_args(config.Layout))),
        needs_grad=draw(st.sampled_from(get_args(config.NeedsGrad))),
        deterministic=draw(st.booleans()),
        data=draw(st.sampled_from(get_args(config.Data))),
        grad_out=draw(st.sampled_from(get_args(config.GradOut))),
        earlier=draw(st.sampled_from(get_args(config.Earlier))),
    )


def test_the_test_describes_every_axis_and_level() -> None:
    assert {name: list(levels) for name, levels in IS_LEVEL.items()} == {
        axis.name: list(axis.levels) for axis in AXES
    }


@given(cases())
def test_a_case_falls_on_exactly_one_level_per_axis(case: Case) -> None:
    at = levels_of(case)
    assert list(at) == [axis.name for axis in AXES]
    for name, levels in IS_LEVEL.items():
        assert [level for level, holds in levels.items() if holds(case)] == [at[name]]


@given(st.integers(1, 1 << 20))
def test_a_head_dim_is_its_own_level(head_dim: int) -> None:
    assert levels_of(Case(head_dim=head_dim))["head_dim"] == head_dim


@given(LENGTH)
def test_length_levels_partition_the_integers(length: int) -> None:
    assert [level for level, holds in IS_LENGTH.items() if holds(length)] == [length_level(length)]


def test_length_levels_partition_all_short_lengths() -> None:
    for length in range(1200):
        assert [level for level, holds in IS_LENGTH.items() if holds(length)] == [length_level(length)]


@given(LENGTH, LENGTH)
def test_order_compares_two_lengths(one: int, other: int) -> None:
    expected = "equal" if one == other else ("q-shorter" if one < other else "q-longer")
    assert order(one, other) == expected


@pytest.mark.parametrize("level", LENGTHS)
def test_representatives_lie_on_their_level(level: str) -> None:
    lengths = representatives(level)
    assert lengths
    assert len(set(lengths)) == len(lengths)
    assert all(IS_LENGTH[level](length) for length in lengths)
    # A level is not one number, apart from those that are.
    assert len(lengths) > 1 or level in {"0", "1"}


def test_axes_are_well_formed() -> None:
    assert len(AXIS) == len(AXES)
    for axis in AXES:
        assert len(set(axis.levels)) == len(axis.levels)
        assert axis.plain in axis.levels
        assert axis.special < set(axis.levels)
        assert axis.plain not in axis.special
        assert set(axis.spelling) <= set(axis.levels)
        assert axis.about


def test_plain_levels_are_allowed_and_the_default_case_lies_on_them() -> None:
    assert allowed(PLAIN)
    assert first_violated(PLAIN) is None
    assert levels_of(Case()) == PLAIN


@pytest.mark.parametrize("dim", HEAD_DIMS)
def test_head_dim_v_stands_for_its_level(dim: int) -> None:
    assert head_dim_v(dim, "equal") == dim
    assert head_dim_v(dim, "larger") > dim
    assert head_dim_v(dim, "larger") % 8 == 0
    smaller = head_dim_v(dim, "smaller")
    assert smaller % 8 == 0
    assert smaller >= 8
    # 8 has nothing smaller that is a multiple of 8, and a constraint says so.
    assert (smaller < dim) == (dim > 8)
    assert allowed({**PLAIN, "head_dim": dim, "head_dim_v": "smaller"}) == (dim > 8)
    assert allowed({**PLAIN, "head_dim": dim, "head_dim_v": "larger"})


# What each constraint says, in other words than axes.py uses: True where the levels may meet.
BOOL: Final[set[Level]] = {"bool", "bool-broadcast"}
FLOAT: Final[set[Level]] = {"float", "float-broadcast"}
LOW: Final = {level: next(n for n in range(600) if IS_LENGTH[level](n)) for level in LENGTHS}
HIGH: Final = {level: next(n for n in range(600, -1, -1) if IS_LENGTH[level](n)) for level in LENGTHS}


def lengths_can_be(q: Level, kv: Level, wanted: Level) -> bool:
    """Return whether any two integers on two levels are in an order."""
    a, b = str(q), str(kv)
    return {"equal": a == b, "q-shorter": LOW[a] < HIGH[b], "q-longer": HIGH[a] > LOW[b]}[str(wanted)]


def rows_fit_mask(rows: Level, mask: Level) -> bool:
    masks: dict[str, set[Level]] = {"none": {mask}, "false": BOOL, "-inf": FLOAT, "finfo-min": FLOAT}
    return mask in masks[str(rows)]


SAYS: Final[dict[tuple[str, ...], Callable[..., bool]]] = {
    ("pass", "needs_grad"): lambda p, g: g == "none" if p == "forward" else g != "none",
    ("needs_grad", "mask"): lambda g, m: not (g == "mask" and m not in FLOAT),
    ("masked_rows", "mask"): rows_fit_mask,
    ("masked_rows", "seqlen_q"): lambda r, n: not (r != "none" and n == "0"),
    ("masked_rows", "seqlen_kv"): lambda r, n: not (r != "none" and n == "0"),
    ("seqlen_q", "seqlen_kv", "seqlen_order"): lengths_can_be,
    ("layout", "mask"): lambda lay, m: not (lay == "varlen" and m in BOOL | FLOAT),
    ("head_dim", "head_dim_v"): lambda d, v: not (d == 8 and v == "smaller"),
    ("data", "batch"): lambda d, b: not (d == "batch-differs" and b == "one"),
    ("grad_out", "pass"): lambda g, p: not (p == "forward" and g != "contiguous"),
    ("earlier", "layout"): lambda e, lay: not (e == "other-strides" and lay == "varlen"),
    ("layout", "heads", "batch"): lambda lay, h, b: not (lay == "expanded" and h == "one-kv" and b == "one"),
}
BY_AXES: Final = {constraint.axes: constraint for constraint in CONSTRAINTS}
WORK_AXES: Final = ("seqlen_q", "seqlen_kv", "head_dim", "head_dim_v", "heads", "batch")


def choices(axes: Iterable[str]) -> Iterable[tuple[Level, ...]]:
    return itertools.product(*(AXIS[name].levels for name in axes))


def test_the_test_describes_every_constraint() -> None:
    assert {*SAYS, WORK_AXES} == set(BY_AXES)
    assert len(BY_AXES) == len(CONSTRAINTS)
    assert all(constraint.reason for constraint in CONSTRAINTS)


@pytest.mark.parametrize("axes", SAYS, ids="-".join)
def test_a_constraint_excludes_what_it_says(axes: tuple[str, ...]) -> None:
    constraint, says = BY_AXES[axes], SAYS[axes]
    excluded = 0
    for levels in choices(axes):
        assert constraint.allows(*levels) == says(*levels), levels
        excluded += not says(*levels)
    assert excluded


HEADS: Final = {"equal": 1, "grouped": 4, "one-kv": 3}
"""Fewest query heads that show a level as the planner draws it."""


def test_the_work_constraint_excludes_what_is_beyond_the_cap_at_any_length() -> None:
    constraint = BY_AXES[WORK_AXES]
    for q, kv, dim, dim_v, heads, batch in choices(WORK_AXES):
        rest = max(int(dim), head_dim_v(int(dim), dim_v)) * HEADS[str(heads)] * (2 if batch == "more" else 1)
        allows = constraint.allows(q, kv, dim, dim_v, heads, batch)
        if min(representatives(q)) * min(representatives(kv)) * rest > WORK_CAP:
            assert not allows
        if max(representatives(q)) * max(representatives(kv)) * rest <= WORK_CAP // 2:
            assert allows


def test_the_work_constraint_excludes_more_of_everything_with_what_it_excludes() -> None:
    constraint = BY_AXES[WORK_AXES]
    excluded = [levels for levels in choices(WORK_AXES) if not constraint.allows(*levels)]
    assert excluded
    for q, kv, dim, dim_v, heads, batch in excluded:
        if batch == "one":
            assert not constraint.allows(q, kv, dim, dim_v, heads, "more")
        if heads == "one-kv":
            assert not constraint.allows(q, kv, dim, dim_v, "grouped", batch)
        if int(dim) < 512:
            assert not constraint.allows(q, kv, int(dim) + 8 if int(dim) < 256 else 512, dim_v, heads, batch)


def test_the_work_constraint_allows_the_largest_single_head() -> None:
    at = {**PLAIN, "seqlen_q": "long", "seqlen_kv": "long", "head_dim": 512}
    assert allowed(at)
    assert Case(heads=1, heads_kv=1, seqlen_q=512, seqlen_kv=513, head_dim=512).work <= WORK_CAP


def test_first_violated_names_the_constraint() -> None:
    for axes, constraint in BY_AXES.items():
        for levels in choices(axes):
            at = {**PLAIN, **dict(zip(axes, levels, strict=True))}
            found: Constraint | None = first_violated(at)
            assert allowed(at) == (found is None)
            if not constraint.allows(*levels):
                assert found is not None
                assert not found.allows(*(at[name] for name in found.axes))
                break
        else:
            pytest.fail(f"{axes} excludes nothing")
