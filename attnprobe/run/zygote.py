"""The process that imports torch once and forks workers; the supervisor starts it with its own module path.

It never runs a kernel and starts no thread, so that a fork of it is a fresh process. It waits on one
socket: when the scan ends, however it ends, the socket closes and the zygote kills all that is left.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import pkgutil
import select
import signal
import socket
import sys
import time
import traceback
from typing import TYPE_CHECKING, Final, NoReturn

from attnprobe.materials.installed import installed
from attnprobe.run import processes
from attnprobe.run.protocol import Exited, Ready, Spawned, send

_END_LIMIT: Final = 3.0
"""Seconds to go on killing what workers left behind."""
_IMPORTED_LATE: Final = (
    "torch.fx.experimental.symbolic_shapes",
    "torch.distributed.tensor",
    "torch.nested._internal.sdpa",
    "torch._dynamo",
)

if TYPE_CHECKING:
    from collections.abc import Callable


def main(arguments: list[str]) -> int:
    """Import, then fork workers until the scan is gone."""
    processes.die_with_parent()
    if os.getppid() != int(arguments[2]):
        return 0  # the scan ended before the kernel was asked to tell
    control = socket.socket(fileno=int(arguments[0]))
    start = time.monotonic()
    try:
        from attnprobe.run.worker import main as work

        _import_what_kernels_will()
    except Exception as error:  # noqa: BLE001  # a broken torch may raise anything
        send(control, Ready(error=f"{type(error).__name__}: {error}"))
        return 3
    # From here on the closed socket tells; a signal would leave the workers' own children behind.
    processes.adopt_orphans()
    processes.die_with_parent(wanted=False)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    zygote = Zygote(control, lambda channel: work(channel, arguments[1]))
    try:
        send(control, Ready(seconds=time.monotonic() - start))
        zygote.serve()
    except (BrokenPipeError, ConnectionResetError):
        pass
    finally:
        zygote.end_all()
    return 0


def run(argv: list[str]) -> NoReturn:
    """Run `main` and end: nothing is left to do, and libraries have words of their own at an orderly exit."""
    os._exit(main(argv[1:]))


def _import_what_kernels_will() -> None:
    """Import the modules that torch imports at the first gradient, nested tensor or mask object.

    Two seconds in all, that every worker after a crash would spend again. None of them runs a kernel.
    """
    for name in _IMPORTED_LATE:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    package = importlib.import_module("attnprobe.backends")
    for module in pkgutil.iter_modules(package.__path__):
        with contextlib.suppress(Exception):
            importlib.import_module(f"{package.__name__}.{module.name}")
    # All of this stays: collections in the forks need not look at it, and do not touch its pages.
    gc.collect()
    gc.freeze()
    # Hashing the record of torch's files takes a while as well; forks inherit the answer.
    installed("torch")


class Zygote:
    """Forks a worker for each request, and reports each that ends."""

    def __init__(self, control: socket.socket, work: Callable[[socket.socket], None]) -> None:
        """Arrange for the end of a child to wake the loop."""
        self._control = control
        self._work = work
        self._workers: set[int] = set()
        self._killed: set[int] = set()
        self._wake, self._wakeup = os.pipe()
        for end in (self._wake, self._wakeup):
            os.set_blocking(end, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wakeup, warn_on_full_buffer=False)

    def serve(self) -> None:
        """Answer until the scan hangs up."""
        while True:
            readable, _, _ = select.select([self._control.fileno(), self._wake], [], [])
            if self._wake in readable:
                with contextlib.suppress(BlockingIOError):
                    os.read(self._wake, 4096)
                self._reap()
            if self._control.fileno() in readable:
                message, fds, _, _ = socket.recv_fds(self._control, 4096, 2)
                if not message:
                    return
                self._spawn(fds)

    def end_all(self) -> None:
        """Kill every worker and whatever they started."""
        for pid in self._workers:
            processes.kill_group(pid)
        # A child of a worker becomes ours only when the worker is gone: look again until there is none.
        deadline = time.monotonic() + _END_LIMIT
        while (left := processes.children_of(os.getpid())) and time.monotonic() < deadline:
            for pid in left:
                processes.kill_tree(pid)
            with contextlib.suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            time.sleep(0.01)

    def _spawn(self, fds: list[int]) -> None:
        zygote = os.getpid()
        pid = os.fork()
        if pid == 0:
            self._become_worker(fds, zygote)
        self._workers.add(pid)
        for fd in fds:
            os.close(fd)
        send(self._control, Spawned(pid))

    def _become_worker(self, fds: list[int], zygote: int) -> NoReturn:
        """Turn a fresh fork into a worker; never returns into the zygote's loop."""
        code = 70
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.close(self._wake)
            os.close(self._wakeup)
            self._control.close()
            os.setsid()
            processes.die_with_parent()
            if os.getppid() != zygote:
                os._exit(code)  # it ended before the kernel was asked to tell
            processes.no_core_dumps()
            processes.limit_output()
            channel, output = fds
            os.dup2(output, 1)
            os.dup2(output, 2)
            os.close(output)
            self._work(socket.socket(fileno=channel))
            code = 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
            if isinstance(end.code, str):
                print(end.code, file=sys.stderr)  # noqa: T201  # as the interpreter would
        except BaseException:  # noqa: BLE001  # it is about to end; what it was goes into the output
            traceback.print_exc()
        finally:
            with contextlib.suppress(Exception):
                sys.stdout.flush()
            os._exit(code)

    def _reap(self) -> None:
        """Report workers that ended, and end what they left behind."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            self._killed.discard(pid)
            if pid not in self._workers:
                continue
            self._workers.discard(pid)
            processes.kill_group(pid)
            orphans = [p for p in processes.children_of(os.getpid()) if p not in self._workers]
            found: set[int] = set().union(*(processes.kill_tree(orphan) for orphan in orphans))
            # What an earlier worker left is killed and may, on a busy machine, not be gone yet.
            left = len(found - self._killed)
            self._killed |= found
            send(self._control, Exited(pid, os.waitstatus_to_exitcode(status), left))
