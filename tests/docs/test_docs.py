"""What docs/ and README say is what the program does."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jsonschema
import msgspec
import pytest

import attnprobe
from attnprobe.matrix.schema import expanded

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/*.md")])


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL)


def test_generated_files_are_up_to_date() -> None:
    done = subprocess.run(
        [sys.executable, "docs/generate.py", "--check"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout


def test_a_real_matrix_and_its_expanded_shape_satisfy_the_published_schema(small_matrix: Path) -> None:
    schema = json.loads((ROOT / "docs/matrix.schema.json").read_text(encoding="utf-8"))
    document = json.loads(small_matrix.read_text(encoding="utf-8"))
    jsonschema.validate(document, schema)
    whole: dict[str, Any] = msgspec.to_builtins(expanded(attnprobe.read_matrix(small_matrix)))
    jsonschema.validate(json.loads(msgspec.json.encode(whole)), schema)


def test_the_schema_refuses_a_wrong_type(small_matrix: Path) -> None:
    schema = json.loads((ROOT / "docs/matrix.schema.json").read_text(encoding="utf-8"))
    document = json.loads(small_matrix.read_text(encoding="utf-8"))
    document["backends"][0]["rules"] = "none"
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(document, schema)


def test_the_examples_of_the_scan_page_run(
    attnprobe: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    page = ROOT / "docs/scan.md"
    (toml,) = blocks(page, "toml")
    (python,) = blocks(page, "python")
    config = tmp_path / "job.toml"
    config.write_text(toml.replace("heads = 32", "heads = 8").replace("512", "64"), encoding="utf-8")
    kernel = tmp_path / "my_kernel.py"
    kernel.write_text(python, encoding="utf-8")
    plan = attnprobe("scan", "--config", str(config), "--plan", "--format", "json")
    assert plan.returncode == 0, plan.stderr
    first = json.loads(plan.stdout)["cases"][0]["at"]
    assert (first["dtype"], first["head_dim"], first["heads"]) == ("bfloat16", 128, "equal")
    output = tmp_path / "m.json"
    done = attnprobe(
        "scan",
        "--config",
        str(config),
        "--backend",
        f"{kernel}:attention",
        "--budget",
        "10s",
        "-o",
        f"json:{output}",
    )
    assert done.returncode == 0, done.stderr
    assert "my_kernel:attention" in done.stdout


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_option_that_a_page_names_exists(
    page: Path, attnprobe: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    text = page.read_text(encoding="utf-8")
    used = re.findall(r"attnprobe (scan|show|validate|doctor)((?: [^\n`#]*)?)", text)
    for command in {name for name, _ in used}:
        known = attnprobe(command, "--help").stdout
        for name, rest in used:
            for option in re.findall(r"(?<!\S)(--?[a-z][a-z-]*)", rest) if name == command else ():
                assert option in known, f"attnprobe {command} {option}"
