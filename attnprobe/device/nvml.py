"""What NVML says of the GPUs, asked in a child process that is killed when it takes too long.

NVML can hang for good on a GPU that fell off the bus, also where SIGKILL has no effect: then the child is
left behind, and what it had said counts.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Final

import msgspec

from attnprobe.device import troubles
from attnprobe.device.cuda import version_text
from attnprobe.device.facts import NvmlFacts, NvmlGpu, Trouble

LIMIT: Final = 5.0
"""Seconds that NVML may take for everything."""
_CHILD: Final = Path(__file__).with_name("_nvml_child.py")
_REAP: Final = 1.0
"""Seconds to wait for the child's end after SIGKILL."""


def nvml_facts(limit: float = LIMIT) -> NvmlFacts:
    """Return what NVML says within `limit` seconds, or why it says nothing. Never raises, never hangs."""
    text, finished = _ask(limit)
    # A last line that was cut off tells nothing.
    lines = [msgspec.json.decode(line) for line in text.splitlines(keepends=True) if line.endswith(b"\n")]
    return read(lines, finished=finished, limit=limit)


def read(lines: list[dict[str, Any]], *, finished: bool, limit: float) -> NvmlFacts:
    """Return the facts in the child's lines; `finished` is False if it was killed after `limit` seconds."""
    system: dict[str, Any] = {}
    gpus: list[NvmlGpu] = []
    trouble: Trouble | None = None
    doing, done = "the start of Python", False
    for line in lines:
        doing = line.get("doing", doing)
        system = line.get("system", system)
        done = done or "done" in line
        if "gpu" in line:
            gpus.append(msgspec.convert(line["gpu"], NvmlGpu))
        if "absent" in line:
            trouble = troubles.NO_PYNVML
        if "failed" in line:
            trouble = troubles.of_nvml(*line["failed"])
    if not finished:
        trouble = troubles.hung(limit, doing)
    elif trouble is None and not done:
        trouble = Trouble(state="failed", what="NVML fails", why=f"the process that asked it died in {doing}")
    return NvmlFacts(
        driver=system.get("driver", ""),
        cuda=version_text(system.get("cuda", 0)),
        gpus=tuple(gpus),
        trouble=trouble,
    )


def _ask(limit: float) -> tuple[bytes, bool]:
    """Return what the child wrote, and whether it came to its end within `limit` seconds."""
    reading, writing = os.pipe()
    try:
        child = subprocess.Popen(  # noqa: S603  # our own file, by our own interpreter
            # -S: the parent's module path is handed over, and site may import anything.
            [sys.executable, "-S", str(_CHILD), str(writing), *sys.path],
            pass_fds=(writing,),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
    except OSError:
        os.close(reading)
        return b"", True
    finally:
        os.close(writing)
    try:
        return _read_until(reading, time.monotonic() + limit)
    finally:
        os.close(reading)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(_REAP)


def _read_until(descriptor: int, deadline: float) -> tuple[bytes, bool]:
    """Return what comes through a pipe, and whether its other end closed before the deadline."""
    pieces: list[bytes] = []
    while (left := deadline - time.monotonic()) > 0:
        if not select.select([descriptor], [], [], left)[0]:
            break
        piece = os.read(descriptor, 1 << 16)
        if not piece:
            return b"".join(pieces), True
        pieces.append(piece)
    return b"".join(pieces), False
