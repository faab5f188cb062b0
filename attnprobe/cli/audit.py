"""`attnprobe audit`."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from attnprobe.cli._config import matrix_option
from attnprobe.errors import NoVerdictError

if TYPE_CHECKING:
    from attnprobe.audit.compare import Audit, Disagreement
    from attnprobe.audit.interface import HostSelector
    from attnprobe.select.selector import Selector


@click.command("audit")
@matrix_option
@click.option("--format", type=click.Choice(["text", "json"]), default="text", show_default=True)
@click.option(
    "--fail-on",
    type=click.Choice(["never", "unsafe"]),
    default="never",
    show_default=True,
    help="Exit 1 if a selector accepts what fails.",
)
def command(*, file: Path | None, assume_device: bool, format: str, fail_on: str) -> int:
    """Say where the installed libraries' own selectors disagree with the matrix; no kernel is run.

    Each selector is asked every case of the matrix. "accepts but fails": it would run what was measured to
    fail, without a word. "refuses but works": it passes over a backend that was measured to be right.
    Exits 3 where the matrix speaks of another device or other builds (--assume-device asks all the same).
    """
    from attnprobe.audit.interface import selectors
    from attnprobe.select.loading import load

    selector = load(file, assume_device=assume_device)
    _check(selector)
    audits, missing = [], {}
    for host in selectors():
        reason = host.missing()
        if reason is None:
            audits.append(_asked(host, selector))
        else:
            missing[host.name] = reason
    if not audits:
        raise NoVerdictError(
            "no selector to ask", why="; ".join(f"{name}: {said}" for name, said in missing.items())
        )
    if format == "json":
        import msgspec

        content = msgspec.json.encode({"audits": audits, "missing": missing}, order="deterministic")
        click.echo(msgspec.json.format(content, indent=2).decode())
    else:
        for audit in audits:
            _print(audit)
        for name, said in missing.items():
            click.echo(f"{name}: not asked, {said}")
    return 1 if fail_on == "unsafe" and any(audit.unsafe for audit in audits) else 0


def _check(selector: Selector) -> None:
    expired = {
        b.name: selector.match.expired(b.name) for b in selector.matrix.backends if b.status == "probed"
    }
    if expired and all(expired.values()):
        raise NoVerdictError(
            "the matrix does not speak of what is installed here",
            why=next(iter(expired.values())),
            fix="attnprobe scan, or --assume-device",
        )


def _asked(host: HostSelector, selector: Selector) -> Audit:
    """Return what one selector says of every case, with a bar on a terminal."""
    from rich.console import Console
    from rich.progress import track

    from attnprobe.audit.compare import compare

    answers = {}
    console = Console(stderr=True, no_color=bool(os.environ.get("NO_COLOR")) or None)
    shown = sys.stderr.isatty() and not os.environ.get("CI")
    for record in track(selector.matrix.cases, host.name, console=console, transient=True, disable=not shown):
        answer = host.ask(record.case)
        if answer is not None:
            answers[record.id] = answer
    return compare(host.name, answers, selector.matrix)


def _print(audit: Audit) -> None:
    click.echo(f"{audit.selector}: {audit.asked} cases asked, {audit.agreed} without a disagreement")
    for one in audit.found:
        click.echo(f"  {_words(one)}")
        click.echo(
            f"    {len(one.cases)} cases, as {one.witness}" + (f"; rule {one.rule}" if one.rule else "")
        )


def _words(one: Disagreement) -> str:
    from attnprobe.report.words import conditions

    kind = one.kind.replace("-", " ")
    said = f"{kind}: {one.backend}, {conditions(one.when)}"
    if one.kind == "accepts-but-fails":
        return f"{said}: {', '.join(one.outputs)} {one.verdict.value}".replace(":  ", ": ")
    return f"{said}; it {f'takes {one.instead}' if one.instead else 'refuses the call'}"
