"""Machines with GPUs that are not here: the stub libraries, and the environment that makes them answer."""

from __future__ import annotations

import atexit
import copy
import functools
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from tests.device.stubs import build

FACTS: Final = Path(__file__).parents[2] / "facts"
BOTH: Final = ("cuda", "nvml")
_ASKING: Final = frozenset({"CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "LD_LIBRARY_PATH"})


@functools.cache
def libraries() -> dict[str, Path]:
    """Build the stub libraries, once a process; return the directory of each."""
    place = Path(tempfile.mkdtemp(prefix="attnprobe-stubs-"))
    atexit.register(shutil.rmtree, place, ignore_errors=True)
    return build.build(place)


def facts(name: str) -> dict[str, Any]:
    """Return the facts of a machine with one GPU, to change at will."""
    found: dict[str, Any] = json.loads((FACTS / f"{name}.json").read_text())
    return found


def together(*names: str, **more: Any) -> dict[str, Any]:
    """Return a machine with the GPUs of several files, in that order, on PCI buses of their own."""
    machine = facts(names[0])
    machine["gpus"] = []
    for bus, name in enumerate(names, start=1):
        gpu = copy.deepcopy(facts(name)["gpus"][0])
        machine["gpus"].append(gpu | {"pci": f"00000000:{bus:02X}:00.0", "uuid": f"{gpu['uuid'][:-1]}{bus}"})
    return machine | more


def with_gpu(machine: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """Return a machine whose first GPU is changed."""
    first, *others = machine["gpus"]
    return machine | {"gpus": [first | changes, *others]}


def environment(
    place: Path, machine: Mapping[str, Any], stubs: tuple[str, ...] = BOTH, **more: str
) -> dict[str, str]:
    """Return an environment in which these stubs are the driver, and answer for a machine."""
    file = place / "machine.json"
    file.write_text(json.dumps(machine))
    kept = {name: value for name, value in os.environ.items() if name not in _ASKING}
    found = {
        "ATTNPROBE_STUB_FACTS": str(file),
        "LD_LIBRARY_PATH": ":".join(str(libraries()[name]) for name in stubs),
        "OMP_NUM_THREADS": "1",
    }
    return kept | found | more


def without_driver() -> dict[str, str]:
    """Return an environment in which no stub is a driver."""
    return {name: value for name, value in os.environ.items() if name not in _ASKING}


def run_python(code: str, env: Mapping[str, str]) -> str:
    """Return what a program printed in a process of its own: a library is loaded once and for all."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=dict(env),
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
