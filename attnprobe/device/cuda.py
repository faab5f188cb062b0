"""What the driver says of the GPUs, through `cuda.bindings.driver`, without a context on any of them.

A state that keeps the driver from answering is a value, never an exception: no driver, no package, a package
that does not load, an error code. Asking initialises the driver in this process: CUDA_VISIBLE_DEVICES counts
as it stands then, and a process forked afterwards cannot use CUDA (one that is spawned can).
"""

from __future__ import annotations

import ctypes
import importlib
import uuid
from typing import Any, Final

from attnprobe.device import troubles
from attnprobe.device.driver import CUDA, has_library
from attnprobe.device.facts import CudaFacts, CudaGpu, Trouble
from attnprobe.text import printable

_ATTRIBUTES: Final = {
    "multiprocessors": "MULTIPROCESSOR_COUNT",
    "registers_per_sm": "MAX_REGISTERS_PER_MULTIPROCESSOR",
    "smem_per_block": "MAX_SHARED_MEMORY_PER_BLOCK",
    "smem_per_block_optin": "MAX_SHARED_MEMORY_PER_BLOCK_OPTIN",
    "smem_reserved_per_block": "RESERVED_SHARED_MEMORY_PER_BLOCK",
    "smem_per_sm": "MAX_SHARED_MEMORY_PER_MULTIPROCESSOR",
    "l2": "L2_CACHE_SIZE",
    "compute_mode": "COMPUTE_MODE",
}
"""Field of `CudaGpu`: attribute of the driver, without CU_DEVICE_ATTRIBUTE_."""


class _FailedError(Exception):
    """A call returned an error code; the trouble says which."""

    def __init__(self, trouble: Trouble) -> None:
        super().__init__(trouble.what)
        self.trouble = trouble


def cuda_facts() -> CudaFacts:
    """Return the GPUs that the driver shows this process, in CUDA's order, or why it shows none."""
    if not has_library(CUDA):
        return CudaFacts(trouble=troubles.NO_DRIVER)
    driver = _client()
    if isinstance(driver, Trouble):
        return CudaFacts(trouble=driver)
    version = ""
    try:
        version = version_text(_call(driver, "cuDriverGetVersion"))
        _call(driver, "cuInit", 0)
        gpus = tuple(_gpu(driver, ordinal) for ordinal in range(_call(driver, "cuDeviceGetCount")))
    except _FailedError as failed:
        return CudaFacts(cuda=version, trouble=failed.trouble)
    except Exception as error:  # noqa: BLE001  # the client raises RuntimeError for a symbol it does not find
        return CudaFacts(cuda=version, trouble=_raised(error))
    return CudaFacts(cuda=version, gpus=gpus)


def version_text(number: int) -> str:
    """Return "13.0" for 13000, as CUDA numbers its versions."""
    return f"{number // 1000}.{number % 1000 // 10}" if number else ""


def _client() -> Any:
    """Return the module, or the trouble with it. It has no types to import it by name for."""
    try:
        return importlib.import_module("cuda.bindings.driver")
    except ModuleNotFoundError:
        return troubles.NO_CUDA_PYTHON
    except BaseException as error:  # a broken extension module may raise anything
        if isinstance(error, KeyboardInterrupt):
            raise
        why = f"cuda-python does not load: {_words(error)}"
        return Trouble(
            state="no-client",
            what="the driver cannot be asked",
            why=why,
            fix="pip install --force-reinstall cuda-python",
        )


def _raised(error: Exception) -> Trouble:
    """Return the trouble that an exception of the client stands for."""
    said = _words(error)
    if "cuGetProcAddress" in said:
        number = ctypes.c_int()
        ctypes.CDLL(CUDA).cuDriverGetVersion(ctypes.byref(number))
        return troubles.too_old(version_text(number.value))
    if "is not found" in said:
        return Trouble(
            state="too-old", what="the NVIDIA driver is too old", why=said, fix="update the driver"
        )
    return Trouble(state="failed", what="the driver fails", why=said, fix="see dmesg and nvidia-smi")


def _words(error: BaseException) -> str:
    """Return the first line of what an error says, fit for one line."""
    return printable((str(error).strip().splitlines() or [""])[0] or type(error).__name__)


def _call(driver: Any, name: str, *arguments: Any) -> Any:
    """Return what a call returns beside its error code, or raise the trouble."""
    code, *values = getattr(driver, name)(*arguments)
    if int(code):
        raise _FailedError(troubles.of_cuda(int(code), name, getattr(code, "name", str(int(code)))))
    return values[0] if values else None


def _gpu(driver: Any, ordinal: int) -> CudaGpu:
    device = _call(driver, "cuDeviceGet", ordinal)
    named = {field: _attribute(driver, name, device) for field, name in _ATTRIBUTES.items()}
    major = _attribute(driver, "COMPUTE_CAPABILITY_MAJOR", device)
    minor = _attribute(driver, "COMPUTE_CAPABILITY_MINOR", device)
    return CudaGpu(
        ordinal=ordinal,
        name=_text(_call(driver, "cuDeviceGetName", 256, device)),
        uuid=str(uuid.UUID(bytes=bytes(_call(driver, "cuDeviceGetUuid", device).bytes))),
        pci=_text(_call(driver, "cuDeviceGetPCIBusId", 64, device)),
        sm=f"{major}.{minor}",
        memory=_call(driver, "cuDeviceTotalMem", device),
        integrated=bool(_attribute(driver, "INTEGRATED", device)),
        **named,
    )


def _attribute(driver: Any, name: str, device: Any) -> int | None:
    """Return an attribute, or None where this driver or this package does not know it."""
    number = getattr(driver.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}", None)
    if number is None:
        return None
    code, value = driver.cuDeviceGetAttribute(number, device)
    return None if int(code) else int(value)


def _text(raw: bytes) -> str:
    return printable(raw.partition(b"\0")[0].decode(errors="replace").strip())
