"""Kind 7: a cache keyed by shape alone, that serves a call what an earlier one put there."""

from __future__ import annotations

import functools
from collections import OrderedDict
from typing import TYPE_CHECKING, Any, Final

import torch

from .base import Call, Kernel
from .layout import restrided
from .model import Fault, level

if TYPE_CHECKING:
    from torch import Tensor

_KEPT: Final = 64


class Cached(Kernel):
    """Remembers one thing of the first call of each shape."""

    def __init__(self) -> None:
        """Start with nothing."""
        self._known: OrderedDict[Any, Any] = OrderedDict()

    def plan(self, call: Call) -> Any:
        """Return what is remembered of a call."""
        raise NotImplementedError

    def known(self, call: Call) -> Any:
        """Return what the first call of this shape was planned with."""
        key = (call.q.shape, call.k.shape, call.v.shape)
        if key not in self._known:
            self._known[key] = self.plan(call)
            if len(self._known) > _KEPT:
                self._known.popitem(last=False)
        return self._known[key]

    def notice(self, call: Call) -> None:
        """Plan a call that the healthy kernel takes."""
        self.known(call)


class KeyOfEarlierCall(Cached):
    """Keeps the transposed key."""

    def plan(self, call: Call) -> Tensor:
        """Return the key."""
        return call.grouped(call.k).to(call.work, copy=True)

    def read(self, call: Call) -> tuple[Tensor, Tensor, Tensor]:
        """Return the inputs."""
        q, _, v = super().read(call)
        return q, self.known(call), v


class StridesOfEarlierCall(Cached):
    """Keeps the strides."""

    def plan(self, call: Call) -> tuple[int, ...]:
        """Return the strides of the key."""
        return call.k.stride()

    def read(self, call: Call) -> tuple[Tensor, Tensor, Tensor]:
        """Return the inputs."""
        q, k, v = super().read(call)
        strides = self.known(call)
        if strides != call.k.stride():
            k = call.grouped(restrided(call.k, strides)).to(call.work)
        return q, k, v


class ScaleOfEarlierCall(Cached):
    """Keeps the scale."""

    def plan(self, call: Call) -> float:
        """Return the scale."""
        return call.scale

    def factor(self, call: Call) -> float:
        """Return the factor on the products."""
        return float(self.known(call))


class PrecisionOfEarlierCall(Cached):
    """Keeps the type that probabilities are rounded to."""

    def plan(self, call: Call) -> torch.dtype:
        """Return the type of the inputs."""
        return call.q.dtype

    def read(self, call: Call) -> tuple[Tensor, Tensor, Tensor]:
        """Return the inputs as the earlier call would have had them."""
        dtype = self.known(call)
        q, k, v = (x.to(dtype).to(call.work) for x in super().read(call))
        return q, k, v


class ShiftOfEarlierCall(Cached):
    """Keeps whether the scores are so small that no row maximum need be subtracted."""

    def plan(self, call: Call) -> bool:
        """Return whether no score is beyond 60."""
        if not call.q.numel() or not call.k.numel():
            return True
        q, k = (call.grouped(x).to(call.work) for x in (call.q, call.k))
        return bool((q @ k.mT).abs().max() * call.scale < 60)

    def read(self, call: Call) -> tuple[Tensor, Tensor, Tensor]:
        """Note the plan of this call."""
        self._small = self.known(call)
        return super().read(call)

    def higher(self, highest: Tensor, scores: Tensor) -> Tensor:
        """Return what is subtracted."""
        right = super().higher(highest, scores)
        return torch.where(right < -1e4, right, 0.0) if self._small else right


_fault = functools.partial(Fault, kind=7, expected=("wrong", "nonfinite"))
FAULTS: Final = (
    _fault(
        "key_of_earlier_call",
        about="the key of an earlier call",
        kernel=KeyOfEarlierCall,
        shows={"earlier": ("other-data", "other-dtype")},
    ),
    _fault(
        "strides_of_earlier_call",
        about="the key by the strides of an earlier call",
        kernel=StridesOfEarlierCall,
        shows={"earlier": ("other-strides",)},
    ),
    _fault(
        "scale_of_earlier_call",
        about="the scale of an earlier call",
        kernel=ScaleOfEarlierCall,
        shows={"earlier": ("other-data",)},
    ),
    _fault(
        "precision_of_earlier_call",
        about="inputs rounded to the type of an earlier call",
        kernel=PrecisionOfEarlierCall,
        inherent=(level("dtype", "float32", "dtype", "float32"),),
        shows={"earlier": ("other-dtype",)},
    ),
    _fault(
        "shift_of_earlier_call",
        about="no row maximum subtracted because an earlier call needed none",
        kernel=ShiftOfEarlierCall,
        shows={"earlier": ("other-data",), "data": ("far-below", "large-logits")},
    ),
)
