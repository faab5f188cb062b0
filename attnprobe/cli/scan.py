"""`attnprobe scan`."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import click

from attnprobe.cli._output import Duration, format_option

LEVELS: Final = ("quick", "standard", "full")


@click.command("scan")
@click.option(
    "--level",
    type=click.Choice(LEVELS),
    default="standard",
    show_default=True,
    help="quick: every pair of axis values; standard: every triple; full: triples and a random share.",
)
@click.option(
    "--backend",
    multiple=True,
    metavar="NAME|FILE.py:NAME|MODULE:NAME",
    help="Probe this backend only (repeatable). A callable of your own has the call shape of "
    "torch.nn.functional.scaled_dot_product_attention. [default: all that are here]",
)
@click.option(
    "--config",
    type=click.Path(path_type=Path),
    help="Probe the configurations in this YAML, JSON or TOML file, and those that differ from one of "
    "them on one axis, instead of a level.",
)
@click.option("--exact", is_flag=True, help="With --config: only the configurations themselves.")
@click.option(
    "--seed",
    type=click.IntRange(0, 2**31 - 1),
    default=0,
    show_default=True,
    help="Draws data and lengths.",
)
@click.option(
    "--budget",
    type=Duration(),
    help="Stop after this time (90s, 5m, 1h) with what is covered by then.",
)
@click.option(
    "--kernels",
    type=click.IntRange(0),
    help="Most kernels to compile on a backend that compiles per configuration. "
    "[default: 0 for quick, 4 for standard, 40 for full]",
)
@click.option(
    "--timeout",
    type=Duration(),
    default="60s",
    show_default=True,
    help="Call a case hung after this time on one backend.",
)
@click.option(
    "-o",
    "--output",
    multiple=True,
    metavar="FORMAT:FILE",
    help="Write this file (repeatable). [default: json in the user's data directory]",
)
@format_option()
@click.option("--resume", is_flag=True, help="Go on with a scan of the same output that was cut off.")
@click.option(
    "--fail-on",
    type=click.Choice(["never", "failing"]),
    default="never",
    show_default=True,
    help="Exit 1 if a backend fails a case.",
)
@click.option("--plan", is_flag=True, help="Print the cases and stop.")
@click.option("--progress/--no-progress", default=None, help="Show a progress bar. [default: on a terminal]")
def command(**options: Any) -> int:
    """Run every attention backend that is here and write a capability matrix.

    Each case runs in a child process, on memory filled with NaN and again with a finite pattern, and is
    compared with a float64 reference. What fails is narrowed down to the smallest combination of axis values.

    \b
    attnprobe scan --level quick                every pair, within a minute
    attnprobe scan --budget 5m -o json:m.json    what five minutes can cover
    attnprobe scan --backend torch-flash --backend my_kernel.py:attention
    attnprobe scan --config job.toml             only what a job runs
    """  # noqa: D301  # click's mark for "keep these lines"
    from attnprobe.cli._scanning import Request

    request = Request(**options)
    return request.run()
