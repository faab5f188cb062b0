"""`attnprobe export repro`: one failing case as a script for a bug report."""

from __future__ import annotations

from pathlib import Path

import click


@click.command("repro")
@click.argument("matrix", type=click.Path(path_type=Path))
@click.argument("case")
@click.option("--backend", metavar="NAME", help="The backend that failed, where several did.")
@click.option("--any", "anything", is_flag=True, help="Also write a case that did not fail.")
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Write this file. [default: standard output]",
)
def command(*, matrix: Path, case: str, backend: str | None, anything: bool, output: Path | None) -> None:
    """Write a Python script that shows one failure, for a bug report.

    CASE is a case id or a rule id (its witness), or the beginning of one;
    `attnprobe show MATRIX` prints both. The script makes the same inputs bit
    for bit, makes the call, compares with float64 and prints what differs. It
    needs torch and the library at fault, not attnprobe, and exits 1 where the
    failure shows, 0 where it does not.

    \b
    attnprobe export repro m.json 399f7c24af21 > repro.py
    attnprobe export repro m.json 399f --backend torch-flash -o repro.py
    python repro.py

    For a callable of your own, keep its file beside the script or name it:
    python repro.py my_kernel.py
    """  # noqa: D301  # click's mark for "keep these lines"
    from attnprobe.errors import UsageError
    from attnprobe.export._choose import choose
    from attnprobe.matrix.store import read_matrix, write_atomically

    subject = choose(read_matrix(matrix), case, backend, anything=anything)
    try:
        from attnprobe.export._script import script
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise UsageError(
            "a script cannot be written without torch",
            why="it draws the same numbers as the scan, and those definitions are in torch",
            fix="pip install torch",
        ) from None
    text = script(subject)
    if output is None:
        click.echo(text, nl=False)
    else:
        write_atomically(output, text.encode())
        click.echo(f"written: {output}", err=True)
