from __future__ import annotations

import pytest

from attnprobe.axes import AXES
from attnprobe.probe.covering import Space, Tuples, generate, text
from attnprobe.probe.plan import ROWS_FILE


@pytest.mark.release
@pytest.mark.timeout(3000)
def test_the_kept_rows_are_what_the_generator_makes() -> None:
    rows, pairs = generate()
    assert ROWS_FILE.read_text(encoding="ascii") == text(rows, pairs)


@pytest.mark.slow
def test_the_search_finds_what_is_possible_and_nothing_else() -> None:
    space = Space()
    pairs = Tuples(2, space)
    for index in range(0, len(pairs.open), 7):
        found = space.complete(pairs.levels(index), None, None)
        assert (found is not None) == bool(pairs.open[index])


def test_the_fewest_special_levels_are_forced() -> None:
    """No query at all, or one alone, is as long as the keys only where they are special too."""
    space = Space()
    at = [axis.name for axis in AXES]
    q, kv, order = (at.index(name) for name in ("seqlen_q", "seqlen_kv", "seqlen_order"))
    assert AXES[order].levels == ("equal", "q-shorter", "q-longer")
    for level in (0, 1):
        assert space.forced({q: level, order: 0}) == {kv: level}
        assert space.forced({kv: level, order: 0}) == {q: level}
        assert space.forced({q: level}) == {}
    assert space.forced({q: 1, order: 2}) == {kv: 0}
    assert space.forced({q: 5, order: 0}) == {}
