"""`attnprobe export te-env`: what a launcher can set for Transformer Engine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from attnprobe.cli._config import matrix_option

if TYPE_CHECKING:
    from attnprobe.select.explain import Candidate


@click.command("te-env")
@matrix_option
@click.option(
    "--config",
    "job",
    required=True,
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="The configurations of the job, as for `attnprobe scan --config`.",
)
def command(*, file: Path | None, assume_device: bool, job: Path) -> int:
    """Print the variables that keep Transformer Engine off a flash-attn.

    A variable counts for all layers of a process, so it is printed only for a
    version of flash-attn that the matrix denies for every configuration in
    the file. Where only some are denied, the guard inside the process can
    tell them apart. Transformer Engine reads these from 2.18 on. Variables
    that Megatron asserts to be unset are never printed. Standard error says
    why. Exits 1 where a configuration has no backend left.

    \b
    eval "$(attnprobe export te-env -m m.json --config job.yaml)"
    """  # noqa: D301  # click's mark for "keep these lines"
    from attnprobe.integrations.transformer_engine_config import BACKENDS, FLASH, as_run
    from attnprobe.probe.config_file import read_configs
    from attnprobe.select.loading import load

    selector = load(file, assume_device=assume_device)
    configs = read_configs(job)
    seen: dict[str, list[Candidate]] = {}
    for name in BACKENDS:
        decisions = [selector.select(as_run(config, name), "veto", backends=(name,)) for config in configs]
        seen[name] = [decision.candidates[0] for decision in decisions]
    for note in decisions[0].notes:
        click.echo(note, err=True)
    for name, found in seen.items():
        denied = [number for number, one in enumerate(found, start=1) if one.status == "denied"]
        if name.startswith(FLASH) and len(denied) == len(found):
            click.echo(f"export NVTE_FLASH_ATTN_V{name.removeprefix(FLASH)}=0")
        _explain(name, found, denied)
    left = [any(found[i].status != "denied" for found in seen.values()) for i in range(len(configs))]
    for number, any_left in enumerate(left, start=1):
        if not any_left:
            click.echo(f"entry {number}: no backend of Transformer Engine is left", err=True)
    return 0 if all(left) else 1


def _explain(name: str, found: list[Candidate], denied: list[int]) -> None:
    """Say on standard error what is known of one backend."""
    if not denied:
        known = ", ".join(sorted({f"{one.status}: {one.reason}" for one in found}))
        click.echo(f"{name}: not denied ({known})", err=True)
        return
    every = len(denied) == len(found)
    click.echo(f"{name}: denied for {'all' if every else len(denied)} of {len(found)}", err=True)
    for number in denied:
        one = found[number - 1]
        evidence = f"{one.evidence.value}: " if one.evidence else ""
        rule = f" (rule {one.rule})" if one.rule else ""
        click.echo(f"  entry {number}: {evidence}{one.reason}{rule}", err=True)
    if not every:
        click.echo("  a variable cannot tell them apart; the guard can: docs/transformer-engine.md", err=True)
