"""The pure part: joining, choosing by CUDA_VISIBLE_DEVICES, suffixes, and the words for what is wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

import attnprobe.device
from attnprobe.device import troubles
from attnprobe.device.facts import CudaFacts, CudaGpu, MigInstance, NvmlFacts, NvmlGpu, Process, Trouble
from attnprobe.device.gpus import Machine, join, pci_id, record_of, storable
from attnprobe.device.targets import special_targets
from attnprobe.device.visible import fault_in
from tests.device.stubs import machines

A, B = "aaaaaaaa-0000-4000-8000-000000000001", "bbbbbbbb-0000-4000-8000-000000000002"


def shown(ordinal: int = 0, uuid: str = A, pci: str = "0000:01:00.0", **more: Any) -> CudaGpu:
    known: dict[str, Any] = {"name": "NVIDIA X", "compute_mode": 0, "smem_per_block_optin": 232448}
    return CudaGpu(ordinal=ordinal, uuid=uuid, pci=pci, sm="9.0", **(known | more))


def listed(index: int = 0, uuid: str = A, pci: str = "00000000:01:00.0", **more: Any) -> NvmlGpu:
    return NvmlGpu(index=index, uuid=f"GPU-{uuid}", pci=pci, **({"name": "NVIDIA X", "sm": "9.0"} | more))


def trouble_of(cuda: CudaFacts, nvml: NvmlFacts, visible: str | None = None) -> Trouble:
    found = join(cuda, nvml, visible).trouble
    assert found is not None
    return found


def test_gpus_are_matched_by_pci_id_where_the_orders_differ() -> None:
    cuda = CudaFacts(cuda="13.0", gpus=(shown(0, B, "0000:0a:00.0"), shown(1, A, "0000:01:00.0")))
    nvml = NvmlFacts(
        driver="580.65.06", cuda="13.0", gpus=(listed(0, A), listed(1, B, "00000000:0A:00.0", ecc=True))
    )
    machine = join(cuda, nvml)
    assert [(gpu.ordinal, gpu.nvml_index, gpu.ecc) for gpu in machine.gpus] == [(0, 1, True), (1, 0, None)]
    assert machine.trouble is None
    assert [note for note in machine.notes if "CUDA_DEVICE_ORDER=PCI_BUS_ID" in note]
    same = join(structs.replace(cuda, gpus=tuple(reversed(cuda.gpus))), nvml)
    assert same.notes == ()


def test_pci_ids_of_both_are_one() -> None:
    assert pci_id("00000000:0A:00.0") == pci_id("0000:0a:00.0") == "0000:0a:00.0"
    assert pci_id("0000000F:01:00.0") == "000f:01:00.0"
    assert pci_id("00010000:01:00.0") == "10000:01:00.0"


def test_mig_instances_are_matched_by_uuid_and_the_hidden_ones_are_listed() -> None:
    instances = tuple(
        MigInstance(uuid=f"MIG-{uuid}", name=f"NVIDIA X MIG {n}", gpu_instance=n, compute_instance=0)
        for n, uuid in enumerate((A, B), start=1)
    )
    whole = "cccccccc-0000-4000-8000-000000000003"
    nvml = NvmlFacts(gpus=(listed(0, whole, mig=True, instances=instances),))
    machine = join(CudaFacts(gpus=(shown(0, B, name="NVIDIA X MIG 2"),)), nvml)
    assert [(gpu.ordinal, gpu.uuid, gpu.gpu_instance) for gpu in machine.gpus] == [
        (0, f"MIG-{B}", 2),
        (None, f"MIG-{A}", 1),
    ]
    assert machine.trouble is None


def test_a_mig_instance_is_busy_by_its_own_processes_only() -> None:
    held = (Process(pid=7),)
    instances = (
        MigInstance(uuid=f"MIG-{A}", name="X MIG 1", gpu_instance=1, compute_instance=0, processes=held),
        MigInstance(uuid=f"MIG-{B}", name="X MIG 2", gpu_instance=2, compute_instance=0),
    )
    nvml = NvmlFacts(gpus=(listed(0, "c", mig=True, instances=instances, processes=held),))
    assert trouble_of(CudaFacts(gpus=(shown(0, A),)), nvml).state == "busy"
    assert join(CudaFacts(gpus=(shown(0, B),)), nvml).trouble is None


def test_what_nvml_knows_better_is_said() -> None:
    none = CudaFacts(trouble=troubles.of_cuda(100, "cuInit", "CUDA_ERROR_NO_DEVICE"))
    unknown = CudaFacts(trouble=troubles.of_cuda(999, "cuInit", "CUDA_ERROR_UNKNOWN"))
    for state, code in {"no-permission": 4, "mismatch": 18, "lost": 15}.items():
        nvml = NvmlFacts(trouble=troubles.of_nvml(code, "nvmlInit"))
        assert trouble_of(none, nvml).state == trouble_of(unknown, nvml).state == state
    assert trouble_of(unknown, NvmlFacts()).state == "failed"
    assert trouble_of(none, NvmlFacts(trouble=troubles.NO_PYNVML)).state == "no-device"
    assert trouble_of(CudaFacts(trouble=troubles.NO_CUDA_PYTHON), NvmlFacts(gpus=(listed(),))).fix == (
        "pip install cuda-python"
    )


def test_a_lost_gpu_beside_a_good_one_spoils_only_itself() -> None:
    nvml = NvmlFacts(
        gpus=(
            listed(0, A),
            NvmlGpu(index=1, pci="00000000:0A:00.0", failed=(15, "nvmlDeviceGetUUID")),
        )
    )
    machine = join(CudaFacts(gpus=(shown(),)), nvml)
    assert machine.trouble is None
    assert [gpu.trouble and gpu.trouble.what for gpu in machine.gpus] == [
        None,
        "GPU 1 of nvidia-smi at 0000:0a:00.0 is lost",
    ]


@pytest.mark.parametrize(
    ("mode", "held", "state"),
    [
        (0, {}, None),
        (0, {"processes": (Process(pid=7, name="python3"),)}, "busy"),
        (0, {"mps": True}, "busy"),
        (2, {}, "exclusive"),
        (3, {}, None),
        (3, {"processes": (Process(pid=7),)}, "exclusive"),
        (3, {"processes": (Process(pid=8, name="nvidia-cuda-mps-server"),)}, "busy"),
    ],
)
def test_a_gpu_that_is_not_free(mode: int, held: dict[str, Any], state: str | None) -> None:
    nvml = NvmlFacts(gpus=(listed(**held),))
    found = join(CudaFacts(gpus=(shown(compute_mode=mode),)), nvml).trouble
    assert (found and found.state) == state
    for process in held.get("processes", ()):
        assert found is not None
        assert f"held by process {process.pid}" in found.why


def test_one_free_gpu_is_enough() -> None:
    nvml = NvmlFacts(gpus=(listed(processes=(Process(pid=7),)), listed(1, B, "00000000:0A:00.0")))
    cuda = CudaFacts(gpus=(shown(), shown(1, B, "0000:0a:00.0")))
    machine = join(cuda, nvml)
    assert machine.trouble is None
    assert machine.gpus[0].trouble is not None


def test_unknown_stays_unknown() -> None:
    machine = join(CudaFacts(gpus=(shown(smem_per_block_optin=None),)), NvmlFacts(trouble=troubles.NO_PYNVML))
    gpu = machine.gpus[0]
    assert (gpu.smem_per_block_optin, gpu.memory, gpu.ecc, gpu.mig) == (None, None, None, None)
    assert "unknown: NVML cannot be asked" in machine.notes[0]
    assert gpu.uuid == f"GPU-{A}"
    instance = join(CudaFacts(gpus=(shown(name="NVIDIA X MIG 1g.10gb"),)), NvmlFacts()).gpus[0]
    assert instance.uuid == f"MIG-{A}"


@pytest.mark.parametrize(
    ("value", "fault"),
    [
        ("2,0", ""),
        ("0,2,-1,9", "-1 is no index of a GPU here"),
        ("3", "3 is no index of a GPU here"),
        ("0,,1", "an entry is empty"),
        ("GPU-aaaa,1", ""),
        ("gpu-AAAA", ""),
        ("GPU-", "GPU- begins the UUIDs of several GPUs"),
        ("GPU-dddd,0", "GPU-dddd is the UUID of no GPU here"),
        (f"MIG-{B}", ""),
        (f"MIG-{A}", f"MIG-{A} is the UUID of no GPU here"),
    ],
)
def test_what_is_wrong_with_cuda_visible_devices(value: str, fault: str) -> None:
    assert fault_in(value, [[f"GPU-{A}"], [f"GPU-{B}"], ["GPU-cccc", f"MIG-{B}"]]) == fault


def test_a_hidden_machine_is_told_from_an_empty_one() -> None:
    none = CudaFacts(trouble=troubles.of_cuda(100, "cuInit", "CUDA_ERROR_NO_DEVICE"))
    assert "hides every GPU" in trouble_of(none, NvmlFacts(gpus=(listed(),)), "").what
    assert trouble_of(none, NvmlFacts()).what == "the driver shows no GPU"
    assert "no MIG instance" in trouble_of(none, NvmlFacts(gpus=(listed(mig=True),))).what
    machine = join(none, NvmlFacts(gpus=(listed(),)), "9")
    assert machine.notes == (
        "CUDA_VISIBLE_DEVICES=9: 9 is no index of a GPU here; CUDA ignores it and all behind it",
    )


@pytest.mark.parametrize(
    ("sm", "targets"),
    [
        ("8.9", ()),
        ("9.0", ("9.0a",)),
        ("10.0", ("10.0a", "10.0f")),
        ("10.3", ("10.3a", "10.0f", "10.3f")),
        ("11.0", ("11.0a", "11.0f")),
        ("12.0", ("12.0a", "12.0f")),
        ("12.1", ("12.1a", "12.0f", "12.1f")),
        ("13.7", ("13.7a", "13.0f", "13.7f")),
    ],
)
def test_suffixes(sm: str, targets: tuple[str, ...]) -> None:
    assert special_targets(sm) == targets


def test_nothing_that_names_one_exemplar_is_stored() -> None:
    nvml = NvmlFacts(gpus=(listed(processes=(Process(pid=7, name="secret"),)),))
    machine = join(CudaFacts(gpus=(shown(),)), nvml, f"GPU-{A},GPU-dddd")
    assert A in str(machine)
    assert "dddd" in str(machine.notes)
    text = str(storable(machine))
    assert machine.trouble is not None
    assert machine.trouble.what in text
    for secret in (A, "dddd", "secret"):
        assert secret in str(machine)
        assert secret not in text
    assert str(storable(structs.replace(machine, visible_devices="0,1")).visible_devices) == "0,1"
    assert A not in str(record_of(shown()))


def test_the_catalogue_names_a_source_for_each_figure_and_agrees_with_the_facts() -> None:
    place = Path(attnprobe.device.__file__).with_name("catalogue.json")
    catalogue = json.loads(place.read_text())
    sources = catalogue["sources"]
    assert all(address.startswith("https://") for address in sources.values())
    for figures in catalogue["architectures"].values():
        assert figures["source"] in sources
        assert figures.get("smem_per_sm", 1 << 30) > figures["smem_per_block_optin"]
    for gpu in catalogue["gpus"]:
        assert set(gpu) - {"name", "sm", "sources"} == set(gpu["sources"]), gpu["name"]
        assert set(gpu["sources"].values()) <= set(sources)
        assert gpu["sm"] in catalogue["architectures"]
    known = {gpu["name"]: gpu | catalogue["architectures"][gpu["sm"]] for gpu in catalogue["gpus"]}
    files = sorted(machines.FACTS.glob("*.json"))
    assert len(files) >= 10
    for file in files:
        machine = machines.facts(file.stem)
        assert machine["label"] == "figures from public documents, not recorded on hardware"
        for gpu in machine["gpus"]:
            for key in set(gpu) & set(known[gpu["name"]]) - set(machine["nominal"]):
                assert gpu[key] == known[gpu["name"]][key], (file.name, key)


def test_a_machine_survives_json() -> None:
    import msgspec

    machine = join(CudaFacts(gpus=(shown(),)), NvmlFacts(gpus=(listed(ecc=False),)))
    assert msgspec.json.decode(msgspec.json.encode(machine), type=Machine) == machine
