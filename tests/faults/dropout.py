"""Kind 10: dropout."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Final

from .base import Call, Grads, Kernel, Saved
from .model import DROPOUT, MORE_BATCH, Fault

if TYPE_CHECKING:
    from torch import Tensor


class NotScaled(Kernel):
    """Drops, and leaves what is kept as it is."""

    def drop(self, call: Call, p: Tensor, keep: Tensor | None, rows: slice, keys: slice) -> Tensor:  # noqa: ARG002
        """Return probabilities after dropout."""
        return p if keep is None else p * keep[..., rows, keys]


class HalfTheRate(Kernel):
    """Drops half as often as it was asked to, and scales as if it did."""

    def rate(self, call: Call) -> float:
        """Return how often a probability is dropped."""
        return call.dropout / 2


class AnotherMask(Kernel):
    """Draws a mask of its own in the backward."""

    def backward(self, call: Call, saved: Saved, grad_out: Tensor, needs: set[str]) -> Grads:
        """Return the gradients."""
        keep = self.draw(call) if call.dropout else None
        return super().backward(call, Saved(saved.out, saved.top, saved.total, keep), grad_out, needs)


class NotInScoreGradient(Kernel):
    """Drops for dv and not for the gradient of the scores."""

    def drop_grad(self, call: Call, dp: Tensor, keep: Tensor | None, rows: slice, keys: slice) -> Tensor:  # noqa: ARG002
        """Return the gradient of the probabilities."""
        return dp


class OneMaskForBatch(Kernel):
    """Counts the random numbers from the same start in every batch entry."""

    def draw(self, call: Call) -> Tensor:
        """Return which probabilities are kept."""
        keep = super().draw(call)
        return keep[:1].expand_as(keep)


_fault = functools.partial(Fault, kind=10, expected=("wrong",))
FAULTS: Final = (
    _fault("not_scaled", about="not scaled by 1/(1-p)", kernel=NotScaled, inherent=(DROPOUT,)),
    _fault(
        "half_the_rate",
        about="half the rate, scaled as for all of it",
        kernel=HalfTheRate,
        inherent=(DROPOUT,),
    ),
    _fault(
        "another_mask",
        about="another mask in the backward",
        kernel=AnotherMask,
        inherent=(DROPOUT,),
        grads="qkvm",
    ),
    _fault(
        "not_in_score_gradient",
        about="no dropout in dq and dk",
        kernel=NotInScoreGradient,
        inherent=(DROPOUT,),
        grads="qkm",
    ),
    _fault(
        "one_mask_for_batch",
        about="the same mask in every batch entry",
        kernel=OneMaskForBatch,
        inherent=(DROPOUT, MORE_BATCH),
    ),
)
