"""`attnprobe device` and the GPUs of `doctor`, on stub drivers loaded by the real clients."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from syrupy.assertion import SnapshotAssertion

from attnprobe.cli.device import lines
from attnprobe.device.gpus import Machine
from tests.device.stubs import machines

if TYPE_CHECKING:
    from tests.conftest import Attnprobe

MODELS = (
    "rtx-3090",
    "rtx-4090",
    "rtx-5090",
    "rtx-pro-6000",
    "l40s",
    "a100",
    "h100-mig",
    "h200",
    "b200",
    "b300",
    "gb10",
    "thor",
    "orin",
)
PROCESS = {"pid": 4242, "memory": 12 << 30, "name": "/opt/venv/bin/python3"}


def two_models() -> dict[str, Any]:
    """Return a machine whose GPUs CUDA numbers otherwise than NVML."""
    return machines.together("rtx-3090", "b200", cuda_order=[1, 0])


@pytest.mark.parametrize("model", [*MODELS, "two-models"])
def test_a_machine(attnprobe: Attnprobe, tmp_path: Path, model: str, snapshot: SnapshotAssertion) -> None:
    machine = two_models() if model == "two-models" else machines.facts(model)
    done = attnprobe("device", "--format", "json", env=machines.environment(tmp_path, machine))
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert done.stdout == snapshot(name="json")
    assert "\n".join(lines(msgspec.json.decode(done.stdout, type=Machine))) == snapshot(name="text")


def test_text_is_what_the_command_prints(attnprobe: Attnprobe, tmp_path: Path) -> None:
    env = machines.environment(tmp_path, two_models())
    text, data = attnprobe("device", env=env), attnprobe("device", "--format", "json", env=env)
    assert (text.returncode, text.stderr) == (0, "")
    assert text.stdout.splitlines() == list(lines(msgspec.json.decode(data.stdout, type=Machine)))


def failing(state: str) -> tuple[dict[str, Any], tuple[str, ...], dict[str, str]]:
    """Return a machine in a state, the stubs that are there, and more environment."""
    a100 = machines.facts("a100")
    nvml = a100["gpus"][0]["nvml"]
    failures = {
        "mismatch": {"cuInit": 803, "nvmlInitWithFlags": 18},
        "no permission": {"cuInit": 100, "nvmlInitWithFlags": 4},
        "not ready": {"cuInit": 802},
        "unknown code": {"cuInit": 719},
        "NVML hangs": {"nvmlDeviceGetPciInfo_v3": "hang"},
    }
    changes: dict[str, dict[str, Any]] = {
        "lost": {"fail": {"nvmlDeviceGetUUID": 15}},
        "busy": {"nvml": nvml | {"processes": [PROCESS]}},
        "exclusive": {"compute_mode": 3, "nvml": nvml | {"processes": [PROCESS]}},
        "prohibited": {"compute_mode": 2},
        "MPS": {"compute_mode": 3, "nvml": nvml | {"mps_processes": [PROCESS]}},
        "MIG without instances": {"nvml": nvml | {"mig_mode": 1}},
    }
    if state in failures:
        return a100 | {"fail": failures[state]}, machines.BOTH, {}
    if state == "lost":
        return machines.with_gpu(a100 | {"fail": {"cuInit": 100}}, **changes[state]), machines.BOTH, {}
    if state in changes:
        return machines.with_gpu(a100, **changes[state]), machines.BOTH, {}
    return {
        "no driver": (a100, (), {}),
        "NVML without CUDA": (a100, ("nvml",), {}),
        "too old": (a100 | {"cuda": 11040}, ("old", "nvml"), {}),
        "no device": (a100 | {"gpus": []}, machines.BOTH, {}),
        "hidden": (a100, machines.BOTH, {"CUDA_VISIBLE_DEVICES": ""}),
        "hidden by a wrong index": (a100, machines.BOTH, {"CUDA_VISIBLE_DEVICES": "7"}),
    }[state]


STATES = {
    "no driver": "no-driver",
    "NVML without CUDA": "no-driver",
    "too old": "too-old",
    "mismatch": "mismatch",
    "no permission": "no-permission",
    "not ready": "not-ready",
    "lost": "lost",
    "no device": "no-device",
    "hidden": "no-device",
    "hidden by a wrong index": "no-device",
    "MIG without instances": "no-device",
    "busy": "busy",
    "MPS": "busy",
    "exclusive": "exclusive",
    "prohibited": "exclusive",
    "NVML hangs": "hung",
    "unknown code": "failed",
}


@pytest.mark.parametrize("state", STATES)
def test_a_machine_on_which_nothing_can_be_probed(
    attnprobe: Attnprobe, tmp_path: Path, state: str, snapshot: SnapshotAssertion
) -> None:
    machine, stubs, more = failing(state)
    env = machines.environment(tmp_path, machine, stubs, **more)
    done = attnprobe("device", "--format", "json", env=env)
    assert done.returncode == 3
    found = msgspec.json.decode(done.stdout, type=Machine)
    assert found.trouble is not None
    assert found.trouble.state == STATES[state]
    assert "Traceback" not in done.stderr
    said = done.stderr.splitlines()
    assert said[0] == f"error: {found.trouble.what}"
    assert said[-1] == f"  try: {found.trouble.fix}"
    assert len(said) <= 3
    assert done.stderr == snapshot(name="error")
    assert "\n".join(lines(found)) == snapshot(name="text")


def test_mig_instances_one_by_one(attnprobe: Attnprobe, tmp_path: Path) -> None:
    machine = machines.facts("h100-mig")
    small = machine["gpus"][0]["instances"][1]
    env = machines.environment(tmp_path, machine, CUDA_VISIBLE_DEVICES=small["uuid"])
    done = attnprobe("device", "--format", "json", env=env)
    assert done.returncode == 0, done.stderr
    first, second = json.loads(done.stdout)["gpus"]
    assert (first["ordinal"], first["name"], first["uuid"]) == (0, small["name"], small["uuid"])
    assert first["multiprocessors"] == small["multiprocessors"]
    assert first["smem_per_block_optin"] == 232448
    assert "ordinal" not in second


def doctor(attnprobe: Attnprobe, place: Path, env: dict[str, str]) -> tuple[list[str], dict[str, Any]]:
    """Return what doctor prints, as text and as JSON; with a torch that fails at once, to save time."""
    (place / "torch").mkdir()
    (place / "torch" / "__init__.py").write_text("raise ImportError('not of interest here')")
    env = env | {"PYTHONPATH": str(place)}
    text, data = attnprobe("doctor", env=env), attnprobe("doctor", "--format", "json", env=env)
    assert (text.returncode, data.returncode) == (3, 3), text.stderr + data.stderr
    return text.stdout.splitlines(), json.loads(data.stdout)


def test_doctor_names_the_gpus_and_no_exemplar(attnprobe: Attnprobe, tmp_path: Path) -> None:
    machine = two_models()
    machine["gpus"][0]["nvml"]["processes"] = [PROCESS]
    uuids = [gpu["uuid"] for gpu in machine["gpus"]]
    env = machines.environment(tmp_path, machine, CUDA_VISIBLE_DEVICES=",".join(uuids))
    text, data = doctor(attnprobe, tmp_path, env)
    assert [line for line in text if line.startswith("GPU")] == [
        "GPU 0: NVIDIA GeForce RTX 3090 (SM 8.6, 101376 B a block)",
        "GPU 1: NVIDIA B200 (SM 10.0, 232448 B a block)",
    ]
    assert [gpu["sm"] for gpu in data["gpus"]["gpus"]] == ["8.6", "10.0"]
    for secret in (*uuids, "4242"):
        assert secret not in str(data)


def test_doctor_says_in_one_line_why_there_is_no_gpu(attnprobe: Attnprobe, tmp_path: Path) -> None:
    text, data = doctor(attnprobe, tmp_path, machines.environment(tmp_path, {}, ()))
    assert [line for line in text if "GPU" in line or "NVIDIA" in line] == [
        "GPU: not usable: no NVIDIA driver: the loader does not find libcuda.so.1"
    ]
    assert data["gpus"]["trouble"]["state"] == "no-driver"
