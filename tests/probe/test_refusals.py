"""Refusals grouped by the library's own words: rules that cover every one and nothing that ran."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Final

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attnprobe.axes import AXES, AXIS, Level, levels_of
from attnprobe.config import Case
from attnprobe.matrix.schema import Result
from attnprobe.probe.observed import Observation
from attnprobe.probe.plan import plan
from attnprobe.probe.refusals import Group, group, words
from attnprobe.verdict import Verdict

CASES: Final = plan("quick").cases
At = dict[str, Level]
AT: Final = [(case, levels_of(case)) for case in CASES]
Says = Callable[[At], str | None]


def observation(case: Case, at: At, says: str | None, verdict: Verdict = Verdict.OK) -> Observation:
    if says is None:
        return Observation(case, at, Result(id=case.id, verdict=verdict))
    return Observation(case, at, Result(id=case.id, verdict=Verdict.REFUSED, detail={"says": says}))


def scanned(says: Says) -> list[Observation]:
    return [observation(case, at, says(at)) for case, at in AT]


def covers(found: Group, seen: Observation) -> bool:
    if found.exact:
        return any(seen is one for one in found.under)
    return all(seen.at[axis] in levels for axis, levels in found.when.items())


def check(everything: list[Observation], found: list[Group]) -> None:
    """Fail unless each refusal is under exactly the groups that name it and no case that ran is."""
    refused = [seen for seen in everything if seen.verdict is Verdict.REFUSED]
    under = [one.case.id for each in found for one in each.under]
    assert sorted(under) == sorted(seen.case.id for seen in refused)
    for each in found:
        assert each.under
        assert len({words(one) for one in each.under}) == 1
        assert all(covers(each, one) for one in each.under)
        for seen in everything:
            if seen.verdict is not Verdict.REFUSED and not seen.verdict.neutral:
                assert not covers(each, seen), (each.when, seen.at)


ONE_VALUE: Final = [
    ("dropout", "on"),
    ("mask", "window"),
    ("layout", "varlen"),
    ("dtype", "float32"),
    ("head_dim", 512),
    ("softcap", "on"),
    ("head_dim_v", "larger"),
]


@pytest.mark.parametrize(("axis", "level"), ONE_VALUE)
def test_one_refused_value_is_one_rule(axis: str, level: Level) -> None:
    everything = scanned(lambda at: f"no {axis}" if at[axis] == level else None)
    found = group(everything)
    check(everything, found)
    assert [each.when for each in found] == [{axis: frozenset({level})}]


def test_several_refused_values_of_an_axis_are_one_rule() -> None:
    wide = {dim for dim in AXIS["head_dim"].levels if int(dim) > 128}
    everything = scanned(lambda at: "head dim is too large" if at["head_dim"] in wide else None)
    found = group(everything)
    check(everything, found)
    assert [each.when for each in found] == [{"head_dim": frozenset(wide)}]


def test_each_wording_has_its_own_rule() -> None:
    def says(at: At) -> str | None:
        if at["dropout"] == "on":
            return "dropout is not supported"
        return "ALiBi is not supported" if at["alibi"] == "on" else None

    everything = scanned(says)
    found = group(everything)
    check(everything, found)
    assert {"dropout": frozenset({"on"})} in [each.when for each in found]
    for each in found:
        assert len({one.result.detail["says"] for one in each.under}) == 1


@pytest.mark.parametrize("seed", range(6))
def test_a_conjunction_is_covered_and_nothing_that_ran(seed: int) -> None:
    draw = random.Random(seed)  # noqa: S311
    _, at = draw.choice(AT)
    axes = draw.sample([axis.name for axis in AXES if axis.name != "head_dim"], 2)
    everything = scanned(lambda other: "no" if all(other[a] == at[a] for a in axes) else None)
    check(everything, group(everything))


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 1 << 30), st.integers(1, 4), st.floats(0, 0.3))
def test_whatever_is_refused_is_covered_and_what_ran_is_not(seed: int, wordings: int, noise: float) -> None:
    draw = random.Random(seed)  # noqa: S311
    triggers = []
    for number in range(wordings):
        axes = draw.sample(AXES, draw.randint(1, 3))
        levels = {axis.name: draw.sample(axis.levels, draw.randint(1, len(axis.levels))) for axis in axes}
        triggers.append((f"reason {'abcd'[number]}", levels))
    neutral = (Verdict.OUT_OF_MEMORY, Verdict.INCONCLUSIVE, Verdict.WRONG)
    everything = []
    for case, at in draw.sample(AT, 200):
        said = next((why for why, when in triggers if all(at[a] in when[a] for a in when)), None)
        said = draw.choice([None, "at random"]) if draw.random() < noise else said
        verdict = draw.choice(neutral) if draw.random() < 0.1 else Verdict.OK
        everything.append(observation(case, at, said, verdict))
    check(everything, group(everything))


def test_where_nothing_ran_a_wording_covers_everything() -> None:
    everything = scanned(lambda _: "CPU only")
    found = group(everything)
    assert [each.when for each in found] == [{}]
    check(everything, found)


def test_what_is_neutral_says_nothing() -> None:
    refused, neutral = AT[0], AT[1]
    everything = [
        observation(*refused, "no"),
        observation(*neutral, None, Verdict.OUT_OF_MEMORY),
        observation(*AT[2], None, Verdict.INCONCLUSIVE),
    ]
    assert [each.when for each in group(everything)] == [{}]


def test_a_failing_case_ran_and_is_kept_out() -> None:
    everything = [
        observation(case, at, "no" if at["dropout"] == "on" else None, Verdict.WRONG) for case, at in AT
    ]
    found = group(everything)
    check(everything, found)
    assert [each.when for each in found] == [{"dropout": frozenset({"on"})}]


def test_nothing_refused_gives_nothing() -> None:
    assert group(scanned(lambda _: None)) == []
    assert group([]) == []


def test_refusals_at_random_are_named_one_by_one() -> None:
    draw = random.Random(1)  # noqa: S311
    everything = [observation(case, at, "no" if draw.random() < 0.5 else None) for case, at in AT]
    check(everything, group(everything))


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("head dim 72 > 64", "head dim 256 > 64", True),
        ("Expected 16 aligned. Got q.size(-1): 72", "Expected 16 aligned. Got k.size(-1): 40", True),
        ("no dropout", "no ALiBi", False),
    ],
)
def test_words_leave_numbers_and_sizes_out(one: str, other: str, *, same: bool) -> None:
    case, at = AT[0]
    assert (words(observation(case, at, one)) == words(observation(case, at, other))) == same
