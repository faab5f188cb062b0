from __future__ import annotations

import pytest

from attnprobe.probe.covering import Space, Tuples, generate, text
from attnprobe.probe.plan import ROWS_FILE


@pytest.mark.release
@pytest.mark.timeout(3000)
def test_the_kept_rows_are_what_the_generator_makes() -> None:
    rows, pairs, _ = generate()
    assert ROWS_FILE.read_text(encoding="ascii") == text(rows, pairs)


def test_the_search_finds_what_is_possible_and_nothing_else() -> None:
    space = Space()
    pairs = Tuples(2, space)
    for index in range(0, len(pairs.open), 7):
        found = space.complete(pairs.levels(index), None, None)
        assert (found is not None) == bool(pairs.open[index])
