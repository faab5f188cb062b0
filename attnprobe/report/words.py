"""Rules, cases and verdicts in plain words."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

from attnprobe.axes import AXIS, Level
from attnprobe.matrix.schema import OUTPUTS, Rule
from attnprobe.text import printable
from attnprobe.verdict import Verdict

_WORDS: Final[dict[tuple[str, Level], str]] = {
    ("masked_rows", "false"): "bool mask with a row masked whole",
    ("masked_rows", "-inf"): "float mask with a row masked whole by -inf",
    ("masked_rows", "finfo-min"): "float mask with a row masked whole by finfo.min",
    ("seqlen_q", "0"): "no queries (length 0)",
    ("seqlen_kv", "0"): "no keys (length 0)",
    ("layout", "inner-stride"): "innermost stride not 1",
    ("layout", "varlen"): "sequences packed end to end",
    ("layout", "packed"): "q, k, v sliced from one buffer",
    ("layout", "expanded"): "k, v expanded with stride 0",
    ("layout", "transposed"): "(B, S, H, D) transposed",
    ("layout", "contiguous"): "contiguous",
    ("needs_grad", "mask"): "gradient of the mask",
    ("needs_grad", "q"): "gradient of q alone",
    ("needs_grad", "kv"): "gradients of k and v alone",
    ("dropout", "on"): "dropout",
    ("dropout", "off"): "no dropout",
    ("softcap", "on"): "softcap",
    ("alibi", "on"): "ALiBi",
    ("scale", "custom"): "a scale of its own",
    ("deterministic", "on"): "deterministic",
    ("mask", "none"): "no mask",
    ("mask", "window"): "sliding window",
    ("batch", "one"): "one batch entry",
    ("batch", "more"): "several batch entries",
    ("data", "gaussian"): "Gaussian data",
    ("data", "far-below"): "scores far below zero",
    ("data", "large-logits"): "large logits",
    ("data", "outliers"): "outlier channels and tokens alike",
    ("data", "batch-differs"): "batch entries that differ",
    ("grad_out", "transposed"): "gradient of out transposed",
    ("grad_out", "expanded"): "gradient of out expanded from one row",
    ("grad_out", "scalar"): "gradient of out expanded from one number",
    ("earlier", "nothing"): "no call before it",
    ("earlier", "other-data"): "after a call with other data",
    ("earlier", "other-strides"): "after a call with other strides",
    ("earlier", "other-dtype"): "after a call in another dtype",
}
_RUNS: Final = 8
"""Most runs that are named one by one."""
_BARE: Final = frozenset({"pass", "dtype"})
_FIRST: Final = ("pass", "masked_rows", "mask", "layout", "dropout")
_VERDICTS: Final = {
    Verdict.UNWRITTEN: "never written",
    Verdict.WRONG: "wrong",
    Verdict.NONFINITE: "not finite",
    Verdict.OUT_OF_BOUNDS: "memory outside the tensors touched",
    Verdict.NONDETERMINISTIC: "not deterministic",
    Verdict.CRASHED: "the process dies",
    Verdict.HUNG: "no answer",
    Verdict.REFUSED: "refused",
}


def conditions(when: Mapping[str, Sequence[Level]]) -> str:
    """Return the conditions of a rule: "backward, float mask ..., float32 or bfloat16"."""
    names = sorted(when, key=_rank)
    return ", ".join(_condition(name, when[name]) for name in names) or "every case"


def _rank(axis: str) -> tuple[int, int]:
    """Return where an axis stands in a sentence: what a reader looks for first, the dtype last."""
    known = list(AXIS)
    first = _FIRST.index(axis) if axis in _FIRST else len(_FIRST) + (axis == "dtype")
    return first, known.index(axis) if axis in known else len(known)


def _condition(axis: str, levels: Sequence[Level]) -> str:
    """Return one axis of a rule: its levels, or those it leaves out where they are fewer."""
    if axis not in AXIS:
        return f"{axis} {' or '.join(map(str, levels))}"
    if axis == "head_dim":
        return f"head dim {_runs(levels)}"
    rest = [level for level in AXIS[axis].levels if level not in levels]
    if rest and len(rest) < len(levels) and len(levels) > 2:  # noqa: PLR2004  # "a or b" reads best
        return f"{axis} not {' or '.join(map(str, rest))}"
    said = [_WORDS.get((axis, level), "") for level in levels]
    if all(said):
        return " or ".join(said)
    bare = " or ".join(map(str, levels))
    return bare if axis in _BARE else f"{axis} {bare}"


def _runs(levels: Sequence[Level]) -> str:
    """Return head dims as "200 to 256 by 8, 512"."""
    known = list(AXIS["head_dim"].levels)
    runs: list[list[Level]] = []
    for level in levels:
        follows = runs and {level, runs[-1][-1]} <= set(known)
        if follows and level == int(runs[-1][-1]) + 8:
            runs[-1].append(level)
        else:
            runs.append([level])
    return ", ".join(str(r[0]) if len(r) == 1 else f"{r[0]} to {r[-1]} by 8" for r in runs)


def _dropout_text(found: Mapping[str, Any]) -> str:
    if "alike" in found:
        return f"one dropout mask for several {found['alike']}"
    return f"drops {found['dropped']}, not {found['asked']}"


def consequence(rule: Rule, detail: Mapping[str, Any], seqlen_kv: int) -> str:
    """Return what happens under a rule: "dq, dk, dv wrong, dq of row 0 128 times too large"."""
    said = _VERDICTS.get(rule.verdict, rule.verdict.value)
    text = f"{', '.join(rule.outputs)} {said}" if rule.outputs else said
    wrong = detail.get("wrong", {})
    for name in (output for output in OUTPUTS if output in wrong):
        found = wrong[name]
        if "factor" in found and float(found["factor"]) > 1:
            times = float(found["factor"])
            exact = abs(times - seqlen_kv) < 0.01 * seqlen_kv > 0
            text += f", {name} {times:g} times too large" + (" (S_kv times)" if exact else "")
    for breach in detail.get("bounds", ())[:1]:
        text += f" ({breach_text(breach)})"
    if "dropout" in detail:
        text += f" ({_dropout_text(detail['dropout'])})"
    if "only" in detail:
        text += f" ({detail['only']})"
    if "against" in detail:
        text += f", by {detail['against']}"
    if "how" in detail:
        text += f" ({detail['how']})"
    if rule.verdict is Verdict.REFUSED and rule.reason:
        text += f": {rule.reason}"
    return text


def breach_text(breach: Mapping[str, Any]) -> str:
    """Return an access outside a tensor in words: "read 4 bytes past the end of k"."""
    offset = int(breach["offset"])
    side = "past the end" if offset >= 0 else "before the start"
    size = offset + 1 if offset >= 0 else -offset
    return f"{breach['access']} {count(size, 'byte')} {side} of {breach['where']}"


def rule_text(rule: Rule, detail: Mapping[str, Any], seqlen_kv: int) -> str:
    """Return a rule in one sentence, without the backend's name."""
    text = f"{conditions(rule.when)}: {consequence(rule, detail, seqlen_kv)}"
    if rule.cases:
        text = f"{count(len(rule.cases), 'exact case')}: {consequence(rule, detail, seqlen_kv)}"
    if rule.right:
        text += f"; {', '.join(rule.right)} {'is' if len(rule.right) == 1 else 'are'} right"
    return text


def count(number: int, what: str) -> str:
    """Return "1 case", "2 cases"."""
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def evidence_text(rule: Rule) -> str:
    """Return on how much a rule rests."""
    parts = [count(rule.failing, "case")]
    if rule.skipped:
        parts.append(f"{rule.skipped} more skipped")
    if rule.rates is not None:
        r = rule.rates
        parts.append(
            f"random neighbours failing: {r.inside_failed} of {r.inside_tried} inside, "
            f"{r.outside_failed} of {r.outside_tried} outside"
        )
    if not rule.localised:
        parts.append("not localised")
    return "; ".join(parts)


def dispute_text(runs: Mapping[Verdict, Collection[int]]) -> str:
    """Return which runs saw what: "disputed: ok in run 1, wrong in runs 0, 2"."""
    said = [f"{one.value} in {_numbered(runs[one])}" for one in Verdict if one in runs]
    return f"disputed: {', '.join(said)}"


def _numbered(runs: Collection[int]) -> str:
    """Return runs by their place in the document, a long list cut short."""
    first = [str(number) for number in sorted(runs)[:_RUNS]]
    more = f" and {len(runs) - _RUNS} more" if len(runs) > _RUNS else ""
    return f"{'run' if len(runs) == 1 else 'runs'} {', '.join(first)}{more}"


def detail_lines(detail: Mapping[str, Any]) -> list[str]:
    """Return a result's detail as printable lines: one a tensor."""
    lines = []
    for check, found in detail.items():
        if check == "bounds":
            lines += [f"bounds: {breach_text(breach)}" for breach in found]
        elif check == "dropout":
            lines.append(f"dropout: {_dropout_text(found)}")
        elif not isinstance(found, dict):
            lines.append(f"{check}: {found}")
        else:
            lines += [f"{name} {check}: {_facts(facts)}" for name, facts in found.items()]
    return [printable(line) for line in lines]


def _facts(facts: object) -> str:
    """Return what is known of one tensor: how many elements, where, and by how much."""
    if not isinstance(facts, dict) or "elements" not in facts:
        return str(facts)
    where = facts.get("where")
    text = f"{facts.get('elements')} of {facts.get('of')} elements" + (f" ({where})" if where else "")
    rest = {key: value for key, value in facts.items() if key not in {"elements", "of", "where"}}
    return text + "".join(f", {key} {value}" for key, value in rest.items())
