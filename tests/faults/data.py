"""Kind 4: right on ordinary data, wrong on data as networks make it."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Final

import torch

from .base import Call, Kernel, Saved
from .model import MORE_BATCH, Fault, lengths, level

if TYPE_CHECKING:
    from torch import Tensor

_MASKED: Final = -1e4
"""Below this a row maximum is a mask's doing, not the data's."""


class Underflows(Kernel):
    """Subtracts the row maximum only where it is positive: rows far below zero underflow."""

    def higher(self, highest: Tensor, scores: Tensor) -> Tensor:
        """Return what is subtracted."""
        right = super().higher(highest, scores)
        return torch.where(right < _MASKED, right, right.clamp(min=0))


class Overflows(Kernel):
    """Subtracts the row maximum only where it is negative: large scores overflow."""

    def higher(self, highest: Tensor, scores: Tensor) -> Tensor:
        """Return what is subtracted."""
        return super().higher(highest, scores).clamp(max=0)


class UnderflowsAgain(Kernel):
    """Recomputes probabilities as exp(s) / exp(lse) in the backward; the forward is right."""

    def probabilities(
        self, call: Call, saved: Saved, both: tuple[Tensor, Tensor], rows: slice, keys: slice
    ) -> Tensor:
        """Return the probabilities."""
        q, k = both
        scores = self.scores(call, q[..., rows, :], k[..., keys, :], rows, keys)
        top, total = saved.top[..., rows, :], saved.total[..., rows, :]
        plain = torch.exp(scores) / (torch.exp(top) * total)
        return torch.where(top < _MASKED, self.divide(self.exponential(scores, top), total), plain)


class Saturates(Kernel):
    """Keeps scores before scaling in a fixed-point type that ends at 512."""

    def products(self, call: Call, q: Tensor, k: Tensor) -> Tensor:
        """Return the products."""
        return super().products(call, q, k).clamp_(-512, 512)


class MaximumOfFirstEntry(Kernel):
    """Shifts every batch entry by the row maxima of the first."""

    def higher(self, highest: Tensor, scores: Tensor) -> Tensor:
        """Return the maximum."""
        own = super().higher(highest, scores)
        first = own[:1].expand_as(own)
        return torch.where((first < _MASKED) | (own < _MASKED), own, first)


class HalfPrecisionSum(Kernel):
    """Accumulates the output, before it is divided, in float16."""

    def add_out(self, acc: Tensor, shrink: Tensor, p: Tensor, v: Tensor) -> Tensor:
        """Return the sum."""
        return super().add_out(acc, shrink, p, v).half().float()


class MaximumOfFirstVector(Kernel):
    """Takes the row maximum from the first eight keys for all."""

    def higher(self, highest: Tensor, scores: Tensor) -> Tensor:
        """Return the maximum."""
        first = scores[..., :8].amax(-1, keepdim=True)
        first = torch.where(first < _MASKED, super().higher(highest, scores), first)
        return torch.where(highest < _MASKED, first, highest)


_fault = functools.partial(Fault, kind=4, expected=("wrong", "nonfinite"))
FAULTS: Final = (
    _fault(
        "underflows",
        about="rows far below zero underflow",
        kernel=Underflows,
        shows={"data": ("far-below",)},
    ),
    _fault("overflows", about="large scores overflow", kernel=Overflows, shows={"data": ("large-logits",)}),
    _fault(
        "underflows_backward",
        about="rows far below zero underflow, in the backward alone",
        kernel=UnderflowsAgain,
        shows={"data": ("far-below", "large-logits")},
        grads="qkvm",
    ),
    _fault(
        "saturates",
        about="scores before scaling saturate at 512",
        kernel=Saturates,
        shows={"data": ("large-logits", "far-below")},
    ),
    _fault(
        "maximum_of_first_entry",
        about="every batch entry shifted by the row maxima of the first",
        kernel=MaximumOfFirstEntry,
        inherent=(MORE_BATCH,),
        shows={"data": ("batch-differs",)},
    ),
    _fault(
        "half_precision_sum",
        about="the output accumulated in float16",
        kernel=HalfPrecisionSum,
        inherent=(level("dtype", "float16", "dtype", "float16"),),
        shows={"data": ("outliers",)},
    ),
    _fault(
        "maximum_of_first_vector",
        about="row maximum of the first eight keys for all",
        kernel=MaximumOfFirstVector,
        inherent=(lengths("seqlen_kv", "S_kv >= 65", lambda n: n > 64),),
        shows={"data": ("large-logits",)},
    ),
)
