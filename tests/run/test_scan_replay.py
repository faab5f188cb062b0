"""A scan cut off anywhere and resumed comes to the same, with workers that answer at once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from attnprobe.config import Case, canonical
from attnprobe.device.cpu import cpu_device
from attnprobe.probe.config_file import read_configs
from attnprobe.probe.plan import Plan, plan_of_configs
from attnprobe.run.journal import Entry, Header, Journal
from attnprobe.run.protocol import Outcome
from attnprobe.run.scan import Present, Scan
from attnprobe.verdict import Verdict

# Two places to start from, so that localising one comes upon cases that the plan skipped.
CONFIGS = """[
  {"pass": "forward", "head_dim": 8, "heads": 1, "seqlen_q": 4, "dtype": "bfloat16"},
  {"pass": "forward", "head_dim": 64, "heads": 2, "seqlen_q": 64, "dtype": "float16"}
]"""


class Answers:
    """A supervisor without processes: one of its two backends dies of short, rounded queries."""

    import_seconds = 0.0
    described = None

    def __init__(self) -> None:
        self.runs = 0

    def run(self, case: Case, names: tuple[str, ...], *_: object, **__: object) -> Iterator[Outcome]:
        for name in names:
            self.runs += 1
            dies = name == "bad" and case.seqlen_q < 64 and case.dtype != "float32"
            yield Outcome(backend=name, case=case.id, verdict=Verdict.CRASHED if dies else Verdict.OK)


def scanned(plan: Plan, path: Path, *, resume: bool) -> tuple[dict[str, Any], int]:
    """Return the document, without what no two scans share, and how many runs it took."""
    answers = Answers()
    scan = Scan(
        device=cpu_device(),
        plan=plan,
        supervisor=answers,  # type: ignore[arg-type]
        backends=(Present(name="bad", materials=()), Present(name="good", materials=())),
        journal=Journal(path, Header(plan="", identity=""), resume=resume, durable=False),
    )
    scan.run()
    document: dict[str, Any] = msgspec.to_builtins(scan.matrix())
    scan.journal.close(keep=True)
    (run,) = document["runs"]
    del document["digest"], run["started"], run["finished"], run["seconds"]
    return document, answers.runs


def test_cut_off_anywhere_it_comes_to_the_same(tmp_path: Path) -> None:
    (tmp_path / "c.json").write_text(CONFIGS)
    plan = plan_of_configs(read_configs(tmp_path / "c.json"), 0)
    whole, runs = scanned(plan, tmp_path / "whole", resume=False)
    assert whole["runs"][0]["skipped"]
    lines = (tmp_path / "whole").read_bytes().splitlines(keepends=True)
    entries = [number for number, line in enumerate(lines) if line.startswith(b'{"case"')]
    assert len(entries) == runs
    for known in range(0, runs, 12):
        path = tmp_path / str(known)
        path.write_bytes(b"".join(lines[: entries[known]]))
        resumed, more = scanned(plan, path, resume=True)
        assert resumed == whole, known
        assert known + more == runs


def test_a_journal_has_no_say_in_what_the_plan_skips(tmp_path: Path) -> None:
    (tmp_path / "c.json").write_text(CONFIGS)
    plan = plan_of_configs(read_configs(tmp_path / "c.json"), 0)
    whole, _ = scanned(plan, tmp_path / "whole", resume=False)
    (bad,) = (backend for backend in whole["backends"] if backend["name"] == "bad")
    ran = {result["id"] for result in bad["cases"]}
    skipped = [case for case in plan.cases if case.id not in ran]
    assert skipped
    # As when localising, at the end of the scan that was cut off, came upon them.
    with (tmp_path / "whole").open("ab") as file:
        for case in skipped:
            (outcome,) = Answers().run(case, ("bad",))
            file.write(canonical(Entry(case=case, outcome=outcome)) + b"\n")
    assert scanned(plan, tmp_path / "whole", resume=True) == (whole, 0)
