"""What `attnprobe scan` does, from options to exit code."""

from __future__ import annotations

import contextlib
import hashlib
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from attnprobe.cli._output import output_spec, print_matrix
from attnprobe.config import canonical
from attnprobe.device.cpu import cpu_device
from attnprobe.errors import NoVerdictError, UsageError
from attnprobe.matrix.store import check_writable, data_directory, write_atomically
from attnprobe.probe.plan import Plan, plan_of_configs
from attnprobe.probe.plan import plan as plan_of
from attnprobe.report.interface import format_named
from attnprobe.run.journal import Header, Journal, journal_path
from attnprobe.run.scan import Present, Scan
from attnprobe.run.supervisor import Supervisor

if TYPE_CHECKING:
    from attnprobe.matrix.schema import Matrix

KERNELS: Final = {"quick": 0, "standard": 4, "full": 40, "config": 40}
SECONDS_PER_KERNEL: Final = 8
"""What one torch.compile of flex_attention was seen to take on two cores; only for the estimate."""


@dataclass
class Request:
    """The options of one scan."""

    level: str
    backend: tuple[str, ...]
    config: Path | None
    exact: bool
    seed: int
    budget: float | None
    kernels: int | None
    timeout: float
    output: tuple[str, ...]
    format: str
    resume: bool
    fail_on: str
    plan: bool
    progress: bool | None

    def run(self) -> int:
        """Scan and return the exit code."""
        format_named(self.format)
        chosen = self._plan()
        if self.plan:
            return self._print_plan(chosen)
        device = cpu_device()
        outputs = [output_spec(spec) for spec in self.output]
        if not outputs:
            outputs = [("json", data_directory() / f"{device.slug}.{chosen.level}.json")]
        for _, path in outputs:
            check_writable(path)
        with contextlib.ExitStack() as stack:
            supervisor = stack.enter_context(Supervisor(device.torch_name, self.backend, self.timeout))
            present = self._present(supervisor)
            if all(one.reason for one in present):
                raise NoVerdictError(
                    "no backend to probe",
                    why="; ".join(f"{one.name}: {one.reason}" for one in present),
                    fix="attnprobe doctor",
                )
            identity = hashlib.sha256(canonical([device.record, present])).hexdigest()[:16]
            journal = Journal(
                journal_path(outputs[0][1]),
                Header(plan=chosen.digest, identity=identity),
                resume=self.resume,
                durable=device.record.kind == "cuda",
            )
            kernels = self.kernels if self.kernels is not None else KERNELS[chosen.level]
            scan = Scan(
                device=device,
                plan=chosen,
                supervisor=supervisor,
                backends=present,
                journal=journal,
                budget=self.budget,
                kernels=kernels,
            )
            self._announce(scan, kernels)
            interrupted = self._drive(scan)
            matrix = scan.matrix()
            self._write(matrix, outputs)
            journal.close(keep=interrupted)
        print_matrix(matrix, self.format)
        for _, path in outputs:
            click.echo(f"written: {path}", err=True)
        if interrupted:
            click.echo("interrupted; go on with the same command and --resume", err=True)
            return 130
        return self._code(matrix)

    def _plan(self) -> Plan:
        if self.config is None:
            if self.exact:
                raise UsageError("--exact goes with --config", fix="name the file of configurations")
            return plan_of(self.level, self.seed)
        from attnprobe.probe.config_file import read_configs

        return plan_of_configs(read_configs(self.config), self.seed, neighbours=not self.exact)

    def _print_plan(self, chosen: Plan) -> int:
        from attnprobe.probe.plan import described

        if self.format == "json":
            import msgspec

            document = {
                "level": chosen.level,
                "seed": chosen.seed,
                "cases": [described(c) for c in chosen.cases],
            }
            click.echo(msgspec.json.format(msgspec.json.encode(document), indent=2).decode())
            return 0
        for case in chosen.cases:
            said = ", ".join(f"{k} {v}" for k, v in sorted(_said(case).items())) or "plain"
            click.echo(f"{case.id}  {said}")
        click.echo(f"{len(chosen.cases)} cases, level {chosen.level}, seed {chosen.seed}", err=True)
        return 0

    @staticmethod
    def _present(supervisor: Supervisor) -> tuple[Present, ...]:
        """Return the backends of this scan; one that refuses the plainest case in every dtype is absent."""
        return tuple(
            Present(name=f.name, materials=f.materials, reason=f.reason, compiles=f.compiles)
            for f in supervisor.controlled()
        )

    def _announce(self, scan: Scan, kernels: int) -> None:
        here = [one for one in scan.backends if not one.reason]
        click.echo(f"device: {scan.device.record.name} ({scan.device.record.kind})", err=True)
        for one in here:
            versions = ", ".join(f"{m.name} {m.version}" for m in one.materials)
            click.echo(f"  {one.name}  {versions}", err=True)
        for one in scan.backends:
            if one.reason:
                click.echo(f"  {one.name}  not here: {one.reason}", err=True)
            elif one.compiles:
                whole = scan.supervisor.count_kernels(one.name, scan.plan.cases)
                click.echo(
                    f"  {one.name}  compiles {min(kernels, whole)} of {whole} kernels, about "
                    f"{min(kernels, whole) * SECONDS_PER_KERNEL} s; all: --kernels {whole}, about "
                    f"{whole * SECONDS_PER_KERNEL / 60:.0f} min",
                    err=True,
                )
        click.echo(f"plan: {len(scan.plan.cases)} cases, level {scan.plan.level}", err=True)

    def _drive(self, scan: Scan) -> bool:
        """Run the scan under a progress bar; return whether it was interrupted."""
        from attnprobe.cli._progress import shown

        try:
            with _sigterm_interrupts(), shown(scan, wanted=self.progress):
                scan.run()
        except KeyboardInterrupt:
            return True
        return False

    @staticmethod
    def _write(matrix: Matrix, outputs: list[tuple[str, Path]]) -> None:
        for name, path in outputs:
            write_atomically(path, format_named(name).file(matrix))

    def _code(self, matrix: Matrix) -> int:
        if not matrix.runs[-1].complete and self.budget is None:
            raise NoVerdictError("the scan is incomplete", fix="attnprobe scan --resume")
        failing = any(r.verdict.fails for b in matrix.backends for r in b.cases)
        return 1 if failing and self.fail_on == "failing" else 0


def _said(case: Any) -> dict[str, Any]:
    import msgspec

    said: dict[str, Any] = msgspec.to_builtins(case)
    said.pop("seed", None)
    return said


@contextlib.contextmanager
def _sigterm_interrupts() -> Iterator[None]:
    """Treat SIGTERM as Ctrl-C while scanning: what is known is written, and the exit code says so."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
