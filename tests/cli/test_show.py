from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from attnprobe import read_matrix
from attnprobe.axes import levels_of
from attnprobe.matrix.schema import Matrix
from attnprobe.matrix.store import encode, parse_matrix

if TYPE_CHECKING:
    from tests.cli.conftest import Terminal
    from tests.conftest import Attnprobe


@pytest.fixture
def handmade_file(handmade: Matrix, tmp_path: Path) -> Path:
    path = tmp_path / "handmade.json"
    path.write_bytes(encode(handmade))
    return path


def test_the_table(attnprobe: Attnprobe, small_matrix: Path) -> None:
    done = attnprobe("show", small_matrix)
    assert done.returncode == 0
    assert done.stderr == ""
    assert "\x1b" not in done.stdout
    assert re.search(r"^torch-flash +torch ", done.stdout, re.MULTILINE)
    assert re.search(r"^torch-math +torch ", done.stdout, re.MULTILINE)


def test_json_loads_as_the_same_document(attnprobe: Attnprobe, small_matrix: Path, tmp_path: Path) -> None:
    done = attnprobe("show", "--format", "json", small_matrix)
    assert done.returncode == 0
    document = json.loads(done.stdout)
    assert "cases" not in document
    assert document["backends"][0]["cases"][0]["at"]["pass"] in {"forward", "backward"}
    (tmp_path / "again.json").write_text(done.stdout)
    assert read_matrix(tmp_path / "again.json") == read_matrix(small_matrix)
    assert attnprobe("show", tmp_path / "again.json").stdout == attnprobe("show", small_matrix).stdout


def test_a_failing_matrix_is_shown_with_0(attnprobe: Attnprobe, handmade_file: Path) -> None:
    done = attnprobe("show", handmade_file)
    assert done.returncode == 0
    assert "dq, dk, dv never written" in done.stdout
    assert "flash-attn-3: not here" in done.stdout


def test_one_case(attnprobe: Attnprobe, handmade: Matrix, handmade_file: Path) -> None:
    flash = handmade.backends[0]
    for result in flash.cases:
        done = attnprobe("show", handmade_file, "--case", result.id)
        assert done.returncode == 0
        assert done.stdout.startswith(f"case {result.id}, seed 7\n")
        assert f"broken-flash: {result.verdict.value}" in done.stdout
        assert "torch-math: " in done.stdout
        covering = [rule.id for rule in flash.rules if rule.witness == result.id]
        assert all(rule in done.stdout for rule in covering)


def test_one_case_as_json(attnprobe: Attnprobe, handmade: Matrix, handmade_file: Path) -> None:
    rule = handmade.backends[0].rules[0]
    done = attnprobe("show", handmade_file, "--case", rule.witness, "--format", "json")
    document = json.loads(done.stdout)
    case = handmade.case(rule.witness)
    assert case is not None
    assert document["id"] == rule.witness
    assert document["at"] == levels_of(case)
    by_name = {backend["name"]: backend for backend in document["backends"]}
    assert by_name["broken-flash"]["verdict"] == "unwritten"
    assert by_name["broken-flash"]["rules"] == [rule.id]
    assert by_name["torch-math"]["verdict"] == "ok"


@pytest.mark.parametrize("format_name", ["yaml", "text", ""])
def test_a_format_that_is_none(attnprobe: Attnprobe, handmade_file: Path, format_name: str) -> None:
    for more in ((), ("--case", "84f5575f02e2")):
        done = attnprobe("show", handmade_file, "--format", format_name, *more)
        assert done.returncode == 2
        assert done.stdout == ""


def test_an_unknown_case(attnprobe: Attnprobe, handmade_file: Path) -> None:
    done = attnprobe("show", handmade_file, "--case", "000000000000")
    assert done.returncode == 2
    assert done.stdout == ""
    assert "no case 000000000000" in done.stderr


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (b"", "is empty"),
        (b"{", "cut off"),
        (b'{"schema": "other/1"}', "has schema 'other/1'"),
        (b'{"schema": "attnprobe.matrix/1"}', "breaks the schema"),
        (b'{"schema": "attnprobe.matrix/1", "digest": "\xff"}', "not JSON"),
    ],
)
def test_a_bad_file_is_2_in_words(attnprobe: Attnprobe, tmp_path: Path, content: bytes, what: str) -> None:
    (tmp_path / "bad.json").write_bytes(content)
    done = attnprobe("show", "bad.json")
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("error: bad.json ")
    assert what in done.stderr
    assert "Traceback" not in done.stderr


def test_a_changed_file_is_refused(attnprobe: Attnprobe, handmade: Matrix, tmp_path: Path) -> None:
    (tmp_path / "m.json").write_bytes(encode(handmade).replace(b'"crashed"', b'"refused"'))
    done = attnprobe("show", "m.json")
    assert done.returncode == 2
    assert "was changed after it was written" in done.stderr
    assert "  why: " in done.stderr
    assert "  try: " in done.stderr


@pytest.mark.parametrize("name", ["none.json", "."])
def test_a_file_that_cannot_be_read(attnprobe: Attnprobe, name: str) -> None:
    done = attnprobe("show", name)
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: {name} ")


def test_without_a_file_the_newest_of_your_own(
    attnprobe: Attnprobe, environment: dict[str, str], handmade: Matrix, small_matrix: Path
) -> None:
    none = attnprobe("show")
    assert none.returncode == 2
    assert "attnprobe scan" in none.stderr
    data = Path(environment["ATTNPROBE_DATA_DIR"])
    data.mkdir()
    (data / "old.json").write_bytes(small_matrix.read_bytes())
    os.utime(data / "old.json", (1, 1))
    (data / "new.json").write_bytes(encode(handmade))
    assert "RTX 5090" in attnprobe("show").stdout
    named = attnprobe("show", env={"ATTNPROBE_MATRIX": str(data / "old.json")})
    assert "level config" in named.stdout
    missing = attnprobe("show", env={"ATTNPROBE_MATRIX": str(data / "none.json")})
    assert missing.returncode == 2


def test_colour_on_a_terminal_only(attnprobe: Attnprobe, terminal: Terminal, handmade_file: Path) -> None:
    assert "\x1b[" in terminal("show", handmade_file).stdout
    assert "\x1b" not in terminal("show", handmade_file, on=("stderr",)).stdout
    assert "\x1b" not in attnprobe("show", handmade_file).stdout


def test_no_color_and_dumb_terminals(terminal: Terminal, handmade_file: Path) -> None:
    assert "\x1b" not in terminal("show", handmade_file, env={"NO_COLOR": "1"}).stdout
    assert "\x1b" not in terminal("show", handmade_file, env={"TERM": "dumb"}).stdout
    # Empty is as unset: no-color.org.
    assert "\x1b[" in terminal("show", handmade_file, env={"NO_COLOR": ""}).stdout


def test_force_color_off_a_terminal(attnprobe: Attnprobe, handmade_file: Path) -> None:
    assert "\x1b[" in attnprobe("show", handmade_file, env={"FORCE_COLOR": "1"}).stdout
    both = attnprobe("show", handmade_file, env={"FORCE_COLOR": "1", "NO_COLOR": "1"})
    assert "\x1b" not in both.stdout


def test_json_has_no_colour_anywhere(terminal: Terminal, handmade: Matrix, handmade_file: Path) -> None:
    seen = terminal("show", "--format", "json", handmade_file, env={"FORCE_COLOR": "1"})
    assert parse_matrix(seen.stdout.encode(), "it") == handmade


def test_the_table_fits_the_terminal(terminal: Terminal, handmade_file: Path) -> None:
    wide = terminal("show", handmade_file, width=160, env={"NO_COLOR": "1"}).stdout
    narrow = terminal("show", handmade_file, width=80, env={"NO_COLOR": "1"}).stdout
    assert "out_of_memory" in wide
    header = next(line for line in narrow.splitlines() if line.startswith("backend"))
    assert len(header) <= 80
