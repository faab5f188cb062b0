"""`table`: device, backends by verdict, rules in plain words."""

from __future__ import annotations

import io
from collections import Counter
from typing import TYPE_CHECKING, Final

from attnprobe.report.words import evidence_text, rule_text
from attnprobe.text import printable
from attnprobe.verdict import Verdict

if TYPE_CHECKING:
    from rich.console import Console

    from attnprobe.matrix.schema import Backend, Matrix, Rule

_WIDTH: Final = 100


class Table:
    """For people."""

    name = "table"

    def file(self, matrix: Matrix) -> bytes:
        """Return the table without colour."""
        return self.text(matrix, width=_WIDTH, color=False).encode()

    def text(self, matrix: Matrix, *, width: int, color: bool) -> str:
        """Return the table, `width` columns wide."""
        from rich.console import Console

        output = io.StringIO()
        console = Console(
            file=output,
            width=max(width, 60),
            force_terminal=color,
            color_system="standard" if color else None,
            highlight=False,
            emoji=False,
            markup=False,
        )
        _head(console, matrix)
        _backends(console, matrix)
        _rules(console, matrix)
        return "\n".join(line.rstrip() for line in output.getvalue().splitlines()) + "\n"


def _head(console: Console, matrix: Matrix) -> None:
    for device in matrix.devices:
        facts = [device.kind, *([f"{device.cores} cores"] if device.cores else [])]
        facts += [f"SM {device.sm}"] if device.sm else []
        console.print(printable(f"{device.name} ({', '.join(facts)})"))
    for run in matrix.runs:
        strength = {3: "every triple", 2: "every pair"}.get(run.strength, "less than every pair")
        state = "complete" if run.complete else "incomplete"
        what = f"{run.executed} of {run.planned} cases, {strength} of axis values met"
        console.print(f"level {run.level}, seed {run.seed}, {state}: {what}")
    console.print()


def _backends(console: Console, matrix: Matrix) -> None:
    from rich.table import Table as RichTable

    shown = [v for v in Verdict if any(r.verdict is v for b in matrix.backends for r in b.cases)]
    table = RichTable(box=None, pad_edge=False, header_style="bold")
    probed = [backend for backend in matrix.backends if backend.status == "probed"]
    needed = sum(len(verdict.value) + 2 for verdict in shown)
    needed += sum(max((len(of(b)) for b in probed), default=0) + 2 for of in (_name, _version))
    # On a narrow terminal the version goes before a figure does; `show --format json` has it.
    wide = needed <= console.width
    table.add_column("backend", overflow="fold")
    if wide:
        table.add_column("version", no_wrap=True)
    for verdict in shown:
        width = len(verdict.value)
        table.add_column(verdict.value, justify="right", min_width=width, style=_style(verdict))
    for backend in probed:
        counts = Counter(result.verdict for result in backend.cases)
        cells = [str(counts[verdict]) if counts[verdict] else "-" for verdict in shown]
        table.add_row(_name(backend), *([_version(backend)] if wide else []), *cells)
    if probed:
        console.print(table)
    for backend in matrix.backends:
        if backend.status == "absent":
            console.print(printable(f"{backend.name}: not here: {backend.reason}"), soft_wrap=True)
    console.print()


def _name(backend: Backend) -> str:
    return printable(backend.name)


def _version(backend: Backend) -> str:
    return printable(" ".join(f"{m.name} {m.version}" for m in backend.materials[-1:]))


def _style(verdict: Verdict) -> str:
    if verdict is Verdict.OK:
        return "green"
    return "red" if verdict.fails else "yellow" if verdict is Verdict.REFUSED else ""


def _rules(console: Console, matrix: Matrix) -> None:
    lengths = {record.id: record.case.seqlen_kv for record in matrix.cases}

    def lines(failing: bool) -> list[tuple[Backend, Rule]]:  # noqa: FBT001  # local
        return [(b, rule) for b in matrix.backends for rule in b.rules if rule.verdict.fails is failing]

    for title, found in (("Failing", lines(failing=True)), ("Refused", lines(failing=False))):
        if not found:
            continue
        console.print(title, style="bold")
        for backend, rule in found:
            details = {result.id: result.detail for result in backend.cases}
            said = rule_text(rule, details.get(rule.witness, {}), lengths.get(rule.witness, 0))
            console.print(printable(f"  {backend.name}, {said}"), soft_wrap=True)
            where = f"    case {rule.witness}; {evidence_text(rule)}"
            console.print(where, soft_wrap=True, style="dim")
        console.print()
    if not lines(failing=True):
        console.print("No failing case found.")
        console.print()
    _traits(console, matrix)


def _traits(console: Console, matrix: Matrix) -> None:
    rows = [(b.name, t, v) for b in matrix.backends for t, v in b.traits.items()]
    if not rows:
        return
    console.print("Traits (choices, not failures)", style="bold")
    by_choice: dict[tuple[str, str], list[str]] = {}
    for name, trait, value in rows:
        by_choice.setdefault((trait, value), []).append(name)
    for (trait, value), names in sorted(by_choice.items()):
        console.print(printable(f"  {trait}: {value} ({', '.join(names)})"), soft_wrap=True)
    console.print()


format_ = Table()
