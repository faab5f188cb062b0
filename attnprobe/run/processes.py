"""Small things of the operating system: die with the parent, find and end children."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import sys
from pathlib import Path
from typing import Final

_PR_SET_PDEATHSIG: Final = 1
_PR_SET_CHILD_SUBREAPER: Final = 36


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def die_with_parent(*, wanted: bool = True) -> None:
    """Ask the kernel to kill this process when the thread that started it ends (Linux)."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL if wanted else 0)


def no_core_dumps() -> None:
    """Let a crash write no core file; that of a process with a GPU would be tens of gigabytes."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


MOST_OUTPUT: Final = 1 << 28
"""Bytes that a worker may write into one file: what it prints without end would fill the disk."""


def output_limit() -> int:
    """Return how many bytes a worker may write into a file: `MOST_OUTPUT`, or a lower limit of the system."""
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    return MOST_OUTPUT if hard == resource.RLIM_INFINITY else min(MOST_OUTPUT, hard)


def limit_output() -> None:
    """Let a process that writes more than `output_limit` into a file die of SIGXFSZ."""
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    resource.setrlimit(resource.RLIMIT_FSIZE, (output_limit(), hard))


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent ends, so that none can hide (Linux)."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def children_of(pid: int) -> list[int]:
    """Return the direct children of a process, by /proc (Linux; elsewhere none)."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            # The name, in parentheses, may hold spaces; the parent is the second field behind it.
            fields = entry.read_text().rpartition(")")[2].split()
            if int(fields[1]) == pid:
                found.append(int(entry.parent.name))
    return found


def kill_group(pid: int) -> None:
    """Kill the process group of a session leader, whatever it ignores."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def kill_tree(pid: int) -> set[int]:
    """Kill a process and all its descendants; return which there were."""
    killed = set()
    for child in children_of(pid):
        killed |= kill_tree(child)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGKILL)
        killed.add(pid)
    return killed
