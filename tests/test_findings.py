"""What a scan of torch's own CPU backends finds without being told, and what it must not find."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

import attnprobe
from attnprobe.verdict import Verdict

if TYPE_CHECKING:
    from attnprobe.matrix.schema import Backend, Matrix, Rule

KERNEL = '''
import math
import torch

def attention(q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
    """Textbook attention, computed in float32."""
    if enable_gqa:
        k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
        v = v.repeat_interleave(q.shape[1] // v.shape[1], 1)
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    scores = (q.float() @ k.float().transpose(-1, -2)) * scale
    if is_causal:
        scores = scores.masked_fill(~torch.ones(scores.shape[-2:], dtype=torch.bool).tril(), -math.inf)
    if attn_mask is not None and attn_mask.dtype is torch.bool:
        scores = scores.masked_fill(~attn_mask, -math.inf)
    elif attn_mask is not None:
        scores = scores + attn_mask.float()
    dead = (scores == -math.inf).all(-1, keepdim=True)
    p = torch.softmax(scores.masked_fill(dead, 0.0), -1).masked_fill(dead, 0.0)
    return (torch.dropout(p, dropout_p, train=True) @ v.float()).to(q.dtype)
'''

pytestmark = pytest.mark.skipif(
    not torch.__version__.startswith("2.13.0"), reason="the findings are those of torch 2.13.0"
)


def scan(path: Path, *options: str) -> Matrix:
    """Scan for real and return the matrix."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("ATTNPROBE_")}
    done = subprocess.run(
        [sys.executable, "-m", "attnprobe", "scan", *options, "-o", f"json:{path}"],
        env=environment,
        cwd=path.parent,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return attnprobe.read_matrix(path)


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> Matrix:
    return scan(tmp_path_factory.mktemp("quick") / "m.json", "--level", "quick")


def backend(matrix: Matrix, name: str) -> Backend:
    return next(one for one in matrix.backends if one.name == name)


def failing(matrix: Matrix, name: str) -> list[Rule]:
    return [rule for rule in backend(matrix, name).rules if rule.verdict.fails]


def detail(matrix: Matrix, name: str, rule: Rule) -> dict[str, Any]:
    return next(r.detail for r in backend(matrix, name).cases if r.id == rule.witness)


@pytest.mark.parametrize("name", ["torch-flash", "torch-default", "aten-flash"])
def test_rows_masked_by_finfo_min_are_wrong_in_the_backward_in_two_dtypes(quick: Matrix, name: str) -> None:
    (rule,) = (r for r in failing(quick, name) if r.when.get("masked_rows") == ("finfo-min",))
    assert rule.verdict is Verdict.WRONG
    assert rule.when["pass"] == ("backward",)
    assert rule.when["dtype"] == ("float32", "bfloat16")
    assert {"dq", "dk", "dv"} <= set(rule.outputs)
    assert "torch-math" in rule.right
    found = detail(quick, name, rule)["wrong"]
    case = quick.case(rule.witness)
    assert case is not None
    assert found["dq"]["factor"] == pytest.approx(case.seqlen_kv, rel=0.01)


def test_nothing_else_is_found_in_the_public_call(quick: Matrix) -> None:
    for name in ("torch-flash", "torch-default"):
        assert [rule.when["masked_rows"] for rule in failing(quick, name)] == [("finfo-min",)]


def test_the_operator_reads_inputs_of_another_inner_stride_wrongly(quick: Matrix) -> None:
    strided = [r for r in failing(quick, "aten-flash") if r.when.get("layout") == ("inner-stride",)]
    assert strided
    for rule in strided:
        assert rule.verdict is Verdict.WRONG
        # Where every row is masked whole there is nothing to get wrong; no other axis may matter.
        assert rule.when.keys() <= {"layout", "masked_rows", "seqlen_q"}, rule.when
        assert "torch-math" in rule.right


def test_the_operator_dies_of_zero_lengths(quick: Matrix) -> None:
    deaths = [rule for rule in failing(quick, "aten-flash") if rule.verdict is Verdict.CRASHED]
    assert sorted(tuple(rule.when.items()) for rule in deaths) == [
        (("seqlen_kv", ("0",)),),
        (("seqlen_q", ("0",)),),
    ]
    for rule in deaths:
        assert detail(quick, "aten-flash", rule)["how"] == "died of SIGFPE"
        assert rule.skipped > 0


def test_the_operator_has_no_other_failing_rule(quick: Matrix) -> None:
    for rule in failing(quick, "aten-flash"):
        known = (
            rule.when.get("layout") == ("inner-stride",)
            or rule.when.get("masked_rows") == ("finfo-min",)
            or rule.verdict is Verdict.CRASHED
        )
        assert known, rule.when
        assert rule.localised


def test_rates_show_that_the_rules_are_no_wider_than_the_failure(quick: Matrix) -> None:
    for name in ("torch-flash", "torch-default", "aten-flash"):
        for rule in failing(quick, name):
            assert rule.rates is not None
            assert rule.rates.inside_tried > 0
            assert rule.rates.inside_failed == rule.rates.inside_tried
            assert rule.rates.outside_failed <= rule.rates.outside_tried // 2


def test_torch_math_has_no_failing_verdict(quick: Matrix) -> None:
    assert failing(quick, "torch-math") == []
    assert not any(result.verdict.fails for result in backend(quick, "torch-math").cases)


def test_the_kernel_that_ran_shows_the_silent_fallback(quick: Matrix) -> None:
    kernels = {r.kernel for r in backend(quick, "torch-default").cases if r.verdict is Verdict.OK}
    assert "math" in kernels
    assert any("flash" in kernel for kernel in kernels)


def test_what_rows_masked_whole_become_is_a_trait(quick: Matrix) -> None:
    traits = backend(quick, "torch-math").traits
    assert traits["whole-masked rows, masked_rows=-inf"] == "zeros"
    assert traits["whole-masked rows, masked_rows=false"] == "zeros"


def test_the_matrix_reached_pairs_and_is_complete(quick: Matrix) -> None:
    (run,) = quick.runs
    assert run.complete
    assert run.strength == 2
    assert run.executed == run.planned


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_scans_with_one_seed_give_the_same_document(tmp_path: Path) -> None:
    documents = []
    for name in ("one", "two"):
        path = tmp_path / f"{name}.json"
        scan(path, "--level", "quick", "--seed", "5")
        document = json.loads(path.read_text(encoding="utf-8"))
        documents.append({k: v for k, v in document.items() if k not in {"runs", "digest"}})
    assert documents[0] == documents[1]


@pytest.mark.timeout(1500)
@pytest.mark.parametrize(
    "seed",
    [
        pytest.param(0, marks=pytest.mark.slow),
        pytest.param(1, marks=pytest.mark.release),
        pytest.param(2, marks=pytest.mark.release),
    ],
)
def test_healthy_backends_have_no_failing_verdict_at_standard(seed: int, tmp_path: Path) -> None:
    kernel = tmp_path / "healthy.py"
    kernel.write_text(KERNEL, encoding="utf-8")
    mine = ("--backend", "torch-math", "--backend", f"{kernel}:attention")
    matrix = scan(tmp_path / "m.json", "--seed", str(seed), *mine)
    assert matrix.runs[0].strength == 3
    for one in matrix.backends:
        accused = [(r.id, r.verdict, r.detail) for r in one.cases if r.verdict.fails]
        assert accused == [], one.name
