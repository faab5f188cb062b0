"""The lines of a script that say what is right: `probe.reference` and `probe.judge`, for one case.

`steps` does attention step by step in one precision; in float64 it is the right answer, in the element type
it is the error that eager attention makes. Only the parts that the case needs are written.
"""

# ruff: noqa: E501  # a line of a template has a margin; what is written is shorter

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from attnprobe.export._calls import grads
from attnprobe.export._inputs import BOOL, FLOAT, Names
from attnprobe.export._template import fill, unrounded
from attnprobe.probe.inputs import DTYPES, sequence_lengths
from attnprobe.probe.reference import EAGER, RELATIVE
from attnprobe.probe.scores import ORDER, SCORES, UNITS

if TYPE_CHECKING:
    from attnprobe.config import Case

_HIDDEN: Final = """
varlen        |def padded(packed, lengths):
varlen        |    \"\"\"Return (T, H, D) as (B, H, S, D), zero past the end of each sequence.\"\"\"
varlen        |    return torch.nn.utils.rnn.pad_sequence(packed.split(lengths), batch_first=True).transpose(1, 2)
varlen        |
varlen        |
varlen        |# Which keys each query does not see; sequences are padded to the longest.
varlen        |hidden = torch.ones(B, 1, $s_q, $s_kv, dtype=torch.bool)
varlen        |for entry, (q_len, kv_len) in enumerate(zip($by_q, $by_kv, strict=True)):
varlen shifted|    shift = kv_len - q_len
varlen        |    hidden[entry, 0, :q_len, :kv_len] = $each
positional    |hidden = ~$visible
empty         |hidden = torch.ones($s_q, $s_kv, dtype=torch.bool)
bool          |hidden = ~mask$cpu
float         |hidden = mask$cpu <= torch.finfo(mask.dtype).min
unseen        |unseen = hidden.all(-1, keepdim=True)
varlen unseen |padding = torch.arange($s_q)[:, None] >= torch.tensor($by_q)[:, None, None, None]
dead varlen   |dead = (unseen & ~padding).expand(B, H, $s_q, 1)
dead !varlen  |dead = unseen.expand(B, H, $s_q, 1)
"""
_BIAS: Final = """
float         |bias = mask$cpu.double().masked_fill(hidden, 0.0)
alibi         |query = torch.arange($s_q, dtype=torch.float64)[:, None] + $shift
alibi         |distance = (query - torch.arange($s_kv)).abs()
alibi         |slopes = torch.tensor([2.0 ** (-8.0 * (head + 1) / H) for head in range(H)])[:, None, None]
alibi !float  |bias = -slopes * distance
alibi float   |bias = bias - slopes * distance
"""

_STEPS: Final = '''
grouped kv    |def over_group(per_head):
grouped kv    |    """Sum the query heads that share a key-value head."""
grouped kv    |    return per_head.unflatten(1, ($h_kv, -1)).sum(2)
grouped kv    |
grouped kv    |
              |@torch.no_grad()
              |def steps(dtype$parameters):
              |    """Return the results of attention done step by step, and how far rounding may move them."""
low           |
low           |    def r(value):
low           |        return value.to($dtype).to(dtype) if rounded else value
low           |
!varlen       |    $locals = (tensor$cpu.to(dtype) for tensor in ($inputs))
varlen        |    both = zip(($inputs), ($lengths), strict=True)
varlen        |    $locals = (padded(tensor$cpu, lengths).to(dtype) for tensor, lengths in both)
grouped       |    k_, v_ = (tensor.repeat_interleave(H // $h_kv, dim=1) for tensor in (k_, v_))
!own !varlen  |    scores = r(q_ @ k_.mT) * $scale
!own varlen   |    root = $scale**0.5
!own varlen   |    scores = r(r(q_ * root) @ r(k_ * root).mT)
!own softcap  |    bent = torch.tanh(scores / $softcap)
!own softcap  |    scores = bent * $softcap
!own bias     |    scores = scores + bias.to(dtype)
!own low      |    scores = r(scores)
own softcap   |    bent = torch.tanh(r(q_ @ k_.mT) * $scale / $softcap)
own           |    p = weights.to(dtype)
!own !dead hidden|    scores = scores.masked_fill(hidden, float("-inf"))
!own !dead !unseen|    p = r(torch.softmax(scores, dim=-1))
!own !dead unseen|    p = r(torch.softmax(scores, dim=-1)).masked_fill(unseen, 0.0)
!own dead     |    if made_of is None:
!own dead     |        p = r(torch.softmax(scores.masked_fill(hidden, float("-inf")), dim=-1))
!own dead     |        p = p.masked_fill(unseen, 0.0)
!own dead     |    else:
!own dead     |        p = r(made_of["uniform"].to(dtype) / $keys + made_of["softmax"] * torch.softmax(scores, dim=-1))
dropout       |    used = p * keep.to(dtype)
keys          |    # A weight is off by its own rounding and by that of its score, a sum in float32 of terms up to |q| |k|;
keys          |    # and float32 sums depend on their order.
keys          |    reach = q_.norm(dim=-1, keepdim=True) * k_.norm(dim=-1).amax(-1)[..., None, None] * $scale
keys bias     |    reach = reach + bias.to(dtype).abs().amax(-1, keepdim=True)
keys          |    units = $units * torch.finfo($dtype).eps + torch.finfo(torch.float32).eps * ($score_units * reach + $order)
!keys         |    units = $units * torch.finfo($dtype).eps + torch.finfo(torch.float32).eps * $order
!own          |    results = {"out": r($used @ v_)}
!own          |    terms = {"out": ($used**2 @ v_**2).sqrt() * units}
own           |    results, terms = {}, {}
backward      |    dp = r(do @ v_.mT)
backward      |    size = (do @ v_.mT).abs() + (do**2 @ (v_**2).mT).sqrt()
backward dropout|    dp, size = dp * keep.to(dtype), size * keep.to(dtype)
backward      |    ds = r(p * (dp - (p * dp).sum(-1, keepdim=True)))
backward      |    size = p * (size + (p * size).sum(-1, keepdim=True)) * units
backward dead !own|    if not to_scores:
backward dead !own|        ds = torch.zeros_like(ds)
backward dead own|    if not to_scores:
backward dead own|        ds = ds.masked_fill(dead, 0.0)
dmask         |    results["dmask"], terms["dmask"] = ds, size
backward softcap|    ds = r(ds * (1 - bent * bent))
dq            |    results["dq"] = r(ds @ k_ * $scale)
dq            |    terms["dq"] = (size**2 @ k_**2).sqrt() * $scale
dk !grouped   |    results["dk"] = r(r(ds.mT @ q_) * $scale)
dk !grouped   |    terms["dk"] = ((size**2).mT @ q_**2).sqrt() * $scale
dk grouped    |    results["dk"] = r(r(over_group(r(ds.mT @ q_))) * $scale)
dk grouped    |    terms["dk"] = over_group((size**2).mT @ q_**2).sqrt() * $scale
dv !grouped   |    results["dv"] = r($used.mT @ do)
dv !grouped   |    terms["dv"] = ((($used * units) ** 2).mT @ do**2).sqrt()
dv grouped    |    results["dv"] = r(over_group(r($used.mT @ do)))
dv grouped    |    terms["dv"] = over_group((($used * units) ** 2).mT @ do**2).sqrt()
              |    return results, terms
              |
              |
              |def expected($choice):
              |    """Return the right values, and how far from them a healthy kernel may be."""
              |    limits = torch.finfo($dtype)
              |    exact, _ = steps(torch.float64$pass_choice)
low           |    near, _ = steps(torch.float32, rounded=True$pass_choice)
!own low      |    _, terms = steps(torch.float32$pass_choice)
!own !low     |    near, terms = steps(torch.float32$pass_choice)
own !low      |    near, _ = steps(torch.float32$pass_choice)
own           |    _, terms = steps(torch.float64, weights=weights.clamp(min=limits.smallest_normal))
              |    tolerance = {}
              |    for name, value in exact.items():
              |        # $eager times what eager attention is off$given, the rounding of the terms, of the result.
              |        eager = $largest
              |        tolerance[name] = $eager * eager + terms[name].double()
              |        tolerance[name] += $relative * limits.eps * value.abs() + limits.tiny
              |    return exact, tolerance
'''


class Features:
    """What the script of a case needs, as flags and values of the templates."""

    def __init__(self, case: Case, *, own: bool = False, device: str = "cpu") -> None:
        """`own`: gradients are held against the weights of the backend's own forward."""
        self.case = case
        self.names = Names(case)
        self.cpu = "" if device == "cpu" else ".cpu()"
        wanted = grads(case)
        self.flags = {f"d{name}" for name in wanted}
        self.flags |= {"backward"} if wanted else set()
        self.flags |= {"kv"} if {"k", "v"} & set(wanted) else set()
        self.flags |= {"own"} if own else set()
        self.flags |= {"low"} if case.dtype != "float32" else set()
        self.flags |= {"keys"} if case.seqlen_kv else set()
        self.flags |= {"grouped"} if case.heads != case.heads_kv else set()
        self.flags |= {name for name in ("softcap", "dropout", "alibi") if getattr(case, name)}
        self.flags |= {"varlen"} if case.layout == "varlen" else set()
        self.flags |= {"bool"} if case.mask in BOOL else {"float"} if case.mask in FLOAT else set()
        self.flags |= {"bias"} if case.alibi or case.mask in FLOAT else set()
        positional = case.mask in {"causal-top-left", "causal-bottom-right", "window"}
        self.flags |= {"positional"} if positional and case.layout != "varlen" else set()
        if case.mask != "none" or case.layout == "varlen":
            self.flags.add("hidden")
        self.flags |= {"shifted"} if case.mask in {"causal-bottom-right", "window"} else set()
        if case.mask == "none" and case.layout != "varlen" and not case.seqlen_kv:
            self.flags |= {"empty", "hidden"}
        if has_dead_rows(case):
            self.flags |= {"dead", "unseen", "hidden"}
        if case.layout == "varlen" and case.batch > 1:
            self.flags |= {"unseen"}

    def visible(self, q: str, kv: str, shift: str) -> str:
        """Return the expression of which keys a query sees by position."""
        ones = f"torch.ones({q}, {kv}, dtype=torch.bool)"
        if self.case.mask == "causal-top-left":
            return f"{ones}.tril()"
        shown = f"{ones}.tril({shift})"
        if self.case.mask == "window":
            low = f"{shift} - {self.case.window}" if shift else f"-{self.case.window}"
            shown += f".triu({low})"
        return shown


def has_dead_rows(case: Case) -> bool:
    """Whether some query may see no key."""
    if not case.seqlen_q:
        return False
    if not case.seqlen_kv or case.masked_rows != "none":
        return True
    if case.mask not in {"causal-bottom-right", "window"}:
        return False
    if case.layout != "varlen":
        return case.seqlen_q > case.seqlen_kv
    lengths = sequence_lengths(case.batch, case.seqlen_q, case.seqlen_kv)
    return any(q > kv for q, kv in zip(*lengths, strict=True))


def lines(features: Features) -> list[str]:
    """Return the functions `steps` and `expected`, and before them what they rest on."""
    case, names, flags = features.case, features.names, features.flags
    by_q, by_kv = names.lengths
    shift = case.seqlen_kv - case.seqlen_q
    same = case.seqlen_q == case.seqlen_kv
    each = "False"
    if "varlen" in flags and case.mask != "none":
        each = f"~{features.visible('q_len', 'kv_len', 'shift')}"
    written = f"{names.seqlen_kv} - {names.seqlen_q}"
    common: dict[str, Any] = {"s_q": names.seqlen_q, "s_kv": names.seqlen_kv, "by_q": by_q, "by_kv": by_kv}
    common["cpu"] = features.cpu
    text = fill(
        _HIDDEN,
        flags,
        each=each,
        visible=features.visible(names.seqlen_q, names.seqlen_kv, "" if same else written),
        **common,
    )
    text += fill(_BIAS, flags, shift=shift, **common)
    text = [""] * bool(text) + text
    return [*text, "", *_steps(features)]


def _steps(features: Features) -> list[str]:
    case, names, flags = features.case, features.names, features.flags
    inputs = ["q", "k", "v", *(["grad_out"] if "backward" in flags else [])]
    local = ["q_", "k_", "v_", *(["do"] if "backward" in flags else [])]
    by_q, by_kv = names.lengths
    lengths = (by_q, by_kv, by_kv, by_q)[: len(inputs)]
    choice, handed = [], []
    if "own" in flags:
        choice, handed = ["weights"], ["weights=weights"]
    elif "dead" in flags:
        choice, handed = ["made_of=None"], ["made_of=made_of"]
    if "dead" in flags and "backward" in flags:
        choice, handed = [*choice, "to_scores=True"], [*handed, "to_scores=to_scores"]
    keyword = ["rounded=False"] if "low" in flags else []
    parameters = [*(["weights"] if "own" in flags else []), *keyword, *[c for c in choice if c != "weights"]]
    largest = "(near[name].double() - value).abs().max()"
    if "own" in flags:
        largest = "(near[name].double() - value).abs().amax((0, 1, 2))"
    if not case.seqlen_q or not case.seqlen_kv:
        largest = "max((near[name].double() - value).abs().flatten().tolist(), default=0.0)"
    text = fill(
        _STEPS,
        flags,
        parameters="".join(f", {p}" for p in parameters),
        choice=", ".join(choice),
        pass_choice="".join(f", {h}" for h in handed),
        dtype=f"torch.{case.dtype}",
        locals=", ".join(local),
        inputs=", ".join(inputs),
        lengths=", ".join(lengths),
        h_kv=names.heads_kv,
        scale=repr(case.softmax_scale),
        softcap=case.softcap,
        keys=names.seqlen_kv,
        used="used" if "dropout" in flags else "p",
        eager=f"{EAGER:g}",
        units=f"{UNITS[DTYPES[case.dtype]]:g}",
        score_units=f"{SCORES:g}",
        order=f"{ORDER * max(case.seqlen_kv, case.seqlen_q * (case.heads // case.heads_kv)):g}",
        relative=f"{RELATIVE:g}",
        given=" with these weights" if "own" in flags else "",
        largest=largest,
        cpu=features.cpu,
    )
    return text if "low" in flags else [unrounded(line) for line in text]
