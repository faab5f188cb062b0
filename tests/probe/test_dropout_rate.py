"""The mask of dropout itself: its rate, and whether several share one, as far as chance allows."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs
from torch import Tensor

from attnprobe.backends.interface import Outputs
from attnprobe.backends.torch_math import backend as torch_math
from attnprobe.config import Case, Mask
from attnprobe.probe.dropout import drawn_once, off_rate, reference_with_its_mask
from attnprobe.probe.inputs import Tensors, make
from attnprobe.probe.judge import Judgement, judge
from attnprobe.probe.memory import Run
from attnprobe.probe.poison import FINITE_FILL, NAN_FILL
from attnprobe.verdict import Verdict

CPU: Final = torch.device("cpu")
CASE: Final = Case(batch=2, seqlen_q=64, seqlen_kv=64, head_dim=16, head_dim_v=16, dropout=0.3, seed=4)
SHAPE: Final = (2, 2, 64, 64)


def kept(dropped: float, seed: int, shape: tuple[int, ...] = SHAPE) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) >= dropped


def exactly(count: int, of: int = 10_000) -> Tensor:
    """Return a mask of (1, 1, 1, of) that dropped so many."""
    return (torch.arange(of) >= count).view(1, 1, 1, of)


@given(rate=st.floats(0.01, 0.99), seed=st.integers(0, 1 << 30), side=st.sampled_from([1, 3, 17, 64]))
def test_chance_is_never_accused(rate: float, seed: int, side: int) -> None:
    assert off_rate(rate, kept(rate, seed, (1, 2, side, side)), None) is None


@given(rate=st.floats(0.01, 0.99), seed=st.integers(0, 1 << 30))
def test_a_rate_in_steps_of_a_byte_is_never_accused(rate: float, seed: int) -> None:
    for stepped in (int(rate * 256) / 256, (int(rate * 256) + 1) / 256):
        assert off_rate(rate, kept(stepped, seed), None) is None


@given(
    rate=st.sampled_from([0.1, 0.3, 0.5, 0.9]),
    other=st.sampled_from([0.0, 0.05, 0.2, 0.4, 0.7, 1.0]),
    seed=st.integers(0, 1 << 30),
)
def test_another_rate_is_told_as_it_is(rate: float, other: float, seed: int) -> None:
    mask = kept(other, seed)
    found = off_rate(rate, mask, None)
    assert found is not None
    assert found == pytest.approx(1 - float(mask.double().mean()))


@pytest.mark.parametrize(("dropped", "accused"), [(3300, False), (3400, True), (2700, False), (2600, True)])
def test_the_margin_is_six_sigmas_and_a_step_of_a_byte(dropped: int, *, accused: bool) -> None:
    """At 0.3 of 10 000 that is 0.0275 (and 0.0012 for how few they are) and 0.0039: 0.0326."""
    assert off_rate(0.3, exactly(dropped), None) == (pytest.approx(dropped / 10_000) if accused else None)


def test_few_scores_prove_little_and_none_nothing() -> None:
    assert off_rate(0.3, exactly(6, of=6), None) is None
    assert off_rate(0.3, exactly(100, of=100), None) == 1.0
    assert off_rate(0.3, torch.ones((1, 2, 3, 0), dtype=torch.bool), None) is None
    assert off_rate(0.3, kept(0.9, 1), torch.ones((1, 1, 64, 64), dtype=torch.bool)) is None


def test_only_what_is_visible_counts() -> None:
    """A hidden score is never kept: counted in, a right rate looked off; kept all the same, it counts not."""
    hidden = torch.ones(64, 64, dtype=torch.bool).triu(1)[None, None]
    right = kept(0.3, 1) & ~hidden
    assert off_rate(0.3, right, hidden) is None
    assert off_rate(0.3, right, None) == pytest.approx(0.65, abs=0.02)
    assert off_rate(0.3, right | hidden, hidden) is None
    found = off_rate(0.3, kept(0.5, 1) | hidden, hidden)
    assert found == pytest.approx(0.5, abs=0.02)


class Dropping:
    """The math backend at another rate than the one it is asked for, scaled to fit."""

    def __init__(self, rate: float) -> None:
        self._rate = rate

    def run(self, case: Case, tensors: Tensors) -> Outputs:
        return torch_math.run(structs.replace(case, dropout=self._rate), tensors)


def judged(case: Case, backend: object) -> Judgement:
    tensors = make(case, CPU)
    runs = []
    for setting in ((NAN_FILL, FINITE_FILL), (FINITE_FILL, NAN_FILL)):
        torch.manual_seed(case.seed)
        runs.append(Run(*setting, backend.run(case, tensors)))  # type: ignore[attr-defined]
    return judge(case, tensors, runs, reference_with_its_mask(case, tensors, backend))


@pytest.mark.parametrize("mask", ["none", "causal-top-left", "bool", "float"])
@pytest.mark.parametrize("rate", [0.0, 0.2, 0.5])
def test_a_backend_at_another_rate_is_told_the_two(mask: Mask, rate: float) -> None:
    found = judged(structs.replace(CASE, mask=mask), Dropping(rate))
    assert (found.verdict, found.outputs) == (Verdict.WRONG, ("out",))
    told = found.detail["dropout"]
    assert told["asked"] == 0.3
    assert told["dropped"] == pytest.approx(rate, abs=0.03)
    assert len(f"{told['dropped']}") <= 5


@pytest.mark.parametrize("mask", ["none", "causal-top-left", "bool", "float"])
@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_a_backend_at_the_rate_asked_for_is_right(mask: Mask, rate: float) -> None:
    case = structs.replace(CASE, mask=mask, dropout=rate)
    assert judged(case, Dropping(rate)).verdict is Verdict.OK


def test_with_alibi_no_rate_is_held_against_it() -> None:
    tensors = make(CASE, CPU)
    for alibi, known in ((False, True), (True, False)):
        found = reference_with_its_mask(structs.replace(CASE, alibi=alibi), tensors, Dropping(0.6))
        assert found is not None
        assert (found.dropout is not None) is known


@given(rate=st.floats(0.01, 0.99), seed=st.integers(0, 1 << 30), side=st.sampled_from([1, 2, 5, 17, 64]))
def test_masks_drawn_apart_are_never_alike(rate: float, seed: int, side: int) -> None:
    assert drawn_once(rate, kept(rate, seed, (3, 2, side, side)), None) is None


@pytest.mark.parametrize(("axis", "name"), [(0, "batch entries"), (1, "heads")])
def test_one_mask_for_two_of_several_is_told(axis: int, name: str) -> None:
    mask = kept(0.3, 1, (3, 3, 32, 32))
    mask.select(axis, 2).copy_(mask.select(axis, 0))
    assert drawn_once(0.3, mask, None) == name


def test_few_scores_that_are_alike_prove_nothing() -> None:
    """At 0.3 two scores are alike with 0.58: 50 of them with 1e-12."""
    for count, known in ((50, False), (51, True)):
        one = kept(0.3, 2, (1, 1, 1, count))
        assert (drawn_once(0.3, one.expand(2, 1, 1, count), None) is not None) is known


def test_what_is_hidden_from_one_of_two_is_not_compared() -> None:
    hidden = torch.zeros(2, 1, 64, 64, dtype=torch.bool)
    hidden[1, :, :, 32:] = True
    mask = kept(0.3, 3, (1, 1, 64, 64)).repeat(2, 1, 1, 1) & ~hidden
    assert drawn_once(0.3, mask, hidden) == "batch entries"
    mask[1, 0, 0, 0] ^= True
    assert drawn_once(0.3, mask, hidden) is None


class OneForAll(Dropping):
    """Starts every batch entry with the same random numbers."""

    def run(self, case: Case, tensors: Tensors) -> Outputs:
        state, parts = torch.get_rng_state(), []
        for entry in range(case.batch):
            torch.set_rng_state(state)
            here = slice(entry, entry + 1)
            q, k, v = (t.detach()[here].requires_grad_() for t in (tensors.q, tensors.k, tensors.v))
            given = replace(tensors, q=q, k=k, v=v, grad_out=tensors.grad_out[here])
            parts.append(torch_math.run(structs.replace(case, batch=1), given))
        return Outputs({name: torch.cat([part[name] for part in parts]) for name in parts[0]})


def test_a_backend_with_one_mask_for_all_batch_entries_is_told() -> None:
    found = judged(CASE, OneForAll(CASE.dropout))
    assert (found.verdict, found.outputs) == (Verdict.WRONG, ("out",))
    assert found.detail["dropout"] == {"alike": "batch entries"}
