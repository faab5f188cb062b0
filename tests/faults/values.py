"""Kinds 2 and 3: wrong values, by a lot or by little, and values that are not finite where they should be."""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Final

import torch

from .base import Call, Kernel, Saved
from .model import (
    CAUSAL,
    FLOAT_MASK,
    HIDDEN_ROWS,
    MASK,
    MORE_BATCH,
    OWN_SCALE,
    Fault,
    grouped,
    lengths,
    level,
)
from .seen import Condition

if TYPE_CHECKING:
    from torch import Tensor


class LastHead(Kernel):
    """Scales the output of the last head by a twentieth too much."""

    def write(self, name: str, target: Tensor, rows: slice, value: Tensor) -> None:
        """Write the output."""
        if name == "out":
            value = value.clone()
            value[:, -1, -1] *= 1.05
        super().write(name, target, rows, value)


class TwentiethInDq(Kernel):
    """Multiplies dq by a constant that is a twentieth too large."""

    def to_queries(self, call: Call, ds: Tensor, k: Tensor) -> Tensor:
        """Return what a tile adds to dq."""
        return super().to_queries(call, ds, k) * 1.05


class DefaultScaleInDk(Kernel):
    """Multiplies dk by the default scale."""

    def to_keys(self, call: Call, ds: Tensor, q: Tensor) -> Tensor:
        """Return what a tile adds to dk."""
        return ds.mT @ q / math.sqrt(call.head_dim)


class FirstEntryOfBatch(Kernel):
    """Forgets the offset of the batch entry where it writes dk."""

    def write(self, name: str, target: Tensor, rows: slice, value: Tensor) -> None:
        """Write."""
        super().write(name, target, rows, value[:1] if name == "dk" else value)


class LostHeadOfGroup(Kernel):
    """Sums the heads of a group up to the last one, exclusive."""

    def sum_heads(self, heads: Tensor) -> Tensor:
        """Return the sum."""
        return super().sum_heads(heads[:, :, :-1])


class HeadsInterleaved(Kernel):
    """Gives query head h the key-value head h % H_kv instead of h // G."""

    def read(self, call: Call) -> tuple[Tensor, Tensor, Tensor]:
        """Read the query heads in the other order."""
        q, k, v = super().read(call)
        flat = q.reshape(call.batch, call.heads, *q.shape[3:])
        apart = flat.view(call.batch, call.groups, call.heads_kv, *q.shape[3:])
        return apart.transpose(1, 2), k, v


class SumNotShrunk(Kernel):
    """Shrinks the output but not the sum where the maximum rose: worse with every tile of keys."""

    def add_sum(self, summed: Tensor, shrink: Tensor, p: Tensor) -> Tensor:  # noqa: ARG002
        """Return the sum."""
        return summed + p.sum(-1, keepdim=True)


class OneKeyTooMany(Kernel):
    """Lets rows past 256 see one key more than they may."""

    def later(self, call: Call, rows: slice, keys: slice) -> Tensor:  # noqa: ARG002
        """Return which keys are hidden."""
        row = torch.arange(rows.start, rows.stop)[:, None]
        return torch.arange(keys.start, keys.stop) > row + (row >= 256)


class LastKeyLost(Kernel):
    """Loses a last key that is alone in its tile of 32."""

    def masked(self, call: Call, scores: Tensor, rows: slice, keys: slice) -> Tensor:
        """Return scores with the last key hidden."""
        scores = super().masked(call, scores, rows, keys)
        if keys.stop == call.seqlen_kv:
            scores[..., -1] = -math.inf
        return scores


class ShortLog2(Kernel):
    """Takes 2 to the power of the scores times a log2(e) of four digits after the binary point."""

    def exponential(self, scores: Tensor, top: Tensor) -> Tensor:
        """Return the exponentials, 0.4 % off in the exponent."""
        return torch.exp2((scores - top.clamp(min=torch.finfo(top.dtype).min)) * 1.4375)


class BottomRight(Kernel):
    """Aligns causal attention at the bottom right."""

    def later(self, call: Call, rows: slice, keys: slice) -> Tensor:
        """Return which keys are hidden."""
        shift = call.seqlen_kv - call.seqlen_q
        return torch.arange(keys.start, keys.stop) > torch.arange(rows.start, rows.stop)[:, None] + shift


class MaskScaled(Kernel):
    """Adds the float mask before it scales."""

    def masked(self, call: Call, scores: Tensor, rows: slice, keys: slice) -> Tensor:
        """Return masked scores."""
        return super().masked(call, scores / call.scale, rows, keys) * call.scale


class InfinityMinusInfinity(Kernel):
    """Subtracts minus infinity from minus infinity in the backward of a row that sees no key."""

    def probabilities(
        self, call: Call, saved: Saved, both: tuple[Tensor, Tensor], rows: slice, keys: slice
    ) -> Tensor:
        """Return the probabilities."""
        q, k = both
        scores = self.scores(call, q[..., rows, :], k[..., keys, :], rows, keys)
        return self.divide(torch.exp(scores - saved.top[..., rows, :]), saved.total[..., rows, :])


class FirstVectorHidden(Kernel):
    """Starts the online softmax with four keys and does not expect all four to be hidden."""

    def masked(self, call: Call, scores: Tensor, rows: slice, keys: slice) -> Tensor:
        """Return scores, NaN where the maximum of the first four is subtracted from itself."""
        scores = super().masked(call, scores, rows, keys)
        if keys.start == 0:
            first = scores[..., :4].amax(-1, keepdim=True)
            scores += first - first
        return scores


class LossScale(Kernel):
    """Keeps dv in float16 times 2^18 until it is written."""

    def write(self, name: str, target: Tensor, rows: slice, value: Tensor) -> None:
        """Write."""
        if name == "dv":
            value = (value * 2**18).half().float() / 2**18
        super().write(name, target, rows, value)


class RowBefore(Kernel):
    """Leaves in a row that sees no key what the registers held: the row before."""

    def divide(self, acc: Tensor, summed: Tensor) -> Tensor:
        """Return the output."""
        right = super().divide(acc, summed)
        return torch.where(summed == 0, right.roll(1, -2), right) if right.shape[-2] > 1 else right


_wrong = functools.partial(Fault, kind=2, expected=("wrong",))
_nonfinite = functools.partial(Fault, kind=3, expected=("nonfinite",))
_DIFFERENT = Condition("seqlen_order", "S_q != S_kv", lambda s: s.seqlen_q != s.seqlen_kv)
_SEVERAL = Condition("heads", "grouped heads, kv heads > 1", lambda s: 1 < s.heads_kv < s.heads)
FAULTS: Final = (
    _wrong("last_head", about="out of the last head 5 % too large", kernel=LastHead),
    _wrong("dq_twentieth", about="dq 5 % too large", kernel=TwentiethInDq, grads="q"),
    _wrong(
        "dk_default_scale",
        about="dk by the default scale",
        kernel=DefaultScaleInDk,
        inherent=(OWN_SCALE,),
        grads="k",
    ),
    _wrong(
        "dk_first_entry",
        about="every batch entry gets the dk of the first",
        kernel=FirstEntryOfBatch,
        inherent=(MORE_BATCH,),
        grads="k",
    ),
    _wrong(
        "lost_head",
        about="dk and dv lack the last head of each group",
        kernel=LostHeadOfGroup,
        inherent=(grouped(),),
        grads="kv",
    ),
    _wrong(
        "heads_interleaved",
        about="query heads matched with the wrong key-value heads",
        kernel=HeadsInterleaved,
        inherent=(_SEVERAL,),
    ),
    _wrong(
        "sum_not_shrunk",
        about="the row sum not rescaled between tiles of keys",
        kernel=SumNotShrunk,
        inherent=(lengths("seqlen_kv", "S_kv >= 129", lambda n: n > 128),),
    ),
    _wrong(
        "one_key_too_many",
        about="rows past 256 see one key too many",
        kernel=OneKeyTooMany,
        inherent=(
            CAUSAL,
            lengths("seqlen_q", "S_q >= 257", lambda n: n > 256),
            lengths("seqlen_kv", "S_kv >= 258", lambda n: n > 257),
        ),
    ),
    _wrong(
        "last_key_lost",
        about="the last key lost where it is alone in a tile of 32",
        kernel=LastKeyLost,
        inherent=(lengths("seqlen_kv", "S_kv % 32 == 1, not 1", lambda n: n % 32 == 1 < n),),
    ),
    _wrong("short_log2", about="exponent 0.4 % too small", kernel=ShortLog2),
    _wrong(
        "bottom_right",
        about="causal aligned at the bottom right",
        kernel=BottomRight,
        inherent=(CAUSAL, _DIFFERENT),
    ),
    _wrong("mask_scaled", about="the float mask scaled", kernel=MaskScaled, inherent=(FLOAT_MASK,)),
    _nonfinite(
        "nan_from_dead_rows",
        about="gradients NaN where a row is hidden whole, out zeros",
        kernel=InfinityMinusInfinity,
        inherent=(HIDDEN_ROWS,),
        grads="qkvm",
    ),
    _nonfinite(
        "first_vector_hidden",
        about="rows NaN whose first four keys are hidden",
        kernel=FirstVectorHidden,
        inherent=(MASK,),
        without=frozenset({"masked_rows"}),
    ),
    _nonfinite(
        "loss_scale",
        about="dv overflows in float16",
        kernel=LossScale,
        inherent=(level("dtype", "float16", "dtype", "float16"),),
        grads="v",
    ),
    Fault(
        "row_before",
        3,
        "a row hidden whole holds the row before it, where nothing is the right answer",
        RowBefore,
        ("wrong",),
        (HIDDEN_ROWS,),
    ),
)
