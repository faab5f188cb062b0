"""What a selector answers against what was measured, case by case, put together into a few lines. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Literal

from msgspec import Struct

from attnprobe.audit.interface import Answer
from attnprobe.axes import AXIS, Level, levels_of
from attnprobe.matrix.schema import Matrix, Result, Rule
from attnprobe.verdict import Evidence, Verdict

Kind = Literal["accepts-but-fails", "refuses-but-works"]


class Disagreement(Struct, frozen=True, kw_only=True):
    """Cases in which a selector and the matrix disagree for one reason.

    accepts-but-fails: what it would run fails there, under `rule`. refuses-but-works: it takes `instead`
    (None: nothing), and `backend` was measured to be right; `when` is what all those cases have in common.
    """

    kind: Kind
    selector: str
    backend: str
    cases: tuple[str, ...]
    witness: str
    when: dict[str, tuple[Level, ...]]
    verdict: Verdict = Verdict.OK
    outputs: tuple[str, ...] = ()
    rule: str = ""
    instead: str | None = None


class Audit(Struct, frozen=True, kw_only=True):
    """All disagreements of one selector. `asked` counts the cases that could be put to it."""

    selector: str
    asked: int
    agreed: int
    found: tuple[Disagreement, ...]

    @property
    def unsafe(self) -> bool:
        """Whether it accepts what fails."""
        return any(one.kind == "accepts-but-fails" for one in self.found)


def compare(selector: str, answers: Mapping[str, Answer], matrix: Matrix) -> Audit:
    """Return where the answers, by case id, disagree with the matrix. Only measured `ok` is held to work."""
    at = {record.id: levels_of(record.case) for record in matrix.cases if record.id in answers}
    failing: dict[tuple[str, str], list[Result]] = defaultdict(list)
    working: dict[tuple[str, str | None], list[str]] = defaultdict(list)
    rules: dict[str, Rule] = {}
    agreed = set(answers)
    # A backend that fell back to the very kernel that the selector takes was not passed over.
    ran = {(b.name, r.id): r.kernel for b in matrix.backends for r in b.cases}
    for backend in matrix.backends:
        for result in backend.cases:
            answer = answers.get(result.id)
            if answer is None:
                continue
            if answer.takes == backend.name and result.verdict.fails:
                rule = next((r for r in backend.rules if r.covers(result.id, at[result.id])), None)
                key = (backend.name, rule.id if rule else "")
                if rule is not None:
                    rules[rule.id] = rule
                failing[key].append(result)
                agreed.discard(result.id)
            right = result.verdict is Verdict.OK and result.evidence is Evidence.MEASURED
            same = bool(result.kernel) and result.kernel == ran.get((str(answer.takes), result.id))
            if right and backend.name in answer.passes_over and not same:
                working[backend.name, answer.takes].append(result.id)
                agreed.discard(result.id)
            elif right and answer.takes is None:
                working[backend.name, None].append(result.id)
                agreed.discard(result.id)
    found = [_fails(selector, *key, results, rules.get(key[1])) for key, results in sorted(failing.items())]
    for (name, instead), ids in sorted(working.items(), key=str):
        other = [levels for case, levels in at.items() if case not in set(ids)]
        found.append(
            Disagreement(
                kind="refuses-but-works",
                selector=selector,
                backend=name,
                cases=tuple(sorted(ids)),
                witness=min(ids),
                when=_common([at[one] for one in ids], other),
                instead=instead,
            )
        )
    return Audit(selector=selector, asked=len(answers), agreed=len(agreed), found=tuple(found))


def _fails(
    selector: str, backend: str, rule_id: str, results: list[Result], rule: Rule | None
) -> Disagreement:
    ids = tuple(sorted(result.id for result in results))
    first = min(results, key=lambda result: result.id)
    return Disagreement(
        kind="accepts-but-fails",
        selector=selector,
        backend=backend,
        cases=ids,
        witness=rule.witness if rule is not None and rule.witness in ids else first.id,
        when={} if rule is None else dict(rule.when),
        verdict=first.verdict if rule is None else rule.verdict,
        outputs=first.outputs if rule is None else rule.outputs,
        rule=rule_id,
    )


def _common(inside: list[dict[str, Level]], outside: list[dict[str, Level]]) -> dict[str, tuple[Level, ...]]:
    """Return the axes whose levels all of `inside` share, and that leave some of `outside` out."""
    when = {}
    for axis in AXIS:
        levels = {at[axis] for at in inside}
        if len(levels) * 2 <= len(AXIS[axis].levels) and any(at[axis] not in levels for at in outside):
            when[axis] = tuple(level for level in AXIS[axis].levels if level in levels)
    return when
