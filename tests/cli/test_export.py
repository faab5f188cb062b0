from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from attnprobe import read_matrix
from attnprobe.matrix.schema import Matrix
from attnprobe.matrix.store import encode

if TYPE_CHECKING:
    from tests.conftest import Attnprobe


@pytest.fixture
def matrix(handmade: Matrix, tmp_path: Path) -> Path:
    path = tmp_path / "m.json"
    path.write_bytes(encode(handmade))
    return path


def case_of(handmade: Matrix, rule: str) -> str:
    return next(r.witness for b in handmade.backends for r in b.rules if r.id == rule)


def test_the_formats_and_their_help(attnprobe: Attnprobe) -> None:
    shown = attnprobe("export", "--help")
    assert shown.returncode == 0
    assert "repro" in shown.stdout
    helped = attnprobe("export", "repro", "--help")
    for line in (shown.stdout + helped.stdout).splitlines():
        assert len(line) <= 80, line
    assert "attnprobe export repro m.json" in helped.stdout


def test_where_a_script_goes(attnprobe: Attnprobe, small_matrix: Path, tmp_path: Path) -> None:
    """To standard output and nothing with it, or to a file; both the same bytes."""
    chosen = read_matrix(small_matrix).cases[0].id
    arguments = ("export", "repro", small_matrix, chosen, "--backend", "torch-math", "--any")
    done = attnprobe(*arguments)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("#!/usr/bin/env python3\n")
    filed = attnprobe(*arguments, "-o", "repro.py")
    assert (filed.returncode, filed.stdout, filed.stderr) == (0, "", "written: repro.py\n")
    assert (tmp_path / "repro.py").read_text() == done.stdout
    ran = subprocess.run(
        [sys.executable, "repro.py"],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.splitlines()[-1] == "passes: not reproduced here"


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (("zzz",), "no case and no rule 'zzz' in this matrix"),
        (("",), "no case and no rule '' in this matrix"),
        (("aaaaaaaa", "--backend", "nobody"), "nobody is not in this matrix"),
        (("bbbbbbbb",), "no script for broken-flash"),
        (("aaaaaaaa",), "no script for unwritten on cuda yet"),
        (("eeeeeeee",), "eeeeeeee did not fail"),
        (("eeeeeeee", "--any"), "broken-flash refuses case"),
        (("aaaaaaaa", "--backend", "torch-math"), "aaaaaaaa did not run on torch-math"),
    ],
)
def test_what_cannot_be_written(
    arguments: tuple[str, ...], what: str, attnprobe: Attnprobe, matrix: Path
) -> None:
    done = attnprobe("export", "repro", matrix, *arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith(f"error: {what}"), done.stderr


def test_ids_that_several_things_have(attnprobe: Attnprobe, matrix: Path, handmade: Matrix) -> None:
    ids = sorted(record.id for record in handmade.cases)
    shared = next((a[0] for a, b in itertools.pairwise(ids) if a[0] == b[0]), None)
    assert shared is not None
    done = attnprobe("export", "repro", matrix, shared)
    assert done.returncode == 2
    assert f"error: {shared!r} begins" in done.stderr
    assert "try: write more digits" in done.stderr


def test_a_case_that_several_backends_ran(attnprobe: Attnprobe, matrix: Path, handmade: Matrix) -> None:
    plain = next(r.id for r in handmade.backends[0].cases if r.verdict == "ok")
    done = attnprobe("export", "repro", matrix, plain)
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: {plain} did not fail")
    assert "broken-flash: ok" in done.stderr
    done = attnprobe("export", "repro", matrix, plain, "--any")
    assert "ran on 2 backends" in done.stderr
    assert "try: choose by --backend" in done.stderr
    # torch-math is right where broken-flash fails: the failing one is meant.
    failing = attnprobe("export", "repro", matrix, case_of(handmade, "bbbbbbbb"))
    assert "error: no script for broken-flash" in failing.stderr


def test_no_torch(attnprobe: Attnprobe, matrix: Path, handmade: Matrix, tmp_path: Path) -> None:
    hidden = tmp_path / "hidden"
    hidden.mkdir()
    (hidden / "torch.py").write_text("raise ModuleNotFoundError(\"No module named 'torch'\", name='torch')\n")
    case = case_of(handmade, "bbbbbbbb")
    done = attnprobe("export", "repro", matrix, case, env={"PYTHONPATH": str(hidden)})
    assert done.returncode == 2
    assert "error: a script cannot be written without torch" in done.stderr
