"""Put what a scan has seen into the document."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from msgspec import structs

import attnprobe
from attnprobe.axes import AXIS, Level
from attnprobe.config import Case, canonical
from attnprobe.matrix.schema import (
    OUTPUTS,
    SCHEMA,
    Backend,
    CaseRecord,
    DeviceRecord,
    Generator,
    Matrix,
    Result,
    Rule,
    Run,
    sealed,
)
from attnprobe.probe import refusals
from attnprobe.probe.finding import Finding
from attnprobe.probe.observed import Observation, Observed, kind
from attnprobe.verdict import Verdict

if TYPE_CHECKING:
    from attnprobe.probe.plan import Plan
    from attnprobe.run.scan import Present


@dataclass
class Account:
    """Counts and times of one run; `extra` cases are those that localising added to the plan."""

    started: str = ""
    finished: str = ""
    executed: int = 0
    skipped: int = 0
    extra: int = 0
    finished_all: bool = False
    localised: bool = False
    poison: str = ""
    guard: str = ""
    seconds: dict[str, float] = field(default_factory=dict)


def assemble(  # noqa: PLR0913, PLR0917  # the stages' results, one each
    device: DeviceRecord,
    plan: Plan,
    present: Iterable[Present],
    observed: Mapping[str, Observed],
    findings: Mapping[str, list[Finding]],
    traits: Mapping[str, dict[str, str]],
    right: Mapping[str, set[str]],
    account: Account,
) -> Matrix:
    """Return the sealed document; what was not localised lies under a rule of all its axis values."""
    backends = []
    cases: dict[str, Case] = {}
    for one in present:
        if one.reason:
            absent = Backend(name=one.name, status="absent", reason=one.reason, materials=one.materials)
            backends.append(absent)
            continue
        seen = list(observed[one.name])
        cases.update({each.case.id: each.case for each in seen})
        refused = refusals.group(seen)
        rules = [
            *_failing_rules(seen, findings[one.name], right),
            *_refusal_rules(refused),
        ]
        backends.append(
            Backend(
                name=one.name,
                status="probed",
                materials=one.materials,
                traits=traits[one.name],
                rules=tuple(rules),
                cases=tuple(_without_reason(each.result, refused) for each in seen),
            )
        )
    run = Run(
        started=account.started,
        finished=account.finished,
        level=plan.level,
        seed=plan.seed,
        complete=account.finished_all and account.localised,
        strength=plan.strength(account.executed),
        planned=len(plan.cases),
        executed=account.executed,
        skipped=account.skipped,
        poison=account.poison,
        guard=account.guard,
        seconds={name: round(value, 3) for name, value in sorted(account.seconds.items())},
    )
    return sealed(
        Matrix(
            schema=SCHEMA,
            digest="",
            devices=(device,),
            backends=tuple(backends),
            cases=tuple(CaseRecord(id=case_id, case=case) for case_id, case in cases.items()),
            runs=(run,),
            generator=Generator(name="attnprobe", version=attnprobe.__version__),
        )
    )


def _failing_rules(
    seen: Sequence[Observation], findings: Sequence[Finding], right: Mapping[str, set[str]]
) -> list[Rule]:
    """Return a rule per finding, and one of all axis values per failing case without a finding."""
    rules = []
    failing = [each for each in seen if each.verdict.fails]
    passing = [each for each in seen if each.verdict is Verdict.OK]
    # One that was cut off while it was being sharpened may still cover what passes: it says nothing yet.
    findings = [f for f in findings if not any(f.covers(each) for each in passing)]
    for finding in findings:
        under = [e for e in failing if kind(e.verdict) == finding.kind and finding.covers(e)]
        witness = finding.witness
        rules.append(
            _rule(
                when={axis: _sorted(axis, levels) for axis, levels in finding.when.items()},
                verdict=witness.verdict,
                under=under,
                witness=witness.case.id,
                counter_witnesses=tuple(sorted(set(finding.counter))),
                cases=tuple(sorted(finding.cases)),
                skipped=finding.skipped,
                right=tuple(sorted(right.get(witness.case.id, ()))),
                rates=finding.rates,
            )
        )
    for each in failing:
        if any(kind(each.verdict) == f.kind and f.covers(each) for f in findings):
            continue
        twins = any(e.at == each.at for e in passing)
        rules.append(
            _rule(
                when={axis: (level,) for axis, level in each.at.items()},
                verdict=each.verdict,
                under=[each],
                witness=each.case.id,
                cases=(each.id,) if twins else (),
                localised=False,
            )
        )
    return rules


def _without_reason(result: Result, groups: Sequence[refusals.Group]) -> Result:
    """Return a result whose refusal a rule explains without the words that the rule has already."""
    if result.verdict is not Verdict.REFUSED or any(g.under[0].id == result.id for g in groups):
        return result
    return structs.replace(result, detail={})


def _refusal_rules(groups: Sequence[refusals.Group]) -> list[Rule]:
    """Return the rules of what the library refused, in its own words."""
    rules = []
    for found in groups:
        first = found.under[0]
        rules.append(
            _rule(
                when={axis: _sorted(axis, levels) for axis, levels in found.when.items()},
                verdict=Verdict.REFUSED,
                under=found.under,
                witness=first.case.id,
                evidence=first.result.evidence,
                cases=tuple(sorted(e.case.id for e in found.under)) if found.exact else (),
                reason=str(first.result.detail.get("says", "")),
            )
        )
    return rules


def _rule(
    when: dict[str, tuple[Level, ...]], verdict: Verdict, under: Sequence[Observation], **rest: Any
) -> Rule:
    """Return a rule named by what it says."""
    key = canonical([when, verdict.value, rest.get("cases", ())])
    outputs = {name for each in under for name in each.result.outputs}
    return Rule(
        id=hashlib.blake2b(key, digest_size=4).hexdigest(),
        when=when,
        verdict=verdict,
        outputs=tuple(name for name in OUTPUTS if name in outputs),
        failing=len(under),
        **rest,
    )


def _sorted(axis: str, levels: AbstractSet[Level]) -> tuple[Level, ...]:
    """Return levels in the order that the axis declares."""
    return tuple(level for level in AXIS[axis].levels if level in levels)
