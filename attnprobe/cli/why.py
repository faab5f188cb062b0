"""`attnprobe why`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from attnprobe.cli._config import config_options, matrix_option, said
from attnprobe.errors import UsageError

if TYPE_CHECKING:
    from attnprobe.config import AttentionConfig
    from attnprobe.select.explain import Candidate
    from attnprobe.select.selector import Selector


@click.command("why")
@click.argument("backend")
@matrix_option
@config_options
@click.option("--format", type=click.Choice(["text", "json"]), default="text", show_default=True)
def command(
    *, backend: str, file: Path | None, assume_device: bool, config: AttentionConfig, format: str
) -> int:
    """Say what is known of one backend for a configuration: the rule, its witness and what passes beside it.

    Exits 0 with an answer, 3 where there is none because the matrix does not match this machine.
    """
    from attnprobe.select.loading import load

    selector = load(file, assume_device=assume_device)
    known = [one.name for one in selector.matrix.backends]
    if backend not in known:
        raise UsageError(f"{backend} is not in this matrix", why=f"it has {', '.join(known)}")
    decision = selector.select(config, backends=(backend,))
    (candidate,) = decision.candidates
    facts = _facts(selector, candidate)
    if format == "json":
        import msgspec

        (shown,) = decision.builtins()["candidates"]
        content = msgspec.json.encode({**shown, **facts}, order="deterministic")
        click.echo(msgspec.json.format(content, indent=2).decode())
    else:
        click.echo(f"{backend}: {candidate.status}, asked {said(config)}")
        click.echo(f"  {candidate.evidence.value + ': ' if candidate.evidence else ''}{candidate.reason}")
        for name, value in facts.items():
            click.echo(
                f"  {name.replace('_', ' ')}: {', '.join(value) if isinstance(value, list) else value}"
            )
        for line in decision.explain().splitlines():
            if line.startswith(("assumed", "unsaid")):
                click.echo(line)
        for note in decision.notes:
            click.echo(note, err=True)
    return 3 if candidate.status == "unknown" and candidate.expired else 0


def _facts(selector: Selector, candidate: Candidate) -> dict[str, Any]:
    """Return what the rule and its cases say, as far as there are any."""
    facts: dict[str, Any] = {}
    if candidate.rule:
        facts["rule"] = candidate.rule
    if candidate.witness:
        facts["witness"] = candidate.witness
    for backend in selector.matrix.backends:
        for rule in backend.rules if backend.name == candidate.backend else ():
            if rule.id == candidate.rule:
                facts["failing_cases"] = rule.failing
                facts["passing_beside_it"] = list(rule.counter_witnesses)
                facts["right"] = list(rule.right)
    facts = {name: value for name, value in facts.items() if value}
    if candidate.witness:
        facts["look"] = f"attnprobe show {selector.source} --case {candidate.witness}"
    return facts
