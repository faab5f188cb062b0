"""Verdicts on outputs made by hand: each check, and what must not be accused."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from types import EllipsisType
from typing import Final

import pytest
import torch
from msgspec import structs
from torch import Tensor

from attnprobe.backends.interface import Outputs
from attnprobe.config import Case, Dtype, NeedsGrad
from attnprobe.probe.inputs import DTYPES, Tensors, make
from attnprobe.probe.judge import (
    Judgement,
    expected_outputs,
    input_bits,
    inputs_changed,
    judge,
)
from attnprobe.probe.memory import Run, bits
from attnprobe.probe.poison import FINITE_FILL, NAN_FILL
from attnprobe.probe.reference import Reference, reference
from attnprobe.verdict import Verdict

CPU: Final = torch.device("cpu")
BASE: Final = Case(batch=2, heads=4, heads_kv=2, seqlen_q=9, seqlen_kv=12, head_dim=16, head_dim_v=24)
GRADS: Final = ("dq", "dk", "dv")
INTS: Final = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}
Place = tuple[int | slice | EllipsisType | Tensor, ...]
Change = Callable[[Tensor], object]


@functools.cache
def known(case: Case) -> tuple[Tensors, Reference]:
    tensors = make(case, CPU)
    return tensors, reference(case, tensors)


def packed(tensor: Tensor, lengths: tuple[int, ...] | None) -> Tensor:
    """Return (B, H, S, D) as (T, H, D) without padding, where a case is varlen."""
    if lengths is None:
        return tensor
    return torch.cat(
        [entry[:, :length].transpose(0, 1) for entry, length in zip(tensor, lengths, strict=True)]
    )


def right(case: Case) -> Outputs:
    """Return the expected outputs, rounded to the dtype of the case."""
    tensors, expected = known(case)
    found = Outputs()
    for name in expected_outputs(case, tensors):
        lengths = tensors.lengths_q if name in {"out", "dq"} else tensors.lengths_kv
        found[name] = packed(expected.expected[name], lengths).to(DTYPES[case.dtype])
    return found


def changed(outputs: Outputs, name: str, change: Change) -> Outputs:
    copy = Outputs({key: value.clone() for key, value in outputs.items()})
    change(copy[name])
    return copy


def filled(byte: int, where: Place) -> Change:
    """Return a change that leaves elements as memory filled with a byte."""

    def change(tensor: Tensor) -> None:
        size = tensor.element_size()
        pattern = int.from_bytes(bytes([byte] * size), "little", signed=True)
        tensor.view(INTS[tensor.dtype])[where] = pattern

    return change


def filled_runs(*outputs: Outputs) -> list[Run]:
    """Return runs under the fills that a trial uses in turn: NaN, a finite one, NaN again."""
    fills = ((NAN_FILL, FINITE_FILL), (FINITE_FILL, NAN_FILL)) * 2
    return [Run(*fill, one) for fill, one in zip(fills, outputs, strict=False)]


def verdict_on(case: Case, *runs: Outputs) -> Judgement:
    tensors, expected = known(case)
    return judge(case, tensors, filled_runs(*(runs * 3 if len(runs) == 1 else runs)), expected)


CASES: Final[dict[str, Case]] = {
    "plain": BASE,
    "bfloat16": structs.replace(BASE, dtype="bfloat16"),
    "float16": structs.replace(BASE, dtype="float16"),
    "forward": structs.replace(BASE, pass_="forward", needs_grad="none"),
    "q only": structs.replace(BASE, needs_grad="q"),
    "mask only": structs.replace(BASE, mask="float", needs_grad="mask"),
    "varlen": structs.replace(BASE, layout="varlen", batch=3),
    "no keys": structs.replace(BASE, seqlen_kv=0),
    "no queries": structs.replace(BASE, seqlen_q=0),
    "one key": structs.replace(BASE, seqlen_kv=1),
    "deterministic": structs.replace(BASE, deterministic=True),
}


@pytest.mark.parametrize("name", CASES)
def test_right_outputs_are_ok(name: str) -> None:
    found = verdict_on(CASES[name], right(CASES[name]))
    assert (found.verdict, found.outputs, found.detail) == (Verdict.OK, (), {})


@pytest.mark.parametrize(
    ("needs", "names"),
    [("all", {"dq", "dk", "dv"}), ("q", {"dq"}), ("kv", {"dk", "dv"}), ("mask", {"dmask"}), ("none", set())],
)
def test_expected_outputs_are_those_the_case_asks_for(needs: NeedsGrad, names: set[str]) -> None:
    pass_: Final = "forward" if needs == "none" else "backward"
    case = structs.replace(BASE, mask="float", needs_grad=needs, pass_=pass_)
    assert set(expected_outputs(case, make(case, CPU))) == {"out"} | names


def test_gradients_that_nobody_asked_for_are_not_judged() -> None:
    case = CASES["q only"]
    extra = right(case)
    extra["dk"] = torch.full((1,), float("nan"))
    assert verdict_on(case, extra).verdict is Verdict.OK


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda _: None, "not returned"),
        (lambda t: t[:, :, :-1], "shape"),
        (lambda t: t.transpose(1, 2), "shape"),
        (lambda t: t.double(), "dtype"),
        (lambda t: t.to("meta"), "meta"),
    ],
    ids=["absent", "short", "transposed", "double", "elsewhere"],
)
@pytest.mark.parametrize("name", ["out", *GRADS])
def test_a_broken_contract_is_wrong(spoil: Callable[[Tensor], Tensor | None], says: str, name: str) -> None:
    outputs = right(BASE)
    spoiled = spoil(outputs.pop(name))
    if spoiled is not None:
        outputs[name] = spoiled
    found = verdict_on(BASE, outputs)
    assert found.verdict is Verdict.WRONG
    assert found.outputs == (name,)
    assert says in found.detail["contract"][name]


PLACES: Final[dict[str, Place]] = {
    "one element": (1, 1, 3, 5),
    "last row": (..., -1, slice(None)),
    "all": (...,),
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("name", ["out", *GRADS])
@pytest.mark.parametrize("place", PLACES)
def test_what_keeps_the_fill_is_unwritten(dtype: Dtype, name: str, place: str) -> None:
    case = structs.replace(BASE, dtype=dtype)
    runs = [changed(right(case), name, filled(byte, PLACES[place])) for byte in (0xFF, 0x42, 0xFF)]
    found = verdict_on(case, *runs)
    assert found.verdict is Verdict.UNWRITTEN
    assert found.outputs == (name,)
    seen = found.detail["memory"][name]
    assert seen["of"] == runs[0][name].numel()
    assert seen["elements"] == int((bits(runs[0][name]) != bits(runs[1][name])).sum())


def test_unwritten_shows_where_nan_is_right_too() -> None:
    case = structs.replace(BASE, mask="bool", masked_rows="false")
    tensors, expected = known(case)
    assert expected.dead is not None
    dead = expected.dead.expand(2, 4, 9, 1).squeeze(-1)
    runs = [changed(right(case), "out", filled(byte, (dead,))) for byte in (0xFF, 0x42, 0xFF)]
    assert bool(runs[0]["out"][dead].isnan().all())
    assert judge(case, tensors, filled_runs(*runs[:1] * 3), expected).verdict is Verdict.OK
    found = judge(case, tensors, filled_runs(*runs), expected)
    assert found.verdict is Verdict.UNWRITTEN
    assert found.outputs == ("out",)


def test_values_computed_from_memory_are_unwritten() -> None:
    first = right(BASE)
    other = changed(first, "dk", lambda t: t[0, 0, 3].mul_(1.0001))
    found = verdict_on(BASE, first, other, first)
    assert found.verdict is Verdict.UNWRITTEN
    assert found.outputs == ("dk",)
    assert "row 3 of 12" in found.detail["memory"]["dk"]["where"]


def test_not_a_number_from_memory_is_unwritten_even_if_the_rest_scatters() -> None:
    def run(byte: int, noise: float) -> Outputs:
        outputs = changed(right(BASE), "dq", filled(byte, (0, 0, 0)))
        return changed(outputs, "dq", lambda t: t[1].mul_(1 + noise))

    found = verdict_on(BASE, run(0xFF, 0), run(0x42, 1e-7), run(0xFF, 2e-7))
    assert found.verdict is Verdict.UNWRITTEN
    assert found.outputs == ("dq",)


SCATTER: Final = (0.0, 3e-7, 6e-7)


@pytest.mark.parametrize("name", ["out", *GRADS])
def test_scatter_is_accused_only_where_determinism_was_asked_for(name: str) -> None:
    def runs(case: Case) -> list[Outputs]:
        return [changed(right(case), name, lambda t, n=noise: t.mul_(1 + n)) for noise in SCATTER]  # type: ignore[misc]

    free = verdict_on(BASE, *runs(BASE))
    assert free.verdict is Verdict.OK
    assert set(free.detail["repeat"]) == {name}
    asked = structs.replace(BASE, deterministic=True)
    bound = verdict_on(asked, *runs(asked))
    assert bound.verdict is Verdict.NONDETERMINISTIC
    assert bound.outputs == (name,)


def test_scatter_between_equal_fills_is_seen_once_anything_differs() -> None:
    asked = structs.replace(BASE, deterministic=True)
    first = right(asked)
    other = changed(first, "dq", lambda t: t.mul_(1 + 3e-7))
    again = changed(changed(first, "dq", lambda t: t.mul_(1 + 6e-7)), "dv", lambda t: t.mul_(1 + 3e-7))
    found = verdict_on(asked, first, other, again)
    assert found.verdict is Verdict.NONDETERMINISTIC
    assert set(found.outputs) == {"dq", "dv"}


def test_two_runs_that_agree_are_enough() -> None:
    assert verdict_on(BASE, right(BASE), right(BASE)).verdict is Verdict.OK


@pytest.mark.parametrize("late", [1, 2])
@pytest.mark.parametrize(
    "spoil", [lambda _: None, lambda t: t[:, :, :-1], lambda t: t.double()], ids=["absent", "short", "double"]
)
def test_a_contract_broken_by_a_later_run_is_wrong(
    late: int, spoil: Callable[[Tensor], Tensor | None]
) -> None:
    runs = [right(BASE), changed(right(BASE), "out", lambda t: t.mul_(1 + 3e-7)), right(BASE)]
    spoiled = spoil(runs[late].pop("dk"))
    if spoiled is not None:
        runs[late]["dk"] = spoiled
    found = verdict_on(BASE, *runs)
    assert found.verdict is Verdict.WRONG
    assert found.outputs == ("dk",)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("name", ["out", *GRADS])
def test_what_is_not_finite_is_nonfinite(value: float, name: str) -> None:
    def change(tensor: Tensor) -> None:
        tensor[1, 0, 2, 7] = value

    found = verdict_on(BASE, changed(right(BASE), name, change))
    assert found.verdict is Verdict.NONFINITE
    assert found.outputs == (name,)
    assert found.detail["nonfinite"][name]["elements"] == 1


def test_nonfinite_and_wrong_outputs_are_both_named() -> None:
    outputs = changed(right(BASE), "dq", lambda t: t.fill_(float("nan")))
    outputs = changed(outputs, "dv", lambda t: t.mul_(2))
    found = verdict_on(BASE, outputs)
    assert found.verdict is Verdict.NONFINITE
    assert set(found.outputs) == {"dq", "dv"}
    assert set(found.detail["wrong"]) == {"dv"}


@pytest.mark.parametrize("factor", [0.5, 1.25, -1.0, 2.0])
@pytest.mark.parametrize("name", ["out", *GRADS])
def test_a_wrong_factor_is_found(factor: float, name: str) -> None:
    found = verdict_on(BASE, changed(right(BASE), name, lambda t: t.mul_(factor)))
    assert found.verdict is Verdict.WRONG
    assert found.outputs == (name,)
    seen = found.detail["wrong"][name]
    assert seen["factor"] == factor
    assert seen["elements"] > seen["of"] // 2


def test_a_wrong_place_is_named_and_has_no_factor() -> None:
    def swap(tensor: Tensor) -> None:
        tensor[0, 1] = tensor[0, 0].clone()

    found = verdict_on(BASE, changed(right(BASE), "dk", swap))
    assert found.verdict is Verdict.WRONG
    seen = found.detail["wrong"]["dk"]
    assert "factor" not in seen
    assert seen["where"] == "batch 0 of 2, head 1 of 2"
    assert seen["error"] > seen["tolerance"] > 0


def test_without_a_reference_memory_is_judged_and_values_are_not() -> None:
    tensors, _ = known(BASE)
    outputs = right(BASE)
    off = changed(outputs, "out", lambda t: t.mul_(3))
    assert judge(BASE, tensors, filled_runs(*[off] * 3), None).verdict is Verdict.INCONCLUSIVE
    runs = [changed(outputs, "out", filled(byte, (...,))) for byte in (0xFF, 0x42, 0xFF)]
    assert judge(BASE, tensors, filled_runs(*runs), None).verdict is Verdict.UNWRITTEN


def test_varlen_is_wrong_where_one_sequence_is() -> None:
    case = CASES["varlen"]

    def late(tensor: Tensor) -> None:
        tensor[-1] *= 2

    for name in ("out", *GRADS):
        found = verdict_on(case, changed(right(case), name, late))
        assert found.verdict is Verdict.WRONG
        assert found.outputs == (name,)
        assert "batch 2 of 3" in found.detail["wrong"][name]["where"]


# What a backend may make of rows that see no key.
DEAD: Final[dict[str, Case]] = {
    "bool": structs.replace(BASE, mask="bool", masked_rows="false"),
    "bool broadcast": structs.replace(BASE, mask="bool-broadcast", masked_rows="false"),
    "float": structs.replace(BASE, mask="float", masked_rows="-inf"),
    "finfo": structs.replace(BASE, mask="float-broadcast", masked_rows="finfo-min"),
    "bottom right": structs.replace(BASE, mask="causal-bottom-right", seqlen_q=12, seqlen_kv=9),
    "bfloat16": structs.replace(BASE, mask="float", masked_rows="finfo-min", dtype="bfloat16"),
}
CAUSES: Final = {
    "bool": "masked_rows=false",
    "bool broadcast": "masked_rows=false",
    "float": "masked_rows=-inf",
    "finfo": "masked_rows=finfo-min",
    "bottom right": "mask=causal-bottom-right",
    "bfloat16": "masked_rows=finfo-min",
}


def dead_rows(case: Case) -> Tensor:
    _, expected = known(case)
    assert expected.dead is not None
    return expected.dead.expand(case.batch, case.heads, case.seqlen_q, 1)


def as_made(case: Case, made: str, *, to_scores: bool = True) -> Outputs:
    """Return right outputs with dead rows made into zeros, NaN, the average or an unmasked softmax."""
    outputs = right(case)
    _, expected = known(case)
    dead = dead_rows(case)
    if made == "nan":
        # As autograd does it: a row of NaN makes every sum it is in NaN.
        for name in ("out", "dq"):
            outputs[name] = outputs[name].masked_fill(dead, float("nan"))
        touched = dead.any(2, keepdim=True).reshape(case.batch, case.heads_kv, -1, 1).any(2, keepdim=True)
        for name in ("dk", "dv"):
            outputs[name] = outputs[name].masked_fill(touched, float("nan"))
    elif made != "zeros":
        extra, _ = expected.of_dead_rows({made: dead}, to_scores=to_scores)
        for name in outputs:
            outputs[name] = (expected.expected[name] + extra[name]).to(outputs[name].dtype)
    return outputs


@pytest.mark.parametrize("made", ["zeros", "nan", "uniform", "softmax"])
@pytest.mark.parametrize("name", DEAD)
@pytest.mark.parametrize("to_scores", [True, False], ids=["to scores", "cut"])
def test_no_choice_for_dead_rows_is_accused(made: str, name: str, *, to_scores: bool) -> None:
    case = DEAD[name]
    found = verdict_on(case, as_made(case, made, to_scores=to_scores))
    assert found.verdict is Verdict.OK, found
    assert found.traits == {f"whole-masked rows, {CAUSES[name]}": made}


def test_a_trait_says_where_rows_differ() -> None:
    case = DEAD["bool"]
    zeros, average = as_made(case, "zeros"), as_made(case, "uniform")
    _, expected = known(case)
    first = dead_rows(case).clone()
    first[1] = False
    extra, _ = expected.of_dead_rows({"uniform": first}, to_scores=True)
    mixed = Outputs({name: (expected.expected[name] + extra[name]).float() for name in zeros})
    assert torch.equal(mixed["out"][0], average["out"][0])
    assert torch.equal(mixed["out"][1], zeros["out"][1])
    found = verdict_on(case, mixed)
    assert found.verdict is Verdict.OK
    assert list(found.traits.values()) == ["zeros and uniform"]


def test_without_dead_rows_there_is_no_trait() -> None:
    assert verdict_on(BASE, right(BASE)).traits == {}


@pytest.mark.parametrize("name", DEAD)
def test_dead_rows_of_arbitrary_values_are_wrong(name: str) -> None:
    case = DEAD[name]
    dead = dead_rows(case).squeeze(-1)

    def change(tensor: Tensor) -> None:
        tensor[dead] = 3.0

    found = verdict_on(case, changed(right(case), "out", change))
    assert found.verdict is Verdict.WRONG
    assert found.outputs == ("out",)
    assert found.traits == {}


@pytest.mark.parametrize("name", ["bool", "float", "finfo", "bottom right"])
@pytest.mark.parametrize(
    ("made", "gradients_of"),
    [
        ("uniform", "zeros"),
        ("softmax", "zeros"),
        ("zeros", "uniform"),
        ("zeros", "softmax"),
        ("zeros", "nan"),
    ],
)
def test_gradients_that_do_not_follow_from_the_choice_are_accused(
    name: str, made: str, gradients_of: str
) -> None:
    case = DEAD[name]
    outputs = as_made(case, gradients_of)
    outputs["out"] = as_made(case, made)["out"]
    found = verdict_on(case, outputs)
    assert found.verdict.fails
    assert "dv" in found.outputs
    assert "out" not in found.outputs
    assert list(found.traits.values()) == [made]


def test_gradients_of_live_rows_are_judged_beside_dead_ones_that_are_nan() -> None:
    case = DEAD["bool"]
    live = ~dead_rows(case).squeeze(-1)

    def change(tensor: Tensor) -> None:
        tensor[live] *= 2

    for name in ("out", "dq"):
        found = verdict_on(case, changed(as_made(case, "nan"), name, change))
        assert found.verdict is Verdict.WRONG
        assert found.outputs == (name,)


def test_the_gradient_of_a_mask_is_judged_and_excused_in_dead_rows_that_are_nan() -> None:
    case = structs.replace(BASE, mask="float", masked_rows="-inf", needs_grad="mask")
    dead = dead_rows(case)
    outputs = right(case)
    assert verdict_on(case, outputs).verdict is Verdict.OK
    nan = Outputs({name: value.masked_fill(dead, float("nan")) for name, value in outputs.items()})
    assert verdict_on(case, nan).verdict is Verdict.OK
    bad = changed(nan, "dmask", lambda t: t.mul_(1.5))
    assert verdict_on(case, bad).outputs == ("dmask",)
    only_gradient = Outputs(out=outputs["out"], dmask=nan["dmask"])
    assert verdict_on(case, only_gradient).verdict is Verdict.NONFINITE


def test_changed_inputs_are_named() -> None:
    case = structs.replace(BASE, mask="bool")
    tensors = make(case, CPU)
    before = input_bits(tensors)
    assert inputs_changed(tensors, before) == []
    assert tensors.mask is not None
    tensors.v[0, 0, 0, 0] += 1
    tensors.mask[0, 0, 0, 0] ^= True
    assert inputs_changed(tensors, before) == ["v", "mask"]
    zero = replace(tensors, q=torch.zeros_like(tensors.q))
    signs = input_bits(zero)
    zero.q[0, 0, 0, 0] = -0.0
    assert inputs_changed(zero, signs) == ["q"]


def test_bits_tell_nan_from_nan_and_zero_from_minus_zero() -> None:
    values = torch.tensor([float("nan"), 0.0])
    other = values.clone()
    other.view(torch.int32)[0] |= 1
    other[1] = -0.0
    assert (bits(values) != bits(other)).tolist() == [True, True]
    assert torch.equal(bits(values), bits(values.clone()))
