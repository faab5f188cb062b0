from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from msgspec import structs

from attnprobe import read_matrix
from attnprobe.matrix.schema import Matrix, Rule, sealed
from attnprobe.matrix.store import encode
from attnprobe.verdict import Verdict

if TYPE_CHECKING:
    from tests.conftest import Attnprobe

CASE = "torch-math"


@pytest.fixture
def other_run(small_matrix: Path, tmp_path: Path) -> tuple[Path, str]:
    """Return a second run of a real scan, as if its first right case had failed, and the id of that case."""
    matrix = read_matrix(small_matrix)
    backends = []
    for backend in matrix.backends:
        first = next(result.id for result in backend.cases if result.verdict is Verdict.OK)
        if backend.name == CASE:
            failed = first
            rule = Rule(id="r", when={}, verdict=Verdict.WRONG, witness=first, cases=(first,), failing=1)
            cases = tuple(
                structs.replace(r, verdict=Verdict.WRONG, outputs=("dq",)) if r.id == first else r
                for r in backend.cases
            )
            backends.append(structs.replace(backend, cases=cases, rules=(*backend.rules, rule)))
        else:
            backends.append(backend)
    runs = (structs.replace(matrix.runs[0], started="2099-01-01T00:00:00+00:00"),)
    path = tmp_path / "other.json"
    path.write_bytes(encode(sealed(structs.replace(matrix, backends=tuple(backends), runs=runs))))
    return path, failed


def test_two_runs_of_a_real_scan(
    attnprobe: Attnprobe, small_matrix: Path, other_run: tuple[Path, str], tmp_path: Path
) -> None:
    other, failed = other_run
    done = attnprobe("merge", small_matrix, other, small_matrix, "-o", "deep/all.json")
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    matrix = read_matrix(tmp_path / "deep" / "all.json")
    said = f"merged: 3 files, 2 runs, {len(matrix.cases)} cases, 1 disputed\nwritten: deep/all.json\n"
    assert done.stderr == said
    assert len(matrix.cases) == len(read_matrix(small_matrix).cases)
    other_way = attnprobe("merge", other, small_matrix)
    assert other_way.stdout.encode() == (tmp_path / "deep" / "all.json").read_bytes()
    assert attnprobe("validate", "--strict", "deep/all.json").stdout == "deep/all.json: valid\n"
    # What reads a matrix reads a merged one.
    shown = attnprobe("show", "deep/all.json").stdout
    assert "run 0 (" in shown
    assert "run 1 (2099-01-01T00:00:00+00:00), level config" in shown
    assert "disputed: ok in run 0, wrong in run 1" in shown
    header = next(line for line in shown.splitlines() if line.startswith("backend"))
    assert header.split()[-1] == "disputed"
    case = attnprobe("show", "deep/all.json", "--case", failed).stdout.splitlines()
    assert [line for line in case if line.startswith(f"{CASE}: ")] == [
        f"{CASE}: disputed: ok (measured, ran math, rule r, run 0)",
        f"{CASE}: disputed: wrong (measured, ran math, rule r, run 1)",
    ]
    document = json.loads(attnprobe("show", "deep/all.json", "--case", failed, "--format", "json").stdout)
    mine = [one for one in document["backends"] if one["name"] == CASE]
    assert [(one["verdict"], one.get("run", 0), one.get("disputed")) for one in mine] == [
        ("ok", 0, True),
        ("wrong", 1, True),
    ]
    again = attnprobe("show", "deep/all.json", "--format", "json").stdout
    (tmp_path / "expanded.json").write_text(again)
    assert read_matrix(tmp_path / "expanded.json") == matrix


def test_one_file_is_a_union_too(attnprobe: Attnprobe, small_matrix: Path, tmp_path: Path) -> None:
    done = attnprobe("merge", small_matrix, "-o", "one.json")
    assert done.returncode == 0, done.stderr
    before, after = read_matrix(small_matrix), read_matrix(tmp_path / "one.json")
    assert [one.cases for one in before.backends] == [one.cases for one in after.backends]
    assert before.runs == after.runs


def test_another_device_is_2_in_one_clear_error(
    attnprobe: Attnprobe, small_matrix: Path, handmade: Matrix, tmp_path: Path
) -> None:
    (tmp_path / "gpu.json").write_bytes(encode(handmade))
    done = attnprobe("merge", small_matrix, "gpu.json", "-o", "all.json")
    assert done.returncode == 2
    assert done.stdout == ""
    what, why, fix = done.stderr.splitlines()
    assert what == "error: matrices of different devices are not merged"
    assert why.startswith(f"  why: {small_matrix} is of kind cpu, name ")
    assert "gpu.json of kind cuda, name NVIDIA RTX 5090, sm 12.0" in why
    assert fix == "  try: merge the files of each kind of device on their own"
    assert not (tmp_path / "all.json").exists()


def test_another_build_is_2_and_named(attnprobe: Attnprobe, small_matrix: Path, tmp_path: Path) -> None:
    matrix = read_matrix(small_matrix)
    older = [
        structs.replace(b, materials=tuple(structs.replace(m, version="2.0") for m in b.materials))
        for b in matrix.backends
    ]
    (tmp_path / "older.json").write_bytes(encode(sealed(structs.replace(matrix, backends=tuple(older)))))
    done = attnprobe("merge", small_matrix, "older.json")
    assert done.returncode == 2
    assert done.stderr.startswith("error: torch-flash was measured in different builds\n  why: torch 2.")
    assert "torch 2.0 (" in done.stderr
    assert "Traceback" not in done.stderr


def test_what_cannot_be_merged_is_2(attnprobe: Attnprobe, small_matrix: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for arguments, what in (
        (("none.json",), "none.json does not exist"),
        ((small_matrix, "file"), "file is empty"),
        ((small_matrix, "-o", "file/m.json"), "file/m.json cannot be written"),
        ((small_matrix, "-o", "."), "is a directory"),
        ((), "Missing argument 'FILE...'"),
    ):
        done = attnprobe("merge", *arguments)
        assert done.returncode == 2, done.stderr
        assert what in done.stderr
        assert "Traceback" not in done.stderr
