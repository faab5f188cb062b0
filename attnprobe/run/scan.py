"""One scan: plan, run, judge, localise, matrix. The one place that sees all stages."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Final

from msgspec import Struct, structs

from attnprobe.axes import levels_of
from attnprobe.config import Case
from attnprobe.device.interface import Device
from attnprobe.matrix.schema import Material, Matrix, Result
from attnprobe.probe.finding import Finding
from attnprobe.probe.localise import Localiser
from attnprobe.probe.observed import Observation, Observed
from attnprobe.probe.plan import Plan
from attnprobe.run.assemble import Account, assemble
from attnprobe.run.journal import Journal
from attnprobe.run.protocol import Outcome
from attnprobe.run.supervisor import Supervisor
from attnprobe.verdict import Verdict

WITNESSES: Final = 5
"""Deaths under one finding after which further cases under it are not run."""
LOCALISING_SHARE: Final = 0.2
"""Share of a time budget that is kept for localising."""


class Present(Struct, frozen=True, kw_only=True):
    """A backend of this scan, or the reason it is absent."""

    name: str
    materials: tuple[Material, ...]
    reason: str = ""
    compiles: bool = False


@dataclass
class Progress:
    """What a display is told: the stage, how far it is, and how many cases failed so far."""

    stage: str = ""
    done: int = 0
    total: int = 0
    failing: int = 0


class BudgetSpent(Exception):  # noqa: N818  # no error: the time that was asked for is over
    """Raised inside localising to end it."""


@dataclass
class Scan:
    """The state of one scan. Call `run()` once; after an interrupt `matrix()` still gives what is known."""

    device: Device
    plan: Plan
    supervisor: Supervisor
    backends: tuple[Present, ...]
    journal: Journal
    budget: float | None = None
    kernels: int | None = None
    show: Callable[[Progress], None] = lambda _: None
    _observed: dict[str, Observed] = field(default_factory=dict)
    _findings: dict[str, list[Finding]] = field(default_factory=dict)
    _traits: dict[str, dict[str, set[str]]] = field(default_factory=dict)
    _right: dict[str, set[str]] = field(default_factory=dict)
    _compiled: dict[str, int] = field(default_factory=dict)
    _confirmed: set[tuple[str, str]] = field(default_factory=set)
    _disordered: set[str] = field(default_factory=set)
    _progress: Progress = field(default_factory=Progress)
    _account: Account = field(default_factory=Account)

    def __post_init__(self) -> None:
        """Prepare an empty record per backend."""
        self._start = time.monotonic()
        self._account.started = _now()
        self._names = tuple(one.name for one in self.backends if not one.reason)
        self._observed = {name: Observed() for name in self._names}
        self._findings = {name: [] for name in self._names}
        self._traits = {name: {} for name in self._names}
        self._limits = {
            one.name: self.kernels or 0 for one in self.backends if one.compiles and not one.reason
        }

    def run(self) -> None:
        """Run the plan, then localise what failed."""
        with contextlib.suppress(BudgetSpent):  # spent while a death was being localised
            self._run_plan()
        self._localise()
        self._account.finished_all = self._account.executed == len(self.plan.cases)
        self._account.localised = self._account.localised and self._account.finished_all

    def matrix(self) -> Matrix:
        """Return the document of what is known now."""
        self._account.finished = _now()
        self._account.seconds["total"] = time.monotonic() - self._start
        self._account.seconds["import"] = self.supervisor.import_seconds
        described = self.supervisor.described
        if described is not None:
            self._account.poison, self._account.guard = described.poison, described.guard
        return assemble(
            self.device.record,
            self.plan,
            self.backends,
            self._observed,
            self._findings,
            {n: {k: " or ".join(sorted(v)) for k, v in t.items()} for n, t in self._traits.items()},
            self._right,
            self._account,
        )

    def _over(self, share: float) -> bool:
        return self.budget is not None and time.monotonic() - self._start > self.budget * share

    def _run_plan(self) -> None:
        self._progress = Progress("cases", total=len(self.plan.cases))
        for case in self.plan.cases:
            if self._over(1 - LOCALISING_SHARE):
                return
            self._execute(case, self._names)
            self._account.executed += 1
            self._progress.done += 1
            self.show(self._progress)

    def _execute(self, case: Case, names: tuple[str, ...]) -> None:
        """Run a case on the backends that still have something to show by it."""
        wanted = []
        for name in names:
            # A journal answers what would run here, and has no say in whether it would: localising may
            # have run a case later that the plan had skipped.
            met = self._observed[name].get(case.id) is not None
            if not met and not self._is_worth(name, case):
                continue
            known = self.journal.known.get((case.id, name))
            if known is not None:
                self._keep(case, known)
            else:
                wanted.append(name)
        if not wanted:
            return
        answered = set()
        for outcome in self._probe(case, tuple(wanted)):
            answered.add(outcome.backend)
            self._keep(case, outcome)
        self._account.skipped += len(wanted) - len(answered)

    def _probe(self, case: Case, names: tuple[str, ...], *, fresh: bool = False) -> Iterator[Outcome]:
        """Run a case for real, every launch and outcome in the journal."""
        self.journal.launch(case, names)
        may = tuple(name for name in names if self._compiled.get(name, 0) < self._limits.get(name, 0))
        for outcome in self.supervisor.run(case, names, self._account.seconds, may, fresh=fresh):
            self.journal.outcome(case, outcome)
            yield outcome

    def _is_worth(self, name: str, case: Case) -> bool:
        """Whether to run a case: not where enough deaths are known."""
        at_death = self._deadly(name, case)
        if at_death is not None and at_death.deaths >= WITNESSES:
            at_death.skipped += 1
            self._account.skipped += 1
            return False
        return True

    def _deadly(self, name: str, case: Case) -> Finding | None:
        seen = Observation(case, levels_of(case), Result(id=case.id))
        for finding in self._findings[name]:
            if finding.kind == "death" and finding.covers(seen):
                return finding
        return None

    def _keep(self, case: Case, outcome: Outcome) -> Observation:
        """Record an outcome; a new way to die is localised at once, so that it is not died of often."""
        name = outcome.backend
        result = Result(
            id=case.id,
            verdict=outcome.verdict,
            evidence=outcome.evidence,
            outputs=outcome.outputs,
            kernel=outcome.kernel,
            detail=outcome.detail,
        )
        seen = self._observed[name].add(case, result)
        if "order" in outcome.detail:
            self._disordered.add(name)
        if outcome.compiled:
            self._compiled[name] = self._compiled.get(name, 0) + 1
        for trait, value in outcome.traits.items():
            self._traits[name].setdefault(trait, set()).add(value)
        if seen.verdict.fails:
            self._progress.failing += 1
        if seen.verdict.ends_worker and self._progress.stage == "cases":
            finding = self._deadly(name, case)
            if finding is None:
                finding = self._localise_death(name, seen)
            finding.deaths += 1
        return seen

    def _localise_death(self, name: str, seen: Observation) -> Finding:
        localiser = self._localiser(name)
        localiser.findings = self._findings[name]
        return localiser.explain(seen)

    def _localiser(self, name: str) -> Localiser:
        def probe(case: Case) -> Observation | None:
            if self._over(1.0):
                raise BudgetSpent
            stage, self._progress.stage = self._progress.stage, "rules"
            known = self.journal.known.get((case.id, name))
            if known is None:
                fresh = name in self._disordered
                known = next(iter([*self._probe(case, (name,), fresh=fresh)]), None)
            seen = None if known is None else self._keep(case, known)
            self._account.extra += 1
            self.show(self._progress)
            self._progress.stage = stage
            return seen

        return Localiser(self._observed[name], probe, lambda seen: self._confirm(name, seen))

    def _confirm(self, name: str, seen: Observation) -> Observation:
        """Return what becomes of a failing case in a process that has run nothing before.

        What passes there failed because of what ran earlier: a cache, or another backend's doing. It is
        held against nobody, and from then on this backend is localised in fresh processes only; the axis
        `earlier` says whether a call of its own is enough.
        """
        if seen.verdict.ends_worker or name in self._limits or (name, seen.id) in self._confirmed:
            return seen
        self._confirmed.add((name, seen.id))
        if self._over(1.0):
            raise BudgetSpent
        self.journal.launch(seen.case, (name,))
        launched = self.supervisor.run(seen.case, (name,), self._account.seconds, fresh=True)
        alone = next(iter([*launched]), None)
        if alone is None or alone.verdict.fails:
            return seen
        then = f"{alone.verdict.value} alone"
        detail = {"order": f"{seen.verdict.value} after other cases in the same process, {then}"}
        outcome = structs.replace(alone, verdict=Verdict.INCONCLUSIVE, outputs=(), detail=detail, traits={})
        self.journal.outcome(seen.case, outcome)
        return self._keep(seen.case, outcome)

    def _localise(self) -> None:
        self._progress = Progress("rules", failing=self._progress.failing)
        try:
            for name in self._names:
                localiser = self._localiser(name)
                localiser.findings = self._findings[name]
                localiser.run()
            self._find_who_is_right()
            self._account.localised = True
        except BudgetSpent:
            self._account.localised = False

    def _find_who_is_right(self) -> None:
        """Run every witness on the other backends, so that a rule can name one that is right."""
        for name in self._names:
            for finding in self._findings[name]:
                case = finding.witness.case
                for other in self._names:
                    if other == name or other in self._limits:
                        continue
                    seen = self._observed[other].get(case.id)
                    if seen is None:
                        seen = self._localiser(other).look(case)
                    if seen is not None and seen.verdict is Verdict.OK:
                        self._right.setdefault(case.id, set()).add(other)


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")
