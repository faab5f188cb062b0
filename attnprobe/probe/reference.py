"""What attention must return, in float64, and how far a healthy kernel may be from it.

Scores s = scale q k^T, softcap c tanh(s/c), ALiBi and mask added; p = softmax(s); o = (p * keep/(1-r)) v.
Gradients by the chain rule: dv = p^T do; ds = p * (dp - sum_j p dp); dq = scale ds k; dk = scale ds^T q;
dmask = ds summed over broadcast axes.

Rows whose keys are all hidden have no right answer, so they are kept apart: the reference holds the
live rows, and adds what the dead rows contribute once the judge has seen what the backend made of them.

The tolerance of an element is `EAGER` times the error that eager attention makes in the same dtype, plus
the rounding of the terms that the element sums (`Scores.units`), as random signs let it grow (root of the
sum of squares), plus the rounding of the result. Scaled by the terms and not by the result alone: where all
terms cancel, as with a single key, the right gradient is 0 and no relative error means anything.
docs/tolerance.md shows how near healthy backends come to it.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

import torch

from attnprobe.probe.inputs import DTYPES, alibi_slopes, positions_visible, visible
from attnprobe.probe.scores import Scores

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from attnprobe.config import Case
    from attnprobe.probe.inputs import Tensors
    from attnprobe.probe.scores import Named

EAGER: Final = 3.0
RELATIVE: Final = 2.0
"""Eps of the result itself: it is rounded, and before it what each head of a group adds to it."""
WEAK: Final = 0.03
"""Where the tolerance is a larger share than this of the mean gradient, a kernel a few per cent off would
pass, and its own forward is asked."""

Results = tuple["Named", "Named"]


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
    dropout: Mapping[str, object] | None = None
    """What is amiss with the dropout mask itself, if anything."""
    seconds: float = 0.0
    """Wall time spent on dead rows so far."""
    _dead: list[tuple[dict[str, Tensor], bool, Results]] = field(default_factory=list)
    _joined: dict[tuple[str, ...], tuple[Tensor, Tensor]] = field(default_factory=dict)
    _out: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    _weak: dict[tuple[str, ...], bool] = field(default_factory=dict)

    def joined(self, names: tuple[str, ...]) -> tuple[Tensor, Tensor]:
        """Return expected values and tolerances of these outputs end to end, 1-D."""
        if names not in self._joined:
            both = (self.expected, self.tolerance)
            wanted, tolerance = (torch.cat([of[name].reshape(-1) for name in names]) for of in both)
            self._joined[names] = (wanted, tolerance)
        return self._joined[names]

    def is_weak(self, names: list[str]) -> bool:
        """Whether this tolerance would let a gradient pass that is a few per cent off."""
        key = tuple(names)
        if key not in self._weak:
            self._weak[key] = is_weak(self.expected, self.tolerance, names)
        return self._weak[key]

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
        spread = self.single.spread(p.float(), self.single.units(dtype))
        results = (extra, _tolerance(extra, eager, spread, dtype))
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
            spread = {"out": self.single.out_spread(p.float(), self.single.units(dtype))}
            tolerance = _tolerance(exact, {"out": self.low.out(low_p)}, spread, dtype)
            self._out[name] = (exact["out"], tolerance["out"])
            self.seconds += time.perf_counter() - start
        return self._out[name]


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
    tolerance = _tolerance(expected, eager, single.spread(p.float(), single.units(dtype)), dtype)
    return Reference(expected, tolerance, dead, exact, low, single)


def _tolerance(exact: Named, eager: Named, spread: Named, dtype: torch.dtype) -> Named:
    """Return the tolerance per element: of the module's docstring, in float64."""
    limits = torch.finfo(dtype)
    tolerance = {}
    for name, value in exact.items():
        error = (eager[name].double() - value).abs_()
        worst = float(error.max()) if error.numel() else 0.0
        floor = EAGER * worst + limits.tiny
        tolerance[name] = spread[name].double().add_(floor).add_(value.abs(), alpha=RELATIVE * limits.eps)
    return tolerance


def is_weak(wanted: Named, tolerance: Named, names: list[str]) -> bool:
    """Whether a tolerance would let a gradient pass that is a few per cent off."""
    return any(
        float(tolerance[name].mean()) > WEAK * float(wanted[name].abs().mean()) > 0
        for name in names
        if name != "out" and wanted[name].numel()
    )


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
    if case.seqlen_kv == 0 and hidden is None:
        # Without keys every row is as one that is masked whole.
        hidden = torch.ones((case.batch, 1, case.seqlen_q, 0), dtype=torch.bool, device=device)
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
