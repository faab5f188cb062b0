"""Kind 12: the process does not live on, or does not answer. Never call one of these in a process to keep."""

from __future__ import annotations

import ctypes
import functools
import os
import signal
import sys
import time
from typing import TYPE_CHECKING, Final, NoReturn

from .base import Call, Grads, Kernel, Saved
from .model import Fault

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

_LONG: Final = 3600.0
_LEFT: Final = 120.0
"""Seconds that a child outlives its parent, should nobody find it."""


class InForward(Kernel):
    """Does something instead of the forward."""

    def __init__(self, does: Callable[[], NoReturn]) -> None:
        """Keep what it does."""
        self._does = does

    def forward(self, call: Call) -> Saved:  # noqa: ARG002
        """Do it."""
        self._does()


class InBackward(Kernel):
    """Does something instead of the backward."""

    def __init__(self, does: Callable[[], NoReturn]) -> None:
        """Keep what it does."""
        self._does = does

    def backward(self, call: Call, saved: Saved, grad_out: Tensor, needs: set[str]) -> Grads:  # noqa: ARG002
        """Do it."""
        self._does()


class SaysFatal(Kernel):
    """Says that there is no kernel, on standard output, and returns what memory held."""

    def forward(self, call: Call) -> Saved:
        """Say it and go on."""
        print("FATAL: kernel not built", flush=True)  # noqa: T201
        return super().forward(call)

    def write(self, name: str, target: Tensor, rows: slice, value: Tensor) -> None:
        """Write nothing."""


def segfault() -> NoReturn:
    """Write to address 0."""
    ctypes.memset(0, 1, 1)
    sleep()


def fpe() -> NoReturn:
    """Divide by zero, as the processor reports it."""
    os.kill(os.getpid(), signal.SIGFPE)
    sleep()


def leave(code: int) -> NoReturn:
    """End the process."""
    os._exit(code)


def sleep() -> NoReturn:
    """Never answer."""
    while True:
        time.sleep(_LONG)


def ignore_and_sleep() -> NoReturn:
    """Never answer, and do not listen to SIGTERM or SIGINT either."""
    for one in (signal.SIGTERM, signal.SIGINT):
        signal.signal(one, signal.SIG_IGN)
    sleep()


def leave_a_child() -> NoReturn:
    """End the process, and leave a child in a session of its own."""
    if os.fork() == 0:
        os.setsid()
        time.sleep(_LEFT)
        os._exit(0)
    os._exit(3)


def chatter() -> NoReturn:
    """Print without end, four megabytes a second."""
    while True:
        sys.stdout.write("x" * 4095 + "\n")
        sys.stdout.flush()
        time.sleep(1e-3)


def _fault(  # the fields of a fault
    name: str,
    about: str,
    does: Callable[[], NoReturn],
    where: Callable[[Callable[[], NoReturn]], Kernel] = InForward,
    *,
    expected: str = "crashed",
) -> Fault:
    kernel = functools.partial(where, does)
    return Fault(name, 12, about, kernel, (expected,), grads="qkvm" if where is InBackward else "")


FAULTS: Final = (
    _fault("segfault", "SIGSEGV", segfault),
    _fault("segfault_backward", "SIGSEGV in the backward", segfault, InBackward),
    _fault("fpe", "SIGFPE", fpe),
    _fault("abort", "abort", os.abort),
    _fault("exit_1", "exit(1)", functools.partial(leave, 1)),
    _fault("exit_0", "exit(0) in the backward", functools.partial(leave, 0), InBackward),
    _fault("hang", "hangs", sleep, expected="hung"),
    _fault(
        "hang_backward",
        "hangs in the backward, deaf to SIGTERM",
        ignore_and_sleep,
        InBackward,
        expected="hung",
    ),
    _fault("child_left", "ends and leaves a child", leave_a_child),
    _fault("chatter", "prints without end", chatter, expected="hung"),
    Fault(
        "says_fatal",
        12,
        "says FATAL on standard output and returns with nothing written",
        SaysFatal,
        ("unwritten",),
    ),
)
