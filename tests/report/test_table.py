from __future__ import annotations

import re
from pathlib import Path

import pytest
from msgspec import structs
from syrupy.assertion import SnapshotAssertion

from attnprobe.matrix.schema import Matrix, sealed
from attnprobe.matrix.store import read_matrix
from attnprobe.report.table import format_

ESCAPE = re.compile(r"\x1b\[[0-9;]*m")


def test_the_handmade_matrix(handmade: Matrix, snapshot: SnapshotAssertion) -> None:
    assert format_.text(handmade, width=100, color=False) == snapshot


def test_the_handmade_matrix_in_colour(handmade: Matrix, snapshot: SnapshotAssertion) -> None:
    assert format_.text(handmade, width=100, color=True) == snapshot


def test_an_incomplete_scan_of_backends_that_are_absent(
    handmade: Matrix, snapshot: SnapshotAssertion
) -> None:
    run = structs.replace(handmade.runs[0], complete=False, executed=3, strength=1)
    nothing = structs.replace(handmade, backends=(handmade.backends[1],), cases=(), runs=(run,))
    assert format_.text(sealed(nothing), width=100, color=False) == snapshot


def test_colour_only_adds_escapes(handmade: Matrix) -> None:
    bare = format_.text(handmade, width=100, color=False)
    coloured = format_.text(handmade, width=100, color=True)
    assert "\x1b" not in bare
    assert "\x1b[" in coloured
    without = "\n".join(line.rstrip() for line in ESCAPE.sub("", coloured).splitlines()) + "\n"
    assert without == bare


def test_colour_is_asked_for_not_found(handmade: Matrix, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert "\x1b" not in format_.text(handmade, width=100, color=False)
    monkeypatch.delenv("FORCE_COLOR")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("TERM", "dumb")
    assert "\x1b[" in format_.text(handmade, width=100, color=True)


def test_failing_counts_are_red_and_passing_ones_green(handmade: Matrix) -> None:
    coloured = format_.text(handmade, width=100, color=True)
    rows = [line for line in coloured.splitlines() if line.startswith(("broken-flash", "torch-math"))]
    assert len(rows) == 2
    assert "\x1b[32m" in rows[0]
    assert "\x1b[31m" in rows[0]


@pytest.mark.parametrize("width", [80, 100, 300])
def test_no_word_is_lost_at_any_width(handmade: Matrix, width: int) -> None:
    text = format_.text(handmade, width=width, color=False)
    for backend in handmade.backends:
        assert backend.name in text
        for rule in backend.rules:
            assert rule.witness in text
    for word in ("unwritten", "wrong", "crashed", "hung", "refused", "out_of_memory"):
        assert word in text


def test_brackets_and_markup_in_reasons_stay_as_they_are(handmade: Matrix) -> None:
    reason = "[bold]not[/bold] here: [red]x :smile: https://x.test/[1]"
    absent = structs.replace(handmade.backends[1], reason=reason)
    matrix = sealed(structs.replace(handmade, backends=(absent,), cases=()))
    assert reason in format_.text(matrix, width=100, color=False)


def test_a_reason_cannot_steer_the_terminal(handmade: Matrix) -> None:
    absent = structs.replace(handmade.backends[1], reason="gone\x1b[2J\x1b]0;title\x07\nforged: line")
    matrix = sealed(structs.replace(handmade, backends=(absent,), cases=()))
    assert "\x1b" not in format_.text(matrix, width=100, color=False)


def test_the_file_is_the_text_without_colour(handmade: Matrix) -> None:
    assert format_.file(handmade).decode() == format_.text(handmade, width=100, color=False)


def test_a_scans_matrix(small_matrix: Path) -> None:
    matrix = read_matrix(small_matrix)
    text = format_.text(matrix, width=100, color=False)
    assert "No failing case found." in text
    assert "level config, seed 0, complete" in text
    for backend in matrix.backends:
        row = next(line for line in text.splitlines() if line.startswith(backend.name))
        ok = sum(result.verdict.value == "ok" for result in backend.cases)
        assert row.split()[3] == str(ok)
    assert all(line == line.rstrip() for line in text.splitlines())
