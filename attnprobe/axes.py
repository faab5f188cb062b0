"""The axes: their levels, how a case falls on a level, and which levels cannot meet.

The only place that declares an axis. The planner covers these levels, the matrix stores them, the
selector asks by them, and docs/axes.md is generated from them.

Every axis partitions its values: each case falls on exactly one level. A level is *special* where whole
libraries refuse it, are known to fail on it, or where most faults do no harm (a softmax over one key is 1,
whatever the scores); the planner keeps specials apart from each other, because such a case says little
about the other axis values in it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from msgspec import Struct

from attnprobe.config import Case
from attnprobe.lengths import LENGTHS, LONG, SPELLING, length_level, order, orders, representatives

Level = str | int
At = Mapping[str, Level]


class Axis(Struct, frozen=True):
    """One axis: `plain` is the level a localiser resets to; `hazard` marks what nobody can promise."""

    name: str
    levels: tuple[Level, ...]
    plain: Level
    about: str
    special: frozenset[Level] = frozenset()
    hazard: bool = False
    spelling: Mapping[str, str] = {}


class Constraint(Struct, frozen=True):
    """Levels of `axes` may meet only where `allows` says so."""

    axes: tuple[str, ...]
    allows: Callable[..., bool]
    reason: str


HEAD_DIMS: Final[tuple[int, ...]] = (*range(8, 257, 8), 512)
WORK_CAP: Final = LONG * (LONG + 1) * 512
"""Most multiply-adds (B x H x S_q x S_kv x D) a planned case may ask for: two different long lengths
at the largest head dim, one head, one batch entry."""


AXES: Final[tuple[Axis, ...]] = (
    Axis("pass", ("forward", "backward"), "backward", "what the job runs; backward includes forward"),
    Axis("dtype", ("float32", "bfloat16", "float16"), "float32", "element type of q, k, v and out"),
    Axis("head_dim", HEAD_DIMS, 64, "exact; kernels exist where 64 and 80 work and 72 does not"),
    Axis(
        "head_dim_v",
        ("equal", "smaller", "larger"),
        "equal",
        "head dim of v against that of q and k",
        special=frozenset({"smaller", "larger"}),
    ),
    Axis(
        "heads",
        ("equal", "grouped", "one-kv"),
        "equal",
        "key-value heads: as many as query heads, fewer, or one",
    ),
    Axis("batch", ("one", "more"), "one", "batch entries"),
    Axis(
        "seqlen_q",
        LENGTHS,
        "x128",
        "query length",
        special=frozenset({"0", "1"}),
        spelling=SPELLING,
    ),
    Axis(
        "seqlen_kv",
        LENGTHS,
        "x128",
        "key length",
        special=frozenset({"0", "1"}),
        spelling=SPELLING,
    ),
    Axis(
        "seqlen_order",
        ("equal", "q-shorter", "q-longer"),
        "equal",
        "query length against key length",
    ),
    Axis(
        "mask",
        (
            "none",
            "causal-top-left",
            "causal-bottom-right",
            "bool",
            "float",
            "bool-broadcast",
            "float-broadcast",
            "window",
        ),
        "none",
        "which scores count; bool and float masks have a value per batch entry and head",
        special=frozenset({"window"}),
        spelling={
            "bool-broadcast": "one bool mask for all heads, stride 0",
            "float-broadcast": "one float mask for all heads, stride 0",
            "window": "causal, and at most `window` earlier keys",
        },
    ),
    Axis(
        "masked_rows",
        ("none", "false", "-inf", "finfo-min"),
        "none",
        "whether the mask hides every key from some query, and by which value",
        special=frozenset({"finfo-min"}),
        spelling={
            "false": "bool mask, a row all False",
            "-inf": "float mask, a row all -inf",
            "finfo-min": "float mask, a row all torch.finfo(dtype).min",
        },
    ),
    Axis("dropout", ("off", "on"), "off", "attention dropout", special=frozenset({"on"})),
    Axis("scale", ("default", "custom"), "default", "factor on the scores; default 1/sqrt(head_dim)"),
    Axis("softcap", ("off", "on"), "off", "scores through c tanh(s/c)", special=frozenset({"on"})),
    Axis("alibi", ("off", "on"), "off", "bias linear in distance", special=frozenset({"on"})),
    Axis(
        "layout",
        ("contiguous", "transposed", "packed", "expanded", "inner-stride", "varlen"),
        "contiguous",
        "how q, k, v lie in memory",
        special=frozenset({"inner-stride", "varlen"}),
        spelling={
            "contiguous": "(B, H, S, D) in order",
            "transposed": "(B, S, H, D) seen as (B, H, S, D)",
            "packed": "slices of one buffer for q, k and v",
            "expanded": "k and v with stride 0 over heads or batch",
            "inner-stride": "neighbours in the head dim two elements apart",
            "varlen": "sequences of different lengths end to end, (T, H, D)",
        },
    ),
    Axis(
        "needs_grad",
        ("none", "all", "q", "kv", "mask"),
        "all",
        "which inputs need a gradient",
        special=frozenset({"mask"}),
        spelling={"none": "forward only", "all": "q, k and v", "mask": "the float mask alone"},
    ),
    Axis(
        "deterministic",
        ("off", "on"),
        "off",
        "torch.use_deterministic_algorithms or the library's own switch",
    ),
    Axis(
        "data",
        ("gaussian", "far-below", "large-logits", "outliers", "batch-differs"),
        "gaussian",
        "what the inputs look like",
        hazard=True,
        spelling={
            "gaussian": "independent, mean 0, variance 1",
            "far-below": "every score far below zero, so that no row's LSE reaches -89",
            "large-logits": "scores of standard deviation 40: exp of them overflows, softmax is one-hot",
            "outliers": "tokens alike, channel scales over orders of magnitude, as activations are",
            "batch-differs": "batch entries of different scale and offset",
        },
    ),
    Axis(
        "grad_out",
        ("contiguous", "transposed", "expanded", "scalar"),
        "contiguous",
        "how the gradient of out lies in memory",
        hazard=True,
        spelling={
            "contiguous": "(B, H, S, D) in order",
            "transposed": "(B, S, H, D) seen as (B, H, S, D)",
            "expanded": "one row for all rows and heads, stride 0",
            "scalar": "one number for all elements, as out.sum() gives",
        },
    ),
    Axis(
        "earlier",
        ("nothing", "other-data", "other-strides", "other-dtype"),
        "nothing",
        "a call of the same shape just before this one",
        hazard=True,
        spelling={
            "other-data": "with other values",
            "other-strides": "with q, k and v in another layout",
            "other-dtype": "with another element type",
        },
    ),
)

AXIS: Final[dict[str, Axis]] = {axis.name: axis for axis in AXES}

_BOOL: Final = frozenset({"bool", "bool-broadcast"})
_FLOAT: Final = frozenset({"float", "float-broadcast"})


def _fits(  # noqa: PLR0913, PLR0917  # one argument an axis
    q: Level, kv: Level, head_dim: Level, dim_v: Level, heads: Level, batch: Level
) -> bool:
    """Whether the smallest lengths of two levels keep a case under the cap; equal levels may differ."""
    shortest = representatives(q)[0]
    others = representatives(kv)
    other = others[min(1, len(others) - 1) if q == kv else 0]
    dim = max(int(head_dim), head_dim_v(int(head_dim), dim_v))
    count = {"equal": 1, "grouped": 4, "one-kv": 3}[str(heads)] * (2 if batch == "more" else 1)
    # One head may take the whole cap, several share half of it.
    return bool(shortest * other * dim * count <= (WORK_CAP if count == 1 else WORK_CAP // 2))


_WORK_AXES: Final = ("seqlen_q", "seqlen_kv", "head_dim", "head_dim_v", "heads", "batch")

CONSTRAINTS: Final[tuple[Constraint, ...]] = (
    Constraint(
        ("pass", "needs_grad"),
        lambda pass_, grad: (pass_ == "forward") == (grad == "none"),
        "a forward pass needs no gradient, a backward pass needs one",
    ),
    Constraint(
        ("needs_grad", "mask"),
        lambda grad, mask: grad != "mask" or mask in _FLOAT,
        "only a float mask has a gradient",
    ),
    Constraint(
        ("masked_rows", "mask"),
        lambda rows, mask: rows == "none" or (mask in _BOOL if rows == "false" else mask in _FLOAT),
        "rows are masked by False in a bool mask, by a number in a float mask",
    ),
    Constraint(
        ("masked_rows", "seqlen_q"),
        lambda rows, length: rows == "none" or length != "0",
        "a mask without rows hides none",
    ),
    Constraint(
        ("masked_rows", "seqlen_kv"),
        lambda rows, length: rows == "none" or length != "0",
        "a mask without columns hides every row anyway",
    ),
    Constraint(
        ("seqlen_q", "seqlen_kv", "seqlen_order"),
        lambda q, kv, order_: order_ in orders(q, kv),
        "two lengths are in one order",
    ),
    Constraint(
        ("layout", "mask"),
        lambda layout, mask: layout != "varlen" or mask not in _BOOL | _FLOAT,
        "sequences packed end to end have no rectangular mask",
    ),
    Constraint(
        ("head_dim", "head_dim_v"),
        lambda dim, dim_v: not (dim == HEAD_DIMS[0] and dim_v == "smaller"),
        "head dims are multiples of 8",
    ),
    Constraint(
        ("layout", "heads", "batch"),
        lambda layout, heads, batch: (layout, heads, batch) != ("expanded", "one-kv", "one"),
        "one kv head of one batch entry has nothing to expand over",
    ),
    Constraint(
        ("data", "batch"),
        lambda data, batch: data != "batch-differs" or batch == "more",
        "entries that differ need more than one",
    ),
    Constraint(
        ("grad_out", "pass"),
        lambda grad_out, pass_: grad_out == "contiguous" or pass_ == "backward",
        "a forward pass has no gradient of out",
    ),
    Constraint(
        ("earlier", "layout"),
        lambda earlier, layout: earlier != "other-strides" or layout != "varlen",
        "sequences packed end to end have one layout",
    ),
    Constraint(
        _WORK_AXES,
        _fits,
        "work per case is capped: long lengths go with few heads of few dimensions",
    ),
)


def head_dim_v(head_dim: int, level: Level) -> int:
    """Return the head dim of v that stands for a level beside a head dim of q and k."""
    if level == "equal":
        return head_dim
    if level == "smaller":
        return max(HEAD_DIMS[0], head_dim // 2 // 8 * 8)
    return head_dim + max(64, head_dim // 4 // 8 * 8)


def levels_of(case: Case) -> dict[str, Level]:
    """Return the level of every axis that a case falls on, in the order of `AXES`."""
    return {
        "pass": case.pass_,
        "dtype": case.dtype,
        "head_dim": case.head_dim,
        "head_dim_v": _compare(case.head_dim_v, case.head_dim, "smaller", "larger"),
        "heads": (
            "equal" if case.heads_kv == case.heads else ("one-kv" if case.heads_kv == 1 else "grouped")
        ),
        "batch": "one" if case.batch == 1 else "more",
        "seqlen_q": length_level(case.seqlen_q),
        "seqlen_kv": length_level(case.seqlen_kv),
        "seqlen_order": order(case.seqlen_q, case.seqlen_kv),
        "mask": case.mask,
        "masked_rows": case.masked_rows,
        "dropout": "on" if case.dropout else "off",
        "scale": "default" if case.scale is None else "custom",
        "softcap": "on" if case.softcap else "off",
        "alibi": "on" if case.alibi else "off",
        "layout": case.layout,
        "needs_grad": case.needs_grad,
        "deterministic": "on" if case.deterministic else "off",
        "data": case.data,
        "grad_out": case.grad_out,
        "earlier": case.earlier,
    }


def _compare(value: int, against: int, less: str, more: str) -> str:
    if value == against:
        return "equal"
    return less if value < against else more


def allowed(at: At) -> bool:
    """Whether every constraint admits this choice of a level on every axis."""
    return first_violated(at) is None


PLANNING_ONLY: Final = frozenset({("head_dim", "head_dim_v"), _WORK_AXES})
"""Axes of constraints that keep a plan small; a job may ask for what they exclude."""


def first_violated(at: At, leaving_out: frozenset[tuple[str, ...]] = frozenset()) -> Constraint | None:
    """Return the first constraint that a full choice of levels breaks, if any."""
    for constraint in CONSTRAINTS:
        if constraint.axes not in leaving_out and not constraint.allows(
            *(at[name] for name in constraint.axes)
        ):
            return constraint
    return None
