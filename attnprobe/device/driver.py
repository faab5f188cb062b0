"""Whether a driver's library is here at all: the cheapest question, asked before anything is imported."""

from __future__ import annotations

import os
from typing import Final

CUDA: Final = "libcuda.so.1"
NVML: Final = "libnvidia-ml.so.1"
"""The driver's libraries, by the names under which every client loads them."""


def has_library(name: str) -> bool:
    """Whether the loader finds a library. It is loaded then, and not initialised.

    By the module beneath ctypes: ctypes itself takes ten times as long to import as the answer takes, and a
    job on a CPU waits for it. An interpreter that was built without it has no client for a GPU either.
    """
    try:
        import _ctypes

        _ctypes.dlopen(name, os.RTLD_NOW)
    except (ImportError, OSError):
        return False
    return True
