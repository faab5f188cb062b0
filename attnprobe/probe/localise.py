"""Find the smallest combinations of axis values that fail, by experiment.

For a failing case: reset one axis after the other to its plain level, run, keep what still fails. The
levels left are the rule. Then every passing case that the rule would cover is asked why it passes: it is
moved toward the rule's witness as long as it passes, and an axis on which the two still differ joins the
rule. So a rule holds only what an experiment showed to matter, and covers nothing that was seen to pass.

At last random neighbours inside and outside each rule are run; what they show is learned from as well.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from collections.abc import Set as AbstractSet
from itertools import chain, islice
from typing import Final

from attnprobe.axes import AXES, AXIS, Level, levels_of
from attnprobe.config import Case
from attnprobe.matrix.schema import Rates
from attnprobe.probe.finding import Finding
from attnprobe.probe.moves import ORDER, differing, forced, reset, step
from attnprobe.probe.neighbours import in_turn, leave, vary
from attnprobe.probe.observed import Observation, Observed, kind
from attnprobe.verdict import Verdict

NEIGHBOURS: Final = 6
"""Random cases run inside, and as many outside, each rule."""
RUNS_PER_FAILURE: Final = 15
"""Runs that localising may add per failing case of the plan, beside `RUNS_AT_LEAST`."""
RUNS_AT_LEAST: Final = 100
_ROUNDS: Final = 3
_JOINS: Final = 12
_FEW_LEVELS: Final = 8
"""An axis of no more levels is tried at each when it joins a rule; head dims are left to the plan."""

# Which axis joins a rule when several could: what a reader expects to matter first.
_SWEPT: Final[dict[str, tuple[Level, ...]]] = {
    **{axis: AXIS[axis].levels for axis in ("pass", "dtype", "dropout", "softcap", "alibi")},
    # Over one key every softmax is 1: much that fails elsewhere is right there.
    **dict.fromkeys(("seqlen_q", "seqlen_kv"), ("1",)),
}
_PREFERRED: Final = ("pass", "dtype", "masked_rows", "mask", "layout", "dropout", "needs_grad")


class Exhausted(Exception):  # noqa: N818  # no error: what may be run has been run
    """Raised inside localising where failures keep asking for more runs than they are worth."""


class Localiser:
    """Explains the failures of one backend.

    `probe` runs a case, or raises to stop all localising; `confirm` runs a failing one again where nothing
    ran before it, and returns what is to be known of it then.
    """

    def __init__(
        self,
        observed: Observed,
        probe: Callable[[Case], Observation | None],
        confirm: Callable[[Observation], Observation] = lambda seen: seen,
    ) -> None:
        """Start without findings."""
        self.observed = observed
        self._probe = probe
        self._confirm = confirm
        self.findings: list[Finding] = []
        self._runs_left: int | None = None

    def run(self) -> None:
        """Explain every failing case, then test and sharpen the findings on random neighbours.

        Ends in bounded time: what is not explained by then, failures without a pattern, gets a finding of
        all its axis values.
        """
        failing = sum(seen.verdict.fails for seen in self.observed)
        self._runs_left = RUNS_AT_LEAST + RUNS_PER_FAILURE * failing
        with contextlib.suppress(Exhausted):
            self._run()
        self.findings[:] = [f for f in self.findings if self._passing_inside(f) is None]
        while (left := self._unexplained()) is not None:
            self._alone(left)
        for finding in self.findings:
            near = (seen for name in finding.counter if (seen := self.observed.get(name)) is not None)
            finding.counter = [seen.id for seen in near if len(differing(seen.at, finding.witness.at)) == 1]

    def _run(self) -> None:
        for round_ in range(_ROUNDS):
            self._explain_all()
            before = self._sharpness()
            for finding in list(self.findings):
                self._try_neighbours(finding, round_)
            self._settle()
            if self._unexplained() is None and self._sharpness() == before:
                break
        self._explain_all()
        self._settle()

    def _explain_all(self) -> None:
        while (failing := self._unexplained()) is not None:
            failing = self._confirm(failing)
            if failing.verdict.fails:
                self.explain(failing)

    def _sharpness(self) -> list[dict[str, set[Level]]]:
        """Return the conditions of all findings, to see whether neighbours taught anything."""
        return [{axis: set(levels) for axis, levels in f.when.items()} for f in self.findings]

    def explained(self, seen: Observation) -> Finding | None:
        """Return the finding that covers a failing case."""
        return next((f for f in self.findings if f.kind == kind(seen.verdict) and f.covers(seen)), None)

    def _unexplained(self) -> Observation | None:
        return next(
            (seen for seen in self.observed if seen.verdict.fails and not self.explained(seen)),
            None,
        )

    def explain(self, failing: Observation) -> Finding:
        """Return a finding that covers a failing case: one extended by it, or a new one."""
        for finding in self.findings:
            if self._extend(finding, failing):
                return finding
        witness, counter = self._minimise(failing)
        when: dict[str, set[Level]] = {
            axis: {witness.at[axis]}
            for axis in ORDER
            if witness.at[axis] != AXIS[axis].plain and not forced(witness.at, axis)
        }
        lengths = {"seqlen_q", "seqlen_kv"} & set(when)
        if lengths and "seqlen_order" in when and not self._order_matters(witness, lengths):
            del when["seqlen_order"]
        if "pass" in when:
            when.pop("needs_grad", None)
        self._sweep(witness)
        finding = Finding(when, witness, counter)
        self.findings.append(finding)
        self._sharpen(finding)
        if not finding.covers(failing):
            # What joined excludes it: it fails for a reason of its own, or for none that is seen.
            return self._alone(failing)
        return finding

    def _sweep(self, witness: Observation) -> None:
        """Run the witness at the other levels of the axes that a reader asks about first.

        A level that is plain was never left while minimising; whether it matters has to be asked.
        """
        for axis, levels in _SWEPT.items():
            for level in levels:
                moved = step(witness.case, axis, level)
                if moved is not None:
                    self.look(moved)

    def _order_matters(self, witness: Observation, held: AbstractSet[str]) -> bool:
        """Whether a witness passes with its lengths in another order, those of `held` kept."""
        for order in AXIS["seqlen_order"].levels:
            moved = step(witness.case, "seqlen_order", order, keep=held)
            if moved is None or order == witness.at["seqlen_order"]:
                continue
            seen = self.look(moved)
            if seen is not None and seen.verdict is Verdict.OK:
                return True
        return False

    def _alone(self, failing: Observation) -> Finding:
        """Return a finding of all the axis values of one case, or of the case itself."""
        when = {axis.name: {failing.at[axis.name]} for axis in AXES}
        finding = Finding(when, failing)
        if any(seen.verdict is Verdict.OK and finding.covers(seen) for seen in self.observed):
            finding.cases = {failing.id}
        self.findings.append(finding)
        return finding

    def _minimise(self, failing: Observation) -> tuple[Observation, list[str]]:
        """Return the plainest case found that fails alike, and the passing ones met on the way."""
        witness, counter = failing, []
        stuck: list[str] = []
        # What others kept from its plain level (work is capped) is tried again once those are plain.
        for axis in chain(ORDER, stuck):
            candidate = reset(witness.case, axis)
            at = witness.at if candidate is None else levels_of(candidate)
            if axis not in stuck and at[axis] != AXIS[axis].plain:
                stuck.append(axis)
            if candidate is None:
                continue
            seen = self.look(candidate)
            if seen is None:
                continue
            if seen.verdict.fails and kind(seen.verdict) == kind(failing.verdict):
                # What another finding explains already would only find that one again.
                witness = witness if self.explained(seen) else seen
            elif seen.verdict is Verdict.OK:
                counter.append(candidate.id)
        return witness, counter

    def look(self, case: Case) -> Observation | None:
        """Return what is known of a case, running it where nothing is; None: it may not be run.

        Raises:
            Exhausted: too many cases were run already.
        """
        known = self.observed.get(case.id)
        if known is not None:
            return known
        if self._runs_left is not None:
            if not self._runs_left:
                raise Exhausted
            self._runs_left -= 1
        return self._probe(case)

    def _extend(self, finding: Finding, failing: Observation) -> bool:
        """Whether one more level on one axis makes a finding cover the case, shown on its witness."""
        if finding.kind != kind(failing.verdict) or finding.cases:
            return False
        off = [axis for axis, levels in finding.when.items() if failing.at[axis] not in levels]
        if len(off) != 1:
            return False
        axis = off[0]
        moved = step(finding.witness.case, axis, failing.at[axis])
        if moved is None:
            return False
        seen = self.look(moved)
        if seen is None or not (seen.verdict.fails and kind(seen.verdict) == finding.kind):
            return False
        finding.when[axis].add(failing.at[axis])
        self._sharpen(finding)
        return finding.covers(failing)

    def _sharpen(self, finding: Finding) -> None:
        """Let axes join until no passing case is covered; pin the failing cases where none helps."""
        for _ in range(_JOINS):
            passing = self._passing_inside(finding)
            if passing is None:
                return
            if not self._join(finding, passing):
                break
        if self._passing_inside(finding) is not None:
            finding.cases = {seen.id for seen in self._failing_inside(finding)}

    def _passing_inside(self, finding: Finding) -> Observation | None:
        if finding.cases:
            return None
        return next((s for s in self.observed if s.verdict is Verdict.OK and finding.covers(s)), None)

    def _join(self, finding: Finding, passing: Observation) -> bool:
        """Whether an axis was found that tells a passing case from the witness, and joined."""
        near = passing
        tied = set()
        for axis in ORDER:
            if near.at[axis] == finding.witness.at[axis]:
                continue
            # What the rule names already stays: outside it a case may pass for that.
            candidate = step(near.case, axis, finding.witness.at[axis], keep=finding.when.keys() - {axis})
            if candidate is None:
                tied.add(axis)
                continue
            seen = self.look(candidate)
            if seen is not None and seen.verdict is Verdict.OK:
                near = seen
        axes = differing(near.at, finding.witness.at)
        # An axis that cannot be moved because another one holds it says nothing of its own.
        axes = [axis for axis in axes if axis not in tied] or axes
        if not axes:
            return False
        finding.counter.append(near.id)
        failing = self._failing_inside(finding)
        # The axis whose level, excluded, leaves fewest failing cases without an explanation.
        axis = min(
            axes,
            key=lambda a: (sum(seen.at[a] == near.at[a] for seen in failing), _preference(a)),
        )
        levels = finding.when.get(axis)
        if levels is None:
            levels = {seen.at[axis] for seen in failing} | {finding.witness.at[axis]}
            levels |= self._failing_levels(finding, axis, levels | {near.at[axis]})
        finding.when[axis] = levels - {near.at[axis]}
        return True

    def _failing_levels(self, finding: Finding, axis: str, known: AbstractSet[Level]) -> set[Level]:
        """Return the levels of a joining axis, beside those known, at which the witness fails too."""
        found: set[Level] = set()
        if len(AXIS[axis].levels) > _FEW_LEVELS:
            return found
        for level in AXIS[axis].levels:
            moved = step(finding.witness.case, axis, level) if level not in known else None
            seen = self.look(moved) if moved is not None else None
            if seen is not None and seen.verdict.fails and kind(seen.verdict) == finding.kind:
                found.add(level)
        return found

    def _failing_inside(self, finding: Finding) -> list[Observation]:
        """Return the failing cases of its kind that a finding covers."""
        return [
            seen
            for seen in self.observed
            if seen.verdict.fails and kind(seen.verdict) == finding.kind and finding.covers(seen)
        ]

    def _settle(self) -> None:
        """Sharpen all findings until none covers a passing case, and drop those another one holds."""
        for finding in list(self.findings):
            self._sharpen(finding)
        self._merge()

    def _merge(self) -> None:
        """Join findings that differ on one axis only; drop those that another one contains."""
        merged = True
        while merged:
            merged = False
            for one in self.findings:
                for other in self.findings:
                    if one is not other and self._merged(one, other):
                        self.findings.remove(other)
                        merged = True
                        break
                if merged:
                    break

    def _merged(self, one: Finding, other: Finding) -> bool:
        """Whether `other` went into `one`."""
        if one.kind != other.kind or one.cases or other.cases:
            return False
        if all(axis in other.when and other.when[axis] <= one.when[axis] for axis in one.when):
            return True
        if one.when.keys() != other.when.keys():
            return False
        off = [axis for axis in one.when if one.when[axis] != other.when[axis]]
        if len(off) != 1:
            return False
        both = Finding({**one.when, off[0]: one.when[off[0]] | other.when[off[0]]}, one.witness)
        if self._passing_inside(both) is not None:
            return False
        one.when = both.when
        one.counter += other.counter
        return True

    def _try_neighbours(self, finding: Finding, round_: int) -> None:
        """Run random cases inside and outside a finding and note how many of each fail."""
        if finding.cases:
            return
        draw = random.Random(f"{finding.witness.case.id}/{round_}")  # noqa: S311  # no secret
        axes = in_turn(draw, finding.when)
        inside = self._sample(draw, finding, lambda case: vary(draw, case, islice(axes, 3), finding.when))
        outside = self._sample(draw, finding, lambda case: leave(draw, case, finding.when, axes))
        counts = []
        for cases in (inside, outside):
            seen = [s for case in cases if (s := self.look(case)) is not None]
            judged = [s for s in seen if s.verdict is Verdict.OK or s.verdict.fails]
            failed = [s for s in judged if s.verdict.fails and kind(s.verdict) == finding.kind]
            counts += [len(failed), len(judged)]
        finding.rates = Rates(
            inside_failed=counts[0],
            inside_tried=counts[1],
            outside_failed=counts[2],
            outside_tried=counts[3],
        )

    def _sample(
        self, draw: random.Random, finding: Finding, move: Callable[[Case], Case | None]
    ) -> list[Case]:
        """Return a few moved cases that no other finding covers."""
        sources = self._failing_inside(finding)
        found: dict[str, Case] = {}
        for _ in range(NEIGHBOURS * 8):
            if len(found) == NEIGHBOURS:
                break
            case = move(draw.choice(sources).case if sources else finding.witness.case)
            if case is not None and not self._covered_by_other(case, finding):
                found[case.id] = case
        return list(found.values())

    def _covered_by_other(self, case: Case, finding: Finding) -> bool:
        at = levels_of(case)
        return any(
            other is not finding
            and not other.cases
            and all(at[axis] in levels for axis, levels in other.when.items())
            for other in self.findings
        )


def _preference(axis: str) -> int:
    return _PREFERRED.index(axis) if axis in _PREFERRED else len(_PREFERRED) + ORDER.index(axis)
