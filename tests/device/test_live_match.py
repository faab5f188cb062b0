"""The live machine has the GPUs that the driver shows: a matrix of one is worth what its device says."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import structs

from attnprobe.device.cpu import cpu_device
from attnprobe.matrix.schema import DeviceRecord, Material, Matrix, sealed
from attnprobe.matrix.store import encode
from attnprobe.select import match
from tests.device.stubs import machines

if TYPE_CHECKING:
    import pytest

LOAD = """
import sys
from msgspec import json, structs
import attnprobe
from attnprobe.materials.installed import installed
from attnprobe.select.match import compare, here
from attnprobe.matrix.store import read_matrix

live = here()
found = compare(read_matrix(sys.argv[1]), live)
decision = attnprobe.load(sys.argv[1]).select(attnprobe.AttentionConfig(pass_="backward", dtype="float32"))
sys.stdout.buffer.write(json.encode({
    "devices": live.devices,
    "device": found.device,
    "indices": sorted(found.devices),
    "backend": decision.backend,
    "modules": sorted({"pynvml", "torch"} & set(sys.modules)),
}))
"""


def on(matrix: Matrix, env: dict[str, str], place: Path) -> dict[str, Any]:
    """Load a matrix in a process on a machine; return what it makes of it."""
    file = place / "matrix.json"
    file.write_bytes(encode(matrix))
    code = LOAD.replace("sys.argv[1]", repr(str(file)))
    found: dict[str, Any] = msgspec.json.decode(machines.run_python(code, env))
    return found


def matrix_of(handmade: Matrix, record: DeviceRecord) -> Matrix:
    """Return a matrix of a device whose one backend was measured with what is installed here."""
    from attnprobe.materials.installed import installed

    msgspec_here = installed("msgspec")
    assert isinstance(msgspec_here, Material)
    math = next(backend for backend in handmade.backends if backend.name == "torch-math")
    one = structs.replace(math, materials=(msgspec_here,))
    return sealed(structs.replace(handmade, devices=(record,), backends=(one,)))


def test_a_matrix_matches_by_shared_memory(handmade: Matrix, tmp_path: Path) -> None:
    record = DeviceRecord(
        kind="cuda", name="NVIDIA GeForce RTX 5090", sm="12.0", smem_per_block_optin=101376, cores=170
    )
    matrix = matrix_of(handmade, record)
    machine = machines.facts("rtx-5090")
    here = on(matrix, machines.environment(tmp_path, machine, ("cuda",)), tmp_path)
    assert here["devices"][0] == msgspec.to_builtins(record)
    assert here["devices"][1]["kind"] == "cpu"
    assert (here["device"], here["indices"]) == ("", [0])
    assert here["modules"] == []

    less = machines.with_gpu(machine, smem_per_block_optin=65536)
    there = on(matrix, machines.environment(tmp_path, less, ("cuda",)), tmp_path)
    assert there["indices"] == []
    assert "101376 B a block" in there["device"]
    assert "65536 B a block" in there["device"]
    assert there["backend"] is None


def test_equal_gpus_are_one_kind_and_a_broken_driver_none(handmade: Matrix, tmp_path: Path) -> None:
    matrix = matrix_of(handmade, DeviceRecord(kind="cuda", name="NVIDIA B200"))
    three = machines.together("b200", "b200", "l40s")
    here = on(matrix, machines.environment(tmp_path, three, ("cuda",)), tmp_path)
    assert [device["name"] for device in here["devices"][:-1]] == ["NVIDIA B200", "NVIDIA L40S"]
    broken = three | {"fail": {"cuInit": 803}}
    here = on(matrix, machines.environment(tmp_path, broken, ("cuda",)), tmp_path)
    assert [device["kind"] for device in here["devices"]] == ["cpu"]


def test_without_a_driver_nothing_is_imported_for_it() -> None:
    code = (
        "import sys, attnprobe.select.match as match\n"
        "live = match.here()\n"
        "loaded = {name.partition('.')[0] for name in sys.modules}\n"
        "print([d.kind for d in live.devices], sorted(loaded & {'cuda', 'pynvml', 'torch', 'ctypes'}),"
        " 'attnprobe.device.cuda' in sys.modules)"
    )
    assert machines.run_python(code, machines.without_driver()) == "['cpu'] [] False\n"


def test_asking_again_without_a_driver_costs_less_than_a_millisecond(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("attnprobe.device.driver.CUDA", "libcuda-that-nobody-has.so.1")
    match._gpus()
    best = float("inf")
    for _ in range(20):
        start = time.perf_counter()
        assert match._gpus() == ()
        best = min(best, time.perf_counter() - start)
    assert best < 1e-3


ENSURE = """
import attnprobe, msgspec, sys
found = attnprobe.ensure([attnprobe.AttentionConfig(head_dim=8)])
sys.stdout.buffer.write(msgspec.json.encode([found.probed, found.selector is None, found.reason]))
"""


def test_a_cpu_matrix_beside_a_gpu_says_that_it_is_of_the_cpu(small_matrix: Path, tmp_path: Path) -> None:
    machine = machines.facts("rtx-5090")
    env = machines.environment(tmp_path, machine, ("cuda",))
    code = f"import attnprobe; chosen = attnprobe.load({str(small_matrix)!r})"
    code += ".select(attnprobe.AttentionConfig()); print(chosen.notes)"
    said = machines.run_python(code, env)
    assert "of the CPU alone: nothing in it is of NVIDIA GeForce RTX 5090" in said


def test_what_a_cpu_proves_is_not_ensured_for_a_gpu(small_matrix: Path, tmp_path: Path) -> None:
    """The user's directory holds a matrix of this CPU; a job on this machine may mean the GPU."""
    machine = machines.facts("rtx-5090")
    env = machines.environment(tmp_path, machine, ("cuda",)) | {"ATTNPROBE_DATA_DIR": str(tmp_path / "data")}
    (tmp_path / "data").mkdir()
    name = f"{cpu_device().slug}.config.json"
    (tmp_path / "data" / name).write_bytes(small_matrix.read_bytes())
    probed, nothing, reason = msgspec.json.decode(machines.run_python(ENSURE, env))
    assert (probed, nothing) == (0, True)
    assert "no scan runs on one yet" in reason
