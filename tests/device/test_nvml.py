"""NVML's facts through the real pynvml in its child process, loaded on the stub library."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from attnprobe.device.facts import NvmlFacts
from attnprobe.device.nvml import read
from tests.device.stubs import machines

ASK = """
import sys, msgspec
from attnprobe.device.nvml import nvml_facts
sys.stdout.buffer.write(msgspec.json.encode(nvml_facts(float(LIMIT))))
assert "pynvml" not in sys.modules
"""


def ask(env: dict[str, str], limit: float = 30, before: str = "") -> NvmlFacts:
    code = before + ASK.replace("LIMIT", repr(limit))
    return msgspec.json.decode(machines.run_python(code, env), type=NvmlFacts)


def test_what_nvml_says_of_gpus_and_mig_instances(tmp_path: Path) -> None:
    machine = machines.facts("h100-mig")
    said = machine["gpus"][0]
    processes = [{"pid": 4242, "memory": 1 << 30, "name": "/usr/bin/python3"}]
    said["nvml"] |= {"processes": processes, "mps_processes": processes}
    said["instances"][1]["processes"] = processes
    facts = ask(machines.environment(tmp_path, machine))
    assert (facts.driver, facts.cuda, facts.trouble) == ("580.65.06", "13.0", None)
    (gpu,) = facts.gpus
    assert (gpu.name, gpu.uuid, gpu.pci, gpu.sm) == (said["name"], said["uuid"], said["pci"], "9.0")
    assert (gpu.ecc, gpu.mig, gpu.mps, gpu.compute_mode) == (True, True, True, 0)
    assert [(p.pid, p.memory, p.name) for p in gpu.processes] == [(4242, 1 << 30, "python3")]
    assert [(one.uuid, one.gpu_instance, one.multiprocessors) for one in gpu.instances] == [
        (instance["uuid"], instance["gpu_instance"], instance["multiprocessors"])
        for instance in said["instances"]
    ]
    assert [len(one.processes) for one in gpu.instances] == [0, 1]


def test_what_a_gpu_does_not_have_is_unknown(tmp_path: Path) -> None:
    (gpu,) = ask(machines.environment(tmp_path, machines.facts("gb10"))).gpus
    assert (gpu.memory, gpu.ecc, gpu.mig, gpu.failed) == (None, None, None, None)
    assert gpu.pci == "0000000F:01:00.0"


@pytest.mark.parametrize(("code", "state"), [(4, "no-permission"), (9, "no-driver"), (18, "mismatch")])
def test_codes_of_init(tmp_path: Path, code: int, state: str) -> None:
    machine = machines.facts("a100") | {"fail": {"nvmlInitWithFlags": code}}
    facts = ask(machines.environment(tmp_path, machine))
    assert facts.trouble is not None
    assert facts.trouble.state == state
    assert facts.gpus == ()


def test_a_lost_gpu_leaves_the_others(tmp_path: Path) -> None:
    machine = machines.together("a100", "h200")
    machine["gpus"][0]["fail"] = {"nvmlDeviceGetUUID": 15}
    lost, good = ask(machines.environment(tmp_path, machine)).gpus
    assert lost.failed == (15, "nvmlDeviceGetUUID: NVML_ERROR_GPU_IS_LOST")
    assert lost.pci == "00000000:01:00.0"
    assert good.failed is None
    assert good.name == "NVIDIA H200"


def test_a_call_that_never_returns_is_ended_and_what_was_said_counts(tmp_path: Path) -> None:
    machine = machines.together("a100", "h200")
    machine["gpus"][1]["fail"] = {"nvmlDeviceGetName": "hang"}
    env = machines.environment(tmp_path, machine, ATTNPROBE_TEST_MARK=str(tmp_path))
    before = time.monotonic()
    facts = ask(env, limit=3)
    assert time.monotonic() - before < 20
    assert facts.trouble is not None
    assert facts.trouble.state == "hung"
    assert facts.trouble.why == "nothing for 3 s in nvmlDeviceGetName of GPU 1"
    assert [gpu.name for gpu in facts.gpus] == ["NVIDIA A100-SXM4-80GB"]
    assert _marked(str(tmp_path)) == []


def _marked(mark: str) -> list[int]:
    """Return the processes that were started with a mark in their environment."""
    found = psutil.process_iter(["environ"])  # None where it may not be read
    return [p.pid for p in found if (p.info["environ"] or {}).get("ATTNPROBE_TEST_MARK") == mark]


def test_a_child_that_dies_is_told(tmp_path: Path) -> None:
    (tmp_path / "pynvml.py").write_text("import os; os._exit(7)")
    before = f"import sys; sys.path.insert(0, {str(tmp_path)!r})"
    trouble = ask(machines.environment(tmp_path, machines.facts("a100")), before=before).trouble
    assert trouble is not None
    assert trouble.state == "failed"
    assert "died" in trouble.why


def test_no_package_and_no_library(tmp_path: Path) -> None:
    env = machines.environment(tmp_path, machines.facts("a100"))
    (tmp_path / "pynvml.py").write_text("raise ModuleNotFoundError('pynvml')")
    before = f"import sys; sys.path.insert(0, {str(tmp_path)!r})"
    trouble = ask(env, before=before).trouble
    assert trouble is not None
    assert trouble.state == "no-client"
    trouble = ask(machines.without_driver()).trouble
    assert trouble is not None
    assert (trouble.state, trouble.what) == ("no-driver", "no NVML")


@pytest.mark.parametrize(
    ("lines", "end", "state", "why"),
    [
        ([], "killed", "hung", "nothing for 5 s in the start of Python"),
        ([], "ended", "failed", "the process that asked it died in the start of Python"),
        ([{"doing": "nvmlInit"}], "killed", "hung", "nothing for 5 s in nvmlInit"),
        ([{"doing": "nvmlInit"}, {"failed": [9, "nvmlInit: X"]}], "ended", "no-driver", "nvmlInit: X"),
    ],
)
def test_reading_what_a_child_left(lines: list[dict[str, Any]], end: str, state: str, why: str) -> None:
    trouble = read(lines, finished=end == "ended", limit=5).trouble
    assert trouble is not None
    assert (trouble.state, trouble.why) == (state, why)
