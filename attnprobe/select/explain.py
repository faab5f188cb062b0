"""A decision and its candidates, as values and in words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal

import msgspec
from msgspec import Struct, structs

from attnprobe.axes import AXIS, Level
from attnprobe.config import AttentionConfig
from attnprobe.matrix.schema import Result, Rule
from attnprobe.report.words import conditions, consequence
from attnprobe.select.asked import Asked
from attnprobe.verdict import Evidence, Verdict

Status = Literal["denied", "proven", "unrefuted", "unknown"]
Mode = Literal["gate", "veto", "observe"]
_DIGEST_SHOWN: Final = 12
_LINE: Final = 120


class Candidate(Struct, frozen=True, kw_only=True):
    """What is known of one backend for one configuration.

    `verdict` and `evidence` are None where nothing is known. `witness` is the id of a case that shows it,
    `strength` is there for `unrefuted`. `expired`: measured on another device or build than is here.
    """

    backend: str
    status: Status
    reason: str
    verdict: Verdict | None = None
    evidence: Evidence | None = None
    rule: str | None = None
    witness: str | None = None
    strength: int | None = None
    expired: bool = False
    absent: bool = False


class Decision(Struct, frozen=True, kw_only=True):
    """The answer to one configuration: the backend to run, or None, and every candidate.

    `would` is there in mode `observe`: what veto and gate would have chosen. `assumed` are the documented
    defaults that stood in for unsaid fields, `unsaid` the fields that stood for all their values. `notes`
    say where the matrix and this machine differ.
    """

    backend: str | None
    candidates: tuple[Candidate, ...]
    mode: Mode
    strength: int | None
    config: AttentionConfig
    assumed: dict[str, str]
    unsaid: tuple[str, ...]
    digest: str
    matches: bool
    notes: tuple[str, ...] = ()
    would: dict[str, str | None] | None = None

    def candidate(self, backend: str) -> Candidate | None:
        """Return the candidate of that name."""
        return next((one for one in self.candidates if one.backend == backend), None)

    def explain(self) -> str:
        """Return the decision in words: every backend, what was assumed, how far the matrix fits."""
        allowed = f"unrefuted at strength {self.strength} counts" if self.strength else "only proven counts"
        modes = {
            "gate": f"gate: {allowed}",
            "veto": "veto: what is denied is taken away",
            "observe": "observe: nothing is changed",
        }
        lines = [f"{self.backend or 'no backend'}  ({modes[self.mode]})"]
        if self.would is not None:
            lines += [f"  {name} would choose {chosen or 'none'}" for name, chosen in self.would.items()]
        width = max((len(one.backend) for one in self.candidates), default=0)
        for one in self.candidates:
            lines.append(f"  {one.backend:{width}}  {one.status:9}  {_known(one)}{one.reason}")
            if one.witness:
                rule = f"rule {one.rule}, " if one.rule else ""
                lines.append(f"  {'':{width}}  {'':9}  {rule}case {one.witness}")
        if self.assumed:
            lines.append("assumed: " + ", ".join(f"{name} {said}" for name, said in self.assumed.items()))
        if self.unsaid:
            lines.append(f"unsaid, so any value: {', '.join(self.unsaid)}")
        lines.append(f"matrix: {self.digest[:_DIGEST_SHOWN]}")
        lines += [f"  {note}" for note in self.notes]
        return "\n".join(lines)

    def builtins(self) -> dict[str, Any]:
        """Return the decision in the form that `select --format json` prints."""
        names = ("backend", "status", "verdict", "evidence", "reason", "rule", "witness", "strength")
        candidates = []
        for one in self.candidates:
            whole = msgspec.to_builtins(one)
            candidates.append({name: whole[name] for name in names})
        document: dict[str, Any] = {
            "backend": self.backend,
            "candidates": candidates,
            "mode": self.mode,
            "assumed": self.assumed,
            "unsaid": list(self.unsaid),
            "digest": self.digest,
            "matches": self.matches,
            "notes": list(self.notes),
        }
        if self.would is not None:
            document["would"] = self.would
        return document


def _known(one: Candidate) -> str:
    return "" if one.evidence is None else f"{one.evidence.value}: "


def shortened(words: str) -> str:
    """Return the first sentence of a library's words, no longer than a line."""
    first = words.partition(". ")[0].partition("\n")[0]
    return first if len(first) <= _LINE else first[: _LINE - 3] + "..."


def rule_words(rule: Rule, result: Result | None, seqlen_kv: int) -> str:
    """Return a rule in one sentence; details of its witness, of that key length, where there is one."""
    detail = result.detail if result is not None else {}
    rule = structs.replace(rule, reason=shortened(rule.reason))
    text = f"{condition_words(rule.when)}: {consequence(rule, detail, seqlen_kv)}"
    if rule.right:
        text += f"; {', '.join(rule.right)} {'is' if len(rule.right) == 1 else 'are'} right"
    return text


def condition_words(when: Mapping[str, tuple[Level, ...]]) -> str:
    """Return conditions in words; an axis or a level that this version does not know, as it stands."""
    if all(
        axis in AXIS and levels and set(levels) <= set(AXIS[axis].levels) for axis, levels in when.items()
    ):
        return conditions(when)
    return ", ".join(f"{axis} {' or '.join(map(str, levels)) or 'any'}" for axis, levels in when.items())


def narrowing(rule: Rule, asked: Asked) -> dict[str, tuple[Level, ...]]:
    """Return the levels of open axes that a rule needs: empty where it covers all that is asked."""
    needed = {}
    for axis, levels in rule.when.items():
        possible = asked.levels.get(axis, ())
        inside = tuple(level for level in possible if level in levels)
        if 0 < len(inside) < len(possible):
            needed[axis] = inside
    return needed


def only_where(rule: Rule, asked: Asked) -> str:
    """Return on what unsaid values a denial rests, so that the reader knows what to say."""
    needed = narrowing(rule, asked)
    return f" (only with {condition_words(needed)}, which is unsaid)" if needed else ""
