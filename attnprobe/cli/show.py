"""`attnprobe show`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from attnprobe.cli._output import format_option, print_matrix
from attnprobe.errors import UsageError

if TYPE_CHECKING:
    from attnprobe.matrix.schema import Matrix


@click.command("show")
@click.argument("file", required=False, type=click.Path(path_type=Path))
@click.option("--case", metavar="ID", help="Show this case only, on every backend.")
@format_option()
def command(file: Path | None, case: str | None, format: str) -> None:
    """Print a matrix: backends by verdict, and the rules in plain words.

    Without FILE: ATTNPROBE_MATRIX, else the newest matrix of your own scans.
    """
    from attnprobe.matrix.store import newest_matrix, read_matrix

    matrix = read_matrix(file or newest_matrix())
    if case is None:
        print_matrix(matrix, format)
    elif format in {"table", "json"}:
        _show_case(matrix, case, format)
    else:
        raise UsageError(f"a case has no format {format!r}", why="known are json and table")


def _show_case(matrix: Matrix, case_id: str, format_name: str) -> None:
    """Print one case with what became of it on each backend."""
    import msgspec

    from attnprobe.axes import levels_of
    from attnprobe.matrix.settled import DISPUTED, settled
    from attnprobe.report.words import detail_lines

    case = matrix.case(case_id)
    if case is None:
        raise UsageError(f"no case {case_id} in this matrix", fix="case ids: `attnprobe show FILE`")
    at = levels_of(case)
    results = [(b.name, r) for b in matrix.backends for r in b.cases if r.id == case_id]
    words = {b.name: settled(r for name, r in results if name == b.name) for b in matrix.backends}
    covering = {
        backend.name: [rule.id for rule in backend.rules if rule.covers(case_id, at)]
        for backend in matrix.backends
    }
    if format_name == "json":
        document = {
            "id": case_id,
            "at": at,
            "case": msgspec.to_builtins(case),
            "backends": [
                {
                    "name": name,
                    **msgspec.to_builtins(r),
                    "verdict": r.verdict.value,
                    "rules": covering[name],
                    **({"disputed": True} if words[name][case_id] == DISPUTED else {}),
                }
                for name, r in results
            ],
        }
        content = msgspec.json.encode(document, order="deterministic")
        click.echo(msgspec.json.format(content, indent=2).decode())
        return
    click.echo(f"case {case_id}, seed {case.seed}")
    for axis, level in at.items():
        click.echo(f"  {axis:14} {level}")
    sizes = f"B {case.batch}, H {case.heads}/{case.heads_kv}, S {case.seqlen_q}/{case.seqlen_kv}"
    click.echo(f"  numbers        {sizes}, D {case.head_dim}/{case.head_dim_v}")
    several = len(matrix.runs) > 1
    for name, result in results:
        ran = f", ran {result.kernel}" if result.kernel else ""
        under = f", rule {' '.join(covering[name])}" if covering[name] else ""
        run = f", run {result.run}" if several else ""
        disputed = f"{DISPUTED}: " if words[name][case_id] == DISPUTED else ""
        click.echo(f"{name}: {disputed}{result.verdict.value} ({result.evidence.value}{ran}{under}{run})")
        for line in detail_lines(result.detail):
            click.echo(f"  {line}")
