"""What runs under different memory tell, and what chance must never be taken for."""

from __future__ import annotations

from typing import Final

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from attnprobe.backends.interface import Outputs
from attnprobe.config import Case
from attnprobe.device.cpu import cpu_device
from attnprobe.probe.inputs import make
from attnprobe.probe.memory import Memory, Run, agree, bits, compare, same_bits
from attnprobe.probe.poison import FINITE_FILL, NAN_FILL
from attnprobe.probe.trial import Trial

CPU: Final = torch.device("cpu")
A: Final = (NAN_FILL, FINITE_FILL)
B: Final = (FINITE_FILL, NAN_FILL)
ZONE_OF_A: Final = (FINITE_FILL, FINITE_FILL)
SHORT: Final = (A, B, A)
WHOLE: Final = (A, B, A, B, ZONE_OF_A, A, B)
"""The settings of a trial, in order: of outputs that scatter, and of outputs that follow memory."""
DTYPES: Final = (torch.float32, torch.bfloat16, torch.float16)
INTS: Final = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}
SHAPE: Final = (2, 3, 5, 4)
Order = tuple[tuple[int, int], ...]


def values(seed: int, dtype: torch.dtype = torch.float32, shape: tuple[int, ...] = SHAPE) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def holding(tensor: Tensor, byte: int, where: Tensor) -> Tensor:
    """Return a tensor whose elements `where` are memory that holds a byte."""
    pattern = int.from_bytes(bytes([byte] * tensor.element_size()), "little", signed=True)
    found = tensor.clone()
    found.view(INTS[tensor.dtype])[where] = pattern
    return found


def last_bit(tensor: Tensor, where: Tensor) -> Tensor:
    """Return a tensor with the last bit of some elements flipped."""
    found = tensor.clone()
    found.view(INTS[tensor.dtype])[where] ^= 1
    return found


def chosen(*indices: int | slice) -> Tensor:
    where = torch.zeros(SHAPE, dtype=torch.bool)
    where[indices] = True
    return where


def runs_of(*made: tuple[tuple[int, int], dict[str, Tensor]]) -> list[Run]:
    return [Run(*setting, Outputs(outputs)) for setting, outputs in made]


def one_output(order: Order, *tensors: Tensor) -> list[Run]:
    pairs = zip(order, tensors, strict=True)
    return runs_of(*((setting, {"out": tensor}) for setting, tensor in pairs))


# Nothing to tell.


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("order", [SHORT, WHOLE])
def test_runs_that_agree_tell_nothing(dtype: torch.dtype, order: Order) -> None:
    right = values(1, dtype)
    right[0, 1] = torch.nan
    right[1, 1] = -0.0
    found = compare(one_output(order, *[right.clone() for _ in order]))
    assert (found.unwritten, found.outside, found.unsteady) == ({}, {}, {})


def test_outputs_without_an_element_tell_nothing() -> None:
    empty = torch.empty(1, 2, 0, 4)
    found = compare(one_output(SHORT, empty, empty, empty))
    assert (found.unwritten, found.outside, found.unsteady) == ({}, {}, {})


# Memory that nobody wrote.


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("order", [SHORT, WHOLE])
@pytest.mark.parametrize(
    ("place", "where"),
    [
        ((0, 1, 2, 3), "batch 0 of 2, head 1 of 3, row 2 of 5, column 3 of 4"),
        ((slice(None), slice(None), slice(3, None)), "row 3..4 of 5"),
        ((1,), "batch 1 of 2"),
        ((...,), ""),
    ],
    ids=["element", "last rows", "entry", "all"],
)
def test_what_keeps_the_fill_was_never_written(
    dtype: torch.dtype,
    order: Order,
    place: tuple[int | slice, ...],
    where: str,
) -> None:
    left = torch.zeros(SHAPE, dtype=torch.bool)
    left[place] = True
    found = compare(one_output(order, *[holding(values(1, dtype), fill, left) for fill, _ in order]))
    assert found.unwritten == {"out": {"elements": int(left.sum()), "of": left.numel(), "where": where}}
    assert (found.outside, found.unsteady) == ({}, {})


def test_what_follows_the_fill_is_enough_if_it_is_more_than_last_bits() -> None:
    right, place = values(1), chosen(1, 2, 3, 0)

    def compared(other: Tensor) -> Memory:
        return compare(one_output(WHOLE, *(right if fill == NAN_FILL else other for fill, _ in WHOLE)))

    # Another order of a sum looks alike, and may by chance go with the fill.
    assert compared(last_bit(right, place)) == Memory({}, {}, compared(last_bit(right, place)).unsteady)
    found = compared(torch.where(place, right * 1.001 + 0.001, right))
    assert found.unwritten["out"]["elements"] == 1


def test_a_right_nan_hides_no_memory_and_is_none() -> None:
    """Rows that are NaN by right in every run are no memory; a NaN that is another number elsewhere is."""
    right = values(1)
    right[:, :, 0] = torch.nan
    assert compare(one_output(WHOLE, *[right] * 7)).unwritten == {}
    # The run before NaN-filled memory looks right: NaN where NaN is due.
    kept = [holding(right, fill, chosen(0, 0, 0)) for fill, _ in WHOLE]
    assert bool(kept[0][0, 0, 0].isnan().all())
    found = compare(one_output(WHOLE, *kept))
    assert found.unwritten["out"] == {
        "elements": 4,
        "of": 120,
        "where": "batch 0 of 2, head 0 of 3, row 0 of 5",
    }


def test_only_the_outputs_concerned_are_named() -> None:
    right = {name: values(seed) for seed, name in enumerate(("out", "dq", "dk", "dv"))}
    left = chosen(0, 0)

    def outputs(setting: tuple[int, int], number: int) -> dict[str, Tensor]:
        fill, zone = setting
        return right | {
            "dq": holding(right["dq"], fill, left),
            "dk": holding(right["dk"], zone, left),
            "dv": last_bit(right["dv"], left) if number % 3 == 1 else right["dv"],
        }

    found = compare(runs_of(*((s, outputs(s, number)) for number, s in enumerate(WHOLE))))
    assert list(found.unwritten) == ["dq"]
    assert list(found.outside) == ["dk"]
    assert list(found.unsteady) == ["dv"]


# Memory around tensors.


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_follows_the_zone_was_read_outside(dtype: torch.dtype) -> None:
    last_key = chosen(slice(None), slice(None), 4)
    found = compare(one_output(WHOLE, *[holding(values(1, dtype), zone, last_key) for _, zone in WHOLE]))
    assert found.outside == {"out": {"elements": 24, "of": 120, "where": "row 4 of 5"}}
    assert (found.unwritten, found.unsteady) == ({}, {})


def test_without_the_run_that_tells_memory_from_zones_it_is_memory() -> None:
    found = compare(one_output(SHORT, *[holding(values(1), zone, chosen(0)) for _, zone in SHORT]))
    assert (list(found.unwritten), found.outside) == (["out"], {})


def test_what_follows_both_is_memory() -> None:
    both = [holding(holding(values(1), fill, chosen(0, 0)), zone, chosen(1, 2)) for fill, zone in WHOLE]
    found = compare(one_output(WHOLE, *both))
    assert found.unwritten["out"]["elements"] == 40
    assert found.outside == {}


# Chance.


@pytest.mark.parametrize("order", [SHORT, WHOLE])
def test_what_does_not_repeat_is_unsteady(order: Order) -> None:
    right, place = values(1), chosen(0, slice(None), 2)
    scattered = [right * (1 + 1e-7 * number * place) for number in range(len(order))]
    found = compare(one_output(order, *scattered))
    assert (found.unwritten, found.outside) == ({}, {})
    assert found.unsteady["out"]["where"] == "batch 0 of 2, row 2 of 5"


def test_a_single_bit_beside_other_threads_is_unsteady() -> None:
    right = values(1)
    loaded = Run(*A, Outputs(out=last_bit(right, chosen(0, 0, 0, 0))), loaded=True)
    runs = [*one_output((A, B), right, right), loaded]
    found = compare(runs)
    assert (found.unwritten, found.outside) == ({}, {})
    assert found.unsteady["out"]["elements"] == 1
    assert compare([*runs[:2], Run(*A, Outputs(out=right), loaded=True)]).unsteady == {}


def test_memory_shows_beside_scatter() -> None:
    right, noisy, left = values(1), chosen(0), chosen(1, 1)
    kept = [
        holding(right * (1 + 1e-7 * number * noisy), fill, left) for number, (fill, _) in enumerate(SHORT)
    ]
    found = compare(one_output(SHORT, *kept))
    assert found.unwritten["out"]["where"] == "batch 1 of 2, head 1 of 3"
    assert found.unwritten["out"]["elements"] == 20


@pytest.mark.parametrize(("times", "unwritten"), [(20, False), (1000, True)])
def test_a_finite_difference_must_be_far_beyond_the_scatter(times: int, *, unwritten: bool) -> None:
    right, noisy, place = torch.ones(SHAPE), chosen(0), chosen(1)
    noise, moved = 2.0**-16 * noisy, 2.0**-16 * times * place
    found = compare(one_output(SHORT, right, right + moved, right + noise))
    assert (list(found.unwritten), list(found.unsteady)) == ((["out"], []) if unwritten else ([], ["out"]))


@settings(max_examples=60)
@given(st.data())
def test_each_element_is_told_for_what_it_follows(data: st.DataObject) -> None:
    """Any elements of any outputs that follow fill or zone, and any that scatter, are told apart."""
    count = 12
    dtype = data.draw(st.sampled_from(DTYPES))
    pick = st.lists(st.booleans(), min_size=count, max_size=count).map(torch.tensor)
    follows_fill, follows_zone, scatters = (data.draw(pick) for _ in range(3))
    right = values(data.draw(st.integers(0, 99)), dtype, (count,))

    def outputs(number: int, fill: int, zone: int) -> dict[str, Tensor]:
        return {
            "out": holding(right, fill, follows_fill),
            "dq": holding(right, zone, follows_zone),
            "dk": right * (1 + number * scatters.to(dtype)),
        }

    runs = runs_of(*((setting, outputs(i, *setting)) for i, setting in enumerate(WHOLE)))
    found = compare(runs)
    for told, name, where in (
        (found.unwritten, "out", follows_fill),
        (found.outside, "dq", follows_zone),
        (found.unsteady, "dk", scatters),
    ):
        assert set(told) == ({name} if bool(where.any()) else set())
        if name in told:
            assert told[name]["elements"] == int(where.sum())


# Kernels that do not repeat, through the runs that a trial makes of them.


class Quiet:
    """Memories that set nothing: what differs is the kernel's own doing."""

    def arm(self, fill: int, zone: int) -> None:
        pass

    def disarm(self) -> tuple[()]:
        return ()


class Scattering:
    """A kernel some of whose last bits are drawn anew for each run, each with a chance of its own."""

    def __init__(self, seed: int, chances: dict[str, Tensor], scales: Tensor | float = 1.0) -> None:
        self._chance = torch.Generator().manual_seed(seed)
        self._chances = chances
        self._right = values(seed, shape=(1, 2, 8, 8)) * scales

    def declares(self, *_: object) -> None:
        return None

    def run(self, *_: object) -> Outputs:
        drawn = Outputs()
        for name, chance in self._chances.items():
            flips = torch.rand(self._right.shape, generator=self._chance) < chance
            drawn[name] = last_bit(self._right, flips)
        return drawn


CASE: Final = Case(head_dim=8, head_dim_v=8, seqlen_q=8, seqlen_kv=8)
FACTS: Final = cpu_device()
TENSORS: Final = make(CASE, CPU)


def accused(kernel: Scattering) -> bool:
    found = compare(Trial(kernel, CASE, TENSORS, Quiet(), CPU, 1).runs(FACTS))
    return bool(found.unwritten or found.outside)


def chance_of(share: float, first: int = 128) -> Tensor:
    """Return a chance for each of 128 elements: `share` for the first ones, none for the others."""
    chances = torch.zeros(128)
    chances[:first] = share
    return chances.view(1, 2, 8, 8)


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_last_bits_by_chance_are_never_called_memory(share: float) -> None:
    assert not any(accused(Scattering(seed, {"dq": chance_of(share)})) for seed in range(150))


@pytest.mark.parametrize("share", [0.1, 0.5])
def test_last_bits_by_chance_in_all_gradients_are_never_called_memory(share: float) -> None:
    chances = {name: chance_of(share) for name in ("dq", "dk", "dv")}
    assert not any(accused(Scattering(seed, chances)) for seed in range(100))


def test_one_bit_by_chance_is_never_called_memory() -> None:
    assert not any(accused(Scattering(seed, {"dq": chance_of(0.5, first=1)})) for seed in range(300))


def test_one_bit_by_chance_beside_a_gradient_that_scatters_is_never_called_memory() -> None:
    chances = {"dq": chance_of(0.5), "dk": chance_of(0.5, first=1)}
    assert not any(accused(Scattering(seed, chances)) for seed in range(60))


def test_few_last_bits_of_channels_that_differ_in_size_are_never_called_memory() -> None:
    scales = torch.exp2(torch.tensor([-5.0, -4.0, -3.0, -2.0, -1.0, 0.0, 1.0, 3.0]))
    kernels = (Scattering(seed, {"dq": chance_of(0.02)}, scales) for seed in range(150))
    assert not any(accused(kernel) for kernel in kernels)


# Bits.


def test_agreement_is_of_names_shapes_types_and_bits() -> None:
    one = Outputs(out=values(1), dq=values(2))
    assert agree(one, Outputs({name: value.clone() for name, value in one.items()}))
    for other in (
        Outputs(out=one["out"]),
        Outputs(one, dk=one["dq"]),
        Outputs(one, dq=one["dq"][..., :-1]),
        Outputs(one, dq=one["dq"].to(torch.bfloat16)),
        Outputs(one, dq=last_bit(one["dq"], chosen(0, 0, 0, 0))),
        Outputs(one, dq=one["dq"].view(torch.int32)),
    ):
        assert not agree(one, other)
        assert not agree(other, one)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64, torch.bool, torch.int8])
def test_same_bits_of_every_element_type_and_layout(dtype: torch.dtype) -> None:
    square = (torch.arange(36).view(6, 6) % 2).to(dtype)
    assert same_bits(square.t(), square.t().contiguous())
    assert same_bits(square[:, ::2], square[:, ::2].clone())
    assert same_bits(square[:1].expand(6, 6), square[:1].repeat(6, 1))
    other = square.clone()
    other[3, 3] = 0
    assert not same_bits(square, other)


def test_bits_of_a_view_are_its_own() -> None:
    square = values(3, shape=(4, 4))
    assert torch.equal(bits(square.t()), bits(square).t())
