from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from attnprobe.config import Case
from attnprobe.run.protocol import (
    SPAWN,
    Begin,
    Describe,
    Described,
    Exited,
    Finished,
    Outcome,
    Ready,
    RunCase,
    Spawned,
    receive_reply,
    receive_zygote,
    send,
)
from attnprobe.run.supervisor import THREADS, ZYGOTE

TINY = Case(head_dim=8, head_dim_v=8, heads=1, heads_kv=1, seqlen_q=4, seqlen_kv=4)


class Zygote:
    """A zygote with nobody between it and the test."""

    def __init__(self, *before: str) -> None:
        """Start it; it looks for modules in the directories `before` first."""
        self.control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.control.settimeout(60)
        self.process = subprocess.Popen(
            [sys.executable, "-c", ZYGOTE, str(theirs.fileno()), "cpu", str(os.getpid()), *before, *sys.path],
            pass_fds=(theirs.fileno(),),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
            env={**os.environ, **THREADS},
        )
        theirs.close()
        self.ready = receive_zygote(self.control)

    def spawn(self) -> tuple[int, socket.socket]:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.settimeout(60)
        with tempfile.TemporaryFile() as output:
            socket.send_fds(self.control, [SPAWN], [theirs.fileno(), output.fileno()])
        theirs.close()
        spawned = receive_zygote(self.control)
        assert isinstance(spawned, Spawned)
        return spawned.pid, ours

    def close(self) -> int:
        self.control.close()
        return self.process.wait(10)


@pytest.fixture(scope="module")
def zygote() -> Iterator[Zygote]:
    one = Zygote()
    yield one
    assert one.close() == 0


def gone_within(pids: list[int], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while any(psutil.pid_exists(p) and psutil.Process(p).status() != psutil.STATUS_ZOMBIE for p in pids):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def test_it_is_ready_and_has_no_thread_and_no_child(zygote: Zygote) -> None:
    assert isinstance(zygote.ready, Ready)
    assert zygote.ready.error == ""
    assert zygote.ready.seconds > 0
    process = psutil.Process(zygote.process.pid)
    assert process.num_threads() == 1
    assert process.children() == []
    assert os.getsid(zygote.process.pid) == zygote.process.pid


def test_a_worker_is_a_fork_in_a_session_of_its_own(zygote: Zygote) -> None:
    start = time.monotonic()
    pid, channel = zygote.spawn()
    with channel:
        send(channel, Describe(("torch-math",)))
        described = receive_reply(channel)
        took = time.monotonic() - start
        assert isinstance(described, Described)
        assert [one.name for one in described.backends] == ["torch-math"]
        assert described.poison
        assert psutil.Process(pid).ppid() == zygote.process.pid
        assert os.getsid(pid) == pid
        assert os.getpgid(pid) == pid
        assert isinstance(zygote.ready, Ready)
        assert took < zygote.ready.seconds
        send(channel, RunCase(TINY, ("torch-math",)))
        replies = [receive_reply(channel) for _ in range(5)]
        # Inputs, the backend, the reference once it returned.
        assert [type(reply) for reply in replies] == [Begin, Begin, Begin, Outcome, Finished]
        assert [reply.backend for reply in replies if isinstance(reply, Begin)] == ["", "torch-math", ""]
    exited = receive_zygote(zygote.control)
    assert exited == Exited(pid, 0, 0)
    assert gone_within([pid], 5.0)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM, signal.SIGINT])
def test_how_a_worker_ended_is_told(zygote: Zygote, number: signal.Signals) -> None:
    pid, channel = zygote.spawn()
    with channel:
        send(channel, Describe(("torch-math",)))
        assert isinstance(receive_reply(channel), Described)
        os.kill(pid, number)
        if number is signal.SIGINT:
            # The zygote ignores it, and so do its forks.
            time.sleep(0.2)
            os.kill(pid, signal.SIGKILL)
            number = signal.SIGKILL
        assert receive_zygote(zygote.control) == Exited(pid, -number, 0)
        assert receive_reply(channel) is None


def test_several_workers_end_without_confusion(zygote: Zygote) -> None:
    workers = [zygote.spawn() for _ in range(4)]
    for pid, _ in workers:
        os.kill(pid, signal.SIGKILL)
    ended = set()
    for _ in workers:
        exited = receive_zygote(zygote.control)
        assert isinstance(exited, Exited)
        ended.add((exited.pid, exited.code))
    assert ended == {(pid, -signal.SIGKILL) for pid, _ in workers}
    for _, channel in workers:
        channel.close()


def test_signals_do_not_end_it(zygote: Zygote) -> None:
    os.kill(zygote.process.pid, signal.SIGINT)
    os.killpg(zygote.process.pid, signal.SIGCHLD)
    time.sleep(0.2)
    assert zygote.process.poll() is None
    pid, channel = zygote.spawn()
    channel.close()
    assert receive_zygote(zygote.control) == Exited(pid, 0, 0)


def test_it_ends_with_all_its_workers_when_the_scan_hangs_up() -> None:
    one = Zygote()
    workers = [one.spawn() for _ in range(3)]
    os.kill(workers[0][0], signal.SIGSTOP)
    assert one.close() == 0
    assert gone_within([pid for pid, _ in workers], 5.0)
    for _, channel in workers:
        channel.close()


def test_a_killed_zygote_takes_its_workers_along() -> None:
    one = Zygote()
    workers = [one.spawn() for _ in range(2)]
    one.process.kill()
    assert gone_within([pid for pid, _ in workers], 5.0)
    one.close()
    for _, channel in workers:
        channel.close()


@pytest.mark.parametrize(
    "raised", ["ImportError('no libcudart')", "OSError('no libcudart')", "KeyError('no libcudart')"]
)
def test_a_broken_torch_is_told(tmp_path: Path, raised: str) -> None:
    (tmp_path / "torch.py").write_text(f"raise {raised}")
    one = Zygote(str(tmp_path))
    assert isinstance(one.ready, Ready)
    assert "no libcudart" in one.ready.error
    assert one.close() == 3
