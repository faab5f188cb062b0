"""Run one backend on one case as often as it takes to know what memory, chance and load do to it."""

from __future__ import annotations

import contextlib
import functools
import threading
from typing import TYPE_CHECKING, Any, Final, Protocol

import torch
from msgspec import structs

from attnprobe.probe.inputs import make, seed_generators
from attnprobe.probe.memory import Breach, Run, agree
from attnprobe.probe.poison import FINITE_FILL, NAN_FILL

if TYPE_CHECKING:
    from collections.abc import Iterator

    from attnprobe.backends.interface import Outputs
    from attnprobe.config import Case, Data
    from attnprobe.device.interface import Device
    from attnprobe.probe.inputs import Tensors

_LOAD_THREADS: Final = 2
_A: Final = (NAN_FILL, FINITE_FILL)
_B: Final = (FINITE_FILL, NAN_FILL)
_ZONE_OF_A: Final = (FINITE_FILL, FINITE_FILL)
"""The fill of B in the zones of A: tells which of the two a difference between A and B follows."""


class Memories(Protocol):
    """Sets what memory holds around a call."""

    def arm(self, fill: int, zone: int) -> None:
        """Let memory allocated from now on hold `fill`, and the zones around tensors `zone`."""

    def disarm(self) -> tuple[Breach, ...]:
        """Let memory be handed out as it is; return the accesses outside tensors since `arm`."""


class Trial:
    """One backend on one case. `threads`: how many a kernel may use; elsewhere it is one."""

    def __init__(  # noqa: PLR0913, PLR0917  # what a call needs, one each
        self,
        backend: Any,
        case: Case,
        tensors: Tensors,
        memories: Memories,
        device: torch.device,
        threads: int,
    ) -> None:
        """Run nothing yet."""
        self._backend = backend
        self._case = case
        self._tensors = tensors
        self._memories = memories
        self._device = device
        self._threads = threads

    def runs(self, facts: Device) -> list[Run]:
        """Return the runs that `memory.compare` asks for.

        A and B, which differ in what memory and zones hold. Where their bits differ, A again: if it does
        not repeat, that is all there is to know; if it does, both twice more, so that chance is unlikely to
        look like memory, and one run that tells memory from zones. Where determinism is asked for, A once
        more beside other threads that keep the machine busy.
        """
        self._call_earlier(facts)
        runs = [self._run(*_A), self._run(*_B)]
        if not agree(runs[0].outputs, runs[1].outputs):
            runs.append(self._run(*_A))
            if agree(runs[0].outputs, runs[2].outputs):
                runs += [self._run(*setting) for setting in (_B, _ZONE_OF_A, _A, _B)]
        elif self._case.deterministic:
            with busy():
                runs.append(structs.replace(self._run(*_A), loaded=True))
        return runs

    def _run(self, fill: int, zone: int) -> Run:
        """Return one run with unwritten memory holding `fill`, and the zones around tensors `zone`."""
        breaches: tuple[Breach, ...] = ()
        with as_in_a_job(self._case, self._device, self._threads):
            self._memories.arm(fill, zone)
            try:
                outputs: Outputs = self._backend.run(self._case, self._tensors)
                if self._device.type != "cpu":
                    torch.accelerator.synchronize()
            finally:
                breaches = self._memories.disarm()
        return Run(fill, zone, outputs, breaches=breaches)

    def _call_earlier(self, facts: Device) -> None:
        """Make the call that the case wants made before, whatever becomes of it."""
        other = earlier_case(self._case)
        if other is None or self._backend.declares(other, facts) is not None:
            return
        with contextlib.suppress(Exception), as_in_a_job(other, self._device, self._threads):
            self._backend.run(other, _made(other, self._device))


@functools.lru_cache(maxsize=1)
def _made(case: Case, device: torch.device) -> Tensors:
    """Return the inputs of an earlier call; one backend after the other makes the same."""
    return make(case, device)


def earlier_case(case: Case) -> Case | None:
    """Return the case to call before this one: the same shape with other data, strides or dtype.

    Other data are of another regime and come with another scale: what is kept for a shape may rest on either.
    """
    plain = structs.replace(case, earlier="nothing")
    if case.earlier == "other-data":
        regime: Data = "large-logits" if case.data == "gaussian" else "gaussian"
        return structs.replace(plain, seed=case.seed + 1, scale=1.5 * case.softmax_scale, data=regime)
    if case.earlier == "other-strides":
        return structs.replace(plain, layout="contiguous" if case.layout == "transposed" else "transposed")
    if case.earlier == "other-dtype":
        return structs.replace(plain, dtype="bfloat16" if case.dtype == "float32" else "float32")
    return None


@contextlib.contextmanager
def as_in_a_job(case: Case, device: torch.device, threads: int) -> Iterator[None]:
    """Set random state, determinism and threads as a job would have them, and back."""
    seed_generators(case.seed, device)
    # use_deterministic_algorithms does the same and imports the compiler, two seconds a worker.
    torch.set_deterministic_debug_mode("error" if case.deterministic else "default")
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(1)
        torch.set_deterministic_debug_mode("default")


@contextlib.contextmanager
def busy() -> Iterator[None]:
    """Keep the machine busy meanwhile, so that threads of a kernel meet in another order."""
    over = threading.Event()

    def work() -> None:
        square = torch.ones(128, 128)
        into = torch.empty_like(square)
        while not over.is_set():
            torch.mm(square, square, out=into)

    others = [threading.Thread(target=work, daemon=True) for _ in range(_LOAD_THREADS)]
    for other in others:
        other.start()
    try:
        yield
    finally:
        over.set()
        for other in others:
            other.join()
