"""Whole scans that are interrupted, killed and resumed."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from attnprobe import read_matrix
from attnprobe.matrix.lint import faults
from attnprobe.matrix.schema import Matrix
from attnprobe.verdict import Verdict

# Answers wrongly with more than one batch entry, leaves a process behind and, where asked to, dies in
# float16; every time alike.
FLAWED = """
DEADLY = False
import os, subprocess
import torch
from torch.nn.functional import scaled_dot_product_attention as right

def attention(q, k, v, **options):
    if 'LEFT_BEHIND' in os.environ and not hasattr(attention, 'left'):
        attention.left = subprocess.Popen(['sleep', '600'], start_new_session=True)
        with open(os.environ['LEFT_BEHIND'], 'a') as file:
            file.write(f'{attention.left.pid}\\n')
    if q.dtype is torch.float16 and DEADLY:
        os._exit(7)
    out = right(q, k, v, **options)
    return out * 1.5 if q.shape[0] > 1 else out
"""
CONFIG = '[{"pass": "forward", "head_dim": 8, "heads": 1, "seqlen_q": 4, "dtype": "bfloat16"}]\n'


class Place:
    """A directory with a config, a flawed backend, and the scan of them."""

    def __init__(self, path: Path, *, deadly: bool = False) -> None:
        self.path = path
        self.output = path / "m.json"
        self.journal = path / ".m.json.journal"
        self.left = path / "left"
        (path / "flawed.py").write_text(FLAWED.replace("DEADLY = False", f"DEADLY = {deadly}"))
        (path / "c.json").write_text(CONFIG)
        self.left.write_text("")
        self.environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("ATTNPROBE_")},
            "ATTNPROBE_DATA_DIR": str(path / "data"),
            "OMP_NUM_THREADS": "1",
            "LEFT_BEHIND": str(self.left),
        }

    def start(self, *more: str) -> subprocess.Popen[str]:
        arguments = ["scan", "--config", "c.json", "-o", "json:m.json", "--timeout", "20s", *more]
        backends = ["--backend", "flawed.py:attention", "--backend", "torch-math"]
        return subprocess.Popen(
            [sys.executable, "-m", "attnprobe", *arguments, *backends],
            cwd=self.path,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def scan(self, *more: str) -> Matrix:
        """Scan to the end."""
        process = self.start(*more)
        _, stderr = process.communicate(timeout=120)
        assert process.returncode == 0, stderr
        return self.matrix()

    def matrix(self) -> Matrix:
        assert faults(self.output.read_bytes(), strict=True) == []
        return read_matrix(self.output)

    def outcomes(self) -> int:
        """Return how many outcomes the journal holds."""
        return self.journal.read_bytes().count(b'\n{"case"') if self.journal.exists() else 0

    def wait_for(self, outcomes: int, process: subprocess.Popen[str]) -> None:
        deadline = time.monotonic() + 60
        while self.outcomes() < outcomes:
            assert process.poll() is None, "it ended before it could be interrupted"
            assert time.monotonic() < deadline
            time.sleep(0.005)

    def left_behind(self) -> list[int]:
        return [int(line) for line in self.left.read_text().split()]

    def end_left_behind(self) -> None:
        """End what a failing test has found to be left."""
        for pid in self.left_behind():
            with contextlib.suppress(psutil.NoSuchProcess):
                if psutil.Process(pid).name() == "sleep":
                    psutil.Process(pid).kill()


def outside_runs(path: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(path.read_bytes())
    del document["runs"], document["digest"]
    return document


def tree_of(process: subprocess.Popen[str]) -> list[int]:
    return [process.pid, *(child.pid for child in psutil.Process(process.pid).children(recursive=True))]


def still_there(pids: list[int], seconds: float) -> list[int]:
    """Return which of these processes outlive a time."""

    def alive(pid: int) -> bool:
        try:
            return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
        except psutil.NoSuchProcess:
            return False

    deadline = time.monotonic() + seconds
    while (left := [pid for pid in pids if alive(pid)]) and time.monotonic() < deadline:
        time.sleep(0.02)
    return left


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    one = Place(tmp_path)
    yield one
    one.end_left_behind()


@pytest.fixture
def deadly_place(tmp_path: Path) -> Iterator[Place]:
    one = Place(tmp_path, deadly=True)
    yield one
    one.end_left_behind()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Place:
    """Return a scan that nobody interrupted."""
    one = Place(tmp_path_factory.mktemp("whole"))
    one.scan()
    return one


@pytest.fixture(scope="module")
def deadly_whole(tmp_path_factory: pytest.TempPathFactory) -> Place:
    """Return a scan with crashes that nobody interrupted."""
    one = Place(tmp_path_factory.mktemp("deadly"), deadly=True)
    one.scan()
    return one


@pytest.mark.slow
def test_a_whole_scan(deadly_whole: Place) -> None:
    whole = deadly_whole
    matrix = whole.matrix()
    assert matrix.runs[0].complete
    assert not whole.journal.exists()
    by_name = {backend.name: backend for backend in matrix.backends}
    flawed = by_name["flawed:attention"]
    crashed = [rule for rule in flawed.rules if rule.verdict is Verdict.CRASHED]
    assert [rule.when for rule in crashed] == [{"dtype": ("float16",)}]
    assert crashed[0].right == ("torch-math",)
    wrong = [rule for rule in flawed.rules if rule.verdict is Verdict.WRONG]
    assert [rule.when.get("batch") for rule in wrong] == [("more",)] * len(wrong)
    assert wrong
    for result in flawed.cases:
        if result.verdict is Verdict.CRASHED:
            assert result.detail["how"] == "exited with code 7"
    assert {result.verdict for result in by_name["torch-math"].cases} == {Verdict.OK, Verdict.REFUSED}
    assert still_there(whole.left_behind(), 5.0) == []
    assert whole.left_behind()


def test_the_same_seed_gives_the_same_document(whole: Place, place: Place) -> None:
    place.scan()
    assert outside_runs(place.output) == outside_runs(whole.output)


@pytest.mark.slow
def test_another_seed_gives_other_cases(whole: Place, place: Place) -> None:
    matrix = place.scan("--seed", "3")
    assert {record.id for record in matrix.cases} & {record.id for record in whole.matrix().cases} == set()
    assert {record.case.seed for record in matrix.cases} == {3}


@pytest.mark.parametrize("outcomes", [8, pytest.param(100, marks=pytest.mark.slow)])
def test_a_killed_scan_leaves_no_process_and_can_be_resumed(
    whole: Place, place: Place, outcomes: int
) -> None:
    kill_and_resume(whole, place, outcomes)


@pytest.mark.release
@pytest.mark.parametrize("outcomes", [8, 90])
def test_a_killed_scan_that_saw_crashes_can_be_resumed(
    deadly_whole: Place, deadly_place: Place, outcomes: int
) -> None:
    kill_and_resume(deadly_whole, deadly_place, outcomes)


def kill_and_resume(whole: Place, place: Place, outcomes: int) -> None:
    process = place.start()
    place.wait_for(outcomes, process)
    tree = tree_of(process)
    assert len(tree) >= 2
    process.kill()
    process.communicate(timeout=10)
    assert still_there([*tree, *place.left_behind()], 5.0) == []
    assert not place.output.exists()
    known = place.outcomes()
    assert known >= outcomes
    resumed = place.start("--resume")
    place.wait_for(known + 1, resumed)
    _, stderr = resumed.communicate(timeout=120)
    assert resumed.returncode == 0, stderr
    assert outside_runs(place.output) == outside_runs(whole.output)
    run, before = place.matrix().runs[-1], whole.matrix().runs[0]
    assert (run.complete, run.planned, run.executed) == (True, before.planned, before.executed)
    assert run.skipped == before.skipped
    assert not place.journal.exists()


@pytest.mark.parametrize(
    ("number", "outcomes"),
    [
        (signal.SIGINT, 8),
        (signal.SIGTERM, 100),
        pytest.param(signal.SIGTERM, 8, marks=pytest.mark.slow),
        pytest.param(signal.SIGINT, 100, marks=pytest.mark.slow),
    ],
)
def test_an_interrupted_scan_keeps_what_it_knows(
    whole: Place, place: Place, number: signal.Signals, outcomes: int
) -> None:
    process = place.start()
    place.wait_for(outcomes, process)
    tree = tree_of(process)
    start = time.monotonic()
    process.send_signal(number)
    stdout, stderr = process.communicate(timeout=30)
    assert time.monotonic() - start < 10
    assert process.returncode == 130
    assert "Traceback" not in stderr
    assert "--resume" in stderr
    assert "incomplete" in stdout
    assert still_there([*tree, *place.left_behind()], 5.0) == []
    partial = place.matrix()
    assert not partial.runs[-1].complete
    assert sum(len(backend.cases) for backend in partial.backends) >= outcomes
    complete = place.scan("--resume")
    assert complete.runs[-1].complete
    assert outside_runs(place.output) == outside_runs(whole.output)
    assert not place.journal.exists()


@pytest.mark.slow
def test_killed_again_and_again_it_still_comes_to_the_same(deadly_whole: Place, deadly_place: Place) -> None:
    whole, place = deadly_whole, deadly_place
    more: list[str] = []
    for outcomes in (5, 20, 50, 90, 130, 180):
        process = place.start(*more)
        place.wait_for(outcomes, process)
        process.kill()
        process.communicate(timeout=10)
        more = ["--resume"]
    place.scan("--resume")
    assert outside_runs(place.output) == outside_runs(whole.output)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_before_the_first_case(place: Place, number: signal.Signals) -> None:
    process = place.start()
    deadline = time.monotonic() + 30
    while not psutil.Process(process.pid).children():
        assert time.monotonic() < deadline
        time.sleep(0.005)
    time.sleep(0.3)
    tree = tree_of(process)
    process.send_signal(number)
    stdout, stderr = process.communicate(timeout=30)
    # Nothing is known yet that could be written, so SIGTERM may also end it as it ends any program.
    assert process.returncode == 130 or (number, process.returncode) == (signal.SIGTERM, -signal.SIGTERM)
    assert stdout == ""
    assert "interrupted" in stderr or number is signal.SIGTERM
    assert "Traceback" not in stderr
    assert still_there(tree, 5.0) == []


@pytest.mark.slow
def test_resuming_another_scan_is_refused(place: Place) -> None:
    process = place.start()
    place.wait_for(3, process)
    process.kill()
    process.communicate(timeout=10)
    content = place.journal.read_bytes()
    other = place.start("--resume", "--seed", "9")
    stdout, stderr = other.communicate(timeout=60)
    assert other.returncode == 2
    assert stdout == ""
    assert "cannot be resumed" in stderr
    assert "the plan is another one now" in stderr
    (place.path / "flawed.py").write_text(FLAWED + "\n# changed\n")
    changed = place.start("--resume")
    _, stderr = changed.communicate(timeout=60)
    assert changed.returncode == 2
    assert "an installed build" in stderr
    assert place.journal.read_bytes() == content


@pytest.mark.slow
def test_no_orphan_outlives_any_of_many_killed_scans(place: Place) -> None:
    for round_ in range(12):
        process = place.start()
        place.wait_for(4 + round_, process)
        tree = tree_of(process)
        process.kill()
        process.communicate(timeout=10)
        assert still_there([*tree, *place.left_behind()], 5.0) == [], round_
