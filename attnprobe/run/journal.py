"""What a scan has launched and learned, on disk while it runs, so that it can be resumed.

One JSON value a line: the header names the plan, then a line before each launch and one for each outcome.
A line is handed to the system before the case is launched, so it survives the scan whatever kills it; on a
GPU, where a case can take the machine down, it is also forced to the disk.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from io import FileIO
from pathlib import Path
from typing import Final

import msgspec
from msgspec import Struct

from attnprobe.config import Case, canonical
from attnprobe.errors import NoVerdictError, UsageError
from attnprobe.run.protocol import Outcome

VERSION: Final = 1


class Header(Struct, frozen=True, kw_only=True):
    """What must be equal for a journal to go on: the digest of plan, device and builds."""

    journal: int = VERSION
    plan: str
    identity: str


class Launch(Struct, frozen=True, kw_only=True):
    """These backends are about to run this case."""

    launch: str
    on: tuple[str, ...]


class Entry(Struct, frozen=True, kw_only=True):
    """What became of a case on a backend."""

    case: Case
    outcome: Outcome


class Journal:
    """An open journal; `known` holds what an earlier run of the same scan has learned."""

    def __init__(self, path: Path, header: Header, *, resume: bool, durable: bool) -> None:
        """Open the journal of `path`, anew or to go on with.

        Raises:
            UsageError: it cannot be written; there is none to resume, or it is of another scan.
        """
        self.path = path
        self.known: dict[tuple[str, str], Outcome] = {}
        self._durable = durable
        self._file = self._opened(resume=resume)
        try:
            if resume:
                self._load(header)
            else:
                if self._file.tell():
                    self._file.truncate(0)
                self._write(header)
        except BaseException:
            self._file.close()
            raise

    def _opened(self, *, resume: bool) -> FileIO:
        """Return the file, locked against a second scan, its content as it was."""
        try:
            # Unbuffered: a line is with the system when write returns. "r+" makes none where there is none.
            file = self.path.open("r+b" if resume else "ab", buffering=0)
        except OSError as error:
            if resume:
                raise UsageError(
                    f"nothing to resume: {self.path} cannot be read and written",
                    why=error.strerror or str(error),
                    fix="scan without --resume",
                ) from None
            raise UsageError(
                f"{self.path} cannot be written",
                why=error.strerror or str(error),
                fix="choose another -o",
            ) from None
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            raise UsageError(
                f"another scan is writing {self.path}",
                why="two scans with one -o would mix what they learn",
                fix="wait for it, or choose another -o",
            ) from None
        except OSError:
            pass  # a file system without locks
        file.seek(0, os.SEEK_END)
        return file

    def launch(self, case: Case, backends: tuple[str, ...]) -> None:
        """Note that a case is about to run."""
        self._write(Launch(launch=case.id, on=backends))
        if self._durable:
            os.fsync(self._file.fileno())

    def outcome(self, case: Case, outcome: Outcome) -> None:
        """Note what became of a case."""
        self.known[case.id, outcome.backend] = outcome
        self._write(Entry(case=case, outcome=outcome))

    def close(self, *, keep: bool) -> None:
        """Close it; a finished scan needs it no more."""
        if not keep:
            self.path.unlink(missing_ok=True)
        self._file.close()

    def _write(self, value: Struct) -> None:
        try:
            self._file.write(canonical(value) + b"\n")
        except OSError as error:
            raise NoVerdictError(
                f"{self.path} cannot be written",
                why=error.strerror or str(error),
                fix="make room, then `attnprobe scan --resume`",
            ) from None

    def _load(self, header: Header) -> None:
        self._file.seek(0)
        content = self._file.readall()
        lines = content.splitlines(keepends=True)
        try:
            found = msgspec.json.decode(lines[0] if lines else b"", type=Header)
        except msgspec.MsgspecError:
            raise UsageError(f"{self.path} is no journal of a scan", fix="scan without --resume") from None
        if found != header:
            different = "the plan" if found.plan != header.plan else "the device or an installed build"
            raise UsageError(
                f"{self.path} cannot be resumed",
                why=f"{different} is another one now",
                fix="scan without --resume",
            )
        decoder = msgspec.json.Decoder(Entry)
        for line in lines[1:]:
            # A line that was cut off or damaged is a case that runs again.
            if not (line.startswith(b'{"case"') and line.endswith(b"\n")):
                continue
            with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError):
                entry = decoder.decode(line)
                self.known[entry.case.id, entry.outcome.backend] = entry.outcome
        if content and not content.endswith(b"\n"):
            self._file.truncate(content.rfind(b"\n") + 1)
        self._file.seek(0, os.SEEK_END)


def journal_path(output: Path) -> Path:
    """Return where the journal of a scan that writes `output` lies."""
    return output.with_name(f".{output.name}.journal")
