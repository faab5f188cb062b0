"""`attnprobe device`."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import click

from attnprobe.errors import NoVerdictError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from attnprobe.device.gpus import Gpu, Machine

_MIB = 1 << 20
_GIB = 1 << 30


@click.command("device")
@click.option("--format", type=click.Choice(["text", "json"]), default="text", show_default=True)
def command(format: str) -> int:
    """Show the GPUs: what kernels are chosen by, and what else runs there.

    Asks the driver and NVML; no context is created and nothing is run. UUIDs are shown and never stored.
    Exits 3 where no GPU could be probed, and says why.
    """
    machine = look()
    if format == "json":
        import msgspec

        content = msgspec.json.encode(machine, order="deterministic")
        click.echo(msgspec.json.format(content, indent=2).decode())
    else:
        for line in lines(machine):
            click.echo(line)
    if machine.trouble:
        raise NoVerdictError(machine.trouble.what, why=machine.trouble.why, fix=machine.trouble.fix)
    return 0


def look() -> Machine:
    """Return the GPUs of this machine."""
    from attnprobe.device.cuda import cuda_facts
    from attnprobe.device.driver import CUDA, NVML, has_library
    from attnprobe.device.facts import CudaFacts, NvmlFacts
    from attnprobe.device.gpus import join
    from attnprobe.device.nvml import nvml_facts

    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if not has_library(CUDA) and not has_library(NVML):
        return join(cuda_facts(), NvmlFacts(), visible)  # nothing to start a process for
    nvml = nvml_facts()
    # Where NVML hangs the driver would hang too, and this process has no one to kill it.
    stuck = nvml.trouble is not None and nvml.trouble.state == "hung"
    return join(CudaFacts() if stuck else cuda_facts(), nvml, visible)


def lines(machine: Machine) -> Iterator[str]:
    """Yield what a person reads of a machine."""
    if machine.driver or machine.cuda:
        cuda = f"CUDA {machine.cuda}" if machine.cuda else "CUDA version unknown"
        yield f"driver {machine.driver or 'unknown'}, {cuda}"
    for gpu in machine.gpus:
        yield from _of(gpu)
    yield from (f"note: {note}" for note in machine.notes)


def _of(gpu: Gpu) -> Iterator[str]:
    if gpu.ordinal is None:
        yield f"not shown to this process: {gpu.name}"
    else:
        yield f"GPU {gpu.ordinal}: {gpu.name}"
    if gpu.sm:
        yield f"  SM {gpu.sm}" + (f", also runs code for {', '.join(gpu.targets)}" if gpu.targets else "")
    if gpu.ordinal is not None:
        yield (
            f"  shared memory per block: {_bytes(gpu.smem_per_block_optin)} opt-in,"
            f" {_bytes(gpu.smem_per_block)} static, {_bytes(gpu.smem_reserved_per_block)} reserved;"
            f" per SM {_bytes(gpu.smem_per_sm)}"
        )
    yield "  " + ", ".join(_sizes(gpu))
    yield "  " + ", ".join(_modes(gpu))
    index = "" if gpu.nvml_index is None else f", nvidia-smi {gpu.nvml_index}"
    yield f"  PCI {gpu.pci or 'unknown'}{index}, {gpu.uuid or 'UUID unknown'}"
    for one in gpu.processes:
        memory = "" if one.memory is None else f", {_amount(one.memory)}"
        yield f"  process {one.pid} {one.name}".rstrip() + memory
    if gpu.trouble:
        yield f"  cannot be probed: {gpu.trouble}"


def _sizes(gpu: Gpu) -> Iterator[str]:
    if gpu.multiprocessors is not None:
        yield f"{gpu.multiprocessors} SMs"
    if gpu.ordinal is not None:
        registers = "unknown" if gpu.registers_per_sm is None else gpu.registers_per_sm
        yield f"{registers} registers per SM"
        yield f"L2 {_amount(gpu.l2)}"
    yield f"memory {_amount(gpu.memory)}" + (" shared with the host" if gpu.integrated else "")


def _modes(gpu: Gpu) -> Iterator[str]:
    """Yield the modes that are known; a GPU that has no ECC or MIG says nothing of it."""
    yield f"compute mode {gpu.compute_mode or 'unknown'}"
    if gpu.ecc is not None:
        yield "ECC on" if gpu.ecc else "ECC off"
    if gpu.gpu_instance is not None:
        yield f"MIG instance {gpu.gpu_instance}/{gpu.compute_instance}"
    elif gpu.mig is not None:
        yield "MIG on" if gpu.mig else "MIG off"
    if gpu.mps:
        yield "MPS on"


def _bytes(value: int | None) -> str:
    return "unknown" if value is None else f"{value} B"


def _amount(value: int | None) -> str:
    """Return a size in the largest binary unit that leaves it at 1 or more."""
    if value is None:
        return "unknown"
    if value >= _GIB:
        return f"{value / _GIB:.1f} GiB"
    return f"{value / _MIB:.1f} MiB" if value % _MIB else f"{value // _MIB} MiB"
