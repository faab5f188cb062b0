"""`attnprobe merge`."""

from __future__ import annotations

from pathlib import Path

import click


@click.command("merge")
@click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="FILE...")
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Write this file. [default: standard output]",
)
def command(*, files: tuple[Path, ...], output: Path | None) -> None:
    """Unite matrices of one kind of device: their runs, cases and rules.

    Nothing that was measured is lost, and the order of the files does not
    matter. A case that one run saw pass and another fail is disputed: it is
    denied, and the reason names the runs. Files of different devices, or of
    different builds of a backend, are refused.

    \b
    attnprobe merge node-*.json -o all.json
    attnprobe merge quick.json config.json | attnprobe show /dev/stdin
    """  # noqa: D301  # click's mark for "keep these lines"
    from attnprobe.matrix.merge import Union
    from attnprobe.matrix.store import check_writable, read_matrix, write_atomically

    if output is not None:
        check_writable(output)
    union = Union()
    for file in files:
        union.add(read_matrix(file), str(file))
    content = union.content()
    if output is None:
        click.echo(content, nl=False)
    else:
        write_atomically(output, content)
    runs, cases = union.counts()
    said = f"{len(files)} files, {runs} runs, {cases} cases, {union.disputes()} disputed"
    click.echo(f"merged: {said}", err=True)
    if output is not None:
        click.echo(f"written: {output}", err=True)
