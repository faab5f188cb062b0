"""Kind 8: results that differ between two equal calls."""

from __future__ import annotations

import functools
import os
import random
import threading
import time
from typing import TYPE_CHECKING, Final

import torch

from .base import Call, Kernel
from .model import Fault, lengths, level

if TYPE_CHECKING:
    from torch import Tensor

_DELAY: Final = 2e-4


class AnyOrder(Kernel):
    """Adds up the probabilities of a row in an order that differs each time, as atomic additions do."""

    def __init__(self) -> None:
        """Draw from a generator that nobody seeds."""
        self._generator = torch.Generator().manual_seed(int.from_bytes(os.urandom(7), "big"))

    def add_sum(self, summed: Tensor, shrink: Tensor, p: Tensor) -> Tensor:
        """Return the sum."""
        order = torch.randperm(p.shape[-1], generator=self._generator)
        halves = p[..., order].tensor_split(5, dim=-1)
        for part in halves:
            summed, shrink = summed * shrink + part.sum(-1, keepdim=True), torch.ones_like(shrink)
        return summed


class AnyOrderOfDk(Kernel):
    """Adds up what tiles of 32 rows give to dk, in the order in which they end."""

    def to_keys(self, call: Call, ds: Tensor, q: Tensor) -> Tensor:
        """Return what a tile adds to dk."""
        cuts = list(range(32, q.shape[-2], 32))
        parts = list(zip(ds.tensor_split(cuts, dim=-2), q.tensor_split(cuts, dim=-2), strict=True))
        random.SystemRandom().shuffle(parts)
        found = super().to_keys(call, *parts[0])
        for weights, rows in parts[1:]:
            found = found + super().to_keys(call, weights, rows)
        return found


class ThreadsRace(Kernel):
    """Lets three threads add their part of dq to one accumulator; a busy machine changes who is first."""

    def to_queries(self, call: Call, ds: Tensor, k: Tensor) -> Tensor:
        """Return what a tile adds to dq."""
        found, turn = [torch.zeros(())], threading.Lock()
        both = zip(ds.tensor_split(3, dim=-1), k.tensor_split(3, dim=-2), strict=True)

        def add(part: int, weights: Tensor, rows: Tensor) -> None:
            time.sleep(part * _DELAY)
            mine = super(ThreadsRace, self).to_queries(call, weights, rows)
            with turn:  # no addition is lost; which one comes first is up to the machine
                found[0] = found[0] + mine

        threads = [threading.Thread(target=add, args=(part, *one)) for part, one in enumerate(both)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return found[0]


class LostUpdate(Kernel):
    """Loses what a tile adds to dq about once in twenty times, as two unsynchronised additions do."""

    def to_queries(self, call: Call, ds: Tensor, k: Tensor) -> Tensor:
        """Return what a tile adds to dq."""
        found = super().to_queries(call, ds, k)
        return found * (random.SystemRandom().random() > 0.05)


_fault = functools.partial(Fault, kind=8, expected=("nondeterministic",))
_ASKED: Final = {"deterministic": (True,)}
FAULTS: Final = (
    _fault("any_order", about="row sums in any order", kernel=AnyOrder, shows=_ASKED),
    _fault(
        "any_order_asked",
        about="row sums in any order, only where determinism is asked for",
        kernel=AnyOrder,
        inherent=(level("deterministic", "determinism asked for", "deterministic", True),),
        shows=_ASKED,
    ),
    _fault(
        "any_order_of_dk",
        about="dk summed over tiles of rows in any order",
        kernel=AnyOrderOfDk,
        inherent=(lengths("seqlen_q", "S_q >= 97", lambda n: n > 96),),
        shows=_ASKED,
        grads="k",
    ),
    _fault(
        "threads_race",
        about="threads add to dq in the order in which they end: under load any",
        kernel=ThreadsRace,
        inherent=(lengths("seqlen_kv", "S_kv >= 3", lambda n: n > 2),),
        shows=_ASKED,
        grads="q",
    ),
    Fault(
        "lost_update",
        8,
        "a tile of dq lost once in about twenty times",
        LostUpdate,
        ("wrong", "unwritten", "nondeterministic"),
        grads="q",
    ),
)
