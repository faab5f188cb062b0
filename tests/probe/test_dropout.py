"""The dropout mask read back from a backend is the one its forward and backward used."""

from __future__ import annotations

from typing import Final

import pytest
import torch
from msgspec import structs
from torch import Tensor

from attnprobe.backends.interface import Outputs
from attnprobe.backends.torch_math import backend as torch_math
from attnprobe.config import Case, Dtype, Layout, Mask
from attnprobe.probe.dropout import read_mask, reference_with_its_mask
from attnprobe.probe.inputs import Tensors, make, visible
from attnprobe.probe.judge import judge
from attnprobe.probe.memory import Run
from attnprobe.probe.poison import FINITE_FILL, NAN_FILL
from attnprobe.verdict import Verdict

CPU: Final = torch.device("cpu")
BASE: Final = Case(
    batch=2, heads=4, heads_kv=4, seqlen_q=40, seqlen_kv=56, head_dim=16, head_dim_v=16, dropout=0.3, seed=4
)


def visible_to(case: Case, tensors: Tensors) -> Tensor:
    shape = (case.batch, case.heads, case.seqlen_q, case.seqlen_kv)
    seen = visible(case, CPU)
    if tensors.mask is not None:
        mask = tensors.mask
        seen = mask if mask.dtype is torch.bool else mask > torch.finfo(mask.dtype).min
    return torch.ones(shape, dtype=torch.bool) if seen is None else seen.expand(shape)


def mask_of(case: Case, tensors: Tensors) -> Tensor:
    kept = read_mask(case, tensors, torch_math)
    assert kept is not None
    return kept


def runs_of(backend: object, case: Case, tensors: Tensors) -> list[Run]:
    found = []
    for fill, zone in ((NAN_FILL, FINITE_FILL), (FINITE_FILL, NAN_FILL)):
        torch.manual_seed(case.seed)
        found.append(Run(fill, zone, backend.run(case, tensors)))  # type: ignore[attr-defined]
    return found


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(
    "mask", ["none", "causal-top-left", "causal-bottom-right", "bool", "float", "float-broadcast"]
)
def test_the_mask_has_the_stated_rate_among_what_is_visible(dtype: Dtype, mask: Mask) -> None:
    case = structs.replace(BASE, dtype=dtype, mask=mask)
    tensors = make(case, CPU)
    kept = mask_of(case, tensors)
    assert kept.shape == (2, 4, 40, 56)
    assert kept.dtype is torch.bool
    seen = visible_to(case, tensors)
    assert not bool(kept[~seen].any())
    assert abs(float(kept[seen].double().mean()) - 0.7) < 0.03


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(
    "case",
    [
        BASE,
        structs.replace(BASE, mask="causal-top-left"),
        structs.replace(BASE, mask="float"),
        structs.replace(BASE, heads_kv=2),
        structs.replace(BASE, head_dim_v=72),
        structs.replace(BASE, head_dim_v=8),
        structs.replace(BASE, layout="transposed"),
        structs.replace(BASE, layout="inner-stride"),
        structs.replace(BASE, layout="packed"),
        structs.replace(BASE, layout="expanded"),
        structs.replace(BASE, needs_grad="mask", mask="float"),
        structs.replace(BASE, pass_="forward", needs_grad="none"),
        structs.replace(BASE, seqlen_kv=1),
        structs.replace(BASE, dropout=0.9),
    ],
    ids=str,
)
def test_the_math_backend_agrees_with_its_own_mask(case: Case, dtype: Dtype) -> None:
    case = structs.replace(case, dtype=dtype)
    tensors = make(case, CPU)
    expected = reference_with_its_mask(case, tensors, torch_math)
    found = judge(case, tensors, runs_of(torch_math, case, tensors), expected)
    assert found.verdict is Verdict.OK, found


def test_reading_leaves_the_inputs_alone() -> None:
    tensors = make(BASE, CPU)
    q, v = tensors.q.clone(), tensors.v.clone()
    read_mask(BASE, tensors, torch_math)
    assert torch.equal(tensors.q, q)
    assert torch.equal(tensors.v, v)


def test_another_seed_keeps_other_scores() -> None:
    tensors = make(BASE, CPU)
    one, again = mask_of(BASE, tensors), mask_of(BASE, tensors)
    assert torch.equal(one, again)
    other = mask_of(structs.replace(BASE, seed=5), tensors)
    assert not torch.equal(one, other)


class Scaled:
    """A backend that drops as torch does and scales what is left by another factor."""

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def run(self, case: Case, tensors: Tensors) -> Outputs:
        return Outputs({name: value * self.factor for name, value in torch_math.run(case, tensors).items()})


def test_a_wrong_scale_of_what_is_kept_is_accused() -> None:
    tensors = make(BASE, CPU)
    backend = Scaled(0.7)
    expected = reference_with_its_mask(BASE, tensors, backend)
    found = judge(BASE, tensors, runs_of(backend, BASE, tensors), expected)
    assert found.verdict is Verdict.WRONG
    assert found.detail["wrong"]["out"]["factor"] == 0.7


class Torn:
    """A backend whose backward drops other scores than its forward."""

    def run(self, case: Case, tensors: Tensors) -> Outputs:
        found = torch_math.run(case, tensors)
        if case.pass_ == "backward":
            torch.manual_seed(case.seed + 1)
            other = torch_math.run(case, tensors)
            found = Outputs({**other, "out": found["out"]})
        return found


def test_a_backward_that_drops_other_scores_is_accused() -> None:
    tensors = make(BASE, CPU)
    expected = reference_with_its_mask(BASE, tensors, Torn())
    found = judge(BASE, tensors, runs_of(Torn(), BASE, tensors), expected)
    assert found.verdict is Verdict.WRONG
    assert set(found.outputs) == {"dq", "dk", "dv"}


class Deaf:
    """A backend that drops nothing whatever is asked."""

    def run(self, case: Case, tensors: Tensors) -> Outputs:
        return torch_math.run(structs.replace(case, dropout=0.0), tensors)


def test_a_backend_that_drops_nothing_is_accused() -> None:
    tensors = make(BASE, CPU)
    expected = reference_with_its_mask(BASE, tensors, Deaf())
    assert judge(BASE, tensors, runs_of(Deaf(), BASE, tensors), expected).verdict is Verdict.WRONG


def test_no_keys_give_an_empty_mask() -> None:
    case = structs.replace(BASE, seqlen_kv=0)
    kept = mask_of(case, make(case, CPU))
    assert kept.shape == (2, 4, 40, 0)
    assert kept.dtype is torch.bool


@pytest.mark.parametrize("layout", ["varlen"])
def test_packed_sequences_cannot_be_read(layout: Layout) -> None:
    case = structs.replace(BASE, layout=layout)
    assert reference_with_its_mask(case, make(case, CPU), torch_math) is None
