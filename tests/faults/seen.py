"""What an attention function can see of a call in its arguments, and calls drawn at random from that space.

The space knows nothing of any plan: lengths, head dims and the rest are drawn freely, so that a condition may
well sit on numbers that a scan does not visit.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Final

import torch
from torch import Tensor

_OUTLIER: Final = 8.0
"""A channel is an outlier where its root mean square is this many times that of the median channel."""
_WORK: Final = 512 * 513 * 512 // 2


@dataclass(frozen=True)
class Seen:
    """One call. The strings are those of attnprobe's axes where both know the same thing.

    `layout`: contiguous, strided (transposed or packed), expanded (k or v with stride 0), inner-stride.
    `masked`: none, hidden (a row all False or -inf), finfo-min.
    """

    dtype: str = "float32"
    head_dim: int = 64
    head_dim_v: int = 64
    heads: int = 2
    heads_kv: int = 2
    batch: int = 1
    seqlen_q: int = 128
    seqlen_kv: int = 128
    mask: str = "none"
    masked: str = "none"
    dropout: bool = False
    scale: bool = False
    layout: str = "contiguous"
    needs: str = "all"
    deterministic: bool = False
    outliers: bool = False

    @property
    def dims_differ(self) -> bool:
        """Whether the head dim of v is not that of q and k."""
        return self.head_dim != self.head_dim_v


def seen_in(  # noqa: PLR0913, PLR0917  # the call shape of scaled_dot_product_attention
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,  # noqa: FBT001, FBT002
    scale: float | None = None,
    enable_gqa: bool = False,  # noqa: ARG001, FBT001, FBT002
    *,
    data: bool = True,
) -> Seen:
    """Return what the arguments of a call show; `data`: look at the values too, which costs."""
    return Seen(
        dtype=str(q.dtype).removeprefix("torch."),
        head_dim=q.shape[3],
        head_dim_v=v.shape[3],
        heads=q.shape[1],
        heads_kv=k.shape[1],
        batch=q.shape[0],
        seqlen_q=q.shape[2],
        seqlen_kv=k.shape[2],
        mask=_mask(attn_mask, is_causal=is_causal),
        masked=_masked(attn_mask) if data else "none",
        dropout=dropout_p > 0,
        scale=scale is not None,
        layout=_layout(q, k, v),
        needs=_needs(q, k, v, attn_mask),
        deterministic=torch.are_deterministic_algorithms_enabled(),
        outliers=data and _outliers(q),
    )


def _mask(mask: Tensor | None, *, is_causal: bool) -> str:
    if mask is None:
        return "causal" if is_causal else "none"
    name = "bool" if mask.dtype is torch.bool else "float"
    shared = mask.dim() < 4 or mask.shape[1] == 1 or mask.stride(1) == 0
    return f"{name}-broadcast" if shared else name


def _masked(mask: Tensor | None) -> str:
    if mask is None or not mask.numel():
        return "none"
    if mask.dtype is torch.bool:
        return "none" if bool(mask.any(-1).all()) else "hidden"
    highest = mask.detach().amax(-1).min()
    if highest > torch.finfo(mask.dtype).min:
        return "none"
    return "finfo-min" if bool(highest.isfinite()) else "hidden"


def _layout(q: Tensor, k: Tensor, v: Tensor) -> str:
    tensors = (q, k, v)
    if any(x.stride(-1) != 1 and x.shape[-1] > 1 and x.numel() for x in tensors):
        return "inner-stride"
    if any(size > 1 and not stride for x in (k, v) for size, stride in zip(x.shape, x.stride(), strict=True)):
        return "expanded"
    return "contiguous" if all(x.is_contiguous() for x in tensors) else "strided"


def _needs(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> str:
    given = (q, k, v, mask)
    wanted = tuple(x is not None and x.requires_grad for x in given) if torch.is_grad_enabled() else ()
    names: dict[tuple[bool, ...], str] = {
        (True, True, True, False): "all",
        (True, False, False, False): "q",
        (False, True, True, False): "kv",
        (False, False, False, True): "mask",
    }
    return names.get(wanted, "some") if any(wanted) else "none"


def _outliers(q: Tensor) -> bool:
    if not q.numel():
        return False
    size = q.detach().float().square().mean((0, 1, 2)).sqrt()
    return bool(size.max() > _OUTLIER * size.median())


def _length(draw: random.Random) -> int:
    low, high = draw.choice(((1, 16), (17, 130), (17, 130), (131, 300), (301, 700)))
    return draw.randint(low, high)


def _heads(draw: random.Random) -> dict[str, Any]:
    heads, heads_kv = draw.choice(((2, 2), (1, 1), (4, 2), (3, 1), (4, 1)))
    return {"heads": heads, "heads_kv": heads_kv}


def _one(name: str, *values: Any) -> Callable[[random.Random], dict[str, Any]]:
    return lambda draw: {name: draw.choice(values)}


_DRAWS: Final[dict[str, Callable[[random.Random], dict[str, Any]]]] = {
    "dtype": _one("dtype", "float32", "bfloat16", "float16"),
    "head_dim": lambda draw: {"head_dim": draw.choice((*range(8, 257, 8), 512))},
    "head_dim_v": _one("head_dim_v", 0, 0, -1, 1),
    "heads": _heads,
    "batch": _one("batch", 1, 2),
    "seqlen_q": lambda draw: {"seqlen_q": _length(draw)},
    "seqlen_kv": lambda draw: {"seqlen_kv": _length(draw)},
    "seqlen_order": lambda draw: dict.fromkeys(("seqlen_q", "seqlen_kv"), _length(draw)),
    "mask": _one("mask", "none", "causal", "bool", "float", "bool-broadcast", "float-broadcast"),
    "masked_rows": _one("masked", "none", "none", "hidden", "finfo-min"),
    "dropout": _one("dropout", False, False, False, True),
    "scale": _one("scale", False, True),
    "layout": _one("layout", "contiguous", "strided", "expanded", "inner-stride"),
    "needs_grad": _one("needs", "none", "all", "all", "q", "kv", "mask"),
    "deterministic": _one("deterministic", False, False, True),
    "data": _one("outliers", False, False, False, True),
}


def redraw(seen: Seen, axis: str, draw: random.Random) -> Seen:
    """Return a call with what one axis decides drawn anew; `pass` goes by the gradients that are needed."""
    fields = _DRAWS["needs_grad" if axis == "pass" else axis](draw)
    if axis == "head_dim":
        moved = seen.head_dim_v - seen.head_dim
        fields["head_dim_v"] = max(8, fields["head_dim"] + moved)
    elif axis == "head_dim_v":
        fields["head_dim_v"] = max(8, seen.head_dim + fields["head_dim_v"] * draw.choice((8, 16, 64)))
    return replace(seen, **fields)


def allowed(seen: Seen) -> bool:
    """Whether a call can be made at all, and is no larger than attnprobe would make one."""
    float_mask, bool_mask = seen.mask.startswith("float"), seen.mask.startswith("bool")
    heads = 1 if seen.heads == seen.heads_kv else seen.heads
    work = seen.batch * heads * seen.seqlen_q * seen.seqlen_kv * max(seen.head_dim, seen.head_dim_v)
    return (
        (seen.needs != "mask" or float_mask)
        and (seen.masked != "hidden" or float_mask or bool_mask)
        and (seen.masked != "finfo-min" or float_mask)
        and (seen.layout != "expanded" or seen.heads_kv > 1 or seen.batch > 1)
        and work <= _WORK
    )


@dataclass(frozen=True)
class Condition:
    """A condition on one axis, in words and as a test of a call."""

    axis: str
    words: str
    holds: Callable[[Seen], bool] = field(compare=False)


_GRADS: Final = {"all": "qkv", "q": "q", "kv": "kv", "mask": "m", "some": "qkvm", "none": ""}


def asked_for(grads: str) -> Condition:
    """Return that one of the gradients of q, k, v, m(ask) is asked for; the axis of that is `pass`."""
    words = f"a gradient of {' or '.join(grads)} is asked for".replace(" m ", " the mask ")
    return Condition("pass", words, lambda seen: bool(set(grads) & set(_GRADS[seen.needs])))


_TRIES: Final = 60


def find(conditions: tuple[Condition, ...], draw: random.Random) -> Seen | None:
    """Return a call, otherwise drawn at random, in which all conditions hold; None where none was found."""
    for _ in range(_TRIES):
        seen = Seen()
        for axis in _DRAWS:
            seen = redraw(seen, axis, draw)
        for condition in conditions:
            for _ in range(_TRIES * 10):
                if condition.holds(seen):
                    break
                seen = redraw(seen, condition.axis, draw)
        # What only the rest of the drawing forbids is drawn away, not a condition's fault.
        for axis in ("needs_grad", "masked_rows", "layout", "seqlen_q", "seqlen_kv", "batch"):
            if axis not in {c.axis for c in conditions} and not allowed(seen):
                seen = replace(seen, **_PLAIN[axis])
        if allowed(seen) and all(condition.holds(seen) for condition in conditions):
            return seen
    return None


_PLAIN: Final[dict[str, dict[str, Any]]] = {
    "needs_grad": {"needs": "all"},
    "masked_rows": {"masked": "none"},
    "layout": {"layout": "contiguous"},
    "seqlen_q": {"seqlen_q": 33},
    "seqlen_kv": {"seqlen_kv": 33},
    "batch": {"batch": 1},
}
