"""`attnprobe validate`."""

from __future__ import annotations

from pathlib import Path

import click

from attnprobe.errors import MatrixError


@click.command("validate")
@click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="FILE...")
@click.option("--strict", is_flag=True, help="Also refuse fields that the schema does not have.")
def command(files: tuple[Path, ...], *, strict: bool) -> int:
    """Check matrix files and name every fault with its path in the file.

    Exits 2 if a file has a fault. Checked are the types, the digest, that ids match what they name, that
    every failing case lies under a rule and that no rule covers a case that passed.
    """
    from attnprobe.matrix.lint import faults
    from attnprobe.matrix.store import read_bytes

    bad = False
    for file in files:
        try:
            found = faults(read_bytes(file), strict=strict)
        except MatrixError as error:
            found = []
            bad = True
            click.echo(f"{file}: {error}")
        else:
            for fault in found:
                click.echo(f"{file}: {fault.path}: {fault.what}")
            if not found:
                click.echo(f"{file}: valid")
        bad = bad or bool(found)
    return 2 if bad else 0
