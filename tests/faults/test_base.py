"""The healthy functions are healthy: they agree with float64, over all that a call can ask for."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from . import FAULTS, HEALTHY
from .base import Kernel, attend
from .healthy import eager
from .inputs import Run, inputs
from .seen import Seen, allowed, find, redraw, seen_in

TOLERANCE = {"float32": 2e-5, "bfloat16": 3e-2, "float16": 4e-3}


def drawn(count: int, name: str) -> list[Seen]:
    draw = random.Random(name)  # noqa: S311  # no secret
    found = (find((), draw) for _ in range(count))
    return [seen for seen in found if seen is not None]


def close(got: Run, wanted: Run, seen: Seen, spared: str = "") -> None:
    """Fail where an output differs by more than a healthy kernel may; rows masked whole are spared."""
    assert got.keys() == wanted.keys()
    for name, value in got.items():
        expected = wanted[name].double()
        assert value.shape == expected.shape
        size = max(float(expected.abs().max()), 1.0) if expected.numel() else 1.0
        error = (value.double() - expected).abs().nan_to_num(0.0 if spared else torch.inf)
        assert not error.numel() or float(error.max()) <= TOLERANCE[seen.dtype] * size, (name, seen)


@pytest.mark.parametrize("healthy", [h for h in HEALTHY if "dead" not in h.name], ids=lambda h: h.name)
def test_it_agrees_with_float64(healthy: Any) -> None:
    attention = healthy.make()
    ran, refusals = 0, []
    for number, seen in enumerate(drawn(25, healthy.name)):
        if seen.dropout or seen.masked == "finfo-min":
            continue
        call = inputs(seen, number)
        try:
            got = call.run(attention)
        except RuntimeError as refusal:
            refusals.append(str(refusal))
            continue
        close(got, call.to(torch.float64).run(eager), seen)
        ran += 1
    assert ran
    assert all("no kernel" in said or "no deterministic" in said for said in refusals)


def test_dropout_drops_in_the_backward_what_it_dropped_in_the_forward() -> None:
    seen = Seen(head_dim=16, head_dim_v=16, seqlen_q=40, seqlen_kv=50, dropout=True)
    call = inputs(seen)
    keep: list[torch.Tensor] = []

    class Told(Kernel):
        def draw(self, call: Any) -> torch.Tensor:
            keep.append(super().draw(call))
            return keep[-1]

    got = call.run(lambda *given, **options: attend(Told(), *given, **options))
    assert len(keep) == 1

    def by_hand(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dropout_p: float) -> torch.Tensor:
        p = torch.softmax(q @ k.mT / 4, -1)
        return p * keep[0][:, :, 0] / (1 - dropout_p) @ v

    close(got, call.to(torch.float64).run(by_hand), seen)
    assert 0.7 < float(keep[0].double().mean()) < 0.9


@pytest.mark.parametrize("mask", ["none", "causal", "float", "bool-broadcast"])
def test_its_gradients_are_those_of_its_own_forward(mask: str) -> None:
    seen = Seen(heads=4, head_dim=8, head_dim_v=16, seqlen_q=5, seqlen_kv=7, mask=mask)
    call = inputs(seen).to(torch.float64)
    tensors = [x.requires_grad_() for x in (call.q, call.k, call.v)]
    given = call.options.pop("attn_mask", None)
    if given is not None and given.is_floating_point():
        given = given.masked_fill(given.isinf(), -3.0).requires_grad_()

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, m: torch.Tensor | None) -> torch.Tensor:
        return attend(Kernel(), q, k, v, m, **call.options)

    assert torch.autograd.gradcheck(attention, (*tensors, given))


@pytest.mark.parametrize(("name", "value"), [("zeros", 0.0), ("nan", torch.nan), ("uniform", None)])
@pytest.mark.parametrize("mask", ["bool", "float"])
def test_rows_masked_whole(name: str, value: float | None, mask: str) -> None:
    names = {"zeros": "healthy_tiled", "nan": "healthy_dead_rows_nan", "uniform": "healthy_dead_rows_uniform"}
    attention = next(h for h in HEALTHY if h.name == names[name]).make()
    call = inputs(Seen(mask=mask, masked="hidden"))
    got = call.run(attention)
    dead = got["out"][:, :, 0]
    wanted = torch.full_like(dead, value) if value is not None else call.v.mean(2)
    torch.testing.assert_close(dead, wanted, equal_nan=True)
    if name == "zeros":
        close(got, call.to(torch.float64).run(eager), call.seen)


@pytest.mark.parametrize(("q", "kv"), [(0, 5), (5, 0), (0, 0)])
def test_lengths_of_zero(q: int, kv: int) -> None:
    call = inputs(Seen(seqlen_q=q, seqlen_kv=kv))
    got = call.run(lambda *given, **options: attend(Kernel(), *given, **options))
    assert all(not bool(value.any()) for value in got.values())


def test_what_is_seen_of_a_call_is_what_was_drawn() -> None:
    for number, seen in enumerate(drawn(60, "seen")):
        call = inputs(seen, number)
        looked: list[Seen] = []

        def look(*given: Any, looked: list[Seen] = looked, **options: Any) -> torch.Tensor:
            looked.append(seen_in(*given, **options))
            return attend(Kernel(), *given, **options)

        call.run(look)
        one = looked[0]
        # With one head a mask of stride 0 cannot be told from another.
        skipped = {"mask"} if seen.heads == 1 else set()
        if seen.head_dim <= 16 or seen.seqlen_q < 8:
            skipped |= {"outliers"}
        for name in Seen.__dataclass_fields__.keys() - skipped:
            assert getattr(one, name) == getattr(seen, name), (name, one, seen)


def test_drawing_makes_only_calls_that_can_be_made() -> None:
    draw = random.Random("calls")  # noqa: S311  # no secret
    assert all(allowed(seen) for seen in drawn(100, "allowed"))
    assert redraw(Seen(), "pass", draw).needs in {"none", "all", "q", "kv", "mask"}


def test_names_are_names() -> None:
    names = [fault.name for fault in FAULTS] + [healthy.name for healthy in HEALTHY]
    assert len(set(names)) == len(names)
    assert all(name.isidentifier() for name in names)
