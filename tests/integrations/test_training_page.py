"""The snippets of docs/training.md run, in order, on a real matrix."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs/training.md"


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_the_snippets_of_the_training_page_run(
    matrix_file: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    logged: Callable[[], list[str]],
) -> None:
    snippets = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)
    assert len(snippets) == 6
    names: dict[str, object] = {"FILE": matrix_file, "LOG": tmp_path / "observed.jsonl"}
    for number, snippet in enumerate(snippets):
        exec(compile(snippet, f"training.md, snippet {number + 1}", "exec"), names)  # noqa: S102  # our own page
    printed = capsys.readouterr().out
    for layer in (0, 1):
        assert f"layer {layer} torch runs torch-flash veto torch-math gate" in printed
    assert "torch-flash  denied" in printed
    assert any(line.endswith("; torch-math runs instead") for line in logged())
