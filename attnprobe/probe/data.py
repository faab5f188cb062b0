"""What the inputs look like: Gaussian, and the regimes in which kernels fail that pass on Gaussian data.

Public defects show on scores far below zero, on large ones, on data like real activations and on batch
entries that differ. The same case gives the same bits in every process of one machine; the width of its
vectors moves last bits, as it does in torch.randn.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from attnprobe.config import Case

FAR_BELOW: Final = 110.0
"""How far below zero scores lie: with 512 keys the log-sum-exp of a row is about -103. Kernels that keep
exp(score) without taking the row's largest off first, in float32, have nothing left below -89."""
_SIGMAS: Final = 6.0
LARGE: Final = 40.0
"""Standard deviation of large logits; among a few hundred the largest is over 88, where exp overflows."""
ALIKE: Final = 0.75
"""Share of a token that all tokens have in common where they are alike."""
SPREAD: Final = (-5, -4, -3, -2, -1, 0, 1)
"""Exponents of two that channel scales are drawn from; one channel has `OUTLIER`."""
OUTLIER: Final = 3
OUTLIER_OF_V: Final = 7
"""Of v alone: there a sum over a few hundred keys, not yet divided by the sum of their weights, is past the
largest float16. In q and k it would make every softmax one-hot."""

Values = list["Tensor"]


def shaped(case: Case, values: Values, entries: tuple[Values, ...], generator: torch.Generator) -> None:
    """Turn Gaussian q, k, v and grad_out into the data regime of the case, in place.

    `values`: the four tensors in float32, (B, H, S, D) or (T, H, D). `entries`: the same memory seen by
    batch entry or sequence, four views each.
    """
    if case.data == "batch-differs":
        for number, entry in enumerate(entries):
            _CYCLE[number % len(_CYCLE)](case, entry, generator)
    else:
        _REGIMES[case.data](case, values, generator)


def _gaussian(case: Case, values: Values, generator: torch.Generator) -> None:
    """Leave them as they are."""


def _far_below(case: Case, values: Values, generator: torch.Generator) -> None:  # noqa: ARG001
    """Move q and k apart along one direction: every score is lower by `FAR_BELOW`.

    What they have along that direction already would make the scores scatter, and is taken out. Where the
    scale of the case makes them scatter more than by 1, they go lower by that.
    """
    q, k = values[:2]
    scatter = case.softmax_scale * case.head_dim**0.5
    depth = FAR_BELOW + _SIGMAS * max(0.0, scatter - 1)
    per_channel = (depth / (case.softmax_scale * case.head_dim)) ** 0.5
    for tensor, sign in ((q, -1.0), (k, 1.0)):
        tensor.sub_(tensor.mean(-1, keepdim=True)).add_(sign * per_channel)


def _large_logits(case: Case, values: Values, generator: torch.Generator) -> None:  # noqa: ARG001
    """Scale q and k so that the scores have a standard deviation of `LARGE`."""
    factor = (LARGE / (case.softmax_scale * case.head_dim**0.5)) ** 0.5
    for tensor in values[:2]:
        tensor.mul_(factor)


def _outliers(case: Case, values: Values, generator: torch.Generator) -> None:  # noqa: ARG001
    """Make tokens alike and channels differ by orders of magnitude, the largest the same in q and k."""
    exponents = torch.tensor(SPREAD, dtype=torch.float32)
    largest = int(torch.randint(1 << 16, (), generator=generator))
    for tensor, outlier in zip(values, (OUTLIER, OUTLIER, OUTLIER_OF_V, OUTLIER), strict=True):
        width = tensor.shape[-1]
        common = torch.randn(width, generator=generator)
        drawn = exponents[torch.randint(len(SPREAD), (width,), generator=generator)]
        drawn[largest % width] = outlier
        tensor.mul_(1 - ALIKE).add_(common, alpha=ALIKE).mul_(torch.exp2(drawn))


_REGIMES: Final[dict[str, Callable[[Case, Values, torch.Generator], None]]] = {
    "gaussian": _gaussian,
    "far-below": _far_below,
    "large-logits": _large_logits,
    "outliers": _outliers,
}
_CYCLE: Final = (_gaussian, _far_below, _large_logits, _outliers)
