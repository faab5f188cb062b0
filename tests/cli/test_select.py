from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import pytest
from msgspec import structs

from attnprobe import read_matrix
from attnprobe.config import AttentionConfig
from attnprobe.matrix.schema import Matrix, sealed
from attnprobe.matrix.store import encode

if TYPE_CHECKING:
    from tests.conftest import Attnprobe

# What `small_matrix` scanned: one small configuration and its neighbours.
SIZES = {"head-dim": 8, "head-dim-v": 8, "heads": 1, "heads-kv": 1, "batch": 1, "seqlen-q": 4, "seqlen-kv": 4}
OTHERS = {"pass": "backward", "dtype": "float32", "mask": "none", "layout": "contiguous", "dropout": 0}
PLAIN = [word for name, value in {**SIZES, **OTHERS}.items() for word in (f"--{name}", str(value))]


@pytest.fixture
def elsewhere(small_matrix: Path, tmp_path: Path) -> Path:
    """Return the real matrix as if made on another CPU."""
    matrix = read_matrix(small_matrix)
    device = structs.replace(matrix.devices[0], name="Other CPU")
    path = tmp_path / "elsewhere.json"
    path.write_bytes(encode(sealed(structs.replace(matrix, devices=(device,)))))
    return path


def test_a_real_scan_proves_its_own_configuration(attnprobe: Attnprobe, small_matrix: Path) -> None:
    done = attnprobe("select", "-m", small_matrix, *PLAIN)
    assert done.returncode == 0, done.stderr + done.stdout
    first = done.stdout.splitlines()[0].split()[0]
    assert first in {"torch-flash", "torch-math"}
    assert "proven" in done.stdout


def test_json_has_the_published_names(attnprobe: Attnprobe, small_matrix: Path) -> None:
    done = attnprobe("select", "-m", small_matrix, *PLAIN, "--backend", "torch-math", "--format", "json")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["backend"] == "torch-math"
    (one,) = document["candidates"]
    assert set(one) == {"backend", "status", "verdict", "evidence", "reason", "rule", "witness", "strength"}
    assert (one["status"], one["verdict"], one["evidence"]) == ("proven", "ok", "measured")
    assert document["digest"] == read_matrix(small_matrix).digest


def test_none_allowed_is_1(attnprobe: Attnprobe, small_matrix: Path) -> None:
    done = attnprobe("select", "-m", small_matrix, *PLAIN, "--batch", "64")
    assert done.returncode == 1
    assert "beyond the measured" in done.stdout
    done = attnprobe("select", "-m", small_matrix, "--alibi", "on", "--mode", "veto", "--format", "json")
    assert done.returncode == 1
    assert {one["status"] for one in json.loads(done.stdout)["candidates"]} == {"denied"}


def test_a_matrix_of_another_device_is_3_unless_assumed(attnprobe: Attnprobe, elsewhere: Path) -> None:
    done = attnprobe("select", "-m", elsewhere, *PLAIN)
    assert done.returncode == 3
    assert "does not match: measured on Other CPU" in done.stdout
    assert attnprobe("select", "-m", elsewhere, *PLAIN, "--assume-device").returncode == 0
    assert attnprobe("why", "-m", elsewhere, "torch-math", *PLAIN).returncode == 3
    assert attnprobe("why", "-m", elsewhere, "torch-math", "--alibi", "on").returncode == 0


def test_the_matrix_can_be_named_by_the_environment(attnprobe: Attnprobe, small_matrix: Path) -> None:
    done = attnprobe("select", *PLAIN)
    assert done.returncode == 3
    assert "there is no matrix for" in done.stderr
    assert attnprobe("select", *PLAIN, env={"ATTNPROBE_MATRIX": str(small_matrix)}).returncode == 0


def test_a_changed_document_is_refused(attnprobe: Attnprobe, small_matrix: Path, tmp_path: Path) -> None:
    changed = tmp_path / "changed.json"
    changed.write_bytes(small_matrix.read_bytes().replace(b'"refused"', b'"wrong"', 1))
    done = attnprobe("select", "-m", changed, *PLAIN)
    assert done.returncode == 2
    assert "changed after it was written" in done.stderr


def test_observe_says_what_the_others_would_do(attnprobe: Attnprobe, small_matrix: Path) -> None:
    done = attnprobe("select", "-m", small_matrix, "--alibi", "on", "--mode", "observe", "--format", "json")
    assert done.returncode == 0
    assert json.loads(done.stdout)["would"] == {"gate": None, "veto": None}


def test_every_field_of_a_configuration_is_an_option(attnprobe: Attnprobe) -> None:
    for command in ("select", "why"):
        help_text = attnprobe(command, "--help").stdout
        for field in msgspec.structs.fields(AttentionConfig):
            assert f"--{field.encode_name.replace('_', '-')} " in help_text


@pytest.mark.parametrize(
    "wrong",
    [
        ["--dtype", "float7"],
        ["--head-dim", "0"],
        ["--head-dim", "wide"],
        ["--dropout", "2"],
        ["--heads", "5", "--heads-kv", "2"],
        ["--scale", "large"],
        ["--mode", "guess"],
        ["--strength", "4"],
    ],
)
def test_a_wrong_option_is_2(attnprobe: Attnprobe, small_matrix: Path, wrong: list[str]) -> None:
    done = attnprobe("select", "-m", small_matrix, *wrong)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr


def test_scale_takes_a_number_or_default(attnprobe: Attnprobe, small_matrix: Path) -> None:
    assert attnprobe("select", "-m", small_matrix, *PLAIN, "--scale", "default").returncode == 0
    done = attnprobe("select", "-m", small_matrix, *PLAIN, "--scale", "0.25")
    assert done.returncode in {0, 1}
    assert "scale default" not in done.stdout


def test_why_names_rule_witness_and_what_passes_beside_it(
    attnprobe: Attnprobe, handmade: Matrix, tmp_path: Path
) -> None:
    path = tmp_path / "handmade.json"
    path.write_bytes(encode(handmade))
    arguments = [
        "why",
        "-m",
        str(path),
        "--assume-device",
        "broken-flash",
        "--head-dim",
        "256",
        "--dropout",
        "0.1",
    ]
    done = attnprobe(*arguments)
    assert done.returncode == 0, done.stderr
    rule = handmade.backends[0].rules[0]
    assert "broken-flash: denied" in done.stdout
    assert rule.witness in done.stdout
    assert "passing beside it" in done.stdout
    document = json.loads(attnprobe(*arguments, "--format", "json").stdout)
    assert document["rule"] == "aaaaaaaa"
    assert document["right"] == ["torch-math"]
    done = attnprobe("why", "-m", path, "no-such-kernel")
    assert done.returncode == 2
    assert "broken-flash" in done.stderr


def test_asking_needs_no_torch(small_matrix: Path) -> None:
    script = (
        "import sys; sys.modules['torch'] = None; sys.modules['numpy'] = None\n"
        "from attnprobe.cli.main import main\n"
        "main()"
    )
    command = [sys.executable, "-c", script, "select", "-m", str(small_matrix), *PLAIN]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
