"""The CPU as a device: its name, cores and the instruction sets that kernels choose by."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Final

from attnprobe.device.interface import Device
from attnprobe.matrix.schema import DeviceRecord

_CPUINFO: Final = Path("/proc/cpuinfo")
_CHOSEN_BY: Final = (
    "avx2",
    "fma",
    "avx512f",
    "avx512bw",
    "avx512vl",
    "avx512_vnni",
    "avx512_bf16",
    "avx512_fp16",
    "amx_bf16",
    "amx_fp16",
    "asimd",
    "bf16",
    "sve",
)


def cpu_device() -> Device:
    """Return the CPU this process runs on."""
    name, flags = _describe(_CPUINFO.read_text() if _CPUINFO.exists() else "")
    found = tuple(flag for flag in _CHOSEN_BY if flag in flags)
    record = DeviceRecord(
        kind="cpu",
        name=name or f"{platform.machine()} CPU",
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1,
        capabilities=(platform.machine(), *found),
    )
    return Device(record, "cpu")


def _describe(cpuinfo: str) -> tuple[str, frozenset[str]]:
    """Return the model name and the flags in the text of /proc/cpuinfo."""
    name, flags = "", frozenset[str]()
    for line in cpuinfo.splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "model name" and not name:
            name = " ".join(value.split())
        if key.strip() in {"flags", "Features"} and not flags:
            flags = frozenset(value.split())
    return name, flags
