"""The dropout mask that a backend drew, read from its own output.

With Q = 0 every visible key has the same probability, so that `out` for a one-hot V shows for each key
whether it was kept. The mask then goes into the reference: gradients that used another mask, and a forward
that scaled by anything but 1/(1-p), come out wrong. How many were kept is compared with the rate asked for,
and batch entries and heads with each other: random numbers that all start alike drop the same scores.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch

from attnprobe.probe.own_forward import weights
from attnprobe.probe.reference import Reference, reference
from attnprobe.probe.region import two_digits

if TYPE_CHECKING:
    from torch import Tensor

    from attnprobe.config import Case
    from attnprobe.probe.inputs import Tensors

_SIGMAS: Final = 6.0
"""Of a normal distribution; a few scatter more, by a third of its square over their number (Bernstein)."""
_COARSE: Final = 1 / 256
"""Kernels compare a random byte with the rate."""
_CHANCE: Final = 1e-12
"""How likely two masks that are drawn apart may be alike before that is held against them."""


def reference_with_its_mask(case: Case, tensors: Tensors, backend: Any) -> Reference | None:
    """Return the reference under the dropout mask of this backend; None where it cannot be read.

    It cannot where sequences are packed.
    """
    kept = read_mask(case, tensors, backend)
    if kept is None:
        return None
    found = reference(case, tensors, kept.double() / (1 - case.dropout))
    # With ALiBi a far key's weight is 0 whether it was kept or not.
    found.dropout = None if case.alibi else amiss(case.dropout, kept, found.exact.hidden)
    return found


def amiss(rate: float, kept: Tensor, hidden: Tensor | None) -> dict[str, object] | None:
    """Return what is amiss with a mask, (B, H, S_q, S_kv), another rate or one mask for several; or None."""
    dropped = off_rate(rate, kept, hidden)
    if dropped is not None:
        return {"asked": rate, "dropped": two_digits(dropped, 3)}
    alike = drawn_once(rate, kept, hidden)
    return None if alike is None else {"alike": alike}


def read_mask(case: Case, tensors: Tensors, backend: Any) -> Tensor | None:
    """Return which scores were kept, (B, H, S_q, S_kv) bool; None where it cannot be read."""
    found = weights(case, tensors, backend, torch.zeros_like(tensors.q))
    return None if found is None else found > 0


def off_rate(rate: float, kept: Tensor, hidden: Tensor | None) -> float | None:
    """Return the share of visible scores that was dropped, where chance does not explain it, else None."""
    visible = torch.ones_like(kept) if hidden is None else (~hidden).expand_as(kept)
    count = int(visible.sum())
    if not count:
        return None
    dropped = 1 - int((kept & visible).sum()) / count
    chance = _SIGMAS * (rate * (1 - rate) / count) ** 0.5 + _SIGMAS**2 / 3 / count
    return dropped if abs(dropped - rate) > chance + _COARSE else None


def drawn_once(rate: float, kept: Tensor, hidden: Tensor | None) -> str | None:
    """Return whether some "batch entries" or "heads" have the mask of the first, where chance does not."""
    visible = torch.ones_like(kept) if hidden is None else (~hidden).expand_as(kept)
    alike = rate**2 + (1 - rate) ** 2
    for axis, name in enumerate(("batch entries", "heads")):
        first, seen = kept.select(axis, 0), visible.select(axis, 0)
        for other in range(1, kept.shape[axis]):
            both = seen & visible.select(axis, other)
            if alike ** int(both.sum()) < _CHANCE and bool((first == kept.select(axis, other))[both].all()):
                return name
    return None
