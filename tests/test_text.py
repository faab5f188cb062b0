"""Words of others cannot steer a terminal."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from attnprobe.text import printable


@given(st.text())
def test_what_is_shown_is_printable_and_as_long(text: str) -> None:
    shown = printable(text)
    assert shown.isprintable()
    assert len(shown) == len(text)
    assert printable(shown) == shown


def test_ordinary_words_stay() -> None:
    said = "No kernel for head dim 72, sm_120: größer"
    assert printable(said) == said
    assert printable("\x1b[2Jgone\n\r\u202e") == "?[2Jgone???"
