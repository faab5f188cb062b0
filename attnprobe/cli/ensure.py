"""`attnprobe ensure`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from attnprobe.cli._config import said
from attnprobe.cli._output import Duration

if TYPE_CHECKING:
    from attnprobe.config import AttentionConfig
    from attnprobe.ensure import Ensured
    from attnprobe.select.explain import Decision, Mode


@click.command("ensure")
@click.option(
    "--config",
    type=click.Path(path_type=Path),
    required=True,
    help="The configurations of the job, in a YAML, JSON or TOML file. What one leaves unsaid takes its "
    "plain value.",
)
@click.option(
    "--backend",
    multiple=True,
    metavar="NAME|FILE.py:NAME",
    help="One that the job can run, the preferred first (repeatable). "
    "[default: all of the matrix, or where there is none all that are here]",
)
@click.option(
    "--time-limit",
    type=Duration(),
    default="60s",
    show_default=True,
    help="End the probing after this time.",
)
@click.option(
    "--wait-limit",
    type=Duration(),
    help="Wait this long for another process that is probing. [default: the time limit and 30s]",
)
@click.option(
    "--mode",
    type=click.Choice(["gate", "veto", "observe"]),
    default="gate",
    show_default=True,
    help="gate: only what is proven; veto: what is not denied; observe: the first.",
)
@click.option(
    "--format",
    type=click.Choice(["table", "json"]),
    default="table",
    show_default=True,
    help="What standard output gets.",
)
def command(  # noqa: PLR0913  # one argument an option
    *,
    config: Path,
    backend: tuple[str, ...],
    time_limit: float,
    wait_limit: float | None,
    mode: Mode,
    format: str,
) -> int:
    """Probe what the matrix does not prove of a job's configurations, and choose a backend for each.

    For a launcher, before CUDA and the process group are up: one process on a
    node probes, in a child process that ends in time; the others wait for it.
    What is proven already costs no probing. Results are added to your matrix.

    Exits 0 if each configuration has a backend, 1 if what was measured leaves
    one without, 3 if that is because something could not be measured.

    \b
    attnprobe ensure --config job.toml && torchrun train.py
    attnprobe ensure --config job.toml --backend my_kernel.py:attention --time-limit 5m
    """  # noqa: D301  # click's mark for "keep these lines"
    from attnprobe.ensure import ensure, plain
    from attnprobe.materials.source import backend_name
    from attnprobe.probe.config_file import read_configs

    configs = read_configs(config)
    found = ensure(configs, backends=backend or None, time_limit=time_limit, wait_limit=wait_limit)
    names = tuple(map(backend_name, backend)) or None
    chosen = []
    if found.selector is not None:
        chosen = [found.selector.select(plain(one), mode, None, names) for one in configs]
    click.echo(_json(found, chosen) if format == "json" else _table(configs, chosen))
    click.echo(f"probed: {found.probed} of {len(configs)} configurations", err=True)
    if found.reason:
        click.echo(f"not all is known: {found.reason}", err=True)
    if found.selector is not None and found.selector.source:
        click.echo(f"matrix: {found.selector.source}", err=True)
    return _code(chosen)


def _table(configs: list[AttentionConfig], chosen: list[Decision]) -> str:
    """Return a line for each configuration; where it has no backend, what is known of every one."""
    width = max(len("backend"), *(len(one.backend or "none") for one in chosen)) if chosen else len("backend")
    lines = [f"{'backend':{width}}  configuration"]
    for number, config in enumerate(configs):
        decision = chosen[number] if chosen else None
        backend = decision.backend if decision is not None else None
        lines.append(f"{backend or 'none':{width}}  {said(config)}")
        if decision is not None and backend is None:
            lines += [f"  {one.backend}: {one.status}: {one.reason}" for one in decision.candidates]
    return "\n".join(lines)


def _json(found: Ensured, chosen: list[Decision]) -> str:
    import msgspec

    document: dict[str, Any] = {
        "probed": found.probed,
        "reason": found.reason,
        "matrix": found.selector.source if found.selector else "",
        "digest": found.selector.digest if found.selector else "",
        "decisions": [
            {"config": msgspec.to_builtins(decision.config), **decision.builtins()} for decision in chosen
        ],
    }
    content = msgspec.json.encode(document, order="deterministic")
    return msgspec.json.format(content, indent=2).decode()


def _code(chosen: list[Decision]) -> int:
    """Return 1 where what is known forbids a configuration, 3 where something of it is not known."""
    without = [decision for decision in chosen if decision.backend is None]
    if any(all(one.status == "denied" or one.absent for one in each.candidates) for each in without):
        return 1
    return 3 if without or not chosen else 0
