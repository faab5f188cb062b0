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
        names = [module.name for module in pkgutil.iter_modules(package.__path__)]
        return sorted(name.replace("_", "-") for name in names if name[0] != "_")

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return a format by name."""
        if cmd_name not in self.list_commands(ctx):
            return None
        module = cmd_name.replace("-", "_")
        found: click.Command = importlib.import_module(f"attnprobe.export.{module}").command
        return found


@click.group("export", cls=Formats)
def command() -> None:
    """Make something for others from a matrix.

    \b
    attnprobe export repro m.json CASE > repro.py         a script for a report
    attnprobe export te-env -m m.json --config job.yaml   a launcher's variables
    """  # noqa: D301  # click's mark for "keep these lines"
