from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from msgspec import structs

from attnprobe.matrix.schema import Backend, Matrix, Rule, sealed
from attnprobe.matrix.store import encode
from attnprobe.verdict import Evidence, Verdict

if TYPE_CHECKING:
    from tests.conftest import Attnprobe

WIDE = tuple(range(200, 257, 8))
OFF = ("NVTE_FLASH_ATTN_V2=0", "NVTE_FLASH_ATTN_V3=0", "NVTE_FLASH_ATTN_V4=0")
JOB = {
    "pass": "backward",
    "dtype": "bfloat16",
    "head_dim": 256,
    "head_dim_v": 256,
    "heads": 16,
    "heads_kv": 16,
    "batch": 1,
    "seqlen_q": 4096,
    "seqlen_kv": 4096,
    "mask": "causal-top-left",
    "dropout": 0.1,
    "layout": "transposed",
}
DROPOUT = {"pass": ("backward",), "dropout": ("on",), "head_dim": WIDE}


@pytest.fixture
def export(attnprobe: Attnprobe, handmade: Matrix, tmp_path: Path) -> Any:
    """Return what prints for a job; `rules` by backend, of a FIXTURE in which nothing was measured."""

    def run(rules: dict[str, dict[str, Any]], *configs: dict[str, Any], options: tuple[str, ...] = ()) -> Any:
        backends = tuple(
            Backend(
                name=name,
                status="probed",
                rules=(Rule(id=f"r{i}", when=when, verdict=Verdict.UNWRITTEN, evidence=Evidence.TRACED),),
            )
            for i, (name, when) in enumerate(rules.items())
        )
        matrix = sealed(structs.replace(handmade, backends=backends, cases=()))
        (tmp_path / "m.json").write_bytes(encode(matrix))
        (tmp_path / "job.json").write_text(json.dumps([JOB | config for config in configs]))
        return attnprobe("export", "te-env", "-m", "m.json", "--config", "job.json", *options)

    return run


def test_the_help_fits_and_the_format_is_listed(attnprobe: Attnprobe) -> None:
    assert "te-env" in attnprobe("export", "--help").stdout
    helped = attnprobe("export", "te-env", "--help").stdout
    assert "NVTE_FUSED" not in helped
    assert all(len(line) <= 80 for line in helped.splitlines())


def test_a_version_that_is_denied_for_all_is_switched_off(export: Any) -> None:
    # Transformer Engine pads 192 to 256 for flash-attn 2.
    done = export({"flash-attn-2": DROPOUT}, {}, {"head_dim": 192}, options=("--assume-device",))
    assert (done.returncode, done.stdout) == (0, "export NVTE_FLASH_ATTN_V2=0\n")
    assert "flash-attn-2: denied for all of 2" in done.stderr
    assert "entry 2: traced: backward, dropout, head dim 200 to 256 by 8" in done.stderr
    assert "flash-attn-3: not denied (unknown: not in this matrix)" in done.stderr


def test_a_version_that_is_denied_for_some_is_not(export: Any) -> None:
    done = export({"flash-attn-2": DROPOUT}, {}, {"dropout": 0.0})
    assert (done.returncode, done.stdout) == (0, "")
    assert "flash-attn-2: denied for 1 of 2" in done.stderr
    assert "the guard can" in done.stderr


def test_only_what_megatron_lets_be_set_is_printed(export: Any) -> None:
    rules = {f"flash-attn-{major}": {"pass": ("backward",)} for major in "234"}
    done = export(rules, {})
    assert done.returncode == 0
    assert done.stdout.split() == [word for name in OFF for word in ("export", name)]
    fused = {f"transformer-engine-{kind}": {"pass": ("backward",)} for kind in ("fused", "unfused")}
    done = export(rules | fused, {}, {"pass": "forward"})
    assert (done.returncode, done.stdout) == (1, "")
    assert "entry 1: no backend of Transformer Engine is left" in done.stderr
    assert "entry 2: no" not in done.stderr
    assert export(fused, {}).returncode == 0


def test_a_causal_mask_of_equal_lengths_has_one_alignment(export: Any) -> None:
    """flash-attn refuses the other one, which Transformer Engine then does not ask it for."""
    refused = {"flash-attn-2": {"mask": ("causal-top-left",)}}
    assert export(refused, {"dropout": 0.0}).stdout == ""
    assert export(refused, {"dropout": 0.0, "seqlen_kv": 8192}).stdout == "export NVTE_FLASH_ATTN_V2=0\n"


def test_a_public_report_counts_too(export: Any) -> None:
    done = export({"flash-attn-2": {"mask": ("float",)}}, {})
    assert done.stdout == "export NVTE_FLASH_ATTN_V2=0\n"
    assert "entry 1: reported: FlashAttention 2 launches no backward kernel" in done.stderr


def test_what_cannot_be_read(attnprobe: Attnprobe, export: Any, tmp_path: Path) -> None:
    assert attnprobe("export", "te-env", "-m", "m.json").returncode == 2
    export({}, {})
    (tmp_path / "none.json").write_text("[]")
    done = attnprobe("export", "te-env", "-m", "m.json", "--config", "none.json")
    assert (done.returncode, done.stdout) == (2, "")
    assert "holds no configurations" in done.stderr
    done = attnprobe("export", "te-env", "--config", "job.json")
    assert (done.returncode, done.stdout) == (3, "")
