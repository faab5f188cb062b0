"""What the scanning process and its children say to each other: one JSON value a message.

Three processes: the scan; a zygote, which imported torch and runs nothing, forked for
each worker, so that a crash costs a fork and not an import; and the worker, which runs cases. Messages
travel over SOCK_SEQPACKET sockets, which keep their borders.
"""

from __future__ import annotations

import os
import socket
from typing import Any, Final

import msgspec
from msgspec import Struct

from attnprobe.config import Case
from attnprobe.matrix.schema import Material
from attnprobe.text import printable
from attnprobe.verdict import Evidence, Verdict

LARGEST: Final = 1 << 17
"""Bytes of the largest message; details are cut before they reach it."""
_WORDS: Final = 300
"""Characters of a library's message that are kept."""
_TAIL: Final = 4096
"""Bytes at the end of what was printed among which the last line is looked for."""


class Describe(Struct, frozen=True, tag="describe"):
    """Ask a worker which backends are here: those asked for, or all."""

    asked: tuple[str, ...]


class Found(Struct, frozen=True, kw_only=True):
    """One backend of a worker's answer; `reason` where it is absent."""

    name: str
    materials: tuple[Material, ...] = ()
    reason: str = ""
    compiles: bool = False


class Described(Struct, frozen=True, tag="described"):
    """The backends here, what the fill covers, or why the question itself is wrong."""

    backends: tuple[Found, ...]
    poison: str = ""
    guard: str = ""
    what: str = ""
    why: str = ""
    fix: str = ""


class RunCase(Struct, frozen=True, tag="run"):
    """Ask a worker to run one case on some backends, in this order."""

    case: Case
    backends: tuple[str, ...]
    may_compile: tuple[str, ...] = ()


class CountKernels(Struct, frozen=True, tag="count"):
    """Ask a worker how many of these cases a backend would compile a kernel for."""

    backend: str
    cases: tuple[Case, ...]


class Counted(Struct, frozen=True, tag="counted"):
    """That many."""

    kernels: int


class Skipped(Struct, frozen=True, tag="skipped"):
    """The case needs a kernel that this backend may not compile any more; it was not run."""

    backend: str
    case: str


class Begin(Struct, frozen=True, tag="begin"):
    """The worker is about to run the case on this backend; "" while it builds the reference."""

    backend: str
    case: str


class Outcome(Struct, frozen=True, kw_only=True, tag="outcome"):
    """What became of the case on one backend. `seconds` by part: kernel, judge, ..."""

    backend: str
    case: str
    verdict: Verdict
    evidence: Evidence = Evidence.MEASURED
    outputs: tuple[str, ...] = ()
    kernel: str = ""
    detail: dict[str, Any] = {}
    traits: dict[str, str] = {}
    compiled: bool = False
    seconds: dict[str, float] = {}


class Finished(Struct, frozen=True, tag="finished"):
    """The case is done on all backends; `seconds` spent on what they share."""

    case: str
    seconds: dict[str, float] = {}


SPAWN: Final = b"spawn"
"""Asks the zygote for a worker; the worker's socket and output file come with the message."""


class Ready(Struct, frozen=True, tag="ready"):
    """The zygote has imported what workers need, or could not; `seconds` of import."""

    error: str = ""
    seconds: float = 0.0


class Spawned(Struct, frozen=True, tag="spawned"):
    """A worker runs."""

    pid: int


class Exited(Struct, frozen=True, tag="exited"):
    """A worker ended: `code` as in subprocess, negative for a signal; `left` children it left behind."""

    pid: int
    code: int
    left: int = 0


Request = Describe | RunCase | CountKernels
Reply = Described | Begin | Outcome | Skipped | Finished | Counted

_TO_WORKER: Final = msgspec.json.Decoder(Request)
_TO_SCAN: Final = msgspec.json.Decoder(Reply)
_FROM_ZYGOTE: Final = msgspec.json.Decoder(Ready | Spawned | Exited)
_ENCODER: Final = msgspec.json.Encoder()


def words(text: str) -> str:
    """Return what a library says, printable and cut to a bearable length."""
    return printable(text)[:_WORDS]


def last_line(fd: int, since: int) -> str:
    """Return the last line in a file from offset `since` on, as `words` leaves it, or ""."""
    size = os.fstat(fd).st_size
    start = max(since, size - _TAIL)
    text = os.pread(fd, size - start, start).decode(errors="replace") if size > start else ""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return words(lines[-1]) if lines else ""


def send(channel: socket.socket, message: Struct) -> None:
    """Send one message."""
    channel.sendall(_ENCODER.encode(message))


def receive_request(channel: socket.socket) -> Request | None:
    """Return what a worker is asked, or None at the end."""
    content = channel.recv(LARGEST)
    return _TO_WORKER.decode(content) if content else None


def receive_reply(channel: socket.socket) -> Reply | None:
    """Return what a worker says, or None where it is gone or what it says is none of ours."""
    try:
        content = channel.recv(LARGEST)
        return _TO_SCAN.decode(content) if content else None
    except (ConnectionResetError, msgspec.DecodeError, UnicodeDecodeError):
        return None


def receive_zygote(channel: socket.socket) -> Ready | Spawned | Exited | None:
    """Return what the zygote says, or None where it is gone."""
    try:
        content = channel.recv(LARGEST)
    except ConnectionResetError:
        return None
    return _FROM_ZYGOTE.decode(content) if content else None
