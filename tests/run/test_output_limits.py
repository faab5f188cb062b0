"""What backends print, and what they remember from one case to the next, through the real command."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from attnprobe import read_matrix
from attnprobe.matrix.schema import Backend, Matrix, Result
from attnprobe.run.processes import MOST_OUTPUT
from attnprobe.verdict import Verdict
from tests.conftest import clean_environment, run

BACKENDS: Final = """
import os
import torch
from torch.nn.functional import scaled_dot_product_attention as right

def floods(q, k, v, **options):
    line = b"all work and no play\\n" * 50_000
    while q.dtype is torch.float16:
        os.write(1, line)
    return right(q, k, v, **options)

def silent(*arguments, **options):
    print("looking for a kernel")
    print("FATAL: kernel not built")
    print("", flush=True)
    return torch.empty_like(right(*arguments, **options))

known = {}

def cached(q, k, v, **options):
    first = known.setdefault((q.shape, k.shape, q.dtype), k.detach().clone())
    return right(q, k + (first - k).detach(), v, **options)
"""
FORWARD: Final = '[{"pass": "forward", "head_dim": 8, "heads": 1, "seqlen_q": 4, "dtype": "float32"}]'
CONFIGS: Final = (
    '[{"pass": "forward", "head_dim": 8, "heads": 1, "seqlen_q": 4, "dtype": "float32"},'
    ' {"pass": "forward", "head_dim": 8, "heads": 1, "seqlen_q": 4, "dtype": "float32", "mask": "bool"}]'
)
REMEMBERED: Final = {"other-data", "other-strides"}
"""What `cached` mistakes for the call before: it tells element types apart."""


def scanned(place: Path, configs: str, *names: str) -> Matrix:
    (place / "backends.py").write_text(BACKENDS)
    (place / "configs.json").write_text(configs)
    backends = [part for name in names for part in ("--backend", f"backends.py:{name}")]
    arguments = ["scan", "--config", "configs.json", *backends, "-o", "json:matrix.json"]
    done = run(arguments, clean_environment(place / "data"), place)
    assert done.returncode == 0, done.stderr
    return read_matrix(place / "matrix.json")


def named(matrix: Matrix, name: str) -> Backend:
    return next(backend for backend in matrix.backends if backend.name == f"backends:{name}")


def with_verdict(backend: Backend, verdict: Verdict) -> list[Result]:
    return [result for result in backend.cases if result.verdict is verdict]


@pytest.fixture(scope="module")
def talkative(tmp_path_factory: pytest.TempPathFactory) -> Matrix:
    """Return what a scan of a callable that prints without end and of one that prints why it fails says."""
    return scanned(tmp_path_factory.mktemp("talkative"), FORWARD, "floods", "silent")


@pytest.fixture(scope="module")
def remembering(tmp_path_factory: pytest.TempPathFactory) -> Matrix:
    """Return what a scan of a callable that remembers the keys of each shape says."""
    return scanned(tmp_path_factory.mktemp("remembering"), CONFIGS, "cached")


def test_printing_without_end_is_a_crash_in_words(talkative: Matrix) -> None:
    backend = named(talkative, "floods")
    dead = with_verdict(backend, Verdict.CRASHED)
    assert dead
    limit = f"{MOST_OUTPUT >> 20} MiB"
    assert {result.detail["how"] for result in dead} == {
        f"died of SIGXFSZ: wrote more than {limit} into one file, such as its output"
    }
    assert {result.detail["said"] for result in dead} <= {"all work and no play"} | {
        "all work and no play"[:end] for end in range(1, 20)
    }
    cases = {record.id: record.case for record in talkative.cases}
    assert {cases[result.id].dtype for result in dead} == {"float16"}
    (rule,) = [rule for rule in backend.rules if rule.verdict.fails]
    assert rule.verdict is Verdict.CRASHED
    assert rule.when == {"dtype": ("float16",)}


def test_a_flood_costs_no_other_case(talkative: Matrix) -> None:
    backend = named(talkative, "floods")
    assert {result.verdict for result in backend.cases} == {Verdict.CRASHED, Verdict.OK, Verdict.REFUSED}
    assert talkative.runs[0].complete
    assert len(with_verdict(named(talkative, "silent"), Verdict.UNWRITTEN)) > 20


def test_the_last_words_before_a_failure_are_kept(talkative: Matrix) -> None:
    backend = named(talkative, "silent")
    failing = [result for result in backend.cases if result.verdict.fails]
    assert {result.verdict for result in failing} == {Verdict.UNWRITTEN}
    assert {result.detail["said"] for result in failing} == {"FATAL: kernel not built"}
    for result in with_verdict(backend, Verdict.OK):  # without a row there is nothing to write
        assert "said" not in result.detail


def test_a_cache_by_shape_is_a_rule_on_the_call_before(remembering: Matrix) -> None:
    failing = [rule for rule in named(remembering, "cached").rules if rule.verdict.fails]
    assert {rule.verdict for rule in failing} == {Verdict.WRONG}
    for rule in failing:
        assert set(rule.when["earlier"]) <= REMEMBERED
    # With one key out is right whatever the keys were: the rule leaves that out, and what fails all the same
    # has a rule of its cases alone.
    (rule,) = [rule for rule in failing if not rule.cases]
    assert "out" in rule.outputs
    assert set(rule.when) == {"earlier", "seqlen_kv"}
    assert set(rule.when["earlier"]) == REMEMBERED
    assert "1" not in rule.when["seqlen_kv"]


def test_what_other_cases_left_behind_is_held_against_nobody(remembering: Matrix) -> None:
    backend = named(remembering, "cached")
    cases = {record.id: record.case for record in remembering.cases}
    for result in with_verdict(backend, Verdict.WRONG):
        assert cases[result.id].earlier in REMEMBERED, cases[result.id]
    unclear = with_verdict(backend, Verdict.INCONCLUSIVE)
    assert unclear
    for result in unclear:
        assert result.detail["order"] == "wrong after other cases in the same process, ok alone"
        assert cases[result.id].earlier not in REMEMBERED


@pytest.mark.parametrize(("hard", "said"), [(4 << 20, "4 MiB"), (1000, "1000 bytes")])
def test_a_lower_limit_of_the_system_is_the_one_that_is_told(hard: int, said: str) -> None:
    told = "from attnprobe.run.death import how_it_ended; import signal; print(how_it_ended(-signal.SIGXFSZ))"
    script = f"import resource; resource.setrlimit(resource.RLIMIT_FSIZE, ({hard}, {hard})); {told}"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert f"wrote more than {said} into" in done.stdout
