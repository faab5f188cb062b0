from __future__ import annotations

import json

import pytest
from syrupy.assertion import SnapshotAssertion

from attnprobe.errors import UsageError
from attnprobe.matrix.schema import Matrix
from attnprobe.matrix.store import encode, parse_matrix
from attnprobe.report.interface import format_named, formats
from attnprobe.report.json import format_


def test_the_file(handmade: Matrix, snapshot: SnapshotAssertion) -> None:
    assert format_.file(handmade).decode() == snapshot


def test_the_text(handmade: Matrix, snapshot: SnapshotAssertion) -> None:
    assert format_.text(handmade, width=100, color=False) == snapshot


def test_both_load_as_the_same_document(handmade: Matrix) -> None:
    assert parse_matrix(format_.file(handmade), "file") == handmade
    assert parse_matrix(format_.text(handmade, width=10, color=True).encode(), "text") == handmade
    assert format_.file(handmade) == encode(handmade)


def test_neither_width_nor_colour_changes_it(handmade: Matrix) -> None:
    text = format_.text(handmade, width=100, color=False)
    assert format_.text(handmade, width=20, color=True) == text
    assert "\x1b" not in text
    assert text.endswith("}\n")


def test_the_file_has_a_line_for_each_result_and_rule(handmade: Matrix) -> None:
    lines = format_.file(handmade).decode().splitlines()
    results = sum(len(backend.cases) + len(backend.rules) for backend in handmade.backends)
    whole = [
        line for line in lines if line.strip().rstrip(",").startswith("{") and line.rstrip(",")[-1] == "}"
    ]
    values = [json.loads(line.strip().rstrip(",")) for line in whole]
    assert len([value for value in values if "id" in value]) == results + len(handmade.cases)


def test_formats_are_found_by_name() -> None:
    assert list(formats()) == ["json", "table"]
    assert format_named("json") is format_
    with pytest.raises(UsageError, match="no format 'yaml'") as caught:
        format_named("yaml")
    assert "json" in caught.value.why
    assert "table" in caught.value.why
