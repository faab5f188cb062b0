"""Backends with a hidden reason to fail: the localiser must find it, in few runs."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Collection, Mapping
from typing import Final

import pytest

from attnprobe.axes import AXES, AXIS, Level, levels_of
from attnprobe.config import Case
from attnprobe.matrix.schema import Result
from attnprobe.probe.finding import Finding
from attnprobe.probe.localise import NEIGHBOURS, Localiser
from attnprobe.probe.moves import differing
from attnprobe.probe.observed import Observation, Observed, kind
from attnprobe.probe.plan import covering_rows, plan, random_cases
from attnprobe.verdict import Verdict

At = Mapping[str, Level]
When = Mapping[str, Collection[Level]]
Behaviour = Callable[[Case, At], Verdict]

CASES: Final = plan("quick").cases
PLANNED_AT: Final = [levels_of(case) for case in CASES]


EVERYWHERE: Final[list[At]] = [
    *covering_rows()[0][::3],
    *(levels_of(case) for case in random_cases(2000, 77)),
]
"""Many allowed choices of all levels, to compare two conditions on."""


def holds(when: When, at: At) -> bool:
    return all(at[axis] in allowed for axis, allowed in when.items())


def failing_under(*triggers: When, verdict: Verdict = Verdict.WRONG) -> Behaviour:
    def behave(_: Case, at: At) -> Verdict:
        return verdict if any(holds(when, at) for when in triggers) else Verdict.OK

    return behave


class Scan:
    """The planned cases as a backend answers them, then the localiser over them."""

    def __init__(self, behave: Behaviour, *, cases: Collection[Case] = CASES, budget: int = 10_000) -> None:
        self.behave = behave
        self.budget = budget
        self.limit = 10_000
        self.extra: list[str] = []
        self.observed = Observed()
        for case in cases:
            self._see(case)
        self.failed_at_first = sum(seen.verdict.fails for seen in self.observed)
        self.localiser = Localiser(self.observed, self._probe)

    def run(self) -> list[Finding]:
        self.localiser.run()
        return self.localiser.findings

    def _see(self, case: Case) -> Observation:
        return self.observed.add(case, Result(id=case.id, verdict=self.behave(case, levels_of(case))))

    def _probe(self, case: Case) -> Observation | None:
        assert self.observed.get(case.id) is None, "a case is run once"
        if len(self.extra) >= self.budget:
            return None
        self.extra.append(case.id)
        assert len(self.extra) <= self.limit, "no end of runs"
        return self._see(case)


def check_cover(scan: Scan) -> None:
    """Fail unless every failing case is under a finding of its kind, and no passing one is."""
    for seen in scan.observed:
        over = [found for found in scan.localiser.findings if found.covers(seen)]
        if seen.verdict.fails:
            assert any(found.kind == kind(seen.verdict) for found in over), seen.at
            assert scan.localiser.explained(seen) in over
        elif seen.verdict is Verdict.OK:
            assert not over, [found.when for found in over]


def disagreement(findings: list[Finding], trigger: When) -> list[At]:
    """Return the choices of levels on which the findings and the trigger differ."""
    return [
        at
        for at in EVERYWHERE
        if any(holds(found.when, at) and not found.cases for found in findings) != holds(trigger, at)
    ]


def hidden(count: int, seed: int, size: int) -> list[dict[str, set[Level]]]:
    """Return random conjunctions of `size` axes at one level each, that some planned case meets."""
    draw = random.Random(seed)  # noqa: S311
    found: list[dict[str, set[Level]]] = []
    for case in random_cases(400, seed):
        at = levels_of(case)
        trigger: dict[str, set[Level]] = {
            axis: {at[axis]} for axis in draw.sample([axis.name for axis in AXES], size)
        }
        if trigger not in found and any(holds(trigger, seen) for seen in PLANNED_AT):
            found.append(trigger)
        if len(found) == count:
            break
    return found


def shown(trigger: When) -> str:
    return ",".join(f"{axis}={'|'.join(map(str, allowed))}" for axis, allowed in trigger.items())


HIDDEN: Final = [*hidden(14, 1, 1), *hidden(14, 2, 2), *hidden(14, 3, 3)]
HEADLINE: Final[dict[str, set[Level]]] = {
    "pass": {"backward"},
    "dropout": {"on"},
    "head_dim": {dim for dim in AXIS["head_dim"].levels if 200 <= int(dim) <= 256},
}
EXTRA_RUNS: Final = 120
"""Runs beyond the plan for one hidden conjunction; measured at 112 at most over 295 of them."""


@functools.cache
def scan_of(index: int) -> Scan:
    """Return the finished scan of a hidden conjunction, for the tests that look at it."""
    scan = Scan(failing_under(HIDDEN[index]))
    scan.run()
    return scan


EACH: Final = pytest.mark.parametrize("index", range(len(HIDDEN)), ids=[shown(trigger) for trigger in HIDDEN])


@EACH
def test_what_fails_is_covered_and_what_passes_is_not_in_few_runs(index: int) -> None:
    scan = scan_of(index)
    assert scan.failed_at_first
    check_cover(scan)
    assert len(scan.extra) <= EXTRA_RUNS


@EACH
def test_the_rule_for_a_conjunction_is_the_conjunction(index: int) -> None:
    findings = scan_of(index).localiser.findings
    wrong = disagreement(findings, HIDDEN[index])
    assert wrong == [], ([found.when for found in findings], len(wrong))


@EACH
def test_a_witness_fails_and_counter_witnesses_pass(index: int) -> None:
    scan = scan_of(index)
    for found in scan.localiser.findings:
        assert found.witness.verdict is Verdict.WRONG
        assert found.covers(found.witness)
        for counter in found.counter:
            seen = scan.observed.get(counter)
            assert seen is not None
            assert seen.verdict is Verdict.OK


def test_counter_witnesses_differ_from_the_witness_on_one_axis() -> None:
    """What `matrix.schema.Rule` says of them."""
    apart = []
    for scan in map(scan_of, range(len(HIDDEN))):
        for found in scan.localiser.findings:
            for counter in found.counter:
                seen = scan.observed.get(counter)
                assert seen is not None
                apart.append(len(differing(seen.at, found.witness.at)))
    assert set(apart) == {1}, sorted(apart)


@EACH
def test_rates_say_that_neighbours_inside_fail_and_those_outside_do_not(index: int) -> None:
    for found in scan_of(index).localiser.findings:
        if found.cases or disagreement([found], HIDDEN[index]):
            continue
        assert found.rates is not None
        assert 0 < found.rates.inside_tried <= NEIGHBOURS
        assert found.rates.inside_failed == found.rates.inside_tried
        assert 0 < found.rates.outside_tried <= NEIGHBOURS
        assert found.rates.outside_failed == 0


def test_the_headline_rule_is_found_whole() -> None:
    scan = Scan(failing_under(HEADLINE, verdict=Verdict.UNWRITTEN), cases=plan("standard").cases)
    (found,) = scan.run()
    check_cover(scan)
    assert found.when == HEADLINE
    assert found.kind == "unwritten"
    assert len(scan.extra) <= EXTRA_RUNS


def test_the_headline_rule_is_found_from_pairs_at_the_head_dims_that_were_seen() -> None:
    scan = Scan(failing_under(HEADLINE, verdict=Verdict.UNWRITTEN))
    (found,) = scan.run()
    check_cover(scan)
    assert {axis: found.when[axis] for axis in ("pass", "dropout")} == {
        "pass": {"backward"},
        "dropout": {"on"},
    }
    assert found.when.keys() == HEADLINE.keys()
    assert found.when["head_dim"] <= HEADLINE["head_dim"]
    assert found.when["head_dim"] == {seen.at["head_dim"] for seen in scan.observed if seen.verdict.fails}


def test_failures_of_two_kinds_have_a_rule_each() -> None:
    deadly: When = {"head_dim": {72}, "dtype": {"bfloat16"}}
    wrong: When = {"dropout": {"on"}, "dtype": {"float16"}}

    def behave(case: Case, at: At) -> Verdict:
        if holds(deadly, at):
            return Verdict.HUNG if case.seqlen_q % 2 else Verdict.CRASHED
        return failing_under(wrong)(case, at)

    scan = Scan(behave)
    findings = scan.run()
    check_cover(scan)
    assert {found.kind: found.when for found in findings} == {"death": deadly, "values": wrong}


def test_one_kind_with_two_reasons_has_two_rules() -> None:
    one: When = {"layout": {"transposed"}, "dtype": {"float16"}}
    other: When = {"mask": {"causal-top-left"}, "scale": {"custom"}}
    scan = Scan(failing_under(one, other))
    findings = scan.run()
    check_cover(scan)
    assert disagreement_with_any(findings, one, other) == []
    assert len(findings) == 2
    assert len(scan.extra) <= 2 * EXTRA_RUNS


def disagreement_with_any(findings: list[Finding], *triggers: When) -> list[At]:
    return [
        at
        for at in EVERYWHERE
        if any(holds(found.when, at) and not found.cases for found in findings)
        != any(holds(trigger, at) for trigger in triggers)
    ]


@pytest.mark.parametrize("seed", range(12))
def test_whatever_the_reasons_are_what_fails_is_covered_and_what_passes_is_not(seed: int) -> None:
    draw = random.Random(seed)  # noqa: S311
    triggers = draw.sample(HIDDEN, draw.randint(2, 4))
    scan = Scan(failing_under(*triggers))
    findings = scan.run()
    check_cover(scan)
    assert findings
    assert len(scan.extra) <= 400


@pytest.mark.parametrize("share", [0.05, 0.3])
def test_failures_without_a_reason_are_covered_all_the_same(share: float) -> None:
    def behave(case: Case, _: At) -> Verdict:
        return Verdict.WRONG if int(case.id, 16) % 1000 < share * 1000 else Verdict.OK

    # What has no reason cannot be reduced: each failure met on the way would ask for runs of its own.
    scan = Scan(behave, cases=CASES[:50])
    scan.limit = 100 * scan.failed_at_first
    scan.run()
    check_cover(scan)


@pytest.mark.parametrize("index", range(0, len(HIDDEN), 3))
@pytest.mark.parametrize("budget", [0, 5, 20])
def test_without_runs_left_what_fails_is_covered_and_what_passes_is_not(index: int, budget: int) -> None:
    scan = Scan(failing_under(HIDDEN[index]), budget=budget, cases=CASES[:100])
    scan.run()
    check_cover(scan)
    assert len(scan.extra) <= budget


def test_refusals_and_neutral_verdicts_neither_join_nor_bar_a_rule() -> None:
    trigger: When = {"layout": {"packed"}, "dtype": {"bfloat16"}}

    def behave(case: Case, at: At) -> Verdict:
        if at["dropout"] == "on":
            return Verdict.REFUSED
        return Verdict.OUT_OF_MEMORY if at["batch"] == "more" else failing_under(trigger)(case, at)

    scan = Scan(behave)
    (found,) = scan.run()
    check_cover(scan)
    assert found.when == trigger


def test_a_failure_everywhere_is_a_rule_without_conditions() -> None:
    scan = Scan(lambda _case, _at: Verdict.NONFINITE)
    (found,) = scan.run()
    assert found.when == {}
    assert len(scan.extra) <= EXTRA_RUNS


def test_wrong_and_not_finite_are_one_kind() -> None:
    def behave(_: Case, at: At) -> Verdict:
        if at["softcap"] == "off":
            return Verdict.OK
        return Verdict.NONFINITE if at["dtype"] == "float16" else Verdict.WRONG

    (found,) = Scan(behave).run()
    assert found.when == {"softcap": {"on"}}


def test_nothing_failing_needs_no_runs() -> None:
    scan = Scan(lambda _case, _at: Verdict.OK)
    assert scan.run() == []
    assert scan.extra == []


def test_localising_again_gives_the_same() -> None:
    one, other = Scan(failing_under(HIDDEN[30])), Scan(failing_under(HIDDEN[30]))
    assert [found.when for found in one.run()] == [found.when for found in other.run()]
    assert one.extra == other.extra


def test_localising_stops_where_the_probe_raises_and_keeps_what_was_found() -> None:
    class StopError(Exception):
        pass

    scan = Scan(failing_under({"dtype": {"float16"}, "layout": {"packed"}}))

    def probe(_: Case) -> Observation | None:
        raise StopError

    localiser = Localiser(scan.observed, probe)
    with pytest.raises(StopError):
        localiser.run()
    assert len(scan.observed) == len(CASES)
