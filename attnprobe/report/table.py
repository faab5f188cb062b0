"""`table`: device, backends by verdict, rules in plain words."""

from __future__ import annotations

import io
from collections import Counter, defaultdict
from typing import TYPE_CHECKING, Any, Final

from attnprobe.axes import Level, levels_of
from attnprobe.matrix.settled import DISPUTED, settled
from attnprobe.report.words import dispute_text, evidence_text, rule_text
from attnprobe.text import printable
from attnprobe.verdict import Verdict

if TYPE_CHECKING:
    from rich.console import Console

    from attnprobe.matrix.schema import Backend, Matrix, Rule

_WIDTH: Final = 100
_RUNS: Final = 12
"""Most runs that are shown, a line each."""


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
    for number, run in enumerate(matrix.runs[:_RUNS]):
        strength = {3: "every triple", 2: "every pair"}.get(run.strength, "less than every pair")
        state = "complete" if run.complete else "incomplete"
        what = f"{run.executed} of {run.planned} cases, {strength} of axis values met"
        several = len(matrix.runs) > 1
        which = f"run {number} ({run.started}), " if several else ""
        said = printable(f"{which}level {run.level}, seed {run.seed}, {state}: {what}")
        console.print(said, soft_wrap=several)
    if len(matrix.runs) > _RUNS:
        console.print(f"and {len(matrix.runs) - _RUNS} more runs")
    console.print()


def _backends(console: Console, matrix: Matrix) -> None:
    from rich.table import Table as RichTable

    counts = {backend.name: Counter(settled(backend.cases).values()) for backend in matrix.backends}
    met = set().union(*counts.values())
    shown = [verdict.value for verdict in Verdict if verdict.value in met] + sorted({DISPUTED} & met)
    table = RichTable(box=None, pad_edge=False, header_style="bold")
    probed = [backend for backend in matrix.backends if backend.status == "probed"]
    needed = sum(len(verdict) + 2 for verdict in shown)
    needed += sum(max((len(of(b)) for b in probed), default=0) + 2 for of in (_name, _version))
    # On a narrow terminal the version goes before a figure does; `show --format json` has it.
    wide = needed <= console.width
    table.add_column("backend", overflow="fold")
    if wide:
        table.add_column("version", no_wrap=True)
    for verdict in shown:
        table.add_column(verdict, justify="right", min_width=len(verdict), style=_style(verdict))
    for backend in probed:
        cells = [str(counts[backend.name][verdict] or "-") for verdict in shown]
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


def _style(word: str) -> str:
    if word == DISPUTED:
        return "red"
    verdict = Verdict(word)
    if verdict is Verdict.OK:
        return "green"
    return "red" if verdict.fails else "yellow" if verdict is Verdict.REFUSED else ""


def _rules(console: Console, matrix: Matrix) -> None:
    lengths = {record.id: record.case.seqlen_kv for record in matrix.cases}
    # Within one run no rule covers what passed.
    at = {record.id: levels_of(record.case) for record in matrix.cases} if len(matrix.runs) > 1 else {}

    def lines(failing: bool) -> list[tuple[Backend, Rule]]:  # noqa: FBT001  # local
        return [(b, rule) for b in matrix.backends for rule in b.rules if rule.verdict.fails is failing]

    for title, found in (("Failing", lines(failing=True)), ("Refused", lines(failing=False))):
        if not found:
            continue
        console.print(title, style="bold")
        for backend, rule in found:
            said = rule_text(rule, _detail(backend, rule), lengths.get(rule.witness, 0))
            console.print(printable(f"  {backend.name}, {said}"), soft_wrap=True)
            where = f"    case {rule.witness}; {evidence_text(rule)}{_dispute(at, backend, rule)}"
            console.print(where, soft_wrap=True, style="dim")
        console.print()
    if not lines(failing=True):
        console.print("No failing case found.")
        console.print()
    _traits(console, matrix)


def _detail(backend: Backend, rule: Rule) -> dict[str, Any]:
    """Return what is known of a rule's witness, from a run in which it showed the rule."""
    seen = [result for result in backend.cases if result.id == rule.witness]
    return next((r.detail for r in seen if r.verdict is rule.verdict), seen[-1].detail if seen else {})


def _dispute(at: dict[str, dict[str, Level]], backend: Backend, rule: Rule) -> str:
    """Return which runs saw cases pass that a rule covers, and which the rule; empty where none did."""
    runs: dict[Verdict, set[int]] = defaultdict(set)
    for result in backend.cases:
        telling = result.verdict in {Verdict.OK, rule.verdict}
        if telling and result.id in at and rule.covers(result.id, at[result.id]):
            runs[result.verdict].add(result.run)
    return f"; {dispute_text(runs)}" if Verdict.OK in runs else ""


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
