"""The weights of a backend's own forward, and the gradients that must follow from them."""

from __future__ import annotations

from typing import Any, Final, get_args

import pytest
import torch
from msgspec import structs
from torch import Tensor

from attnprobe.backends._sdpa import Sdpa
from attnprobe.backends.calling import attend
from attnprobe.backends.interface import Outputs
from attnprobe.backends.torch_flash import backend as torch_flash
from attnprobe.backends.torch_math import backend as torch_math
from attnprobe.config import Case, Data, Dtype, GradOut
from attnprobe.probe.inputs import DTYPES, Tensors, make
from attnprobe.probe.judge import Judgement, expected_outputs, judge
from attnprobe.probe.memory import Run
from attnprobe.probe.own_forward import MOST_CALLS, gradients, weights
from attnprobe.probe.poison import FINITE_FILL, NAN_FILL
from attnprobe.probe.reference import Reference, reference
from attnprobe.verdict import Verdict

CPU: Final = torch.device("cpu")
BASE: Final = Case(
    batch=2, heads=4, heads_kv=4, seqlen_q=17, seqlen_kv=24, head_dim=16, head_dim_v=16, seed=3
)
GRADS: Final = ("dq", "dk", "dv")


class Counting:
    """A backend that notes each case and tensors it is called with."""

    def __init__(self, backend: Any = torch_math) -> None:
        self._backend = backend
        self.calls: list[tuple[Case, Tensors]] = []

    def run(self, case: Case, tensors: Tensors) -> Outputs:
        self.calls.append((case, tensors))
        found: Outputs = self._backend.run(case, tensors)
        return found


def read(case: Case, backend: Any = torch_math) -> Tensor:
    found = weights(case, make(case, CPU), backend)
    assert found is not None
    return found


# Weights.

MASKED: Final = {
    "none": BASE,
    "causal": structs.replace(BASE, mask="causal-top-left"),
    "bottom right": structs.replace(BASE, mask="causal-bottom-right"),
    "bool": structs.replace(BASE, mask="bool"),
    "float broadcast": structs.replace(BASE, mask="float-broadcast"),
    "grouped": structs.replace(BASE, heads_kv=2),
    "one kv head": structs.replace(BASE, heads_kv=1, mask="float"),
    "keys in several calls": structs.replace(BASE, head_dim_v=8, seqlen_kv=21),
    "wide values": structs.replace(BASE, head_dim_v=40),
    "expanded": structs.replace(BASE, layout="expanded"),
    "inner stride": structs.replace(BASE, layout="inner-stride"),
    "packed": structs.replace(BASE, layout="packed"),
    "custom scale": structs.replace(BASE, scale=0.7),
    "one key": structs.replace(BASE, seqlen_kv=1),
}


@pytest.mark.parametrize("dtype", get_args(Dtype))
@pytest.mark.parametrize("name", MASKED)
def test_they_are_the_softmax_of_the_scores(name: str, dtype: Dtype) -> None:
    case = structs.replace(MASKED[name], dtype=dtype)
    tensors = make(case, CPU)
    found = weights(case, tensors, torch_math)
    wanted, _, dead = reference(case, tensors).exact.live()
    assert dead is None
    assert found is not None
    assert found.dtype is DTYPES[dtype]
    assert found.shape == wanted.shape
    eps = torch.finfo(found.dtype).eps
    assert bool(((found.double() - wanted).abs() <= 32 * eps * wanted + eps * 2**-10).all())


@pytest.mark.parametrize("data", get_args(Data))
def test_they_are_the_weights_of_every_kind_of_data(data: Data) -> None:
    case = structs.replace(BASE, data=data)
    wanted, _, _ = reference(case, make(case, CPU)).exact.live()
    assert bool(((read(case).double() - wanted).abs() <= 1e-4).all())


@pytest.mark.parametrize("name", ["none", "causal", "keys in several calls"])
def test_other_queries_can_be_given(name: str) -> None:
    case = MASKED[name]
    tensors = make(case, CPU)
    found = weights(case, tensors, torch_math, torch.zeros_like(tensors.q))
    assert found is not None
    rows = torch.arange(1, 18)[:, None] if name == "causal" else torch.tensor([[case.seqlen_kv]])
    seen = torch.arange(case.seqlen_kv) < rows
    torch.testing.assert_close(found, (seen / rows).expand(found.shape))


def test_a_dropout_mask_is_the_same_over_several_calls() -> None:
    """The generator is set back before each: were it not, each call would show another mask."""
    whole = structs.replace(BASE, dropout=0.4, head_dim_v=24)
    parts = structs.replace(whole, head_dim_v=8)
    kept = [read(case) > 0 for case in (whole, parts, parts)]
    assert 0.5 < float(kept[0].double().mean()) < 0.7
    assert torch.equal(kept[0], kept[1])
    assert torch.equal(kept[1], kept[2])


def test_the_calls_are_forward_and_leave_inputs_alone() -> None:
    case = structs.replace(BASE, head_dim_v=8, grad_out="scalar", mask="float", needs_grad="mask")
    tensors, backend = make(case, CPU), Counting()
    before = [x.clone() for x in (tensors.q, tensors.k, tensors.v)]
    weights(case, tensors, backend)
    assert len(backend.calls) == 3
    for asked, given in backend.calls:
        assert (asked.pass_, asked.needs_grad, asked.grad_out) == ("forward", "none", "contiguous")
        assert (given.q is tensors.q, given.k is tensors.k) == (True, True)
        assert given.v.shape == tensors.v.shape
    assert all(torch.equal(a, b) for a, b in zip(before, (tensors.q, tensors.k, tensors.v), strict=True))


def test_no_keys_need_no_call() -> None:
    case, backend = structs.replace(BASE, seqlen_kv=0), Counting()
    assert read(case, backend).shape == (2, 4, 17, 0)
    assert backend.calls == []


def test_packed_sequences_have_none() -> None:
    case, backend = structs.replace(BASE, layout="varlen"), Counting()
    assert weights(case, make(case, CPU), backend) is None
    assert backend.calls == []


@pytest.mark.parametrize(("keys", "calls"), [(8 * MOST_CALLS, MOST_CALLS), (8 * MOST_CALLS + 1, 0)])
def test_too_many_calls_are_not_made(keys: int, calls: int) -> None:
    case = structs.replace(
        BASE, batch=1, heads=1, heads_kv=1, seqlen_q=2, seqlen_kv=keys, head_dim=8, head_dim_v=8
    )
    backend = Counting()
    found = weights(case, make(case, CPU), backend)
    assert (found is not None) is bool(calls)
    assert len(backend.calls) == calls


# Gradients of healthy backends.

VARIANTS: Final = {
    "plain": BASE,
    "causal": structs.replace(BASE, mask="causal-top-left"),
    "grouped": structs.replace(BASE, heads_kv=2),
    "other head dim": structs.replace(BASE, head_dim_v=24),
    "gradient of a mask": structs.replace(BASE, mask="float", needs_grad="mask"),
    "one key": structs.replace(BASE, seqlen_kv=1),
    "more queries than keys": structs.replace(BASE, mask="causal-bottom-right", seqlen_q=24, seqlen_kv=17),
    "bool rows": structs.replace(BASE, mask="bool", masked_rows="false"),
    "float rows": structs.replace(BASE, mask="float-broadcast", masked_rows="-inf"),
    "finfo rows": structs.replace(BASE, mask="float", masked_rows="finfo-min"),
    "gradient of a mask of rows": structs.replace(
        BASE, mask="float-broadcast", masked_rows="finfo-min", needs_grad="mask"
    ),
}
LAYOUTS: Final = get_args(GradOut)


def share_of_tolerance(case: Case, run: Outputs, p: Tensor, expected: Reference) -> float:
    """Return the largest error as a share of its tolerance, under the choice for dead rows that fits best."""
    names = [name for name in run if name != "out"]
    tries = []
    for dead_to_scores in (True, False) if expected.dead is not None else (True,):
        wanted, tolerance = gradients(p, expected, dead_to_scores=dead_to_scores)
        shares = [(run[name].double() - wanted[name]).abs() / tolerance[name] for name in names]
        tries.append(max(float(share.max()) for share in shares if share.numel()))
    assert names, case
    return min(tries)


@pytest.mark.parametrize("backend", [torch_math, torch_flash], ids=lambda b: b.name)
@pytest.mark.parametrize("dtype", get_args(Dtype))
@pytest.mark.parametrize("data", get_args(Data))
def test_gradients_of_a_healthy_backend_follow_from_its_forward(
    data: Data, dtype: Dtype, backend: Sdpa
) -> None:
    judged = set()
    for number, (name, variant) in enumerate(VARIANTS.items()):
        if backend is torch_flash and name == "finfo rows":
            continue  # there it is wrong: it keeps one log-sum-exp, which has lost the sum
        grad_out = LAYOUTS[number % len(LAYOUTS)]
        case = structs.replace(variant, data=data, dtype=dtype, grad_out=grad_out)
        tensors = make(case, CPU)
        try:
            run = backend.run(case, tensors)
        except RuntimeError:
            assert backend is torch_flash
            continue
        p = weights(case, tensors, backend)
        assert p is not None
        assert not bool(p.isnan().any())
        worst = share_of_tolerance(case, run, p, reference(case, tensors))
        assert worst <= 1, (name, grad_out, worst)
        judged.add(name)
    assert judged >= {"plain", "causal", "more queries than keys", "bool rows", "float rows"}


@pytest.mark.parametrize("grad_out", LAYOUTS)
@pytest.mark.parametrize("dtype", get_args(Dtype))
@pytest.mark.parametrize("data", get_args(Data))
def test_gradients_follow_however_the_gradient_of_out_lies(
    data: Data, dtype: Dtype, grad_out: GradOut
) -> None:
    case = structs.replace(BASE, data=data, dtype=dtype, grad_out=grad_out)
    tensors = make(case, CPU)
    expected = reference(case, tensors)
    for backend in (torch_math, torch_flash):
        p = weights(case, tensors, backend)
        assert p is not None
        assert share_of_tolerance(case, backend.run(case, tensors), p, expected) <= 1


@pytest.mark.parametrize("dtype", get_args(Dtype))
def test_exact_weights_give_the_gradients_of_the_reference(dtype: Dtype) -> None:
    case = structs.replace(BASE, dtype=dtype, mask="float", masked_rows="-inf")
    expected = reference(case, make(case, CPU))
    p, _, dead = expected.exact.live()
    assert dead is not None
    wanted, tolerance = gradients(p, expected, dead_to_scores=True)
    assert wanted.keys() == tolerance.keys() == expected.expected.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(value, expected.expected[name])
        assert bool((tolerance[name] > 0).all())


def test_weights_of_a_dead_row_reach_the_scores_or_not() -> None:
    case = structs.replace(BASE, mask="bool", masked_rows="false")
    tensors = make(case, CPU)
    expected = reference(case, tensors)
    p, _, dead = expected.exact.live()
    assert dead is not None
    uniform = torch.where(dead, 1 / case.seqlen_kv, p)
    rows = dead.expand(*p.shape[:3], 1)
    for to_scores in (True, False):
        extra, _ = expected.of_dead_rows({"uniform": rows}, to_scores=to_scores)
        found, _ = gradients(uniform, expected, dead_to_scores=to_scores)
        for name in ("out", *GRADS):
            torch.testing.assert_close(found[name], expected.expected[name] + extra[name])


# Through the judge.


class Off:
    """Another backend whose backward is off by a factor in some gradients."""

    def __init__(self, factor: float, names: tuple[str, ...], backend: Any = torch_math) -> None:
        self._factor = factor
        self._names = names
        self._backend = backend

    def run(self, case: Case, tensors: Tensors) -> Outputs:
        found = Outputs(self._backend.run(case, tensors))
        for name in self._names:
            if name in found:
                found[name] = (found[name].double() * self._factor).to(found[name].dtype)
        return found


LARGE: Final = structs.replace(
    BASE, seqlen_q=64, seqlen_kv=64, head_dim=64, head_dim_v=64, data="large-logits", dtype="bfloat16"
)
"""Where a bfloat16 score is off by more than 0.1, the reference can be sure of nothing."""


def judged(case: Case, backend: Any, *, asking: bool = True) -> tuple[Judgement, int]:
    """Return the verdict, and how often the judge asked for the weights."""
    tensors, asked = make(case, CPU), 0
    outputs = backend.run(case, tensors)
    settings = ((NAN_FILL, FINITE_FILL), (FINITE_FILL, NAN_FILL))

    def own() -> Tensor | None:
        nonlocal asked
        asked += 1
        return weights(case, tensors, backend) if asking else None

    found = judge(case, tensors, [Run(*s, outputs) for s in settings], reference(case, tensors), own)
    return found, asked


AGAINST: Final = "the weights of its own forward"


def accuse(backend: Any) -> Judgement:
    """Return the verdict where without the weights there is nothing to be seen."""
    assert judged(LARGE, backend, asking=False)[0].verdict is Verdict.OK
    found, asked = judged(LARGE, backend)
    assert asked == 1
    assert found.verdict is Verdict.WRONG
    assert found.detail["against"] == AGAINST
    assert tuple(found.detail["wrong"]) == found.outputs
    return found


@pytest.mark.parametrize("backend", [torch_math, torch_flash], ids=lambda b: b.name)
@pytest.mark.parametrize("factor", [1.05, 0.95])
def test_a_backward_five_per_cent_off_is_accused_by_its_own_forward(backend: Sdpa, factor: float) -> None:
    found = accuse(Off(factor, GRADS, backend))
    assert "dv" in found.outputs
    assert found.detail["wrong"]["dv"]["factor"] == pytest.approx(factor, abs=0.01)


@pytest.mark.parametrize("backend", [torch_math, torch_flash], ids=lambda b: b.name)
@pytest.mark.parametrize(
    ("name", "factor"), [("dv", 1.05), ("dq", 1.1), ("dq", 0.9), ("dk", 1.1), ("dk", 0.9)]
)
def test_a_single_gradient_that_is_off_is_accused_by_its_own_forward(
    backend: Sdpa, name: str, factor: float
) -> None:
    found = accuse(Off(factor, (name,), backend))
    assert found.outputs == (name,)


ROWS: Final[dict[str, Case]] = {
    "zeros": structs.replace(LARGE, mask="bool", masked_rows="false"),
    "softmax": structs.replace(LARGE, mask="float", masked_rows="finfo-min"),
}
"""What the math backend makes of rows masked whole."""


@pytest.mark.parametrize("data", get_args(Data))
@pytest.mark.parametrize("case", [LARGE, *ROWS.values()], ids=["no rows masked whole", *ROWS])
def test_a_healthy_backend_is_not_accused_by_its_own_forward(data: Data, case: Case) -> None:
    for backend in (torch_math, torch_flash):
        if backend is torch_flash and case.masked_rows == "finfo-min":
            continue  # there it is wrong
        found, _ = judged(structs.replace(case, data=data), backend)
        assert found.verdict is Verdict.OK, found


class Replacing:
    """Eager attention that puts a number in the place of a hidden score, which cuts the gradient off."""

    def run(self, case: Case, tensors: Tensors) -> Outputs:
        def attention(q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor) -> Tensor:
            scores = (q @ k.mT * case.softmax_scale).masked_fill(~attn_mask, torch.finfo(q.dtype).min)
            return torch.softmax(scores, -1, dtype=torch.float32).to(q.dtype) @ v

        return attend(attention, case, tensors)


def test_a_backend_that_cuts_the_gradient_of_hidden_scores_is_not_accused() -> None:
    found, asked = judged(ROWS["zeros"], Replacing())
    assert asked == 1
    assert found.verdict is Verdict.OK, found
    assert list(found.traits.values()) == ["uniform"]
    assert judged(ROWS["zeros"], Off(1.05, GRADS, Replacing()))[0].detail["against"] == AGAINST


def test_it_is_asked_only_where_the_reference_is_coarse() -> None:
    assert judged(BASE, torch_math)[1] == 0
    assert judged(LARGE, torch_math)[1] == 1
    found, asked = judged(BASE, Off(1.05, GRADS))
    assert (found.verdict, asked) == (Verdict.WRONG, 0)
    assert "against" not in found.detail


@pytest.mark.parametrize("made", ROWS)
def test_rows_masked_whole_spare_no_wrong_gradient(made: str) -> None:
    case, backend = ROWS[made], Off(1.05, GRADS)
    healthy, asked = judged(case, torch_math)
    assert (healthy.verdict, asked) == (Verdict.OK, 1)
    assert list(healthy.traits) == [f"whole-masked rows, masked_rows={case.masked_rows}"]
    assert judged(case, backend, asking=False)[0].verdict is Verdict.OK
    found, _ = judged(case, backend)
    assert found.verdict is Verdict.WRONG
    assert found.detail["against"] == AGAINST
    assert found.traits == healthy.traits


@pytest.mark.parametrize("value", [None, float("nan")])
def test_without_weights_nobody_is_accused(value: float | None) -> None:
    backend = Off(1.05, GRADS)
    tensors = make(LARGE, CPU)
    settings = ((NAN_FILL, FINITE_FILL), (FINITE_FILL, NAN_FILL))
    runs = [Run(*s, backend.run(LARGE, tensors)) for s in settings]
    p = None if value is None else torch.full((2, 4, 64, 64), value)
    found = judge(LARGE, tensors, runs, reference(LARGE, tensors), lambda: p)
    assert (found.verdict, found.detail) == (Verdict.OK, {})


def test_a_forward_has_no_gradient_to_ask_about() -> None:
    case = structs.replace(LARGE, pass_="forward", needs_grad="none")
    found, asked = judged(case, torch_math)
    assert (found.verdict, asked) == (Verdict.OK, 0)
    assert set(expected_outputs(case, make(case, CPU))) == {"out"}
