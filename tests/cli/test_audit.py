from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import structs

from attnprobe import read_matrix
from attnprobe.matrix.schema import Rule, sealed
from attnprobe.matrix.store import encode
from attnprobe.verdict import Verdict

if TYPE_CHECKING:
    from tests.conftest import Attnprobe


def with_failing_flash(source: Path, path: Path) -> str:
    """Write the matrix as if one case that passed on torch-flash had failed; return the id of that case."""
    matrix = read_matrix(source)
    cases = {record.id: record.case for record in matrix.cases}
    (flash,) = (one for one in matrix.backends if one.name == "torch-flash")
    one = next(
        r for r in flash.cases if r.verdict is Verdict.OK and "flash" in r.kernel and cases[r.id].dropout == 0
    )
    failed = structs.replace(one, verdict=Verdict.WRONG, outputs=("dq",))
    results = tuple(failed if r.id == one.id else r for r in flash.cases)
    rule = Rule(id="r", when={}, cases=(one.id,), verdict=Verdict.WRONG, outputs=("dq",), witness=one.id)
    flash = structs.replace(flash, cases=results, rules=(*flash.rules, rule))
    others = tuple(b for b in matrix.backends if b.name != "torch-flash")
    path.write_bytes(encode(sealed(structs.replace(matrix, backends=(*others, flash)))))
    return one.id


def test_a_selector_that_accepts_what_fails(attnprobe: Attnprobe, small_matrix: Path, tmp_path: Path) -> None:
    path = tmp_path / "m.json"
    case = with_failing_flash(small_matrix, path)
    done = attnprobe("audit", "-m", path)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("torch scaled_dot_product_attention: ")
    accepts = [n for n, line in enumerate(lines) if "accepts but fails: torch-flash" in line]
    assert any(f"as {case}" in lines[number + 1] for number in accepts), done.stdout
    assert "dq wrong" in done.stdout
    assert attnprobe("audit", "-m", path, "--fail-on", "unsafe").returncode == 1


def test_as_json(attnprobe: Attnprobe, small_matrix: Path, tmp_path: Path) -> None:
    path = tmp_path / "m.json"
    case = with_failing_flash(small_matrix, path)
    done = attnprobe("audit", "-m", path, "--format", "json")
    (audit,) = json.loads(done.stdout)["audits"]
    assert audit["asked"] > audit["agreed"]
    assert any(case in one["cases"] for one in audit["found"] if one["kind"] == "accepts-but-fails")


def test_a_matrix_of_another_machine_is_3(attnprobe: Attnprobe, small_matrix: Path, tmp_path: Path) -> None:
    matrix = read_matrix(small_matrix)
    device = structs.replace(matrix.devices[0], name="Other CPU")
    path = tmp_path / "elsewhere.json"
    path.write_bytes(encode(sealed(structs.replace(matrix, devices=(device,)))))
    done = attnprobe("audit", "-m", path)
    assert done.returncode == 3
    assert "does not speak of what is installed here" in done.stderr
    assert "--assume-device" in done.stderr
    assert attnprobe("audit", "-m", path, "--assume-device").returncode == 0
