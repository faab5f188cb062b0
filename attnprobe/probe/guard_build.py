"""Build `guard.c` with the system's C compiler, once, and say how a process is started with it.

The built library lies in the user's cache under the digest of its source, the platform and the compiler,
so that a changed one of these builds anew. Nothing here raises: where it cannot be built, the reason is
a few words, and the probing process goes on without it.
"""

from __future__ import annotations

import atexit
import functools
import hashlib
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

from platformdirs import user_cache_path

SOURCE: Final = Path(__file__).with_name("guard.c")
STEM: Final = "attnprobe-guard-"
"""How the file name of every built library begins."""
ABSENT: Final = "ATTNPROBE_NO_GUARD"
"""The environment variable that tells the probing process why there is no library."""
_FLAGS: Final = ("-std=c11", "-O2", "-fPIC", "-shared", "-pthread")
_LIMIT: Final = 120.0
"""Seconds that a compiler or the first process with the library may take."""
_SAID: Final = 160
_UNSPEAKABLE: Final = frozenset(" :$;\t\n")
"""Characters that the loader takes for its own in LD_PRELOAD."""
_TRY: Final = "import ctypes; print(ctypes.CDLL(None).attnprobe_guard_version())"


def environment() -> dict[str, str]:
    """Return what to add to the environment of a process that is to have the guard bands.

    Either LD_PRELOAD, with what the user preloads already behind it, or the reason under `ABSENT`.
    """
    found = build()
    given = os.environ.get("LD_PRELOAD", "")
    if isinstance(found, Path) and given and (trouble := _trouble(found)):
        found = trouble  # it does not get on with what the user preloads
    if isinstance(found, str):
        return {ABSENT: found}
    return {"LD_PRELOAD": f"{found}:{given}" if given else str(found)}


def build() -> Path | str:
    """Return the built library, or why there is none in a few words. Never raises.

    Takes about a second where it must be built, and calls no other program where it has been.
    """
    try:
        return _build()
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        return _without_folders(f"{type(error).__name__}: {error}")


def _build() -> Path | str:
    if not sys.platform.startswith("linux"):
        return "not Linux"
    compiler = _compiler()
    if compiler is None:
        return "no C compiler"
    name = f"{STEM}{_digest(compiler)}.so"
    cached = _cache() / name
    if cached.is_file():
        return cached
    try:
        cached.parent.mkdir(parents=True, exist_ok=True)
        return _compile(compiler, cached) if _speakable(cached) else _compile(compiler, _private() / name)
    except OSError:
        return _compile(compiler, _private() / name)  # nothing can be written to the cache


def _cache() -> Path:
    return user_cache_path("attnprobe", appauthor=False)


def _speakable(path: Path) -> bool:
    return not _UNSPEAKABLE & set(str(path))


def _compiler() -> list[str] | None:
    """Return the command of $CC, or cc, with the full path of its program; None where there is none."""
    command = shlex.split(os.environ.get("CC", "")) or ["cc"]
    program = shutil.which(command[0])
    return None if program is None else [program, *command[1:]]


def _digest(compiler: list[str]) -> str:
    """Return what the library is made of, as a name; a compiler is known by its file."""
    there = Path(compiler[0]).resolve()
    stat = there.stat()
    parts = (
        hashlib.sha256(SOURCE.read_bytes()).hexdigest(),
        sys.platform,
        platform.machine(),
        os.confstr("CS_GNU_LIBC_VERSION") if "CS_GNU_LIBC_VERSION" in os.confstr_names else "",
        str(there),
        *compiler[1:],
        *_FLAGS,
        str(stat.st_size),
        str(stat.st_mtime_ns),
    )
    return hashlib.sha256("\0".join(str(part) for part in parts).encode()).hexdigest()[:20]


@functools.cache
def _private() -> Path:
    """Return a folder of this process alone, which goes with it."""
    folder = tempfile.mkdtemp(prefix="attnprobe-guard.")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


def _compile(compiler: list[str], into: Path) -> Path | str:
    """Compile, try the result in a process of its own, and only then give it its name.

    Raises OSError where nothing can be written beside `into`.
    """
    if into.is_file():
        return into
    handle, name = tempfile.mkstemp(prefix="building-", suffix=".so", dir=into.parent)
    os.close(handle)
    try:
        done = subprocess.run(  # noqa: S603  # the user's own compiler
            [*compiler, *_FLAGS, "-o", name, str(SOURCE), "-ldl"],
            env={**os.environ, "LC_ALL": "C"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_LIMIT,
            check=False,
        )
        if done.returncode:
            return f"the C compiler says: {_first_error(done.stderr, done.returncode)}"
        if trouble := _trouble(Path(name)):
            return trouble
        Path(name).chmod(0o755)
        Path(name).replace(into)
    finally:
        Path(name).unlink(missing_ok=True)
    return into


def _trouble(library: Path) -> str:
    """Return what keeps this interpreter from running with the library; nothing where it runs."""
    given = os.environ.get("LD_PRELOAD", "")
    done = subprocess.run(  # noqa: S603  # our own interpreter
        [sys.executable, "-I", "-S", "-c", _TRY],
        env={**os.environ, "LD_PRELOAD": f"{library}:{given}" if given else str(library)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=_LIMIT,
        check=False,
    )
    if done.returncode == 0 and done.stdout.strip().isdigit():
        return ""
    return f"cannot be preloaded: {_first_error(done.stderr, done.returncode)}"


def _first_error(said: bytes, code: int) -> str:
    """Return the line that says most: the first with "error" in it, or the first."""
    lines = [line.strip() for line in said.decode(errors="replace").splitlines() if line.strip()]
    best = next((line for line in lines if "error" in line.lower()), lines[0] if lines else f"code {code}")
    return _without_folders(best)


def _without_folders(words: str) -> str:
    """Return words with the names of files alone: they go into a matrix, which holds no paths."""
    return re.sub(r"[^\s'\"]*/", "", words)[:_SAID]
