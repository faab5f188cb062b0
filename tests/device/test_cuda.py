"""The driver's facts through the real `cuda.bindings.driver`, loaded on the stub library."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from attnprobe.device.cuda import version_text
from attnprobe.device.facts import CudaFacts
from tests.device.stubs import machines

ASK = """
import sys, msgspec
from attnprobe.device.cuda import cuda_facts
sys.stdout.buffer.write(msgspec.json.encode(cuda_facts()))
"""


def ask(env: dict[str, str], before: str = "") -> CudaFacts:
    return msgspec.json.decode(machines.run_python(before + ASK, env), type=CudaFacts)


def test_every_figure_and_no_context(tmp_path: Path) -> None:
    machine = machines.facts("rtx-5090")
    facts = ask(machines.environment(tmp_path, machine))
    said = machine["gpus"][0]
    assert facts.cuda == "13.0"
    assert facts.trouble is None
    (gpu,) = facts.gpus
    assert (gpu.ordinal, gpu.name, gpu.sm, gpu.pci) == (0, said["name"], "12.0", "0000:01:00.0")
    assert f"GPU-{gpu.uuid}" == said["uuid"]
    fields = ["memory", "multiprocessors", "registers_per_sm", "smem_per_block", "smem_per_block_optin"]
    fields += ["smem_reserved_per_block", "smem_per_sm", "l2", "compute_mode"]
    assert {field: getattr(gpu, field) for field in fields} == {field: said[field] for field in fields}
    # The stub has no function that creates a context, so that none was: asking for one fails.
    tried = "from cuda.bindings import driver\ntry: driver.cuDevicePrimaryCtxRetain(0)\n"
    tried += "except RuntimeError as error: print(error)"
    env = machines.environment(tmp_path, machine)
    assert "cuDevicePrimaryCtxRetain is not found" in machines.run_python(tried, env)


def test_what_the_driver_does_not_say_is_unknown(tmp_path: Path) -> None:
    (gpu,) = ask(machines.environment(tmp_path, machines.facts("gb10"))).gpus
    assert (gpu.smem_per_block_optin, gpu.smem_per_sm, gpu.l2) == (101376, None, None)
    assert gpu.integrated


def test_visible_devices_and_order_are_the_drivers_own(tmp_path: Path) -> None:
    two = machines.together("rtx-3090", "b200", cuda_order=[1, 0])
    uuids = [gpu["uuid"] for gpu in two["gpus"]]

    def names(**env: str) -> list[str]:
        facts = ask(machines.environment(tmp_path, two, ("cuda",), **env))
        return [gpu.name.rpartition(" ")[2] for gpu in facts.gpus]

    assert names() == ["B200", "3090"]
    assert names(CUDA_DEVICE_ORDER="PCI_BUS_ID") == ["3090", "B200"]
    assert names(CUDA_VISIBLE_DEVICES="1") == ["3090"]
    assert names(CUDA_VISIBLE_DEVICES=f"{uuids[0][:12]},{uuids[1]}") == ["3090", "B200"]
    assert names(CUDA_VISIBLE_DEVICES="0,5,1") == ["B200"]
    assert names(CUDA_VISIBLE_DEVICES="") == []


@pytest.mark.parametrize(
    ("code", "state"),
    [
        (46, "busy"),
        (304, "no-permission"),
        (802, "not-ready"),
        (803, "mismatch"),
        (804, "mismatch"),
        (999, "failed"),
    ],
)
def test_codes_of_cuinit(tmp_path: Path, code: int, state: str) -> None:
    facts = ask(
        machines.environment(tmp_path, machines.facts("a100") | {"fail": {"cuInit": code}}, ("cuda",))
    )
    assert facts.gpus == ()
    assert facts.trouble is not None
    assert facts.trouble.state == state
    assert facts.trouble.why.startswith("cuInit: CUDA_ERROR_")


def test_a_driver_from_before_the_calls_that_the_client_needs(tmp_path: Path) -> None:
    env = machines.environment(tmp_path, machines.facts("a100") | {"cuda": 11040}, ("old",))
    facts = ask(env)
    assert facts.trouble is not None
    assert facts.trouble.state == "too-old"
    assert facts.trouble.why == "it supports CUDA 11.4; cuda-python needs 12.0"


def test_no_driver() -> None:
    trouble = ask(machines.without_driver()).trouble
    assert trouble is not None
    assert trouble.state == "no-driver"


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "cuda-python is not installed"),
        ("raise OSError('ABI of the extension is wrong')", "ABI of the extension is wrong"),
        ("raise SystemExit(1)", "does not load"),
    ],
)
def test_a_package_that_is_absent_or_broken(tmp_path: Path, content: str | None, says: str) -> None:
    package = tmp_path / "cuda"
    (package / "bindings").mkdir(parents=True)
    for one in (package, package / "bindings"):
        (one / "__init__.py").write_text("")
    if content:
        (package / "bindings" / "driver.py").write_text(content)
    env = machines.environment(tmp_path, machines.facts("a100"), ("cuda",))
    trouble = ask(env, f"import sys; sys.path.insert(0, {str(tmp_path)!r})").trouble
    assert trouble is not None
    assert trouble.state == "no-client"
    assert says in trouble.why


def test_versions_as_cuda_numbers_them() -> None:
    assert [version_text(number) for number in (0, 11040, 12080, 13000)] == ["", "11.4", "12.8", "13.0"]
