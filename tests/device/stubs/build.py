"""Builds the stub driver libraries with the system's C compiler.

Each library lies in a directory of its own, so that a test can put one of them, both or none on
LD_LIBRARY_PATH. `old` is a libcuda.so.1 without the symbol that drivers before CUDA 12 lack.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Final

HERE: Final = Path(__file__).parent
COMMON: Final = ("json.c", "machine.c")
_FLAGS: Final = ("-std=gnu11", "-fPIC", "-shared", "-fvisibility=hidden", "-Wall", "-Wextra", "-Werror")
_LIBRARIES: Final = {
    "cuda": ("libcuda.so.1", ("libcuda.c",), ()),
    "nvml": ("libnvidia-ml.so.1", ("libnvml.c",), ()),
    "old": ("libcuda.so.1", ("libcuda.c",), ("-DcuGetProcAddress_v2=cuGetProcAddress_v1",)),
}


def build(place: Path) -> dict[str, Path]:
    """Build all libraries under `place`; return the directory of each.

    Raises:
        RuntimeError: there is no C compiler, or it failed; with its words.
    """
    compiler = shutil.which("cc")
    if compiler is None:
        raise RuntimeError("there is no C compiler: cc")
    found = {}
    for name, (soname, sources, defines) in _LIBRARIES.items():
        directory = place / name
        directory.mkdir(parents=True, exist_ok=True)
        files = [str(HERE / file) for file in (*sources, *COMMON)]
        output = str(directory / soname)
        done = subprocess.run(
            [compiler, *_FLAGS, *defines, f"-Wl,-soname,{soname}", "-o", output, *files],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(done.stderr)
        found[name] = directory
    return found
