"""`attnprobe export`: every module of `attnprobe.export` that holds a `command` is one of its formats."""

from __future__ import annotations

import importlib
import pkgutil

import click


class Formats(click.Group):
    """The formats, by the names of their modules."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002  # click's signature
        """Return the names of all formats."""
        package = importlib.import_module("attnprobe.export")
        return sorted(m.name for m in pkgutil.iter_modules(package.__path__) if m.name[0] != "_")

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return a format by name."""
        if cmd_name not in self.list_commands(ctx):
            return None
        found: click.Command = importlib.import_module(f"attnprobe.export.{cmd_name}").command
        return found


@click.group("export", cls=Formats)
def command() -> None:
    """Make something for others from a matrix.

    \b
    attnprobe export repro m.json CASE > repro.py    a script for a bug report
    """  # noqa: D301  # click's mark for "keep these lines"
