"""`attnprobe select`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from attnprobe.cli._config import config_options, matrix_option

if TYPE_CHECKING:
    from attnprobe.config import AttentionConfig
    from attnprobe.select.explain import Mode


@click.command("select")
@matrix_option
@config_options
@click.option(
    "--mode",
    type=click.Choice(["gate", "veto", "observe"]),
    default="gate",
    show_default=True,
    help="gate: only what is proven; veto: what is not denied; observe: the first, with what both would do.",
)
@click.option(
    "--strength",
    type=click.IntRange(1, 3),
    help="Let the gate also pass what is unrefuted at this strength.",
)
@click.option(
    "--backend",
    multiple=True,
    metavar="NAME",
    help="One that the job can run, the preferred first (repeatable). [default: all of the matrix]",
)
@click.option("--format", type=click.Choice(["text", "json"]), default="text", show_default=True)
def command(  # noqa: PLR0913  # one argument an option
    *,
    file: Path | None,
    assume_device: bool,
    config: AttentionConfig,
    mode: Mode,
    strength: int | None,
    backend: tuple[str, ...],
    format: str,
) -> int:
    """Choose a backend for a configuration, and say what is known of every one.

    A field that is left out means any of its values. Exits 0 with a choice, 1 where none is allowed, 3 where
    that is because the matrix does not match this machine.

    \b
    attnprobe select --pass backward --dtype bfloat16 --head-dim 128 --head-dim-v 128 ...
    attnprobe select -m FILE --assume-device --mode veto --dropout 0.1 --format json
    """  # noqa: D301  # click's mark for "keep these lines"
    from attnprobe.select.loading import load

    selector = load(file, assume_device=assume_device)
    decision = selector.select(config, mode, strength, backend or None)
    if format == "json":
        import msgspec

        content = msgspec.json.encode(decision.builtins(), order="deterministic")
        click.echo(msgspec.json.format(content, indent=2).decode())
    else:
        click.echo(decision.explain())
    if decision.backend is not None:
        return 0
    return 3 if any(one.expired for one in decision.candidates) and not decision.matches else 1
