"""What is said of the elements that are amiss."""

from __future__ import annotations

from typing import Final

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from attnprobe.probe.region import describe, factor, size, two_digits

SHAPE: Final = (2, 3, 8, 4)


def marked(*where: tuple[int | slice, ...], shape: tuple[int, ...] = SHAPE) -> Tensor:
    found = torch.zeros(shape, dtype=torch.bool)
    for one in where:
        found[one] = True
    return found


EVERY: Final = slice(None)


@pytest.mark.parametrize(
    ("found", "elements", "where"),
    [
        (marked((EVERY,)), 192, ""),
        (marked(), 0, "batch  of 2, head  of 3, row  of 8, column  of 4"),
        (marked((1, 2, 3, 0)), 1, "batch 1 of 2, head 2 of 3, row 3 of 8, column 0 of 4"),
        (marked((EVERY, EVERY, 7)), 24, "row 7 of 8"),
        (marked((EVERY, 0)), 64, "head 0 of 3"),
        (marked((0, EVERY, slice(4, 8))), 48, "batch 0 of 2, row 4..7 of 8"),
        (marked((EVERY, EVERY, slice(0, 8, 2))), 96, "row 0, 2, 4, and 1 more runs of 8"),
        (marked((0, 0, 0), (1, 2, 1)), 8, "head 0, 2 of 3, row 0..1 of 8"),
        (marked((0,), shape=(5, 2, 3)), 6, "row 0 of 5"),
        (marked((EVERY, 1), shape=(5, 2, 3)), 15, "head 1 of 2"),
        (marked((2,), shape=(4,)), 1, "axis 0 2 of 4"),
        (marked((EVERY, 1), shape=(4, 3)), 4, "axis 1 1 of 3"),
    ],
)
def test_describe(found: Tensor, elements: int, where: str) -> None:
    if elements:
        assert describe(found) == {"elements": elements, "of": found.numel(), "where": where}
    else:
        assert describe(found)["elements"] == 0


@given(st.lists(st.booleans(), min_size=1, max_size=12))
def test_rows_are_said_as_runs(rows: list[bool]) -> None:
    found = torch.tensor(rows)[None, None, :, None].expand(2, 3, -1, 4)
    said = describe(found)
    assert said["elements"] == sum(rows) * 24
    if all(rows):
        assert said["where"] == ""
        return
    starts = [i for i, hit in enumerate(rows) if hit and not (i and rows[i - 1])]
    ends = [i for i, hit in enumerate(rows) if hit and not (i + 1 < len(rows) and rows[i + 1])]
    runs = [f"{a}" if a == b else f"{a}..{b}" for a, b in zip(starts, ends, strict=True)]
    if any(rows):
        more = [f"and {len(runs) - 3} more runs"] if len(runs) > 3 else []
        assert said["where"] == f"row {', '.join(runs[:3] + more)} of {len(rows)}"


def test_size_is_that_of_the_element_furthest_beyond_its_tolerance() -> None:
    wanted = torch.tensor([1.0, 2.0, 100.0, 4.0]).double()
    got = torch.tensor([1.5, 2.2, 101.0, 4.0]).double()
    error = (got - wanted).abs()
    tolerance = torch.tensor([0.1, 0.01, 10.0, 0.0]).double()
    said = size(got, wanted, error, tolerance, error > tolerance)
    assert said == {"error": 0.2, "tolerance": 0.01, "expected": 2.0}


def test_size_names_a_factor_that_explains_the_error() -> None:
    wanted = torch.linspace(-1, 1, 50).double()
    got = wanted * 1.1112
    error = (got - wanted).abs()
    tolerance = torch.full_like(error, 1e-3)
    assert size(got, wanted, error, tolerance, error > tolerance)["factor"] == 1.11


@pytest.mark.parametrize("by", [-1.0, 0.5, 0.8, 1.25, 2.0, 100.0])
def test_factor_is_found_within_a_hundredth(by: float) -> None:
    draw = torch.Generator().manual_seed(1)
    wanted = torch.randn(1000, generator=draw).double()
    noise = torch.randn(1000, generator=draw).double()
    assert factor(wanted * by, wanted) == by
    assert factor(wanted * by * (1 + 1e-3 * noise), wanted) == pytest.approx(by, rel=1e-2)
    assert factor(wanted * by * (1 + 0.1 * noise), wanted) is None


def test_no_factor_where_none_explains() -> None:
    draw = torch.Generator().manual_seed(1)
    wanted, other = torch.randn(2, 1000, generator=draw).double()
    assert factor(other, wanted) is None
    assert factor(wanted, torch.zeros_like(wanted)) is None
    assert factor(torch.zeros_like(wanted), wanted) == 0.0


@pytest.mark.parametrize(
    ("value", "digits", "expected"),
    [(0.0123456, 2, 0.012), (98765.0, 2, 99000.0), (1.0049, 3, 1.0), (0.0, 2, 0.0), (-0.00777, 2, -0.0078)],
)
def test_two_digits(value: float, digits: int, expected: float) -> None:
    assert two_digits(value, digits) == expected
