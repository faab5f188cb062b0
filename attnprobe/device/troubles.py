"""The codes of the driver and of NVML in words: what happened, why, what to do.

Codes are those of the public headers cuda.h and nvml.h; what a code has no words for is `failed`, by name.
"""

from __future__ import annotations

from typing import Final

from attnprobe.device.facts import State, Trouble

_REBOOT: Final = "reboot, or unload and load the module nvidia"
_CONTAINER: Final = "in a container, start it with --gpus all or --device nvidia.com/gpu=all"

NO_DRIVER: Final = Trouble(
    state="no-driver",
    what="no NVIDIA driver",
    why="the loader does not find libcuda.so.1",
    fix=f"install the driver; {_CONTAINER}",
)
NO_CUDA_PYTHON: Final = Trouble(
    state="no-client",
    what="the driver cannot be asked",
    why="cuda-python is not installed",
    fix="pip install cuda-python",
)
NO_PYNVML: Final = Trouble(
    state="no-client",
    what="NVML cannot be asked",
    why="nvidia-ml-py is not installed",
    fix="pip install nvidia-ml-py",
)

_CUDA: Final[dict[int, tuple[State, str, str]]] = {
    34: ("failed", "the toolkit's stub of the driver is loaded", "take its stubs out of LD_LIBRARY_PATH"),
    35: ("too-old", "the NVIDIA driver is too old", "update the driver"),
    46: ("busy", "all GPUs are busy or unavailable", "wait, or see nvidia-smi for what holds them"),
    100: ("no-device", "the driver shows no GPU", f"see nvidia-smi; {_CONTAINER}"),
    101: ("no-device", "the driver shows no GPU", "look at CUDA_VISIBLE_DEVICES"),
    304: (
        "no-permission",
        "the system refuses the driver its devices",
        "look at the rights of /dev/nvidia*",
    ),
    800: ("no-permission", "the driver may not be used here", "look at the rights of /dev/nvidia*"),
    802: ("not-ready", "the GPUs are not ready yet", "start nvidia-fabricmanager"),
    803: ("mismatch", "libcuda and the kernel module are of different versions", _REBOOT),
    804: (
        "mismatch",
        "the forward-compatible libcuda does not serve this GPU",
        "take cuda-compat out of LD_LIBRARY_PATH",
    ),
}
_NVML: Final[dict[int, tuple[State, str, str]]] = {
    4: ("no-permission", "no permission to use the GPUs", "look at the rights of /dev/nvidia*"),
    9: ("no-driver", "the NVIDIA driver is not loaded", "load the module nvidia: modprobe nvidia"),
    12: ("no-driver", "no NVML", "install the driver; " + _CONTAINER),
    13: ("too-old", "the NVIDIA driver is too old", "update the driver"),
    15: ("lost", "the GPU is lost", "look for Xid in dmesg, then reset the GPU or reboot"),
    16: ("lost", "the GPU needs a reset", "nvidia-smi --gpu-reset, or reboot"),
    18: ("mismatch", "libnvidia-ml and the kernel module are of different versions", _REBOOT),
    19: ("busy", "the GPU is in use by something that locks it", "wait, or see nvidia-smi"),
    28: ("no-device", "NVML finds no GPU", f"see nvidia-smi; {_CONTAINER}"),
}


def of_cuda(code: int, call: str, name: str) -> Trouble:
    """Return the words for a code of the driver; `name` is the code's own, `call` what returned it."""
    state, what, fix = _CUDA.get(code, ("failed", "the driver fails", "see dmesg and nvidia-smi"))
    return Trouble(state=state, what=what, why=f"{call}: {name}", fix=fix)


def of_nvml(code: int, said: str) -> Trouble:
    """Return the words for a code of NVML; `said` is the call with the code's name."""
    state, what, fix = _NVML.get(code, ("failed", "NVML fails", "see dmesg and nvidia-smi"))
    return Trouble(state=state, what=what, why=said, fix=fix)


def too_old(version: str) -> Trouble:
    """Return the words for a driver from before the calls that the client needs."""
    supports = f"it supports CUDA {version}" if version else "it does not say what CUDA it supports"
    return Trouble(
        state="too-old",
        what="the NVIDIA driver is too old",
        why=f"{supports}; cuda-python needs 12.0",
        fix="update the driver to 525 or later",
    )


def hung(limit: float, doing: str) -> Trouble:
    """Return the words for NVML that did not answer within `limit` seconds."""
    return Trouble(
        state="hung",
        what="NVML does not answer",
        why=f"nothing for {limit:g} s in {doing}",
        fix="look for Xid in dmesg; a GPU that hangs needs a reset or a reboot",
    )
