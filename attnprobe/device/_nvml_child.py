"""The child process that asks NVML: it imports pynvml and nothing of attnprobe, and may hang.

Started as a script with the number of a pipe and the parent's module path. It writes a line of JSON before
each call that could hang, `{"doing": ...}`, and one with each answer, so that what was said before a hang
counts. The parent is `attnprobe.device.nvml`.
"""

from __future__ import annotations

import sys

if __name__ == "__main__":
    # Not this file's own directory, where modules have the names of packages.
    sys.path[:] = sys.argv[2:]

import contextlib
import importlib
import json
import os
from collections.abc import Callable
from typing import Any

_UNKNOWN = frozenset({3, 4, 6, 13, 25})
"""Codes that mean "this GPU or driver does not say", not that something is broken: not supported, no
permission, not found, no such function, another version of a structure."""


class _Speaker:
    """Writes lines to the pipe."""

    def __init__(self, descriptor: int) -> None:
        self._pipe = os.fdopen(descriptor, "w", encoding="utf-8")

    def say(self, **content: Any) -> None:
        """Write one line, at once."""
        print(json.dumps(content), file=self._pipe, flush=True)


class _FailedError(Exception):
    """A call failed in a way that matters: the code, and the call with the code's name."""

    def __init__(self, code: int, said: str) -> None:
        super().__init__(said)
        self.code = code
        self.said = said


class _Library:
    """pynvml, with its errors sorted, and each call announced."""

    def __init__(self, pynvml: Any, speaker: _Speaker) -> None:
        self._pynvml = pynvml
        self._speaker = speaker
        self.where = ""

    def must(self, call: str, *arguments: Any) -> Any:
        """Return an answer.

        Raises:
            _FailedError: any error code.
        """
        self._speaker.say(doing=call + self.where)
        try:
            return getattr(self._pynvml, call)(*arguments)
        except self._pynvml.NVMLError as error:
            raise self._failed(int(error.value), call) from None
        except AttributeError:  # this pynvml does not know the call
            raise self._failed(self._pynvml.NVML_ERROR_FUNCTION_NOT_FOUND, call) from None

    def _failed(self, code: int, call: str) -> _FailedError:
        names = (name for name, value in vars(self._pynvml).items() if value == code)
        name = next((name for name in names if name.startswith("NVML_ERROR_")), str(code))
        return _FailedError(code, f"{call}: {name}")

    def may(self, call: str, *arguments: Any) -> Any:
        """Return an answer, or None where there is none to have."""
        try:
            return self.must(call, *arguments)
        except _FailedError as error:
            if error.code in _UNKNOWN:
                return None
            raise


def main(descriptor: int) -> None:
    """Say what NVML says."""
    speaker = _Speaker(descriptor)
    try:
        pynvml = importlib.import_module("pynvml")
    except ModuleNotFoundError:
        speaker.say(absent=True)
        return
    library = _Library(pynvml, speaker)
    try:
        library.must("nvmlInit")
        speaker.say(
            system={
                "driver": library.may("nvmlSystemGetDriverVersion") or "",
                "cuda": library.may("nvmlSystemGetCudaDriverVersion_v2") or 0,
            }
        )
        for index in range(library.must("nvmlDeviceGetCount")):
            library.where = f" of GPU {index}"
            speaker.say(gpu=_gpu(library, index))
    except _FailedError as error:
        speaker.say(failed=[error.code, error.said])
        return
    speaker.say(done=True)


def _gpu(library: _Library, index: int) -> dict[str, Any]:
    """Return what NVML says of a GPU; one that is broken says which call told so, the others go on."""
    found: dict[str, Any] = {"index": index}
    try:
        device = library.must("nvmlDeviceGetHandleByIndex", index)
        for field, ask in _FIELDS.items():
            answer = ask(library, device)
            if answer is not None:
                found[field] = answer
    except _FailedError as error:
        found["failed"] = [error.code, error.said]
    return found


def _sm(library: _Library, device: Any) -> str | None:
    version = library.may("nvmlDeviceGetCudaComputeCapability", device)
    return version and f"{version[0]}.{version[1]}"


def _memory(library: _Library, device: Any) -> int | None:
    memory = library.may("nvmlDeviceGetMemoryInfo", device)
    return memory and int(memory.total)


def _mode(call: str) -> Callable[[_Library, Any], bool | None]:
    """Return a question for a mode that is on or off, or that the GPU does not have."""

    def ask(library: _Library, device: Any) -> bool | None:
        modes = library.may(call, device)
        return modes and bool(modes[0])

    return ask


def _instances(library: _Library, device: Any) -> list[dict[str, Any]] | None:
    if not _mode("nvmlDeviceGetMigMode")(library, device):
        return None
    found = []
    for index in range(library.may("nvmlDeviceGetMaxMigDeviceCount", device) or 0):
        mig = library.may("nvmlDeviceGetMigDeviceHandleByIndex", device, index)
        if mig is None:
            continue
        one = {
            "uuid": library.must("nvmlDeviceGetUUID", mig),
            "name": library.may("nvmlDeviceGetName", mig) or "",
            "gpu_instance": library.must("nvmlDeviceGetGpuInstanceId", mig),
            "compute_instance": library.must("nvmlDeviceGetComputeInstanceId", mig),
            "memory": _memory(library, mig),
            "processes": _processes(library, mig),
        }
        attributes = library.may("nvmlDeviceGetAttributes_v2", mig)
        if attributes is not None:
            one["multiprocessors"] = int(attributes.multiprocessorCount)
        found.append(one)
    return found


def _processes(library: _Library, device: Any) -> list[dict[str, Any]]:
    found = library.may("nvmlDeviceGetComputeRunningProcesses", device) or []
    return [{"pid": p.pid, "memory": p.usedGpuMemory, "name": _program(library, p.pid)} for p in found]


def _program(library: _Library, pid: int) -> str:
    name = ""
    with contextlib.suppress(_FailedError):  # it may have ended, or be another user's
        name = str(library.may("nvmlSystemGetProcessName", pid) or "")
    return name.split(" ")[0].rpartition("/")[2]


def _mps(library: _Library, device: Any) -> bool:
    return bool(library.may("nvmlDeviceGetMPSComputeRunningProcesses", device))


_FIELDS: dict[str, Callable[[_Library, Any], Any]] = {
    "pci": lambda library, device: library.must("nvmlDeviceGetPciInfo", device).busId,
    "uuid": lambda library, device: library.must("nvmlDeviceGetUUID", device),
    "name": lambda library, device: library.must("nvmlDeviceGetName", device),
    "sm": _sm,
    "memory": _memory,
    "compute_mode": lambda library, device: library.may("nvmlDeviceGetComputeMode", device),
    "ecc": _mode("nvmlDeviceGetEccMode"),
    "mig": _mode("nvmlDeviceGetMigMode"),
    "instances": _instances,
    "processes": _processes,
    "mps": _mps,
}
"""Field of `NvmlGpu`: how it is asked for. The PCI id comes first: by it the rest is matched."""

if __name__ == "__main__":
    main(int(sys.argv[1]))
