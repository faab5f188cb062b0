"""A float32 sum that is added up term by term, over terms that are alike, is a healthy kernel's right."""

from __future__ import annotations

from typing import Final

import pytest
import torch
from torch import Tensor

from attnprobe.config import Case
from attnprobe.probe import scores
from attnprobe.probe.inputs import Tensors, make
from attnprobe.probe.reference import reference

LONG: Final = 1500


def term_by_term(tensors: Tensors) -> dict[str, Tensor]:
    """Return out and dv of one head, every sum in float32 and in the plainest order."""
    q, k, v, grad_out = (t.detach()[0, 0] for t in (tensors.q, tensors.k, tensors.v, tensors.grad_out))
    p = torch.softmax(q @ k.T / k.shape[-1] ** 0.5, dim=-1)
    out = torch.zeros(q.shape[0], v.shape[1])
    for key in range(k.shape[0]):
        out += p[:, key, None] * v[key]
    dv = torch.zeros_like(v)
    for row in range(q.shape[0]):
        dv += p[row, :, None] * grad_out[row]
    return {"out": out[None, None], "dv": dv[None, None]}


def worst(case: Case) -> float:
    """Return the largest error over tolerance of out and dv."""
    tensors = make(case, torch.device("cpu"))
    expected = reference(case, tensors)
    ratios = [
        float(((got.double() - expected.expected[name]).abs() / expected.tolerance[name]).max())
        for name, got in term_by_term(tensors).items()
    ]
    return max(ratios)


CASES: Final = [
    Case(heads=1, heads_kv=1, seqlen_q=q, seqlen_kv=kv, data=data, grad_out=grad_out)
    for q, kv in ((LONG, 3), (LONG, 40), (40, LONG))
    for data in ("gaussian", "outliers", "far-below")
    for grad_out in ("contiguous", "scalar")
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.seqlen_q}-{case.data}-{case.grad_out}")
def test_it_is_within_the_tolerance(case: Case) -> None:
    assert worst(case) < 0.9


def test_without_room_for_the_order_some_would_be_accused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scores, "ORDER", 0.0)
    assert max(map(worst, CASES)) > 1
