"""What several commands print and parse alike."""

from __future__ import annotations

import os
import re
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

from attnprobe.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

    from attnprobe.matrix.schema import Matrix

Command = TypeVar("Command", bound="Callable[..., Any]")

PIPE_WIDTH: Final = 100
_UNITS: Final = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}


def print_matrix(matrix: Matrix, format_name: str) -> None:
    """Print a matrix in a format to standard output, as wide and as coloured as it allows."""
    from attnprobe.report.interface import format_named

    terminal = sys.stdout.isatty()
    width = shutil.get_terminal_size().columns if terminal else PIPE_WIDTH
    text = format_named(format_name).text(matrix, width=width, color=wants_color(sys.stdout))
    click.echo(text, nl=False, color=True)


def wants_color(stream: Any) -> bool:
    """Whether to colour: FORCE_COLOR, else a terminal without NO_COLOR and not a dumb one."""
    if os.environ.get("NO_COLOR"):
        return False
    if os.environ.get("FORCE_COLOR"):
        return True
    return bool(stream.isatty()) and os.environ.get("TERM") != "dumb"


class Duration(click.ParamType[float]):
    """Seconds, minutes or hours: 90, 90s, 5m, 1.5h."""

    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Return seconds."""
        if isinstance(value, float):
            return value
        match = re.fullmatch(r"(\d+(?:\.\d+)?)([smh]?)", str(value).strip())
        if not match or float(match[1]) == 0:
            self.fail(f"{value!r} is no duration; write 90s, 5m or 1h", param, ctx)
        return float(match[1]) * _UNITS[match[2]]


def output_spec(spec: str) -> tuple[str, Path]:
    """Return format and path of an `-o FORMAT:FILE`.

    Raises:
        UsageError: no colon, or no such format.
    """
    from attnprobe.report.interface import format_named

    name, colon, path = spec.partition(":")
    if not colon or not path:
        raise UsageError(f"-o {spec} names no format", fix="write -o FORMAT:FILE, as -o json:m.json")
    format_named(name)
    return name, Path(path)


def format_option(default: str = "table") -> Callable[[Command], Command]:
    """Return the `--format` option of commands that print a matrix."""
    return click.option(
        "--format",
        default=default,
        show_default=True,
        metavar="FORMAT",
        help="What standard output gets: table or json.",
    )
