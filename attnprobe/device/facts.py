"""What the driver and NVML say of a machine's GPUs, before the two are joined.

All sizes are in bytes. `None` means that it was not said: unknown, never 0. UUIDs are for the screen; nothing
that is stored has a field for them.
"""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

State = Literal[
    "no-driver",
    "no-client",
    "too-old",
    "mismatch",
    "no-permission",
    "not-ready",
    "no-device",
    "lost",
    "busy",
    "exclusive",
    "hung",
    "failed",
]
"""Why a GPU cannot be probed, in one word for programs."""


class Trouble(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Why a GPU, or all of them, cannot be probed: what happened, why, and the next step."""

    state: State
    what: str
    why: str = ""
    fix: str = ""

    def __str__(self) -> str:
        """Return the parts on one line."""
        return self.what + (f": {self.why}" if self.why else "") + (f" ({self.fix})" if self.fix else "")


class CudaGpu(Struct, frozen=True, kw_only=True):
    """A device as the driver shows it to this process, in CUDA's order: a GPU or a MIG instance.

    `uuid` is without a prefix; `pci` like "0000:01:00.0"; `compute_mode` as CUDA numbers it.
    """

    ordinal: int
    name: str
    uuid: str
    pci: str
    sm: str
    memory: int | None = None
    multiprocessors: int | None = None
    registers_per_sm: int | None = None
    smem_per_block: int | None = None
    smem_per_block_optin: int | None = None
    smem_reserved_per_block: int | None = None
    smem_per_sm: int | None = None
    l2: int | None = None
    compute_mode: int | None = None
    integrated: bool = False


class CudaFacts(Struct, frozen=True, kw_only=True):
    """What the driver says. `cuda` is the CUDA version it supports, like "13.0"."""

    cuda: str = ""
    gpus: tuple[CudaGpu, ...] = ()
    trouble: Trouble | None = None


class Process(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A process that holds a context on a GPU. `name` is its program's, without the path."""

    pid: int
    memory: int | None = None
    name: str = ""


class MigInstance(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A MIG device: a compute instance inside a GPU instance, and what runs in it."""

    uuid: str
    name: str
    gpu_instance: int
    compute_instance: int
    multiprocessors: int | None = None
    memory: int | None = None
    processes: tuple[Process, ...] = ()


class NvmlGpu(Struct, frozen=True, kw_only=True):
    """A GPU as NVML lists it, in NVML's order. `mig` and `ecc` are None where the GPU has no such thing.

    `failed` is the code and the words of a call that failed for this GPU alone, or None.
    """

    index: int
    name: str = ""
    uuid: str = ""
    pci: str = ""
    sm: str = ""
    memory: int | None = None
    compute_mode: int | None = None
    ecc: bool | None = None
    mig: bool | None = None
    instances: tuple[MigInstance, ...] = ()
    processes: tuple[Process, ...] = ()
    mps: bool = False
    failed: tuple[int, str] | None = None


class NvmlFacts(Struct, frozen=True, kw_only=True):
    """What NVML says. `driver` is the version of the kernel driver, like "580.65.06"."""

    driver: str = ""
    cuda: str = ""
    gpus: tuple[NvmlGpu, ...] = ()
    trouble: Trouble | None = None
