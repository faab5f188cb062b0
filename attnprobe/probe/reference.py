"""What attention must return, in float64, and how far a healthy kernel may be from it.

Scores s = scale q k^T, softcap c tanh(s/c), ALiBi and mask added; p = softmax(s); o = (p * keep/(1-r)) v.
Gradients by the chain rule: dv = p^T do; ds = p * (dp - sum_j p dp); dq = scale ds k; dk = scale ds^T q;
dmask = ds summed over broadcast axes.

Rows whose keys are all hidden have no right answer, so they are kept apart: the reference holds the
live rows, and adds what the dead rows contribute once the judge has seen what the backend made of them.

The tolerance of an element is `EAGER` times the error that eager attention makes in the same dtype, plus
`UNITS` times the dtype's eps of the terms that the element sums, as random signs let them grow (root of the
sum of squares). Scaled by the terms and not by the result: where all terms cancel, as with a single key, the
right gradient is 0 and no relative error means anything.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

import torch

from attnprobe.probe.inputs import DTYPES, alibi_slopes, positions_visible, visible

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from attnprobe.config import Case
    from attnprobe.probe.inputs import Tensors

EAGER: Final = 3.0
UNITS: Final = {torch.float32: 16.0, torch.float16: 4.0, torch.bfloat16: 2.0}
"""In float32, kernels approximate the exponential and sum in an order of their own; in 16 bits they compute
in float32 and round the probabilities and the results."""

Named = dict[str, "Tensor"]
Results = tuple[Named, Named]


@dataclass
class Reference:
    """Expected results of the live rows; all tensors dense (B, H, S, D), float64.

    `tolerance` is per element. `dead`: (B, H or 1, S_q, 1) bool, the rows with every key hidden, or None.
    """

    expected: Named
    tolerance: Named
    dead: Tensor | None
    exact: Scores
    low: Scores
    single: Scores
    seconds: float = 0.0
    """Wall time spent on dead rows so far."""
    _dead: list[tuple[dict[str, Tensor], bool, Results]] = field(default_factory=list)
    _joined: dict[tuple[str, ...], tuple[Tensor, Tensor]] = field(default_factory=dict)
    _out: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def joined(self, names: tuple[str, ...]) -> tuple[Tensor, Tensor]:
        """Return expected values and tolerances of these outputs end to end, 1-D."""
        if names not in self._joined:
            both = (self.expected, self.tolerance)
            wanted, tolerance = (torch.cat([of[name].reshape(-1) for name in names]) for of in both)
            self._joined[names] = (wanted, tolerance)
        return self._joined[names]

    def of_dead_rows(self, made_of: Mapping[str, Tensor], *, to_scores: bool) -> Results:
        """Return what dead rows add to every result and its tolerance, given what each was made into.

        `made_of` maps "uniform" (the average over all keys) and "softmax" (as if nothing were hidden)
        to the rows so treated, (B, H, S_q, 1) bool; rows in neither add nothing. `to_scores`: whether
        their gradient goes on to q, k and the mask, or is cut where the mask replaced the score.
        """
        given = {name: rows for name, rows in made_of.items() if name in {"uniform", "softmax"}}
        for before, cut, results in self._dead:
            same = before.keys() == given.keys() and cut is to_scores
            if same and all(torch.equal(before[name], given[name]) for name in given):
                return results
        start = time.perf_counter()
        p, slope = self.exact.dead_probabilities(given)
        extra = self.exact.results(p, slope, to_scores=to_scores)
        low_p, low_slope = self.low.dead_probabilities(given)
        eager = self.low.results(low_p, low_slope, to_scores=to_scores)
        dtype = self.low.rounds or torch.float32
        results = (extra, _tolerance(extra, eager, self.single.spread(p.float()), dtype))
        self._dead.append((given, to_scores, results))
        self.seconds += time.perf_counter() - start
        return results

    def dead_out(self, name: str) -> tuple[Tensor, Tensor]:
        """Return what `out` is in every row if it is made into `name`, and its tolerance."""
        if name not in self._out:
            start = time.perf_counter()
            rows = {name: torch.ones((), dtype=torch.bool, device=self.exact.q.device)}
            p, _ = self.exact.dead_probabilities(rows)
            low_p, _ = self.low.dead_probabilities(rows)
            exact = {"out": self.exact.out(p)}
            dtype = self.low.rounds or torch.float32
            spread = {"out": self.single.out_spread(p.float())}
            tolerance = _tolerance(exact, {"out": self.low.out(low_p)}, spread, dtype)
            self._out[name] = (exact["out"], tolerance["out"])
            self.seconds += time.perf_counter() - start
        return self._out[name]


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
        scores = self._kept(_by_group(self.q, self.k.transpose(-1, -2), self.groups)) * self.scale
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

    def out_spread(self, p: Tensor) -> Tensor:
        """Return, per element of out, the root of the sum of its terms squared."""
        dropped = self._dropped(p)
        return _by_group(dropped * dropped, self.v * self.v, self.groups).sqrt_()

    def spread(self, p: Tensor) -> Named:
        """Return, per element of each result, the root of the sum of its terms squared."""
        found = {"out": self.out_spread(p)}
        if not self.backward:
            return found
        dropped = self._dropped(p)
        # dp is a sum itself: what its own terms leave behind counts even where they cancel.
        products = _by_group(self.grad_out * self.grad_out, (self.v * self.v).transpose(-1, -2), self.groups)
        dp = _by_group(self.grad_out, self.v.transpose(-1, -2), self.groups).abs_()
        dp = self._dropped(dp + products.sqrt_())
        size = p * (dp + (p * dp).sum(-1, keepdim=True))
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


def reference(case: Case, tensors: Tensors, keep: Tensor | None = None) -> Reference:
    """Return expected results and tolerance of a case.

    `keep` (B, H, S_q, S_kv) float64 is the dropout mask over 1/(1-rate); without it dropout is off.
    """
    exact = _scores(case, tensors, torch.float64, keep)
    p, slope, dead = exact.live()
    expected = exact.results(p, slope)
    single = _scores(case, tensors, torch.float32, keep)
    dtype = DTYPES[case.dtype]
    low = single if dtype is torch.float32 else replace(single, rounds=dtype)
    low_p, low_slope, _ = low.live()
    eager = low.results(low_p, low_slope)
    tolerance = _tolerance(expected, eager, single.spread(p.float()), dtype)
    return Reference(expected, tolerance, dead, exact, low, single)


def _tolerance(exact: Named, eager: Named, spread: Named, dtype: torch.dtype) -> Named:
    """Return the tolerance per element: of the module's docstring, in float64."""
    limits = torch.finfo(dtype)
    tolerance = {}
    for name, value in exact.items():
        error = (eager[name].double() - value).abs_()
        worst = float(error.max()) if error.numel() else 0.0
        floor = EAGER * worst + limits.tiny
        tolerance[name] = spread[name].double().mul_(UNITS[dtype] * limits.eps).add_(floor)
    return tolerance


def _scores(case: Case, tensors: Tensors, dtype: torch.dtype, keep: Tensor | None) -> Scores:
    """Return the case's inputs in `dtype`, dense, with masks joined into one bias and one hidden."""
    q, k, v, grad_out = (
        dense(tensor, lengths).to(dtype)
        for tensor, lengths in (
            (tensors.q, tensors.lengths_q),
            (tensors.k, tensors.lengths_kv),
            (tensors.v, tensors.lengths_kv),
            (tensors.grad_out, tensors.lengths_q),
        )
    )
    device = q.device
    hidden: Tensor | None = None
    bias: Tensor | None = None
    padding: Tensor | None = None
    if tensors.lengths_q is not None and tensors.lengths_kv is not None:
        hidden = _hidden_by_length(case, tensors.lengths_q, tensors.lengths_kv, device)
        ends = torch.tensor(tensors.lengths_q, device=device)[:, None, None, None]
        padding = torch.arange(case.seqlen_q, device=device)[None, None, :, None] >= ends
    else:
        seen = visible(case, device)
        hidden = None if seen is None else ~seen.expand(case.batch, 1, -1, -1)
    mask = tensors.mask
    mask_shape = None
    if mask is not None and mask.dtype is torch.bool:
        hidden = ~mask if hidden is None else hidden | ~mask
    elif mask is not None:
        mask_shape = mask.shape if case.needs_grad == "mask" else None
        lowest = torch.finfo(mask.dtype).min
        gone = mask <= lowest
        hidden = gone if hidden is None else hidden | gone
        bias = mask.to(dtype).masked_fill(gone, 0.0)
    if case.alibi:
        slopes = alibi_slopes(case.heads).to(device, dtype)[:, None, None]
        query = torch.arange(case.seqlen_q, device=device)[:, None] + case.seqlen_kv - case.seqlen_q
        distance = (query - torch.arange(case.seqlen_kv, device=device)[None, :]).abs().to(dtype)
        bias = -slopes * distance if bias is None else bias - slopes * distance
    return Scores(
        q=q,
        k=k,
        v=v,
        grad_out=grad_out,
        bias=bias,
        hidden=hidden,
        padding=padding,
        scale=case.softmax_scale,
        softcap=case.softcap,
        keep=None if keep is None else keep.to(dtype),
        groups=case.heads // case.heads_kv,
        mask_shape=mask_shape,
        backward=case.pass_ == "backward",
    )


def _hidden_by_length(
    case: Case, lengths_q: tuple[int, ...], lengths_kv: tuple[int, ...], device: torch.device
) -> Tensor:
    """Return which keys are past the end of each sequence or not visible in it, (B, 1, S_q, S_kv)."""
    hidden = torch.ones((len(lengths_q), 1, case.seqlen_q, case.seqlen_kv), dtype=torch.bool, device=device)
    for entry, (q, kv) in enumerate(zip(lengths_q, lengths_kv, strict=True)):
        seen = positions_visible(case.mask, case.window, q, kv, device)
        hidden[entry, 0, :q, :kv] = False if seen is None else ~seen
    return hidden


def dense(tensor: Tensor, lengths: tuple[int, ...] | None) -> Tensor:
    """Return a packed (T, H, D) tensor as (B, H, S, D), zero past each sequence's end."""
    if lengths is None:
        return tensor
    longest = max(lengths, default=0)
    result = tensor.new_zeros((len(lengths), tensor.shape[1], longest, tensor.shape[2]))
    start = 0
    for entry, length in enumerate(lengths):
        result[entry, :, :length] = tensor[start : start + length].transpose(0, 1)
        start += length
    return result
