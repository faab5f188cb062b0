"""The process that runs cases: builds inputs and the reference once, then each backend, and judges.

Every library here may crash it, end it or hang it; the scan notices and goes on with another worker. What
it prints goes to a file, not into the conversation.
"""

from __future__ import annotations

import ctypes
import os
import socket
import sys
import time
import warnings
from typing import Any

import torch

from attnprobe.backends.registry import choose
from attnprobe.config import Case
from attnprobe.device.cpu import cpu_device
from attnprobe.errors import AttnprobeError
from attnprobe.probe import dropout
from attnprobe.probe.inputs import Tensors, make
from attnprobe.probe.judge import Judgement, input_bits, inputs_changed, judge
from attnprobe.probe.memories import Memories
from attnprobe.probe.memory import Run
from attnprobe.probe.own_forward import weights
from attnprobe.probe.reference import Reference, reference
from attnprobe.probe.trial import Trial
from attnprobe.run.protocol import (
    Begin,
    Counted,
    CountKernels,
    Describe,
    Described,
    Finished,
    Found,
    Outcome,
    RunCase,
    Skipped,
    last_line,
    receive_request,
    send,
    words,
)
from attnprobe.verdict import Evidence, Verdict


def main(channel: socket.socket, device_name: str) -> None:
    """Answer requests until there are no more."""
    Worker(channel, device_name).serve()


class Worker:
    """One device, one conversation."""

    def __init__(self, channel: socket.socket, device_name: str) -> None:
        """Prepare the device; torch's own fill would hide ours, so it is off."""
        self._channel = channel
        self._device = cpu_device()
        self._torch_device = torch.device(device_name)
        self._memories = Memories()
        self._backends: dict[str, Any] = {}
        self._case_id = ""
        self._expected: Reference | None = None
        # Kernels run on as many threads as a job's would; on the small tensors of inputs, reference and
        # judge, waking a second thread takes longer than the work.
        self._threads = torch.get_num_threads()
        torch.set_num_threads(1)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]

    def serve(self) -> None:
        """Answer requests until the scan hangs up."""
        while (request := receive_request(self._channel)) is not None:
            if isinstance(request, Describe):
                self._describe(request)
            elif isinstance(request, CountKernels):
                backend = self._backends[request.backend]
                send(self._channel, Counted(sum(backend.kernel_key(c) is not None for c in request.cases)))
            else:
                self._run(request)

    def _describe(self, request: Describe) -> None:
        try:
            self._backends, absent = choose(request.asked, self._device)
        except AttnprobeError as error:
            send(self._channel, Described((), what=error.what, why=error.why, fix=error.fix))
            return
        plain = Case(pass_="forward", needs_grad="none")
        found = [
            Found(
                name=name,
                materials=tuple(backend.materials()),
                compiles=backend.kernel_key(plain) is not None,
            )
            for name, backend in self._backends.items()
        ]
        found += [Found(name=one.name, reason=one.reason) for one in absent]
        send(self._channel, Described(tuple(found), self._memories.poison, self._memories.guard))

    def _run(self, request: RunCase) -> None:
        case, seconds = request.case, {"inputs": 0.0}
        self._case_id = case.id
        willing = []
        for name in request.backends:
            refusal = self._backends[name].declares(case, self._device)
            if refusal is None:
                compiles = self._backends[name].kernel_key(case) is not None
                if compiles and name not in request.may_compile:
                    send(self._channel, Skipped(name, self._case_id))
                else:
                    willing.append(name)
            else:
                self._say(name, Verdict.REFUSED, {"says": refusal.reason}, Evidence.DECLARED)
        if willing:
            send(self._channel, Begin("", self._case_id))
            with _Timer(seconds, "inputs"):
                tensors = self._memories.place(make(case, self._torch_device))
                before = input_bits(tensors)
            self._expected = None
            for name in willing:
                send(self._channel, Begin(name, self._case_id))
                if self._one(name, case, tensors, before):
                    # A backend changed the inputs: the next one gets them as they were.
                    tensors = self._memories.place(make(case, self._torch_device))
        send(self._channel, Finished(self._case_id, seconds))

    def _one(self, name: str, case: Case, tensors: Tensors, before: list[torch.Tensor]) -> bool:
        """Run, judge and report one backend; return whether it changed the inputs."""
        seconds = {"kernel": 0.0, "judge": 0.0, "reference": 0.0}
        backend = self._backends[name]
        compiled = backend.kernel_key(case) is not None
        trial = Trial(backend, case, tensors, self._memories, self._torch_device, self._threads)
        printed = _Printed()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                with _Timer(seconds, "kernel"):
                    runs = trial.runs(self._device)
                    kernel = runs[0].outputs.kernel or self._kernel(backend, case, tensors)
            except (MemoryError, torch.OutOfMemoryError) as error:
                self._say(name, Verdict.OUT_OF_MEMORY, {"says": _words(error)})
                return False
            except Exception as error:  # noqa: BLE001  # a refusal is whatever the library raises
                self._say(name, Verdict.REFUSED, {"says": _words(error)}, compiled=compiled, seconds=seconds)
                return False
            with _Timer(seconds, "judge"):
                changed = inputs_changed(tensors, before)
            if changed:
                found = Judgement(Verdict.WRONG, tuple(changed), {"inputs changed": changed})
            else:
                found = self._judged(case, tensors, backend, runs, seconds)
        if found.verdict.fails and (said := printed.last_line()):
            found.detail["said"] = said
        self._say(
            name,
            found.verdict,
            found.detail,
            outputs=found.outputs,
            traits=found.traits,
            kernel=kernel,
            compiled=compiled,
            seconds=seconds,
        )
        return bool(changed)

    def _judged(
        self, case: Case, tensors: Tensors, backend: Any, runs: list[Run], seconds: dict[str, float]
    ) -> Judgement:
        """Return the verdict on runs that left the inputs as they were."""
        late = 0.0

        def own() -> torch.Tensor | None:
            nonlocal late
            start = time.perf_counter()
            found = weights(case, tensors, backend) if not case.dropout else None
            late += time.perf_counter() - start
            return found

        try:
            with _Timer(seconds, "reference"):
                expected = self._reference(case, tensors, backend)
            late -= expected.seconds if expected is not None else 0.0
            with _Timer(seconds, "judge"):
                found = judge(case, tensors, runs, expected, own)
        except (MemoryError, torch.OutOfMemoryError) as error:
            return Judgement(Verdict.INCONCLUSIVE, (), {"judge": _words(error)})
        # What whole-masked rows contribute, and the weights of the own forward, are done once the judge asks.
        late += expected.seconds if expected is not None else 0.0
        seconds["reference"] += late
        seconds["judge"] -= late
        return found

    def _reference(self, case: Case, tensors: Tensors, backend: Any) -> Reference | None:
        """Return the reference, made when the first backend that returned needs it.

        With dropout it is that of the backend's own mask; None where that cannot be had.
        """
        if case.dropout:
            return dropout.reference_with_its_mask(case, tensors, backend)
        if self._expected is None:
            send(self._channel, Begin("", self._case_id))  # what ends the process now is no kernel's doing
            self._expected = reference(case, tensors)
        return self._expected

    @staticmethod
    def _kernel(backend: Any, case: Case, tensors: Tensors) -> str:
        """Return the operator that runs, where the backend can tell."""
        probe = getattr(backend, "kernel", None)
        return "" if probe is None else str(probe(case, tensors))

    def _say(  # noqa: PLR0913  # one field each of the message
        self,
        name: str,
        verdict: Verdict,
        detail: dict[str, Any],
        evidence: Evidence = Evidence.MEASURED,
        *,
        compiled: bool = False,
        outputs: tuple[str, ...] = (),
        traits: dict[str, str] | None = None,
        kernel: str = "",
        seconds: dict[str, float] | None = None,
    ) -> None:
        message = Outcome(
            backend=name,
            case=self._case_id,
            verdict=verdict,
            evidence=evidence,
            outputs=outputs,
            kernel=kernel,
            detail=detail,
            traits=traits or {},
            compiled=compiled,
            seconds=seconds or {},
        )
        send(self._channel, message)


class _Printed:
    """What a backend prints, into the file that stands for this process' output, from here on."""

    def __init__(self) -> None:
        self._mark = self._size()

    @staticmethod
    def _size() -> int:
        """Return how much has been printed, what still lay in buffers included."""
        sys.stdout.flush()
        ctypes.CDLL(None).fflush(None)
        return os.fstat(1).st_size

    def last_line(self) -> str:
        """Return the last line that was printed, cut to a bearable length, or ""."""
        self._size()
        return last_line(1, self._mark)


class _Timer:
    """Adds the wall time of a block to one entry of a dictionary."""

    def __init__(self, seconds: dict[str, float], part: str) -> None:
        self._seconds = seconds
        self._part = part

    def __enter__(self) -> None:
        self._start = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self._seconds[self._part] += time.perf_counter() - self._start


def _words(error: BaseException) -> str:
    """Return what an exception says, its first line, cut to a bearable length."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return words(f"{type(error).__name__}: {lines[0] if lines else ''}")
