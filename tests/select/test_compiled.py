from __future__ import annotations

import pytest

from attnprobe.select.compiled import bits_of, column_bits


@pytest.mark.parametrize("levels", [1, 2, 35, 256, 257, 300])
def test_the_bits_of_a_column_are_its_items(levels: int) -> None:
    column = [(7 * item) % levels for item in range(700)]
    rows = column_bits(column)
    assert set(rows) == set(column)
    for level, bits in rows.items():
        assert bits == bits_of((item for item, on in enumerate(column) if on == level), len(column))


def test_no_item_has_no_bits() -> None:
    assert column_bits([]) == {}
    assert bits_of([], 0) == 0
