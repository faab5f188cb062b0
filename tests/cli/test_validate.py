from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from msgspec import structs

from attnprobe.matrix.schema import Matrix, sealed
from attnprobe.matrix.store import encode

if TYPE_CHECKING:
    from tests.conftest import Attnprobe


def test_a_valid_file(attnprobe: Attnprobe, small_matrix: Path) -> None:
    done = attnprobe("validate", "--strict", small_matrix)
    assert done.returncode == 0
    assert done.stdout == f"{small_matrix}: valid\n"
    assert done.stderr == ""


def test_what_show_prints_is_valid(attnprobe: Attnprobe, small_matrix: Path, tmp_path: Path) -> None:
    (tmp_path / "expanded.json").write_text(attnprobe("show", "--format", "json", small_matrix).stdout)
    assert attnprobe("validate", "expanded.json").returncode == 0


def test_every_fault_of_every_file(attnprobe: Attnprobe, handmade: Matrix, tmp_path: Path) -> None:
    document = json.loads(encode(handmade))
    document["runs"][0]["seed"] = "seven"
    document["backends"][0]["rules"][1]["verdict"] = "odd"
    (tmp_path / "types.json").write_text(json.dumps(document))
    (tmp_path / "good.json").write_bytes(encode(handmade))
    (tmp_path / "empty.json").write_bytes(b"")
    done = attnprobe("validate", "types.json", "good.json", "empty.json", "none.json")
    assert done.returncode == 2
    lines = done.stdout.splitlines()
    assert any(line.startswith("types.json: $.runs[0].seed: ") for line in lines)
    assert any(line.startswith("types.json: $.backends[0].rules[1].verdict: ") for line in lines)
    assert "good.json: valid" in lines
    assert any(line.startswith("empty.json: ") and "empty" in line for line in lines)
    assert any(line.startswith("none.json: ") and "does not exist" in line for line in lines)
    assert len(lines) == 5


def test_unknown_fields_only_when_strict(attnprobe: Attnprobe, handmade: Matrix, tmp_path: Path) -> None:
    document = json.loads(encode(handmade))
    document["later"] = 1
    (tmp_path / "later.json").write_text(json.dumps(document))
    assert attnprobe("validate", "later.json").returncode == 0
    strict = attnprobe("validate", "--strict", "later.json")
    assert strict.returncode == 2
    assert strict.stdout == "later.json: $.later: unknown field\n"


@pytest.mark.parametrize("axis", ["colour", "mask"])
def test_a_rule_about_nothing(attnprobe: Attnprobe, handmade: Matrix, tmp_path: Path, axis: str) -> None:
    flash = handmade.backends[0]
    rule = structs.replace(flash.rules[-1], when={axis: ("red", "window")})
    broken = structs.replace(flash, rules=(*flash.rules[:-1], rule))
    (tmp_path / "m.json").write_bytes(
        encode(sealed(structs.replace(handmade, backends=(broken, *handmade.backends[1:]))))
    )
    done = attnprobe("validate", "m.json")
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert f"$.backends[0].rules[4].when.{axis}: " in done.stdout


def test_a_digest_that_does_not_match(attnprobe: Attnprobe, handmade: Matrix, tmp_path: Path) -> None:
    (tmp_path / "m.json").write_bytes(encode(structs.replace(handmade, digest="0" * 64)))
    done = attnprobe("validate", "m.json")
    assert done.returncode == 2
    assert "m.json: $.digest: " in done.stdout
