"""Keep one worker busy and alive: attribute every crash, exit and hang to the case that caused it.

A worker is its own session; it is forked from a zygote that imported torch. When it dies or overstays,
its whole group is killed within a bounded time, the backend it was on is tried once more alone in a fresh
worker, and the rest of the case goes on in another. A death that does not repeat alone accuses nobody: it
is `inconclusive`.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import Final

from msgspec import structs

from attnprobe.config import Case
from attnprobe.errors import NoVerdictError, UsageError
from attnprobe.probe import guard_build
from attnprobe.probe.poison import ENVIRONMENT
from attnprobe.run import processes
from attnprobe.run.death import Death, how_it_ended, inconclusive, unanswered
from attnprobe.run.handle import WorkerHandle
from attnprobe.run.protocol import (
    SPAWN,
    Begin,
    Counted,
    CountKernels,
    Describe,
    Described,
    Exited,
    Finished,
    Found,
    Outcome,
    Ready,
    RunCase,
    Skipped,
    Spawned,
    receive_zygote,
)
from attnprobe.verdict import Verdict

ZYGOTE: Final = "import sys; sys.path[:] = sys.argv[4:]; from attnprobe.run.zygote import run; run(sys.argv)"
"""With the path of the scan: `-m` would put the working directory, and a torch.py there, before torch."""
START_LIMIT: Final = 120.0
"""Seconds that importing torch and its backends may take."""
KILL_LIMIT: Final = 5.0
"""Seconds to wait for a killed process to be gone."""
_BATCH: Final = 200
"""Cases in one message that asks for kernels; a message has a largest size."""
THREADS: Final = {"OMP_WAIT_POLICY": "PASSIVE", "OPENBLAS_NUM_THREADS": "1"}
"""Threads that wait must not spin: beside any other load that made small kernels ten times slower. numpy's
pool, which nothing here uses, is not started, so that the zygote is free of threads when it forks."""
CONTROLS: Final = tuple(
    Case(pass_="forward", needs_grad="none", dtype=dtype) for dtype in ("float32", "bfloat16", "float16")
)
"""The plainest case in each dtype: a backend that refuses all of them is not here."""


class Supervisor:
    """Runs cases on one device. Use as a context manager: leaving it leaves no process."""

    def __init__(self, device_name: str, asked: tuple[str, ...], limit: float) -> None:
        """`asked` are backend names as given by the user; `limit` seconds per case and backend."""
        self._device_name = device_name
        self._asked = asked
        self._limit = limit
        self._zygote: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._worker: WorkerHandle | None = None
        self._spare: WorkerHandle | None = None
        self._exits: dict[int, Exited] = {}
        self._unborn: list[WorkerHandle] = []
        self._died = False
        self.import_seconds = 0.0
        self.described: Described | None = None

    def __enter__(self) -> Supervisor:  # noqa: PYI034  # Self needs Python 3.11
        """Start the zygote and ask a first worker what is here."""
        try:
            self._start_zygote()
            self._ensure_worker()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """End every process."""
        self.close()

    def close(self) -> None:
        """End the worker and the zygote, waiting a bounded time for each."""
        self._drop_worker()
        if self._control is not None:
            self._control.close()
            self._control = None
        if self._zygote is not None:
            try:
                self._zygote.wait(KILL_LIMIT)
            except subprocess.TimeoutExpired:
                processes.kill_tree(self._zygote.pid)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._zygote.wait(KILL_LIMIT)
            self._zygote = None
        self._unborn.clear()
        self._exits.clear()

    def controlled(self) -> list[Found]:
        """Return what is here; a backend that refuses the plainest case in every dtype is absent.

        The reason is the library's own: this is how a backend without a kernel for the device shows.
        """
        assert self.described is not None
        found = []
        for one in self.described.backends:
            reason = one.reason
            if not reason and not one.compiles:
                reason = self._refuses_all(one.name)
            found.append(structs.replace(one, reason=reason))
        return sorted(found, key=lambda one: one.name)

    def _refuses_all(self, name: str) -> str:
        said = ""
        for case in CONTROLS:
            (outcome,) = self.run(case, (name,), {})
            if outcome.verdict is not Verdict.REFUSED:
                return ""
            said = said or str(outcome.detail.get("says", "refused"))
        return said

    def count_kernels(self, backend: str, cases: Sequence[Case]) -> int:
        """Return how many of the cases a backend would compile a kernel for."""
        total = 0
        for start in range(0, len(cases), _BATCH):
            worker = self._ensure_worker()
            worker.ask(CountKernels(backend, tuple(cases[start : start + _BATCH])))
            reply = worker.reply(self._limit)
            total += reply.kernels if isinstance(reply, Counted) else 0
        return total

    def run(
        self,
        case: Case,
        backends: tuple[str, ...],
        seconds: dict[str, float],
        may_compile: tuple[str, ...] = (),
        *,
        fresh: bool = False,
    ) -> Iterator[Outcome]:
        """Yield an outcome for every backend, whatever they do to their process.

        A backend that would have to compile a kernel and is not in `may_compile` yields none. Adds the
        worker's own account of its time to `seconds`. `fresh`: in a process that has run nothing before.
        """
        if fresh:
            self._drop_used()
        left = list(backends)
        idle_death_left = True
        while left:
            death = None
            try:
                for reply in self._attempt(case, tuple(left), seconds, may_compile):
                    if reply.backend not in left:
                        continue  # said twice, as by a process that forked and went on in both
                    left.remove(reply.backend)
                    if isinstance(reply, Outcome):
                        yield reply
            except Death as caught:  # each turn is a worker's life
                death = caught
            if death is None:
                # Finished without an answer for these: the worker broke its promise.
                yield from (unanswered(name, case) for name in left)
                return
            if not death.backend:
                if idle_death_left and not death.begun:
                    idle_death_left = False  # it died before it had the case; another one may take it
                    continue
                # It died building inputs or reference: nobody's kernel, and it would die again.
                yield from (inconclusive(name, case, death) for name in left)
                return
            left.remove(death.backend)
            yield self._again(case, death, seconds, may_compile)

    def _again(
        self, case: Case, first: Death, seconds: dict[str, float], may_compile: tuple[str, ...]
    ) -> Outcome:
        """Return the outcome of a case that ended its worker, tried alone in a fresh one if it was not."""
        if first.alone:
            return first.outcome(case)
        name = first.backend
        for _ in range(2):
            try:
                for _ in self._attempt(case, (name,), seconds, may_compile):
                    pass
            except Death as second:
                if second.backend == name:
                    return second.outcome(case)
                if not second.begun:
                    continue  # a spare that died before it had the case; another one may take it
            break
        return inconclusive(name, case, first)

    def _attempt(
        self, case: Case, backends: tuple[str, ...], seconds: dict[str, float], may_compile: tuple[str, ...]
    ) -> Iterator[Outcome | Skipped]:
        """Yield outcomes as they come; raise Death where the worker ends on the way."""
        worker = self._ensure_worker()
        worker.ask(RunCase(case, backends, may_compile))
        on, begun = "", False
        while True:
            reply = worker.reply(self._limit)
            if isinstance(reply, Begin | Outcome | Skipped | Finished) and reply.case != case.id:
                continue  # late words about an earlier case
            if isinstance(reply, Begin):
                on, begun = reply.backend, True
                worker.begun += bool(on)
            elif isinstance(reply, Skipped):
                yield reply
            elif isinstance(reply, Outcome):
                _add(seconds, reply.seconds)
                yield reply
                on = ""
            elif isinstance(reply, Finished):
                _add(seconds, reply.seconds)
                return
            else:
                raise self._death(worker, on, hung=reply == "hung", begun=begun)

    def _death(self, worker: WorkerHandle, on: str, *, hung: bool, begun: bool = True) -> Death:
        """Return how the worker ended, after making sure that it did."""
        self._died = True
        if not self._is_born(worker):
            raise NoVerdictError("no worker could be started")
        if hung:
            processes.kill_group(worker.pid)
        exited = self._wait_exit(worker.pid)
        lived_on = exited is None
        if lived_on:
            # It hung up, or talked nonsense, and lives on; or the zygote is gone and cannot tell.
            processes.kill_group(worker.pid)
            exited = self._wait_exit(worker.pid)
        said = worker.said()
        self._worker = None
        worker.close()
        left = exited.left if exited else 0
        verdict, how = Verdict.HUNG, f"no answer within {self._limit:g} s"
        if not hung:
            verdict, how = Verdict.CRASHED, "ended, and cannot be waited for"
            if exited is not None:
                how = "hung up, and did not end" if lived_on else how_it_ended(exited.code)
        return Death(on, verdict, how, said, left, alone=worker.begun == 1, begun=begun)

    def _start_zygote(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        environment = {**THREADS, **os.environ, **ENVIRONMENT, **guard_build.environment()}
        arguments = [str(theirs.fileno()), self._device_name, str(os.getpid())]
        self._zygote = subprocess.Popen(  # noqa: S603  # our own module, by our own interpreter
            [sys.executable, "-c", ZYGOTE, *arguments, *sys.path],
            pass_fds=(theirs.fileno(),),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=None,
            start_new_session=True,
            env=environment,
        )
        theirs.close()
        self._control = ours
        ready = self._from_zygote(START_LIMIT)
        if not isinstance(ready, Ready):
            raise NoVerdictError("the probing process did not start", why="no answer from it")
        if ready.error:
            raise NoVerdictError(
                "torch cannot be imported",
                why=ready.error,
                fix="pip install 'attnprobe[torch]', or a torch of your own",
            )
        self.import_seconds = ready.seconds

    def _ensure_worker(self) -> WorkerHandle:
        """Return the living worker, or a fresh one that knows its backends.

        Once a worker has died, a spare is forked while its successor works: the next death costs no wait.
        """
        if self._worker is not None:
            return self._worker
        if self._zygote is None or self._zygote.poll() is not None:
            self.close()
            self._start_zygote()
        spare, self._spare = self._spare, None
        worker = self._worker = spare or self._spawn_somehow()
        described = worker.reply(START_LIMIT)
        if spare is not None and not isinstance(described, Described):
            self._drop_worker()  # it did not live to be used
            worker = self._worker = self._spawn_somehow()
            described = worker.reply(START_LIMIT)
        if not isinstance(described, Described):
            death = self._death(worker, "", hung=described == "hung")
            asked = [spec for spec in self._asked if ":" in spec]
            raise NoVerdictError(
                f"importing {' or '.join(asked) or 'the backends'} ended the process",
                why=f"{death.how}{': ' if death.said else ''}{death.said}",
                fix="import it in a Python of your own to see more",
            )
        if described.what:
            raise UsageError(described.what, why=described.why, fix=described.fix)
        self.described = self.described or described
        if self._died:
            with contextlib.suppress(NoVerdictError):
                self._spare = self._spawn()
        return worker

    def _spawn_somehow(self) -> WorkerHandle:
        """Ask for a worker; start the zygote again where it is found to be gone only now."""
        try:
            return self._spawn()
        except NoVerdictError:
            self.close()
            self._start_zygote()
            return self._spawn()

    def _spawn(self) -> WorkerHandle:
        """Ask for a worker and what is there for it, without waiting for either."""
        assert self._control is not None
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        output = tempfile.TemporaryFile()  # noqa: SIM115  # lives as long as the worker
        worker = WorkerHandle(ours, output)
        # First: an interrupt that comes right after the request must not leave an answer without a taker.
        self._unborn.append(worker)
        try:
            socket.send_fds(self._control, [SPAWN], [theirs.fileno(), output.fileno()])
        except OSError:
            self._unborn.remove(worker)
            worker.close()
            raise NoVerdictError("no worker could be started", why="the probing process is gone") from None
        finally:
            theirs.close()
        worker.ask(Describe(self._asked))
        return worker

    def _drop_worker(self) -> None:
        for worker in (self._worker, self._spare):
            if worker is not None:
                self._drop(worker)
        self._worker = self._spare = None

    def _drop_used(self) -> None:
        """End the worker if it has run anything."""
        if self._worker is not None and self._worker.begun:
            self._drop(self._worker)
            self._worker = None
            self._died = True  # it will not be the last

    def _drop(self, worker: WorkerHandle) -> None:
        """End a worker, and wait until it is gone."""
        if self._is_born(worker, KILL_LIMIT):
            processes.kill_group(worker.pid)
            self._wait_exit(worker.pid)
        worker.close()

    def _is_born(self, worker: WorkerHandle, limit: float = START_LIMIT) -> bool:
        """Wait for the zygote to say which process a worker is; False where it does not."""
        while not worker.pid and self._hear(limit):
            pass
        return bool(worker.pid)

    def _wait_exit(self, pid: int) -> Exited | None:
        """Return the zygote's report of a worker's end; None if it does not come in time."""
        deadline = time.monotonic() + KILL_LIMIT
        while pid not in self._exits and (left := deadline - time.monotonic()) > 0:
            if not self._hear(left):
                break
        return self._exits.pop(pid, None)

    def _hear(self, limit: float) -> bool:
        """Take one word of the zygote; False where none comes."""
        heard = self._from_zygote(limit)
        if isinstance(heard, Exited):
            self._exits[heard.pid] = heard
        elif isinstance(heard, Spawned):
            self._unborn.pop(0).pid = heard.pid
        return heard is not None

    def _from_zygote(self, limit: float) -> Ready | Spawned | Exited | None:
        if self._control is None:
            return None
        readable, _, _ = select.select([self._control], [], [], limit)
        return receive_zygote(self._control) if readable else None


def _add(total: dict[str, float], part: dict[str, float]) -> None:
    for name, value in part.items():
        total[name] = total.get(name, 0.0) + value
