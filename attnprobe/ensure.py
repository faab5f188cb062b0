"""Probe now what the matrix does not prove: the one place where select and run meet.

One process on a node probes, in a child process with a hard time limit; the others wait for it, bounded,
and read what it found. Nothing that goes wrong with a device raises: it is said in `Ensured.reason`.
"""

from __future__ import annotations

import contextlib
import fcntl
import math
import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from types import ModuleType
from typing import IO, Any, Final

from msgspec import Struct, structs

from attnprobe._known import (
    Request,
    has_gpu,
    known_to,
    missing_from,
    selector_of,
    slug,
    still_open,
    stored,
)
from attnprobe.config import AttentionConfig, case_from, config_of
from attnprobe.errors import AttnprobeError, UsageError
from attnprobe.materials.source import backend_name
from attnprobe.matrix.store import data_directory, encode, parse_matrix
from attnprobe.run.probing import probe
from attnprobe.select.asked import asked
from attnprobe.select.selector import Selector

TIME_LIMIT: Final = 60.0
"""Seconds that probing may take."""
WAIT_MARGIN: Final = 30.0
"""Seconds beyond the time limit that others wait for the one who probes."""
_POLL: Final = 0.05


class Ensured(Struct, frozen=True):
    """What is known now.

    `selector` is None where there is no matrix. `probed`: how many configurations this call probed; 0 where
    the matrix proved them already, where another process probed them, or where none could. `reason`: why
    something that was asked for is still not known, empty where nothing is.
    """

    selector: Selector | None
    probed: int
    reason: str = ""


def ensure(
    configs: Sequence[AttentionConfig],
    *,
    backends: Sequence[str] | None = None,
    time_limit: float = TIME_LIMIT,
    wait_limit: float | None = None,
) -> Ensured:
    """Return a selector that knows these configurations, after probing what its matrix does not prove.

    What a configuration leaves unsaid takes its plain value, as for `attnprobe scan --config`. `backends`
    are those to ask about and to probe, a callable of your own as FILE.py:NAME; by default those of the
    matrix, or all that are here. Results are added to the user's matrix for this device.

    `time_limit` is in seconds, for probing; whoever finds another process probing waits up to `wait_limit`
    seconds for it (by default `time_limit` + 30), and may then have to probe itself. Call it before CUDA
    and the process group are initialised. Where torch.distributed is up already, all ranks must call it:
    rank 0 does the above, and every rank gets its matrix, or after the sum of both limits goes on alone.

    Raises:
        UsageError: no configuration, one that contradicts itself, or a limit that is no time.
    """
    wait = time_limit + WAIT_MARGIN if wait_limit is None else wait_limit
    if not (0 < time_limit < math.inf and 0 <= wait < math.inf):
        raise UsageError(
            f"time_limit={time_limit} and wait_limit={wait} are no limits",
            why="they are seconds to probe and to wait, the first more than 0",
        )
    if not configs:
        raise UsageError("there is no configuration to ensure", fix="name what the job will call")
    specs = {backend_name(spec): spec for spec in backends or ()}
    if len(specs) < len(set(backends or ())):
        raise UsageError(
            f"two of the backends {', '.join(backends or ())} have one name",
            why="a matrix names a callable by file and function",
            fix="rename one of the files",
        )
    request = Request(tuple(plain(config) for config in configs), specs, time_limit, wait)
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return _together(distributed, request)
    return _alone(request)


def plain(config: AttentionConfig) -> AttentionConfig:
    """Return a configuration with a plain value for all that it leaves unsaid, as a scan would run it.

    Raises:
        UsageError: it contradicts itself.
    """
    return config_of(case_from(asked(config).config))


def _alone(request: Request) -> Ensured:
    """Return what this process knows, finds out, or waits for."""
    known: Selector | None = None
    try:
        known = known_to(request)
        if not missing_from(known, request):
            return Ensured(known, 0)
        if has_gpu():
            return Ensured(known, 0, "nothing was probed: there is a GPU here, and no scan runs on one yet")
        data = data_directory()
        data.mkdir(parents=True, exist_ok=True)
        with (data / f".{slug()}.ensure.lock").open("a+b") as file:
            return _in_turn(known, request, file)
    except AttnprobeError as error:
        return Ensured(known, 0, str(error))
    except Exception as error:  # noqa: BLE001  # a job must not end because probing could not begin
        return Ensured(known, 0, f"nothing was probed: {type(error).__name__}: {error}")


def _in_turn(known: Selector | None, request: Request, file: IO[bytes]) -> Ensured:
    """Probe if this process gets the lock; else wait for the one that has it, and read what it found."""
    before = _read(file)
    waited = not _locked(file, 0)
    if waited and not _locked(file, request.wait_limit):
        known = known_to(request)
        late = f"another process is still probing after {request.wait_limit:g} s"
        return Ensured(known, 0, late if missing_from(known, request) else "")
    known = known_to(request)
    missing = missing_from(known, request)
    if not missing:
        return Ensured(known, 0)
    note = _read(file)
    if waited and note != before and note.startswith(request.digest.encode()):
        # The very same was just tried; each of many ranks trying it again would take hours.
        return Ensured(known, 0, note.decode(errors="replace").split(" ", 2)[2])
    names = {one.backend for _, one in missing if one.backend} or request.specs.keys()
    numbers = sorted({number for number, _ in missing})
    specs = [request.specs.get(name, name) for name in sorted(names)]
    fresh, reason = probe([request.configs[number] for number in numbers], specs, request.time_limit)
    unwritten = ""
    if fresh is not None:
        known, unwritten = stored(known, fresh, request)
    left = missing_from(known, request)
    if left and fresh is not None:
        reason = reason or still_open(left)
    said = "; ".join(filter(None, (reason if left else "", unwritten)))
    with contextlib.suppress(OSError):
        # Who waited tells a new note from an old one by the time in it.
        file.truncate(0)
        file.write(f"{request.digest} {time.time_ns()} {said}".encode())
        file.flush()
    return Ensured(known, len(numbers) if fresh is not None else 0, said)


def _locked(file: IO[bytes], limit: float) -> bool:
    """Take the lock within so many seconds; the kernel frees it when its holder ends, however that ends."""
    deadline = time.monotonic() + limit
    while not _taken(file):
        if time.monotonic() >= deadline:
            return False
        time.sleep(_POLL)
    return True


def _taken(file: IO[bytes]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True  # a file system without locks: two may probe, and both are merged
    return True


def _read(file: IO[bytes]) -> bytes:
    file.seek(0)
    return file.read()


# With torch.distributed.


def _together(distributed: Any, request: Request) -> Ensured:
    """Let rank 0 do it, and give every rank its matrix; without it within the bound, go on alone."""
    rank = distributed.get_rank()
    bound = request.wait_limit + request.time_limit + WAIT_MARGIN
    mine: Ensured | None = None
    group = None
    try:
        # A group of its own, on the CPU: a wait that ends badly must not break the job's.
        group = distributed.new_group(backend="gloo", timeout=timedelta(seconds=bound))
        box: list[Any] = [None]
        if rank == 0:
            mine = _alone(request)
            content = None if mine.selector is None else encode(mine.selector.matrix)
            box = [(content, mine.selector.source if mine.selector else "", mine.reason)]
        distributed.broadcast_object_list(box, src=0, group=group)
        if mine is None:
            content, source, reason = box[0]
            matrix = None if content is None else parse_matrix(content, source or "the matrix of rank 0")
            selector = None if matrix is None else selector_of(matrix, source, request)
            mine = Ensured(selector, 0, reason)
    except Exception as error:  # noqa: BLE001  # torch raises many kinds; the job goes on with what is known
        first = str(error).partition("\n")[0]
        lost = "the other ranks were not all reached" if rank == 0 else "rank 0 was not heard"
        mine = mine or _unprobed(request)
        said = (mine.reason, f"{lost}: {type(error).__name__}: {first}")
        mine = structs.replace(mine, reason="; ".join(filter(None, said)))
    finally:
        if group is not None:
            with contextlib.suppress(Exception):
                distributed.destroy_process_group(group)
    return mine


def _unprobed(request: Request) -> Ensured:
    """Return what is known without probing."""
    try:
        return Ensured(known_to(request), 0)
    except (AttnprobeError, OSError) as error:
        return Ensured(None, 0, str(error))


class _Callable(ModuleType):
    """`attnprobe.ensure` is this module and its function: whichever was imported first, it can be called."""

    def __call__(self, *arguments: Any, **options: Any) -> Ensured:
        """Return `ensure(...)`."""
        return ensure(*arguments, **options)


sys.modules[__name__].__class__ = _Callable
