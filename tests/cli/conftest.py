"""Run the command on a terminal."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import select
import struct
import subprocess
import termios
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple, Protocol

import pytest

COMMAND_LIMIT = 120.0


class Seen(NamedTuple):
    """What a command wrote to each stream, and how it ended."""

    code: int
    stdout: str
    stderr: str


class Terminal(Protocol):
    """Run the command with the named streams on a terminal of their own, `width` columns wide."""

    def __call__(
        self,
        *arguments: str | os.PathLike[str],
        on: tuple[str, ...] = ("stdout", "stderr"),
        env: Mapping[str, str] | None = None,
        width: int = 100,
    ) -> Seen: ...


@pytest.fixture
def terminal(environment: dict[str, str], tmp_path: Path) -> Terminal:
    import sys

    def call(
        *arguments: str | os.PathLike[str],
        on: tuple[str, ...] = ("stdout", "stderr"),
        env: Mapping[str, str] | None = None,
        width: int = 100,
    ) -> Seen:
        ends = {}
        for name in ("stdout", "stderr"):
            if name in on:
                ends[name] = pty.openpty()
                fcntl.ioctl(ends[name][1], termios.TIOCSWINSZ, struct.pack("HHHH", 40, width, 0, 0))
            else:
                ends[name] = os.pipe()
        process = subprocess.Popen(
            [sys.executable, "-m", "attnprobe", *[os.fspath(one) for one in arguments]],
            stdin=subprocess.DEVNULL,
            stdout=ends["stdout"][1],
            stderr=ends["stderr"][1],
            env={**environment, "TERM": "xterm-256color", **(env or {})},
            cwd=tmp_path,
        )
        for _, ours in ends.values():
            os.close(ours)
        seen = _read({name: readable for name, (readable, _) in ends.items()})
        return Seen(process.wait(10), seen["stdout"], seen["stderr"])

    return call


def _read(streams: dict[str, int]) -> dict[str, str]:
    content = dict.fromkeys(streams, b"")
    names = {fd: name for name, fd in streams.items()}
    deadline = time.monotonic() + COMMAND_LIMIT
    while names:
        assert time.monotonic() < deadline, content
        for fd in select.select(list(names), [], [], 1.0)[0]:
            chunk = b""
            # A terminal whose other end was closed answers EIO.
            with contextlib.suppress(OSError):
                chunk = os.read(fd, 65536)
            content[names[fd]] += chunk
            if not chunk:
                del names[fd]
                os.close(fd)
    return {name: text.decode().replace("\r\n", "\n") for name, text in content.items()}
