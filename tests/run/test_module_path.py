"""What lies about in the working directory does not stand before the libraries a scan probes."""

from __future__ import annotations

import subprocess
import sysconfig
from pathlib import Path

from attnprobe.matrix.store import read_matrix
from attnprobe.verdict import Verdict
from tests.conftest import clean_environment

JOB = "- {pass: forward, head_dim: 8, heads: 1, seqlen_q: 16}\n"
KERNELS = """
import torch

def attention(q, k, v, **options):
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, **options)
"""


def test_a_file_named_as_a_library_is_not_that_library(tmp_path: Path) -> None:
    for name in ("torch", "msgspec", "select"):
        (tmp_path / f"{name}.py").write_text("raise RuntimeError('the working directory came first')")
    (tmp_path / "my_kernels.py").write_text(KERNELS)
    (tmp_path / "job.yaml").write_text(JOB)
    script = Path(sysconfig.get_path("scripts")) / "attnprobe"
    backends = ["--backend", "torch-math", "--backend", "my_kernels:attention"]
    done = subprocess.run(
        [script, "scan", "--config", "job.yaml", "--budget", "1s", *backends, "-o", "json:m.json"],
        env=clean_environment(tmp_path / "data"),
        cwd=tmp_path,
        timeout=120,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    matrix = read_matrix(tmp_path / "m.json")
    for backend in matrix.backends:
        assert Verdict.OK in {result.verdict for result in backend.cases}, backend
