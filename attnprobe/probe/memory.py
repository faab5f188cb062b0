"""What runs under different memory tell: unwritten, read out of bounds, or not repeatable. Pure.

Runs differ in the byte that memory from an allocator held before (`fill`) and in the byte that the guard
zones around every tensor held (`zone`). Under one setting a kernel should repeat itself; where it does,
and another setting gives other bits, the result depends on memory that nobody wrote for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch
from msgspec import Struct

from attnprobe.backends.interface import Outputs
from attnprobe.probe.region import describe

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

_BITS: Final = {4: torch.int32, 2: torch.int16, 8: torch.int64, 1: torch.int8}
_BEYOND_SCATTER: Final = 100.0
"""A kernel that scatters is accused of unwritten memory only for what lies this far beyond its scatter."""


_LAST_BITS: Final = 16.0
"""Eps of an output's largest value that the order of a sum may move an element by."""


class Breach(Struct, frozen=True):
    """An access outside a tensor: `offset` in bytes from its edge, negative before the start."""

    where: str
    access: str
    offset: int
    count: int = 1


class Run(Struct, frozen=True):
    """What one call returned, and what memory held before it."""

    fill: int
    zone: int
    outputs: Outputs
    loaded: bool = False
    breaches: tuple[Breach, ...] = ()


class Memory(Struct, frozen=True):
    """Per output, the elements that depend on memory nobody wrote, and those that do not repeat."""

    unwritten: dict[str, Any]
    outside: dict[str, Any]
    unsteady: dict[str, Any]


def bits(tensor: Tensor) -> Tensor:
    """Return the bit patterns of a tensor as integers."""
    return tensor.contiguous().view(_BITS[tensor.element_size()])


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors of one shape and dtype hold the same bits."""
    if one.dtype is torch.bool:
        return torch.equal(one, other)
    return torch.equal(bits(one), bits(other))


def agree(one: Outputs, other: Outputs) -> bool:
    """Whether two runs returned the same bits in every output."""
    return one.keys() == other.keys() and all(
        tensor.shape == other[name].shape
        and tensor.dtype is other[name].dtype
        and same_bits(tensor, other[name])
        for name, tensor in one.items()
    )


def compare(runs: Sequence[Run]) -> Memory:
    """Return what the bits of runs tell; all runs have the outputs of the first, in shape and dtype.

    With two runs, one per setting, differences cannot be told from chance: the caller repeats settings
    (`trial.Trial.runs` says which) before it asks.
    """
    first = runs[0]
    found = Memory({}, {}, {})
    for name, tensor in first.outputs.items():
        # What nobody asked for may be there once, or have another shape each time.
        comparable = all(
            name in run.outputs
            and run.outputs[name].shape == tensor.shape
            and run.outputs[name].dtype is tensor.dtype
            for run in runs
        )
        if comparable and not all(same_bits(tensor, run.outputs[name]) for run in runs[1:]):
            _compare(name, runs, found)
    return found


def _compare(name: str, runs: Sequence[Run], found: Memory) -> None:
    """Add what one output tells."""
    first = runs[0]
    tensor = first.outputs[name]
    differs = torch.zeros_like(bits(tensor), dtype=torch.bool)
    unsteady, scatter = differs.clone(), 0.0
    settings: dict[tuple[int, int], Tensor] = {}
    for run in runs:
        value = run.outputs[name]
        head = settings.setdefault((run.fill, run.zone), value)
        differs |= bits(value) != bits(tensor)
        apart = bits(value) != bits(head)
        if bool(apart.any()):
            unsteady |= apart
            moved = (value[apart].double() - head[apart].double()).abs()
            scatter = max(scatter, float(moved.nan_to_num(nan=torch.inf).max()))
    heads = list(settings.values())
    depends = torch.zeros_like(differs)
    for head in heads[1:]:
        depends |= bits(head) != bits(tensor)
    # Chance makes settings differ too, and a coin may fall alike under each: only what is not finite, or
    # far beyond the scatter and the last bits of such values, tells.
    spread = torch.zeros_like(tensor, dtype=torch.float64)
    for head in heads[1:]:
        spread = torch.maximum(spread, (head.double() - tensor.double()).abs().nan_to_num(nan=torch.inf))
    size = float(tensor.double().nan_to_num(0.0, 0.0, 0.0).abs().max()) if tensor.numel() else 0.0
    last_bits = _LAST_BITS * torch.finfo(tensor.dtype).eps * size
    depends &= ~unsteady & (spread > max(_BEYOND_SCATTER * scatter, last_bits))
    if not bool(depends.any()):
        found.unsteady[name] = describe(unsteady | differs)
        return
    follows_zone = any(
        fill != first.fill and zone == first.zone and torch.equal(bits(head)[depends], bits(tensor)[depends])
        for (fill, zone), head in settings.items()
    )
    (found.outside if follows_zone else found.unwritten)[name] = describe(depends)
