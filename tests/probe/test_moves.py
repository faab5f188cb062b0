"""A step lands on the wanted level with as little else changed as the constraints allow."""

from __future__ import annotations

import random
from typing import Final

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from attnprobe.axes import AXES, AXIS, WORK_CAP, Level, allowed, levels_of
from attnprobe.config import Case
from attnprobe.probe.moves import LENGTHS, ORDER, differing, forced, reset, step
from attnprobe.probe.plan import random_cases

STEPS: Final = [(axis.name, level) for axis in AXES for level in axis.levels if axis.name != "head_dim"] + [
    ("head_dim", dim) for dim in (8, 72, 256, 512)
]

# Axes that may move along with one, because a constraint ties them.
COMPANIONS: Final[dict[str, frozenset[str]]] = {
    "seqlen_q": frozenset({"seqlen_order"}),
    "seqlen_kv": frozenset({"seqlen_order"}),
    "seqlen_order": frozenset({"seqlen_q", "seqlen_kv"}),
    "pass": frozenset({"needs_grad", "grad_out"}),
}


@st.composite
def some_case(draw: st.DrawFn) -> Case:
    """Return a random case; sometimes with numbers that no level of the plan stands for."""
    (case,) = random_cases(1, draw(st.integers(0, 1 << 31)))
    if draw(st.booleans()):
        odd = structs.replace(
            case,
            seqlen_q=max(case.seqlen_q - 2, 0) if case.seqlen_q % 2 else case.seqlen_q,
            dropout=0.5 if case.dropout else 0.0,
        )
        if odd.work <= WORK_CAP and allowed(levels_of(odd)):
            return odd
    return case


def wanted_alone(at: dict[str, Level], axis: str, level: Level) -> dict[str, Level]:
    """Return the levels after changing one axis, and the gradients with the pass."""
    wanted = {**at, axis: level}
    if axis == "pass" and at[axis] != level:
        wanted["needs_grad"] = "none" if level == "forward" else "all"
    return wanted


@settings(max_examples=800, deadline=None)
@given(some_case(), st.sampled_from(STEPS))
def test_a_step_lands_on_the_level_or_says_that_it_cannot(case: Case, to: tuple[str, Level]) -> None:
    axis, level = to
    at = levels_of(case)
    moved = step(case, axis, level)
    alone = wanted_alone(at, axis, level)
    if moved is None:
        assert not allowed(alone), "nothing forbids it, and yet no step was found"
        return
    after = levels_of(moved)
    assert after[axis] == level
    assert allowed(after)
    assert moved.work <= WORK_CAP
    assert moved.seed == case.seed
    changed = {name for name in after if after[name] != at[name]}
    assert changed <= {axis} | COMPANIONS.get(axis, frozenset())
    if allowed(alone):
        assert after == alone


@settings(deadline=None)
@given(some_case())
def test_a_step_to_where_it_stands_changes_nothing(case: Case) -> None:
    for axis, level in levels_of(case).items():
        assert step(case, axis, level) == case


@settings(deadline=None)
@given(some_case(), st.sampled_from(["dtype", "softcap", "alibi", "deterministic", "scale", "dropout"]))
def test_a_step_there_and_back_on_a_free_axis_keeps_the_levels(case: Case, axis: str) -> None:
    at = levels_of(case)
    for level in AXIS[axis].levels:
        there = step(case, axis, level)
        assert there is not None
        back = step(there, axis, at[axis])
        assert back is not None
        assert levels_of(back) == at
        assert (back.seqlen_q, back.seqlen_kv) == (case.seqlen_q, case.seqlen_kv)


@settings(max_examples=300, deadline=None)
@given(some_case(), st.sampled_from(ORDER))
def test_reset_makes_one_axis_plainer(case: Case, axis: str) -> None:
    at = levels_of(case)
    levels = AXIS[axis].levels
    moved = reset(case, axis)
    if moved is None:
        assert at[axis] == AXIS[axis].plain or step(case, axis, AXIS[axis].plain) is None
        return
    after = levels_of(moved)
    assert after[axis] != at[axis]
    assert after[axis] == AXIS[axis].plain or levels.index(after[axis]) < levels.index(at[axis])
    assert moved == step(case, axis, after[axis])


def test_resetting_every_axis_again_and_again_ends_in_the_plain_case() -> None:
    draw = random.Random(5)  # noqa: S311
    for case in random_cases(60, draw.randrange(1 << 30)):
        at_start, seed = case, case.seed
        for _ in range(3):
            for axis in ORDER:
                case = reset(case, axis) or case  # noqa: PLW2901
        assert levels_of(case) == levels_of(Case()), at_start
        assert case.seed == seed


def test_forced_says_when_the_other_levels_leave_no_plain_one() -> None:
    forward = levels_of(Case(pass_="forward", needs_grad="none"))
    assert forced(forward, "needs_grad")
    assert forced(levels_of(Case(mask="bool", masked_rows="false")), "mask")
    assert not forced(levels_of(Case(mask="bool")), "mask")
    assert not forced(levels_of(Case(dtype="float16")), "dtype")
    assert forced(levels_of(Case(seqlen_q=7)), "seqlen_order")


@settings(deadline=None)
@given(some_case(), some_case())
def test_differing_names_the_axes_apart_without_those_that_follow(one: Case, other: Case) -> None:
    at, to = levels_of(one), levels_of(other)
    apart = {axis for axis in at if at[axis] != to[axis]}
    named = differing(at, to)
    assert len(set(named)) == len(named)
    assert set(named) <= apart
    follows = set()
    if "pass" in apart:
        follows |= {"needs_grad", "grad_out"}
    if apart & {"seqlen_q", "seqlen_kv"}:
        follows.add("seqlen_order")
    assert apart - set(named) == apart & follows
    assert bool(named) == bool(apart)
    assert differing(to, at) == named


def test_the_order_of_axes_holds_each_once() -> None:
    assert sorted(ORDER) == sorted(AXIS)
    assert set(ORDER) >= LENGTHS
