"""Scripts of failures that a real scan found, run for real: they show what the scan saw."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from attnprobe import read_matrix
from attnprobe.config import Case
from attnprobe.export._choose import choose
from attnprobe.export._script import script
from attnprobe.verdict import Verdict
from tests.conftest import clean_environment, run

if TYPE_CHECKING:
    from attnprobe.matrix.schema import Matrix, Result
    from tests.export.conftest import MatrixOf, RunScript

pytestmark = pytest.mark.slow  # real scans and the scripts of what they find

PLAIN = """
- {head_dim: 8, heads: 2, seqlen_q: 4}
- {head_dim: 8, heads: 2, seqlen_q: 4, mask: float, masked_rows: finfo-min}
"""
KERNELS = '''
"""Attention with one fault each."""
import ctypes, os, time
import torch
from torch.nn.functional import scaled_dot_product_attention as right


class Gradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, options):
        ctx.options = options
        ctx.save_for_backward(q, k, v)
        return right(q, k, v, **options)

    @staticmethod
    def backward(ctx, grad):
        leaves = [tensor.detach().requires_grad_() for tensor in ctx.saved_tensors]
        with torch.enable_grad():
            out = right(*leaves, **ctx.options)
        dq, dk, dv = torch.autograd.grad(out, leaves, grad)
        return dq, 1.5 * dk, dv, None


def wrong_dk(q, k, v, **options):
    return Gradients.apply(q, k, v, options)


def unwritten(q, k, v, **options):
    found = right(q, k, v, **options)
    out = torch.empty_like(found)
    out[..., 1:] = found[..., 1:]
    return out


def nonfinite(q, k, v, **options):
    return right(q, k, v, **options) / 0.0


def short(q, k, v, **options):
    with torch.no_grad():
        return right(q, k, v, **options)[..., :1]


def changes(q, k, v, **options):
    with torch.no_grad():
        k.mul_(2)
    return right(q, k, v, **options)


def dropout(q, k, v, dropout_p=0.0, **options):
    return right(q, k, v, dropout_p=min(2 * dropout_p, 0.9), **options)


def one_mask(q, k, v, dropout_p=0.0, attn_mask=None, **options):
    state, outs = torch.get_rng_state(), []
    for entry in range(q.shape[0]):
        torch.set_rng_state(state)
        here = slice(entry, entry + 1)
        mask = attn_mask if attn_mask is None or attn_mask.shape[0] == 1 else attn_mask[here]
        outs.append(right(q[here], k[here], v[here], attn_mask=mask, dropout_p=dropout_p, **options))
    return torch.cat(outs)


def exits(*arguments, **options):
    os._exit(3)


def hangs(*arguments, **options):
    time.sleep(1000)


def reads_past_k(q, k, v, **options):
    ctypes.string_at(k.data_ptr() + k.nbytes, 4)
    return right(q, k, v, **options)


def writes_past_out(q, k, v, **options):
    out = right(q, k, v, **options).clone()
    ctypes.memset(out.data_ptr() + out.nbytes, 1, 4)
    return out
'''
READ_PAST_K = {"bounds": [{"where": "k", "access": "read", "offset": 0, "count": 1}]}
WRITTEN_PAST_OUT = {
    "bounds": [{"where": "an allocation of 1024 bytes", "access": "write", "offset": 0, "count": 4}]
}


def scanned(place: Path, config: str, backends: list[str], *options: str) -> Matrix:
    (place / "job.yaml").write_text(config)
    (place / "kernels.py").write_text(KERNELS)
    named = [argument for name in backends for argument in ("--backend", name)]
    done = run(
        ["scan", "--config", "job.yaml", *named, *options, "-o", "json:m.json"],
        clean_environment(place / "data"),
        place,
    )
    assert done.returncode == 0, done.stderr
    return read_matrix(place / "m.json")


@pytest.fixture(scope="module")
def cpu(tmp_path_factory: pytest.TempPathFactory) -> Matrix:
    place = tmp_path_factory.mktemp("cpu")
    return scanned(place, PLAIN, ["torch-default", "torch-flash", "aten-flash"], "--budget", "20s")


@pytest.fixture(scope="module")
def callables(tmp_path_factory: pytest.TempPathFactory) -> tuple[Matrix, Path]:
    place = tmp_path_factory.mktemp("callables")
    names = ["wrong_dk", "unwritten", "nonfinite", "short", "changes", "dropout", "one_mask"]
    # The cases of the job come first, then what differs from them on one axis.
    config = "- {head_dim: 8, heads: 1, seqlen_q: 16}\n"
    config += "- {pass: forward, head_dim: 8, heads: 1, seqlen_q: 16}\n"
    config += "- {head_dim: 8, heads: 1, seqlen_q: 16, dropout: 0.2}\n"
    config += "- {batch: 2, head_dim: 8, heads: 1, seqlen_q: 16, dropout: 0.2}\n"
    return scanned(place, config, [f"kernels.py:{name}" for name in names], "--budget", "8s"), place


def failing(matrix: Matrix, name: str) -> list[Result]:
    (backend,) = (one for one in matrix.backends if one.name == name)
    return [result for result in backend.cases if result.verdict.fails]


def written(matrix: Matrix, result: Result, name: str, place: Path) -> Path:
    text = script(choose(matrix, result.id, name, anything=False))
    assert "attnprobe" not in "".join(line for line in text.splitlines() if "import" in line)
    assert str(place) not in text
    path = place / f"repro_{result.id}_{re.sub('[^a-z]', '_', name)}.py"
    path.write_text(text)
    return path


def as_seen(done: subprocess.CompletedProcess[str], detail: dict[str, Any]) -> None:
    """Every tensor that the scan called wrong is wrong here, in as many elements."""
    for kind in ("wrong", "nonfinite"):
        for name, facts in detail.get(kind, {}).items():
            found = re.search(rf"^{name}: wrong, (\d+) of (\d+) elements", done.stdout, flags=re.MULTILINE)
            assert found, done.stdout
            assert int(found[2]) == facts["of"]
            assert abs(int(found[1]) - facts["elements"]) <= max(2, 0.02 * facts["of"])
            if "factor" in facts:
                assert f"{facts['factor']:.3g} times what is expected" in done.stdout


def one_of_a_kind(matrix: Matrix) -> list[tuple[str, Result]]:
    """Return a failing case of each backend, and one for each further set of outputs that was wrong."""
    found: dict[tuple[str, ...], tuple[str, Result]] = {}
    for backend in matrix.backends:
        for number, result in enumerate(failing(matrix, backend.name)):
            kind = (backend.name, *result.outputs) if not number else result.outputs
            found.setdefault(kind, (backend.name, result))
    return list({(name, result.id): (name, result) for name, result in found.values()}.values())


def test_the_rules_of_the_cpu_backends(cpu: Matrix, tmp_path: Path, run_script: RunScript) -> None:
    """Float masks with rows of finfo.min, inner strides, lengths of 0: scripts show what the scan saw."""
    found = one_of_a_kind(cpu)
    assert {name for name, _ in found} >= {"torch-default", "torch-flash", "aten-flash"}
    endings = set()
    for name, result in found:
        done = run_script(written(cpu, result, name, tmp_path))
        assert done.returncode == 1, (name, result, done.stdout + done.stderr)
        ending = done.stdout.splitlines()[-1]
        if result.verdict.ends_worker:
            assert ending == f"FAILS: the process {result.detail['how']}"
        else:
            assert ending == f"FAILS: {', '.join(result.outputs)} wrong"
            as_seen(done, result.detail)
        endings.add(ending)
    assert "FAILS: the process died of SIGFPE" in endings
    assert "FAILS: dq, dk, dv wrong" in endings


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("wrong_dk", "dk wrong"),
        ("unwritten", "out never written"),
        ("nonfinite", "out"),
        ("short", "out not as promised"),
        ("changes", "k changed by the call"),
        ("dropout", "the dropout rate is another"),
        ("one_mask", "one dropout mask for several batch entries"),
    ],
)
def test_callables(name: str, says: str, callables: tuple[Matrix, Path], run_script: RunScript) -> None:
    matrix, place = callables
    backend = f"kernels:{name}"
    cases = {record.id: record.case for record in matrix.cases}
    # A fault of dropout is in cases with dropout, others show best without.
    wants = name in {"dropout", "one_mask"}
    results = sorted(failing(matrix, backend), key=lambda r: bool(cases[r.id].dropout) is not wants)
    path = written(matrix, results[0], backend, place)
    done = run_script(path)
    assert done.returncode == 1, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].startswith(f"FAILS: {says}"), done.stdout
    as_seen(done, results[0].detail)


@pytest.mark.parametrize(
    ("name", "verdict", "detail", "says"),
    [
        ("exits", Verdict.CRASHED, {"how": "exited with code 3"}, "the process exited with code 3"),
        ("hangs", Verdict.HUNG, {"how": "no answer within 5 s"}, "no answer within 5 s"),
        ("reads_past_k", Verdict.OUT_OF_BOUNDS, READ_PAST_K, "the process died of SIGSEGV"),
        ("writes_past_out", Verdict.OUT_OF_BOUNDS, WRITTEN_PAST_OUT, "the process died of SIGABRT"),
    ],
)
def test_what_ends_the_process(  # noqa: PLR0913, PLR0917  # a row of the table, and fixtures
    name: str,
    verdict: Verdict,
    detail: dict[str, Any],
    says: str,
    matrix_of: MatrixOf,
    run_script: RunScript,
    tmp_path: Path,
) -> None:
    """A scan of these takes a while, so the matrix is made by hand; the script is run for real."""
    file = tmp_path / "kernels.py"
    file.write_text(KERNELS)
    case = Case(head_dim=8, head_dim_v=8, seqlen_q=16, seqlen_kv=16)
    matrix = matrix_of(case, f"kernels:{name}", verdict, detail=detail, outputs=(), file=file)
    path = written(matrix, matrix.backends[0].cases[0], f"kernels:{name}", tmp_path)
    done = run_script(path)
    assert (done.returncode, done.stdout.splitlines()[-1]) == (1, f"FAILS: {says}"), done.stdout + done.stderr
    file.write_text(f"from torch.nn.functional import scaled_dot_product_attention as {name}\n")
    if name == "reads_past_k":
        assert run_script(path).stdout.splitlines()[-1] == "passes: not reproduced here"


def test_the_file_of_a_callable(
    callables: tuple[Matrix, Path], tmp_path: Path, run_script: RunScript
) -> None:
    """It is looked for beside the script, else named; another content is said; a fixed one passes."""
    matrix, place = callables
    name = "kernels:nonfinite"
    path = written(matrix, failing(matrix, name)[0], name, place)
    moved = tmp_path / path.name
    moved.write_bytes(path.read_bytes())
    absent = run_script(moved)
    assert absent.returncode == 2
    assert "kernels.py is not here" in absent.stderr
    assert run_script(moved, place / "kernels.py").returncode == 1
    fixed = tmp_path / "fixed.py"
    fixed.write_text(KERNELS.replace("/ 0.0", ""))
    done = run_script(moved, fixed)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "not what was scanned" in done.stdout
    assert done.stdout.splitlines()[-1] == "passes: not reproduced here"


def test_a_refusal_is_no_failure(
    callables: tuple[Matrix, Path], tmp_path: Path, run_script: RunScript
) -> None:
    matrix, place = callables
    name = "kernels:nonfinite"
    path = written(matrix, failing(matrix, name)[0], name, place)
    refusing = tmp_path / "refusing.py"
    refusing.write_text("def nonfinite(*arguments, **options):\n    raise ValueError('not this one')\n")
    done = run_script(path, refusing)
    assert done.returncode == 0
    assert done.stdout.splitlines()[-2:] == [
        "refused: ValueError: not this one",
        "passes: not reproduced here",
    ]


def test_a_script_alone(cpu: Matrix, tmp_path: Path) -> None:
    name, result = next(one for one in one_of_a_kind(cpu) if not one[1].verdict.ends_worker)
    path = written(cpu, result, name, tmp_path)
    done = subprocess.run([sys.executable, path], capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    assert done.stdout.startswith(f"torch {torch.__version__}\n")
    as_seen(done, result.detail)
