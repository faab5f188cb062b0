"""The process that imports torch once and forks workers: `python -m attnprobe.run.zygote FD DEVICE`.

It never runs a kernel and starts no thread, so that a fork of it is a fresh process. It waits on one
socket: when the scan ends, however it ends, the socket closes and the zygote kills all that is left.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import sys
import time
from typing import NoReturn

from attnprobe.run import processes
from attnprobe.run.protocol import Exited, Ready, Spawned, send


def main(arguments: list[str]) -> int:
    """Import, then fork workers until the scan is gone."""
    processes.die_with_parent()
    if os.getppid() == 1:
        return 0
    control = socket.socket(fileno=int(arguments[0]))
    device = arguments[1]
    start = time.monotonic()
    try:
        from attnprobe.run import worker
    except Exception as error:  # noqa: BLE001  # a broken torch may raise anything
        send(control, Ready(error=f"{type(error).__name__}: {error}"))
        return 3
    # From here on the closed socket tells; a signal would leave the workers' own children behind.
    processes.adopt_orphans()
    processes.die_with_parent(wanted=False)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    read_end, write_end = os.pipe()
    for end in (read_end, write_end):
        os.set_blocking(end, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    send(control, Ready(seconds=time.monotonic() - start))
    workers: set[int] = set()
    try:
        while True:
            readable, _, _ = select.select([control, read_end], [], [])
            if read_end in readable:
                with contextlib.suppress(BlockingIOError):
                    os.read(read_end, 4096)
                _reap(control, workers)
            if control in readable:
                message, fds, _, _ = socket.recv_fds(control, 4096, 2)
                if not message:
                    break
                pid = os.fork()
                if pid == 0:
                    signal.set_wakeup_fd(-1)
                    for end in (read_end, write_end):
                        os.close(end)
                    control.close()
                    _become_worker(worker, fds, device)
                workers.add(pid)
                for fd in fds:
                    os.close(fd)
                send(control, Spawned(pid))
    except (BrokenPipeError, ConnectionResetError):
        pass
    finally:
        for pid in workers:
            processes.kill_group(pid)
        for pid in processes.children_of(os.getpid()):
            processes.kill_tree(pid)
    return 0


def _become_worker(worker: object, fds: list[int], device: str) -> NoReturn:
    """Turn a fresh fork into a worker; never returns into the zygote's loop."""
    code = 70
    try:
        os.setsid()
        processes.die_with_parent()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        channel, output = fds
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.close(output)
        worker.main(socket.socket(fileno=channel), device)  # type: ignore[attr-defined]  # imported late
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
        os._exit(code)


def _reap(control: socket.socket, workers: set[int]) -> None:
    """Report workers that ended, and end what they left behind."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        if pid not in workers:
            continue
        workers.discard(pid)
        processes.kill_group(pid)
        left = sum(processes.kill_tree(p) for p in processes.children_of(os.getpid()) if p not in workers)
        send(control, Exited(pid, os.waitstatus_to_exitcode(status), left))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
