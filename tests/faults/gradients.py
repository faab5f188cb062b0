"""Kinds 5 and 11: gradients of another function than the forward's, and gradients of some inputs alone."""

from __future__ import annotations

import functools
import math
from dataclasses import replace
from typing import TYPE_CHECKING, Final

import torch

from .base import Call, Kernel, Saved
from .model import CAUSAL, FLOAT_MASK, OWN_SCALE, Fault, lengths, level

if TYPE_CHECKING:
    from torch import Tensor


class SumLostInLse(Kernel):
    """Keeps maximum and sum as one log-sum-exp, which forgets the sum where the maximum is huge."""

    def probabilities(
        self, call: Call, saved: Saved, both: tuple[Tensor, Tensor], rows: slice, keys: slice
    ) -> Tensor:
        """Return the probabilities."""
        q, k = both
        scores = self.scores(call, q[..., rows, :], k[..., keys, :], rows, keys)
        return self.exponential(scores, (saved.top + torch.log(saved.total))[..., rows, :])


class AnotherCall(Kernel):
    """Recomputes the probabilities of a call that is not quite the forward's."""

    def other(self, call: Call) -> Call:
        """Return the call whose probabilities are recomputed."""
        raise NotImplementedError

    def probabilities(
        self, call: Call, saved: Saved, both: tuple[Tensor, Tensor], rows: slice, keys: slice
    ) -> Tensor:
        """Return the probabilities."""
        return super().probabilities(self.other(call), saved, both, rows, keys)


class BiasForgotten(AnotherCall):
    """Recomputes with what the float mask hides, without what it adds."""

    def other(self, call: Call) -> Call:
        """Return the call without bias."""
        assert call.mask is not None
        gone = call.mask <= torch.finfo(call.mask.dtype).min
        return replace(call, mask=torch.where(gone, call.mask, 0.0))


class DefaultScaleAgain(AnotherCall):
    """Recomputes with the default scale."""

    def other(self, call: Call) -> Call:
        """Return the call with the default scale."""
        return replace(call, scale=1 / math.sqrt(call.head_dim))


class CausalForgotten(AnotherCall):
    """Recomputes without the causal mask."""

    def other(self, call: Call) -> Call:
        """Return the call that sees every key."""
        return replace(call, causal=False)


class RowTermOfFirstTile(Kernel):
    """Leaves the row term zero past row 128."""

    def row_term(self, call: Call, saved: Saved, g: Tensor) -> Tensor:
        """Return the row term."""
        term = super().row_term(call, saved, g)
        term[..., 128:, :] = 0
        return term


class RoundedAgain(Kernel):
    """Recomputes the scores from q and k rounded to bfloat16."""

    def probabilities(
        self, call: Call, saved: Saved, both: tuple[Tensor, Tensor], rows: slice, keys: slice
    ) -> Tensor:
        """Return the probabilities."""
        q, k = both
        return super().probabilities(call, saved, (q.bfloat16().float(), k.bfloat16().float()), rows, keys)


class NoRowTerm(Kernel):
    """Leaves the row term to a kernel that is not launched for these gradients."""

    def row_term(self, call: Call, saved: Saved, g: Tensor) -> Tensor:
        """Return zeros."""
        return torch.zeros_like(super().row_term(call, saved, g))


class DkNotScaled(Kernel):
    """Leaves the scale to a kernel that is not launched for these gradients."""

    def to_keys(self, call: Call, ds: Tensor, q: Tensor) -> Tensor:  # noqa: ARG002
        """Return what a tile adds to dk."""
        return ds.mT @ q


class DvNotWritten(Kernel):
    """Takes "no dq" for "nothing to copy back"."""

    def write(self, name: str, target: Tensor, rows: slice, value: Tensor) -> None:
        """Write, but no dv."""
        if name != "dv":
            super().write(name, target, rows, value)


_own = functools.partial(Fault, kind=5, expected=("wrong", "nonfinite"))
_only = functools.partial(Fault, kind=11, expected=("wrong",))
_ONLY_KV = level("needs_grad", "only k and v need a gradient", "needs", "kv")
FAULTS: Final = (
    _own(
        "sum_lost_in_lse",
        about="dq, dk, dv of rows at finfo.min too large by the number of keys",
        kernel=SumLostInLse,
        inherent=(
            level("masked_rows", "a row all finfo.min", "masked", "finfo-min"),
            level("dtype", "float32 or bfloat16", "dtype", "float32", "bfloat16"),
        ),
        grads="qkvm",
    ),
    _own(
        "bias_forgotten",
        about="backward without the bias",
        kernel=BiasForgotten,
        inherent=(FLOAT_MASK,),
        grads="qkvm",
    ),
    _own(
        "scale_forgotten",
        about="backward at the default scale",
        kernel=DefaultScaleAgain,
        inherent=(OWN_SCALE,),
        grads="qkvm",
    ),
    _own(
        "causal_forgotten",
        about="backward without causal",
        kernel=CausalForgotten,
        inherent=(CAUSAL,),
        grads="qkvm",
    ),
    _own(
        "row_term_tail_zero",
        about="row term zero past row 128",
        kernel=RowTermOfFirstTile,
        inherent=(lengths("seqlen_q", "S_q >= 129", lambda n: n > 128),),
        grads="qkm",
    ),
    _own(
        "rounded_again",
        about="backward from inputs rounded to bfloat16",
        kernel=RoundedAgain,
        inherent=(level("dtype", "float32 or float16", "dtype", "float32", "float16"),),
        grads="qkvm",
    ),
    _only(
        "only_q",
        about="dq without the row term where only q needs a gradient",
        kernel=NoRowTerm,
        inherent=(level("needs_grad", "only q needs a gradient", "needs", "q"),),
        grads="q",
    ),
    _only(
        "only_kv",
        about="dk not scaled where only k and v need a gradient",
        kernel=DkNotScaled,
        inherent=(_ONLY_KV,),
        grads="k",
    ),
    Fault(
        "only_kv_unwritten",
        11,
        "dv unwritten where only k and v need a gradient",
        DvNotWritten,
        ("unwritten",),
        (_ONLY_KV,),
        grads="v",
    ),
    _only(
        "only_mask",
        about="gradient of the mask without the row term where only the mask needs one",
        kernel=NoRowTerm,
        inherent=(level("needs_grad", "only the mask needs a gradient", "needs", "mask"),),
        grads="m",
    ),
)
