"""Whether a matrix speaks of this machine: its device, and per backend the builds it was measured with.

What does not match proves nothing any more; what it denies stays denied. `assume_device` skips the
comparison for those who ask about another machine.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection

from msgspec import Struct

from attnprobe.device.cpu import cpu_device
from attnprobe.matrix.schema import Backend, DeviceRecord, Material, Matrix

MaterialOf = Callable[[str], "Material | None"]


class Live(Struct, frozen=True):
    """This machine: its devices, and what is installed under a material's name."""

    devices: tuple[DeviceRecord, ...]
    material: MaterialOf


class Match(Struct, frozen=True):
    """How a matrix compares with a machine.

    `devices`: which of the matrix's devices are here, by index. `device` says what differs, or is empty.
    `materials` holds per backend what differs; a backend that is not in it matches. `beside` names the GPUs
    that are here where the matrix is of the CPU alone.
    """

    devices: frozenset[int]
    device: str
    materials: dict[str, str]
    assumed: bool = False
    beside: str = ""

    def expired(self, backend: str) -> str:
        """Return why nothing measured on a backend counts here, or an empty string."""
        return self.device or self.materials.get(backend, "")


def here() -> Live:
    """Return this machine: its GPUs as CUDA shows them to this process, each kind once, then the CPU.

    Materials are looked up when first asked for, and once. Where there is a driver, it is initialised: see
    `attnprobe.device.cuda` for what that means to a process. No context is created, and NVML is not asked.
    """
    return Live((*_gpus(), cpu_device().record), functools.cache(_installed))


def _gpus() -> tuple[DeviceRecord, ...]:
    from attnprobe.device.driver import CUDA, has_library

    if not has_library(CUDA):
        return ()
    # Only here: without a driver, a job does not wait for any of this.
    from attnprobe.device.cuda import cuda_facts
    from attnprobe.device.gpus import record_of

    return tuple(dict.fromkeys(record_of(gpu) for gpu in cuda_facts().gpus))


def _installed(name: str) -> Material | None:
    # importlib.metadata takes longer to import than a matrix takes to read; explaining for another
    # machine does without.
    from attnprobe.materials.installed import installed

    return installed(name)


def compare(matrix: Matrix, live: Live, tolerate: Collection[str] = ()) -> Match:
    """Return how a matrix compares with a machine; differences in `tolerate`d materials do not count."""
    found = frozenset(
        index
        for index, record in enumerate(matrix.devices)
        if any(_same_class(record, device) for device in live.devices)
    )
    device = "" if found else _device_words(matrix, live)
    materials = {}
    for backend in matrix.backends:
        if backend.status == "probed":
            said = material_difference(backend, live.material, tolerate)
            if said:
                materials[backend.name] = said
    gpus = [one.name for one in live.devices if one.kind == "cuda"]
    of_gpu = any(matrix.devices[index].kind == "cuda" for index in found)
    return Match(found, device, materials, beside="" if of_gpu or not found else " and ".join(gpus))


def assume(matrix: Matrix) -> Match:
    """Return the match of a matrix with the machine it was made on."""
    return Match(frozenset(range(len(matrix.devices))), "", {}, assumed=True)


def _same_class(record: DeviceRecord, device: DeviceRecord) -> bool:
    """Whether kernels see the same device. How many cores a process may use is no matter of the device."""
    return (
        record.kind == device.kind
        and record.name == device.name
        and record.sm == device.sm
        and record.smem_per_block_optin == device.smem_per_block_optin
        and record.capabilities == device.capabilities
    )


def _device_words(matrix: Matrix, live: Live) -> str:
    said = " or ".join(_device(record) for record in matrix.devices) or "no device"
    return f"measured on {said}; here {' and '.join(_device(d) for d in live.devices) or 'is no device'}"


def _device(record: DeviceRecord) -> str:
    facts = [f"SM {record.sm}"] if record.sm else []
    facts += [f"{record.smem_per_block_optin} B a block"] if record.smem_per_block_optin else []
    facts += [" ".join(record.capabilities)] if record.capabilities else []
    return f"{record.name} ({', '.join([record.kind, *facts])})"


def material_difference(backend: Backend, material: MaterialOf, tolerate: Collection[str] = ()) -> str:
    """Return which build of a backend differs from what is installed, or an empty string."""
    if not backend.materials:
        return "the matrix does not say with which builds it was measured"
    for recorded in backend.materials:
        if recorded.name in tolerate:
            continue
        found = material(recorded.name)
        if found is None:
            return f"{recorded.name} {recorded.version} was measured, and is not installed here"
        if found.version != recorded.version:
            return f"{recorded.name} {recorded.version} was measured, {found.version} is here"
        if found.digest != recorded.digest:
            return f"{recorded.name} {recorded.version} was measured in another build than the one here"
    return ""
