"""What a backend's own forward says: the probabilities it used, the dropout mask it drew.

With V one-hot in its columns, `out` shows the weight of each key. The generator is set back before each
run and the head dims stay, so the kernel and its draws are those of the judged run.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import torch
from msgspec import structs

from attnprobe.probe.inputs import seed_generators
from attnprobe.probe.reference import EAGER, RELATIVE

if TYPE_CHECKING:
    from torch import Tensor

    from attnprobe.config import Case
    from attnprobe.probe.inputs import Tensors
    from attnprobe.probe.reference import Reference, Results
    from attnprobe.probe.scores import Named, Scores

MOST_CALLS: Final = 64
"""Forward calls that reading the weights of one case may take: a column of V per key and call."""


def weights(case: Case, tensors: Tensors, backend: Any, q: Tensor | None = None) -> Tensor | None:
    """Return the weight of each key in each row, (B, H, S_q, S_kv) in the dtype of the case.

    None for packed sequences, where it would take too many calls, and where a call is refused or returns
    something else. `q` replaces the case's own.
    """
    columns = case.head_dim_v
    if tensors.lengths_q is not None or case.seqlen_kv > columns * MOST_CALLS:
        return None
    forward = structs.replace(case, pass_="forward", needs_grad="none", grad_out="contiguous")
    rows = (case.batch, case.heads, case.seqlen_q)
    q = tensors.q if q is None else q
    seen = []
    for start in range(0, case.seqlen_kv, columns):
        v = torch.zeros_like(tensors.v)
        count = min(columns, case.seqlen_kv - start)
        index = torch.arange(count, device=v.device)
        v[:, :, start + index, index] = 1
        seed_generators(case.seed, q.device)
        try:
            out = backend.run(forward, replace(tensors, q=q, v=v))["out"]
        except Exception:  # noqa: BLE001  # it refuses, in whatever way, what the judged run did not ask
            return None
        if out.shape != (*rows, columns):
            return None
        seen.append(out[..., :count])
    return torch.cat(seen, dim=-1) if seen else q.new_zeros((*rows, 0))


def gradients(p: Tensor, expected: Reference, *, dead_to_scores: bool) -> Results:
    """Return the gradients that follow from weights `p`, and how far a kernel may be from them.

    A kernel computes its weights anew in the backward, in float32, and rounds what it computes to the
    element type: the tolerance of the reference, without the error that eager attention makes in its
    scores. Where tokens are alike the roundings are too, and add up: what eager attention is off when given
    these weights counts, the worst of each column. Weights under the smallest normal number of the type are
    only as exact as that number is.
    """
    exact, low = expected.exact, expected.low
    found = _results(exact, p.double(), expected, dead_to_scores=dead_to_scores)
    eager = _results(low, p.float(), expected, dead_to_scores=dead_to_scores)
    dtype = low.rounds or torch.float32
    limits = torch.finfo(dtype)
    spread = exact.spread(p.double().clamp(min=limits.smallest_normal), exact.units(dtype))
    tolerance = {}
    for name, value in found.items():
        error = (eager[name].double() - value).abs_()
        worst = error.amax((0, 1, 2), keepdim=True) if error.numel() else error
        tolerance[name] = spread[name].add_(worst, alpha=EAGER)
        tolerance[name].add_(value.abs(), alpha=RELATIVE * limits.eps).add_(limits.tiny)
    return found, tolerance


def _results(scores: Scores, p: Tensor, expected: Reference, *, dead_to_scores: bool) -> Named:
    """Return results for weights in one precision, dead rows passing their gradient on or not."""
    _, slope = scores.raw()
    if expected.dead is None:
        return scores.results(p, slope)
    live = p.masked_fill(expected.dead, 0.0)
    found = scores.results(live, slope)
    more = scores.results(p - live, slope, to_scores=dead_to_scores)
    return {name: value + more[name] for name, value in found.items()}
