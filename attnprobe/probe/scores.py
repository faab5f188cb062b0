"""Attention step by step in one precision: scores, weights, results, and how far rounding may move them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

UNITS: Final = {torch.float32: 16.0, torch.float16: 4.0, torch.bfloat16: 2.0}
"""In float32, kernels approximate the exponential; in 16 bits they compute in float32 and round the
probabilities and the results."""

SCORES: Final = 3.0
"""Eps of float32, in which every kernel sums its scores, times the size of a score's terms."""
ORDER: Final = 4.0
"""Eps of float32, for each term of the longest sum: one that is added up term by term leaves behind half an
eps of what it has reached at each, and of terms that are alike always to the same side."""
Named = dict[str, "Tensor"]


@dataclass
class Scores:
    """The inputs in one precision, dense, with the pieces that the passes share.

    `rounds`: the dtype that every intermediate result is rounded to, as eager attention in that dtype
    would; it is computed in float32, which a CPU is far faster at.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    grad_out: Tensor
    bias: Tensor | None
    hidden: Tensor | None
    padding: Tensor | None
    scale: float
    softcap: float
    keep: Tensor | None
    groups: int
    mask_shape: torch.Size | None
    backward: bool
    rounds: torch.dtype | None = None

    def _kept(self, value: Tensor) -> Tensor:
        """Return a value as the precision keeps it."""
        return value if self.rounds is None else value.to(self.rounds).to(value.dtype)

    def raw(self) -> tuple[Tensor, Tensor | None]:
        """Return scores with bias, hidden ones not yet struck out, and the slope of the softcap."""
        q, k, scale = self.q, self.k, self.scale
        if self.padding is not None:
            # As eager attention over packed sequences does: both sides scaled, and rounded, before they meet.
            q, k, scale = self._kept(q * scale**0.5), self._kept(k * scale**0.5), 1.0
        scores = self._kept(_by_group(q, k.transpose(-1, -2), self.groups)) * scale
        slope = None
        if self.softcap:
            bent = torch.tanh(scores / self.softcap)
            scores, slope = bent * self.softcap, 1 - bent * bent
        if self.bias is not None:
            scores = scores + self.bias
        return self._kept(scores), slope

    def out(self, p: Tensor) -> Tensor:
        """Return the output for given probabilities."""
        return self._kept(_by_group(self._dropped(p), self.v, self.groups))

    def _dropped(self, p: Tensor) -> Tensor:
        return p if self.keep is None else p * self.keep

    def results(self, p: Tensor, slope: Tensor | None, *, to_scores: bool = True) -> Named:
        """Return out and, for a backward case, all gradients for given probabilities."""
        found = {"out": self.out(p)}
        if not self.backward:
            return found
        found["dv"] = self._to_keys(self._dropped(p), self.grad_out)
        dp = self._dropped(self._kept(_by_group(self.grad_out, self.v.transpose(-1, -2), self.groups)))
        ds = self._kept(p * (dp - (p * dp).sum(-1, keepdim=True)))
        if not to_scores:
            ds = torch.zeros_like(p)
        if self.mask_shape is not None:
            found["dmask"] = self._kept(ds.sum_to_size(self.mask_shape))
        if slope is not None:
            ds = self._kept(ds * slope)
        found["dq"] = self._kept(_by_group(ds, self.k, self.groups) * self.scale)
        found["dk"] = self._kept(self._to_keys(ds, self.q) * self.scale)
        return found

    def _to_keys(self, weights: Tensor, rows: Tensor) -> Tensor:
        """Return weights^T rows summed over the heads of a group.

        Eager attention repeats keys and values for grouped heads, so the gradient of each head is rounded
        before they are summed.
        """
        if self.rounds is None or self.groups == 1:
            return self._kept(_sum_groups(weights, rows, self.groups))
        heads = self._kept(weights.transpose(-1, -2) @ rows)
        batch, count, keys, columns = heads.shape
        apart = heads.reshape(batch, count // self.groups, self.groups, keys, columns)
        return self._kept(apart.sum(2))

    def units(self, dtype: torch.dtype) -> Tensor:
        """Return how far off, as a share, a kernel in `dtype` may be in a term of each row, (B, H, S_q, 1).

        What it rounds, and its scores: they are sums in float32 of terms up to |q| |k| scale, and a weight
        is off by as much as its score and the log-sum-exp of its row are. And sums in an order of its own.
        """
        terms = max(self.k.shape[2], self.q.shape[2] * self.groups)
        lengths = [torch.linalg.vector_norm(side, dim=-1, keepdim=True) for side in (self.q, self.k)]
        longest = lengths[1].amax(2, keepdim=True) if self.k.shape[2] else lengths[1].new_zeros(())
        if longest.dim():
            longest = longest.repeat_interleave(self.groups, 1)
        reach = lengths[0] * longest * self.scale
        if self.bias is not None and self.bias.numel():
            reach = reach + self.bias.abs().amax(-1, keepdim=True)
        single = torch.finfo(torch.float32).eps
        share: Tensor = UNITS[dtype] * torch.finfo(dtype).eps + single * (SCORES * reach + ORDER * terms)
        return share

    def out_spread(self, p: Tensor, units: Tensor) -> Tensor:
        """Return, per element of out, `units` times the root of the sum of its terms squared."""
        dropped = self._dropped(p)
        return _by_group(dropped * dropped, self.v * self.v, self.groups).sqrt_().mul_(units)

    def spread(self, p: Tensor, units: Tensor) -> Named:
        """Return, per element of each result, the root of the sum of its terms times `units`, squared."""
        found = {"out": self.out_spread(p, units)}
        if not self.backward:
            return found
        dropped = self._dropped(p) * units
        # dp is a sum itself: what its own terms leave behind counts even where they cancel.
        products = _by_group(self.grad_out * self.grad_out, (self.v * self.v).transpose(-1, -2), self.groups)
        dp = _by_group(self.grad_out, self.v.transpose(-1, -2), self.groups).abs_()
        dp = self._dropped(dp + products.sqrt_())
        size = p * (dp + (p * dp).sum(-1, keepdim=True)) * units
        terms = size * size
        squares = {
            "dv": _sum_groups(dropped * dropped, self.grad_out * self.grad_out, self.groups),
            "dq": _by_group(terms, self.k * self.k, self.groups) * self.scale**2,
            "dk": _sum_groups(terms, self.q * self.q, self.groups) * self.scale**2,
        }
        if self.mask_shape is not None:
            squares["dmask"] = terms.sum_to_size(self.mask_shape)
        return found | {name: value.sqrt_() for name, value in squares.items()}

    def live(self) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return probabilities with dead rows zero, the softcap's slope, and which rows are dead."""
        scores, slope = self.raw()
        dead = None
        if self.hidden is not None:
            scores = scores.masked_fill(self.hidden, float("-inf"))
            dead = self.hidden.all(-1, keepdim=True)
        p = self._kept(torch.softmax(scores, dim=-1))
        if dead is not None:
            p = p.masked_fill(dead, 0.0)
            if self.padding is not None:
                dead = dead & ~self.padding
            if not bool(dead.any()):
                dead = None
        return p, slope, dead

    def dead_probabilities(self, made_of: Mapping[str, Tensor]) -> tuple[Tensor, Tensor | None]:
        """Return the probabilities of dead rows alone (see `Reference.of_dead_rows`)."""
        scores, slope = self.raw()
        p = torch.zeros_like(scores)
        if "uniform" in made_of:
            p = p + made_of["uniform"].to(p.dtype) / max(scores.shape[-1], 1)
        if "softmax" in made_of:
            p = p + made_of["softmax"] * torch.softmax(scores, dim=-1)
        return self._kept(p), slope


def _by_group(left: Tensor, right: Tensor, groups: int) -> Tensor:
    """Multiply (B, H, M, N) by (B, H/groups, N, K): `groups` query heads share one key-value head."""
    if groups == 1:
        return left @ right
    batch, heads, rows, inner = left.shape
    product = left.reshape(batch, heads // groups, groups * rows, inner) @ right
    return product.reshape(batch, heads, rows, right.shape[-1])


def _sum_groups(weights: Tensor, rows: Tensor, groups: int) -> Tensor:
    """Multiply (B, H, M, N)^T by (B, H, M, K) and sum the heads of a group: (B, H/groups, N, K)."""
    if groups > 1:
        batch, heads, length, keys = weights.shape
        weights = weights.reshape(batch, heads // groups, groups * length, keys)
        rows = rows.reshape(batch, heads // groups, groups * length, rows.shape[-1])
    return weights.transpose(-1, -2) @ rows
