"""The GPUs of a machine: what the driver says joined with what NVML says. Facts in, structs out.

The two number GPUs differently, so they are matched by PCI id; a MIG instance, which has its GPU's PCI id, by
UUID. `None` is unknown.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from msgspec import Struct, structs

from attnprobe.device import troubles
from attnprobe.device.facts import CudaFacts, CudaGpu, MigInstance, NvmlFacts, NvmlGpu, Process, Trouble
from attnprobe.device.targets import special_targets
from attnprobe.device.visible import fault_in
from attnprobe.matrix.schema import DeviceRecord

_COMPUTE_MODES: Final = {0: "default", 1: "exclusive-thread", 2: "prohibited", 3: "exclusive-process"}
_MPS_SERVER: Final = "nvidia-cuda-mps-server"
_SPECIFIC: Final = {"mismatch", "no-permission", "lost", "hung", "busy", "not-ready", "too-old"}
"""What NVML knows better than the driver, to which all of these may look like no device."""


class Gpu(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A GPU, or a MIG instance of one (`gpu_instance` and `compute_instance` are set then).

    `ordinal` is CUDA's number in this process, None where CUDA does not show it; `nvml_index` is the number
    of nvidia-smi. Sizes in bytes. `targets`: see `attnprobe.device.targets`.
    """

    name: str
    sm: str = ""
    targets: tuple[str, ...] = ()
    ordinal: int | None = None
    nvml_index: int | None = None
    pci: str = ""
    uuid: str = ""
    gpu_instance: int | None = None
    compute_instance: int | None = None
    smem_per_block_optin: int | None = None
    smem_per_block: int | None = None
    smem_reserved_per_block: int | None = None
    smem_per_sm: int | None = None
    multiprocessors: int | None = None
    registers_per_sm: int | None = None
    l2: int | None = None
    memory: int | None = None
    integrated: bool = False
    compute_mode: str = ""
    ecc: bool | None = None
    mig: bool | None = None
    mps: bool = False
    processes: tuple[Process, ...] = ()
    trouble: Trouble | None = None


class Machine(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """All GPUs: those that CUDA shows first, in its order. `trouble` says why none can be probed.

    `driver` is the kernel driver's version, `cuda` the CUDA version that libcuda supports.
    """

    driver: str = ""
    cuda: str = ""
    visible_devices: str | None = None
    gpus: tuple[Gpu, ...] = ()
    notes: tuple[str, ...] = ()
    trouble: Trouble | None = None


def join(cuda: CudaFacts, nvml: NvmlFacts, visible_devices: str | None = None) -> Machine:
    """Return the machine that driver and NVML tell of; `visible_devices` is CUDA_VISIBLE_DEVICES, if set."""
    by_pci = {pci_id(gpu.pci): gpu for gpu in nvml.gpus if gpu.pci}
    shown = tuple(_shown(gpu, by_pci.get(pci_id(gpu.pci))) for gpu in cuda.gpus)
    gpus = (*shown, *_others(nvml, {_bare(gpu.uuid) for gpu in shown}))
    return Machine(
        driver=nvml.driver,
        cuda=cuda.cuda or nvml.cuda,
        visible_devices=visible_devices,
        gpus=gpus,
        notes=tuple(_notes(cuda, nvml, shown, visible_devices)),
        trouble=_trouble(cuda, nvml, gpus, visible_devices),
    )


def record_of(gpu: CudaGpu) -> DeviceRecord:
    """Return what a matrix records of a device: nothing that names one exemplar."""
    return DeviceRecord(
        kind="cuda",
        name=gpu.name,
        sm=gpu.sm,
        smem_per_block_optin=gpu.smem_per_block_optin or 0,
        cores=gpu.multiprocessors or 0,
    )


def storable(machine: Machine) -> Machine:
    """Return a machine without what names one exemplar or what runs there: fit for a file or a bug report.

    A CUDA_VISIBLE_DEVICES of UUIDs goes as well, with the words that would quote it.
    """
    gpus = tuple(
        structs.replace(gpu, uuid="", processes=(), trouble=_plain(gpu.trouble)) for gpu in machine.gpus
    )
    value = machine.visible_devices
    notes, trouble = machine.notes, _plain(machine.trouble)
    if value is not None and any(character.isalpha() for character in value):
        notes = tuple(note for note in notes if value not in note)
        if trouble is not None and value in trouble.why:
            trouble = structs.replace(trouble, why="")
        value = "UUIDs"
    return structs.replace(machine, gpus=gpus, notes=notes, trouble=trouble, visible_devices=value)


def _plain(trouble: Trouble | None) -> Trouble | None:
    """Return a trouble without the processes that its reason names."""
    held = trouble is not None and trouble.state in {"busy", "exclusive"}
    return structs.replace(trouble, why="") if trouble is not None and held else trouble


def pci_id(text: str) -> str:
    """Return a PCI id as CUDA and Linux write it: NVML's "00000000:0A:00.0" is "0000:0a:00.0"."""
    domain, bus, rest = text.split(":")
    return f"{int(domain, 16):04x}:{bus.lower()}:{rest.lower()}"


def _place(gpu: NvmlGpu) -> str:
    return pci_id(gpu.pci) if gpu.pci else ""


def _bare(uuid: str) -> str:
    """Return a UUID without GPU- or MIG- before it: CUDA gives the 16 bytes only."""
    return uuid.removeprefix("GPU-").removeprefix("MIG-").lower()


def _prefix(gpu: CudaGpu) -> str:
    """Return what stands before a UUID where NVML does not say it: CUDA names an instance by its profile."""
    return "MIG" if " MIG " in gpu.name else "GPU"


def _uuids(gpu: NvmlGpu) -> list[str]:
    return [gpu.uuid, *(one.uuid for one in gpu.instances)]


def _shown(cuda: CudaGpu, nvml: NvmlGpu | None) -> Gpu:
    """Return a device that CUDA shows."""
    instances = nvml.instances if nvml else ()
    instance = next((one for one in instances if _bare(one.uuid) == cuda.uuid), None)
    processes = instance.processes if instance else nvml.processes if nvml else ()
    mode = _COMPUTE_MODES.get(-1 if cuda.compute_mode is None else cuda.compute_mode, "")
    mps = bool(nvml and (nvml.mps or any(one.name == _MPS_SERVER for one in processes)))
    return Gpu(
        name=cuda.name,
        sm=cuda.sm,
        targets=special_targets(cuda.sm),
        ordinal=cuda.ordinal,
        nvml_index=nvml.index if nvml else None,
        pci=pci_id(cuda.pci),
        uuid=instance.uuid if instance else f"{_prefix(cuda)}-{cuda.uuid}",
        gpu_instance=instance.gpu_instance if instance else None,
        compute_instance=instance.compute_instance if instance else None,
        smem_per_block_optin=cuda.smem_per_block_optin,
        smem_per_block=cuda.smem_per_block,
        smem_reserved_per_block=cuda.smem_reserved_per_block,
        smem_per_sm=cuda.smem_per_sm,
        multiprocessors=cuda.multiprocessors,
        registers_per_sm=cuda.registers_per_sm,
        l2=cuda.l2,
        memory=cuda.memory,
        integrated=cuda.integrated,
        compute_mode=mode,
        ecc=nvml.ecc if nvml else None,
        mig=nvml.mig if nvml else None,
        mps=mps,
        processes=processes,
        trouble=_broken(nvml) or _occupied(f"GPU {cuda.ordinal}", mode, processes, mps=mps),
    )


def _others(nvml: NvmlFacts, shown: set[str]) -> Iterator[Gpu]:
    """Yield what NVML lists and CUDA does not show."""
    for gpu in nvml.gpus:
        if gpu.instances:
            yield from (_other(gpu, one) for one in gpu.instances if _bare(one.uuid) not in shown)
        elif _bare(gpu.uuid) not in shown or not gpu.uuid:
            yield _other(gpu, None)


def _other(gpu: NvmlGpu, instance: MigInstance | None) -> Gpu:
    return Gpu(
        name=(instance.name if instance else gpu.name) or "an unknown GPU",
        sm=gpu.sm,
        targets=special_targets(gpu.sm) if gpu.sm else (),
        nvml_index=gpu.index,
        pci=_place(gpu),
        uuid=instance.uuid if instance else gpu.uuid,
        gpu_instance=instance.gpu_instance if instance else None,
        compute_instance=instance.compute_instance if instance else None,
        multiprocessors=instance.multiprocessors if instance else None,
        memory=instance.memory if instance else gpu.memory,
        compute_mode=_COMPUTE_MODES.get(-1 if gpu.compute_mode is None else gpu.compute_mode, ""),
        ecc=gpu.ecc,
        mig=gpu.mig,
        mps=gpu.mps,
        processes=instance.processes if instance else gpu.processes,
        trouble=_broken(gpu),
    )


def _broken(gpu: NvmlGpu | None) -> Trouble | None:
    if gpu is None or gpu.failed is None:
        return None
    said = troubles.of_nvml(*gpu.failed)
    at = f" at {_place(gpu)}" if gpu.pci else ""
    what = said.what.replace("the GPU", f"GPU {gpu.index} of nvidia-smi{at}")
    return Trouble(state=said.state, what=what, why=said.why, fix=said.fix)


def _occupied(gpu: str, mode: str, processes: tuple[Process, ...], *, mps: bool) -> Trouble | None:
    """Return why a GPU is not free, or None: what runs beside others measures them as well."""
    holders = ", ".join(f"{one.pid} {one.name}".rstrip() for one in processes)
    held = f"held by process {holders}"
    if mode == "prohibited":
        return Trouble(
            state="exclusive",
            what=f"{gpu} takes no work",
            why="its compute mode is prohibited",
            fix="nvidia-smi --compute-mode=DEFAULT",
        )
    if mps:
        return Trouble(
            state="busy",
            what=f"{gpu} is shared through MPS",
            why=held if holders else "its clients share one context: a fault of one ends all",
            fix="stop MPS: echo quit | nvidia-cuda-mps-control",
        )
    if not processes:
        return None
    if mode.startswith("exclusive"):
        what = f"{gpu} takes one process at a time"
        return Trouble(state="exclusive", what=what, why=held, fix="wait for it")
    return Trouble(state="busy", what=f"{gpu} is busy", why=held, fix="wait for it, or choose another GPU")


def _trouble(
    cuda: CudaFacts, nvml: NvmlFacts, gpus: tuple[Gpu, ...], visible_devices: str | None
) -> Trouble | None:
    """Return why no GPU can be probed, from whoever knows best, or None."""
    shown = [gpu for gpu in gpus if gpu.ordinal is not None]
    if shown:
        return shown[0].trouble if all(gpu.trouble for gpu in shown) else None
    if nvml.trouble and nvml.trouble.state in _SPECIFIC:
        return nvml.trouble
    said = cuda.trouble or troubles.of_cuda(100, "cuDeviceGetCount", "0 devices")
    if said.state != "no-device":
        return said
    broken = next((gpu.trouble for gpu in gpus if gpu.trouble), None)
    return broken or _hidden(gpus, visible_devices) or said


def _hidden(gpus: tuple[Gpu, ...], visible_devices: str | None) -> Trouble | None:
    """Return why CUDA shows none of the GPUs that NVML lists, where that can be told."""
    if visible_devices is not None and gpus:
        return Trouble(
            state="no-device",
            what="CUDA_VISIBLE_DEVICES hides every GPU",
            why=f"it is {visible_devices!r}",
            fix="unset it, or name a UUID that nvidia-smi -L lists",
        )
    if gpus and all(gpu.mig and gpu.gpu_instance is None for gpu in gpus):
        return Trouble(
            state="no-device",
            what="MIG is on and there is no MIG instance",
            fix="make one: nvidia-smi mig -cgi PROFILE -C; or turn MIG off: nvidia-smi -mig 0",
        )
    return None


def _notes(
    cuda: CudaFacts,
    nvml: NvmlFacts,
    shown: tuple[Gpu, ...],
    visible_devices: str | None,
) -> Iterator[str]:
    """Yield what a reader should know besides, a sentence each."""
    fault = fault_in(visible_devices, [_uuids(gpu) for gpu in nvml.gpus]) if visible_devices else ""
    if fault and nvml.gpus:
        yield f"CUDA_VISIBLE_DEVICES={visible_devices}: {fault}; CUDA ignores it and all behind it"
    indices = [gpu.nvml_index for gpu in shown if gpu.nvml_index is not None]
    if visible_devices is None and indices != sorted(indices):
        yield (
            "CUDA numbers the GPUs otherwise than nvidia-smi; CUDA_DEVICE_ORDER=PCI_BUS_ID gives one order"
        )
    if cuda.gpus and nvml.trouble:
        yield f"MIG, ECC and other processes are unknown: {nvml.trouble.what}: {nvml.trouble.why}"
    if cuda.cuda and nvml.cuda and cuda.cuda != nvml.cuda:
        yield f"libcuda supports CUDA {cuda.cuda}, the kernel driver {nvml.cuda}: libcuda is of cuda-compat"
