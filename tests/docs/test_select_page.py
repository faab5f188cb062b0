"""The snippets of docs/select.md run, in order, on a real matrix."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs/select.md"


def test_the_snippets_of_the_select_page_run(small_matrix: Path, capsys: pytest.CaptureFixture[str]) -> None:
    snippets = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)
    assert len(snippets) == 5
    names: dict[str, object] = {"FILE": small_matrix}
    for number, snippet in enumerate(snippets):
        exec(compile(snippet, f"select.md, snippet {number + 1}", "exec"), names)  # noqa: S102  # our own page
    assert "proven" in capsys.readouterr().out
