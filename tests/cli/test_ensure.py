from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from attnprobe import read_matrix
from attnprobe.config import AttentionConfig
from attnprobe.probe.plan import plan_of_configs

if TYPE_CHECKING:
    from tests.conftest import Attnprobe

PLAIN = {"head_dim": 8, "heads": 1, "seqlen_q": 4, "dtype": "float32"}


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """Return a file of one configuration, which `small_matrix` proves."""
    path = tmp_path / "job.json"
    path.write_text(json.dumps([PLAIN]))
    return path


def test_what_is_proven_is_chosen_without_probing(
    attnprobe: Attnprobe, job: Path, small_matrix: Path, environment: dict[str, str]
) -> None:
    known = {"ATTNPROBE_MATRIX": str(small_matrix)}
    done = attnprobe("ensure", "--config", job, "--backend", "torch-math", env=known, timeout=20)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "backend     configuration",
        "torch-math  dtype float32, head_dim 8, heads 1, seqlen_q 4",
    ]
    assert done.stderr.splitlines() == ["probed: 0 of 1 configurations", f"matrix: {small_matrix}"]
    assert not Path(environment["ATTNPROBE_DATA_DIR"]).exists()
    json_too = attnprobe("ensure", "--config", job, "--format", "json", env=known, timeout=20)
    document = json.loads(json_too.stdout)
    assert (document["probed"], document["reason"]) == (0, "")
    assert document["digest"] == read_matrix(small_matrix).digest
    (decision,) = document["decisions"]
    assert decision["backend"] in {"torch-flash", "torch-math"}
    assert {one["status"] for one in decision["candidates"]} == {"proven"}
    assert decision["config"]["seqlen_kv"] == 4


def test_what_is_denied_is_1_and_says_why(
    attnprobe: Attnprobe, job: Path, small_matrix: Path, tmp_path: Path
) -> None:
    job.write_text(json.dumps([PLAIN, {**PLAIN, "alibi": True}]))
    done = attnprobe("ensure", "--config", job, env={"ATTNPROBE_MATRIX": str(small_matrix)}, timeout=20)
    assert done.returncode == 1, done.stderr
    first, second, *denied = done.stdout.splitlines()[1:]
    assert first.split()[0] in {"torch-flash", "torch-math"}
    assert second.split()[0] == "none"
    assert [line.split(": ")[1] for line in denied] == ["denied", "denied"]
    assert sorted(one.name for one in tmp_path.iterdir()) == ["job.json"]


def test_what_could_not_be_measured_is_3(attnprobe: Attnprobe, job: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = attnprobe("ensure", "--config", job, env={"ATTNPROBE_DATA_DIR": str(tmp_path / "file" / "data")})
    assert done.returncode == 3
    assert done.stdout.splitlines()[1].split()[0] == "none"
    assert "not all is known: nothing was probed: NotADirectoryError" in done.stderr
    assert "Traceback" not in done.stderr


def test_in_mode_veto_what_is_not_known_will_do(
    attnprobe: Attnprobe, job: Path, small_matrix: Path, tmp_path: Path
) -> None:
    job.write_text(json.dumps([{**PLAIN, "head_dim": 16, "dtype": "bfloat16"}]))
    (tmp_path / "file").write_text("")
    # Nothing can be probed: there is nowhere to put it.
    env = {"ATTNPROBE_MATRIX": str(small_matrix), "ATTNPROBE_DATA_DIR": str(tmp_path / "file" / "data")}
    asked = ("ensure", "--config", job, "--backend", "torch-math")
    done = attnprobe(*asked, env=env)
    assert done.returncode == 3
    assert "  torch-math: unrefuted: " in done.stdout
    assert attnprobe(*asked, "--mode", "veto", env=env).returncode == 0


@pytest.mark.slow
def test_a_launchers_prolog_probes_once(attnprobe: Attnprobe, job: Path, environment: dict[str, str]) -> None:
    done = attnprobe("ensure", "--config", job, "--backend", "torch-math", "--time-limit", "2m")
    assert done.returncode == 0, done.stderr
    assert "probed: 1 of 1 configurations" in done.stderr
    (written,) = Path(environment["ATTNPROBE_DATA_DIR"]).glob("*.json")
    assert f"matrix: {written}" in done.stderr
    again = attnprobe("ensure", "--config", job, "--backend", "torch-math")
    assert (again.returncode, again.stdout) == (0, done.stdout)
    assert "probed: 0 of 1 configurations" in again.stderr


@pytest.mark.parametrize(
    ("content", "arguments", "what"),
    [
        (None, (), "cannot be read"),
        ("[]", (), "holds no configurations"),
        ('[{"heads": 5, "heads_kv": 2}]', (), "heads=5 is no multiple of heads_kv=2"),
        ('[{"head_dim": 0}]', (), "is no attention configuration"),
        ("[{}]", ("--time-limit", "soon"), "'soon' is no duration"),
        ("[{}]", ("--mode", "guess"), "'guess' is not one of"),
    ],
)
def test_a_bad_request_is_2(
    attnprobe: Attnprobe, job: Path, content: str | None, arguments: tuple[str, ...], what: str
) -> None:
    job.unlink() if content is None else job.write_text(content)
    done = attnprobe("ensure", "--config", job, *arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    assert what in done.stderr
    assert "Traceback" not in done.stderr


# The scan that it runs.


def test_an_exact_scan_has_no_neighbours(attnprobe: Attnprobe, job: Path) -> None:
    plan = ("scan", "--config", job, "--plan", "--format", "json")
    exact = json.loads(attnprobe(*plan, "--exact").stdout)["cases"]
    whole = json.loads(attnprobe(*plan).stdout)["cases"]
    assert len(exact) == 1
    assert exact[0] == whole[0]
    assert len(whole) > 50
    config = AttentionConfig(head_dim=8, heads=1, seqlen_q=4, dtype="float32")
    (case,) = plan_of_configs([config, config], neighbours=False).cases
    assert case.id == exact[0]["id"]
    done = attnprobe("scan", "--exact", "--plan")
    assert done.returncode == 2
    assert "--exact goes with --config" in done.stderr
