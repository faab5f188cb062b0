"""`attnprobe`: finds the commands of this package and turns errors into messages and exit codes."""

from __future__ import annotations

import importlib
import os
import pkgutil
import sys
from typing import NoReturn

import click

import attnprobe
from attnprobe.errors import AttnprobeError

EPILOG = """\
\b
Exit codes: 0 done; 1 a gate you asked for forbids it; 2 usage or bad input;
3 no verdict (nothing to probe, driver failure, incomplete); 130 interrupted.
Every option can be given as ATTNPROBE_<COMMAND>_<OPTION>. Completion:
eval "$(_ATTNPROBE_COMPLETE=bash_source attnprobe)".
"""


class Commands(click.Group):
    """Every module of `attnprobe.cli` that holds a `command` is one."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002  # click's signature
        """Return the names of all commands."""
        package = importlib.import_module("attnprobe.cli")
        names = [module.name for module in pkgutil.iter_modules(package.__path__)]
        return [name for name in names if name != "main" and name[0] != "_"]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return a command by name."""
        if cmd_name not in self.list_commands(ctx):
            return None
        found: click.Command = importlib.import_module(f"attnprobe.cli.{cmd_name}").command
        return found


@click.group(
    cls=Commands,
    epilog=EPILOG,
    context_settings={"help_option_names": ["-h", "--help"], "auto_envvar_prefix": "ATTNPROBE"},
)
@click.version_option(attnprobe.__version__, prog_name="attnprobe")
def cli() -> None:
    """Measure which attention backend may run which configuration on this device.

    \b
    attnprobe scan                 run every backend, write a capability matrix
    attnprobe show                 print the matrix of the last scan
    attnprobe select --pass backward --dtype bfloat16 --head-dim 128
    attnprobe doctor               what a scan would run on, and what is missing
    """  # noqa: D301  # click's mark for "keep these lines"


def main() -> NoReturn:
    """Run the command line and exit."""
    try:
        code = _run()
        sys.stdout.flush()
    except AttnprobeError as error:
        report(error)
        code = error.exit_code
    except click.ClickException as error:
        error.show()
        code = 2
    except (click.Abort, KeyboardInterrupt):
        click.echo("interrupted", err=True)
        code = 130
    except OSError as error:
        code = _output_failed(error)
    sys.exit(code)


def _run() -> int:
    """Return the exit code of the command that the arguments name."""
    if os.environ.get("_ATTNPROBE_COMPLETE"):
        cli.main(prog_name="attnprobe")
    if len(sys.argv) == 1:
        sys.argv.append("--help")
    try:
        # Not cli.main: it would turn a closed pipe into exit code 1, which means something else here.
        with cli.make_context("attnprobe", sys.argv[1:]) as context:
            code = cli.invoke(context)
    except click.exceptions.Exit as end:
        code = end.exit_code
    return code if isinstance(code, int) else 0


def _output_failed(error: OSError) -> int:
    """Return the exit code where standard output takes no more, and keep the interpreter quiet at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if isinstance(error, BrokenPipeError):
        return 0  # the reader has seen enough
    click.echo(f"error: standard output cannot be written\n  why: {error.strerror}", err=True)
    return 3


def report(error: AttnprobeError) -> None:
    """Print an error: what, why, what to do."""
    click.echo(f"error: {error.what}", err=True)
    if error.why:
        click.echo(f"  why: {error.why}", err=True)
    if error.fix:
        click.echo(f"  try: {error.fix}", err=True)
