"""docs/examples/triton_attention.py in Triton's interpreter: right, and found wrong where it is broken."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from attnprobe import read_matrix
from attnprobe.matrix.schema import Backend
from attnprobe.verdict import Verdict

if TYPE_CHECKING:
    from tests.conftest import Attnprobe

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="triton is for Linux")

DOCS = Path(__file__).parents[2] / "docs"
INTERPRETED = {"TRITON_INTERPRET": "1"}
COMPARE = """
import sys
import torch
from torch.nn.functional import scaled_dot_product_attention as right
sys.path.insert(0, sys.argv[1])
import triton_attention as example

torch.manual_seed(0)
for dtype, allowed in ((torch.float32, 2e-6), (torch.float16, 4e-3)):
    for heads, heads_kv, s_q, s_kv, causal in ((2, 2, 10, 10, False), (4, 2, 66, 97, True)):
        sizes = ((heads, s_q), (heads_kv, s_kv), (heads_kv, s_kv))
        q, k, v = (torch.randn(1, h, s, 16, dtype=dtype, requires_grad=True) for h, s in sizes)
        grad = torch.randn(1, heads, s_q, 16, dtype=dtype)
        options = {"is_causal": causal, "enable_gqa": heads != heads_kv}
        out = example.attention(q, k, v, **options)
        found = (out, *torch.autograd.grad(out, (q, k, v), grad))
        out = right(q.double(), k.double(), v.double(), **options)
        wanted = (out, *torch.autograd.grad(out, (q, k, v), grad.double()))
        errors = [float((a.double() - b).abs().max()) for a, b in zip(found, wanted, strict=True)]
        assert max(errors) < allowed, (dtype, heads, errors)
for options in ({"attn_mask": torch.ones(4, 4)}, {"dropout_p": 0.1}):
    try:
        example.attention(*(torch.ones(1, 1, 4, 16) for _ in range(3)), **options)
    except NotImplementedError as error:
        print(error)
try:
    example.attention(*(torch.ones(1, 1, 4, 16, dtype=torch.bfloat16) for _ in range(3)))
except NotImplementedError as error:
    print(error)
"""


def test_the_kernel_is_right_and_refuses_the_rest() -> None:
    done = subprocess.run(
        [sys.executable, "-c", COMPARE, str(DOCS / "examples")],
        env={**os.environ, **INTERPRETED, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "this kernel does not do attn_mask",
        "this kernel does not do dropout",
        "this kernel does not do torch.bfloat16 off a GPU",
    ]


def scanned(attnprobe: Attnprobe, name: str, place: Path) -> Backend:
    """Return what a scan with the command of docs/triton.md finds."""
    page = (DOCS / "triton.md").read_text(encoding="utf-8")
    (command,) = re.findall(rf"TRITON_INTERPRET=1 attnprobe (scan \S+ \S+:{name} .*?)\n", page)
    arguments = [one.replace("docs/", f"{DOCS}/") for one in command.split()]
    done = attnprobe(*arguments, "-o", f"json:{place}", env=INTERPRETED, timeout=600)
    assert done.returncode == 0, done.stderr
    (backend,) = read_matrix(place).backends
    return backend


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_healthy_kernel_is_found_healthy(attnprobe: Attnprobe, tmp_path: Path) -> None:
    backend = scanned(attnprobe, "attention", tmp_path / "m.json")
    verdicts = [result.verdict for result in backend.cases]
    assert set(verdicts) == {Verdict.OK, Verdict.REFUSED}
    assert verdicts.count(Verdict.OK) > 30


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_broken_kernel_is_found_and_its_script_shows_it(attnprobe: Attnprobe, tmp_path: Path) -> None:
    backend = scanned(attnprobe, "attention_broken", tmp_path / "m.json")
    (rule,) = (rule for rule in backend.rules if rule.verdict.fails)
    assert (rule.verdict, rule.outputs) == (Verdict.WRONG, ("dk",))
    assert rule.when["pass"] == ("backward",)
    script = attnprobe("export", "repro", tmp_path / "m.json", rule.id)
    assert script.returncode == 0, script.stderr
    (tmp_path / "repro.py").write_text(script.stdout)
    done = subprocess.run(
        [sys.executable, "repro.py", DOCS / "examples" / "triton_attention.py"],
        cwd=tmp_path,
        env={**os.environ, **INTERPRETED},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout.splitlines()[-1]) == (1, "FAILS: dk wrong"), done.stderr
