"""The comment at the head of a script: what fails, where it was seen, with which versions."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING, Final

from attnprobe.axes import AXIS, levels_of
from attnprobe.export._bounds import beyond_the_script
from attnprobe.report.words import conditions, detail_lines
from attnprobe.text import printable

if TYPE_CHECKING:
    from attnprobe.config import Case
    from attnprobe.export._calls import Snippet
    from attnprobe.export._choose import Subject

_WIDTH: Final = 100
_SAID: Final = {
    "values": "compares the call with float64",
    "own": "compares the gradients with those that follow from the weights of the backend's own forward",
    "rate": "counts what dropout drops",
    "alike": "compares what dropout drops in one and in another",
    "contract": "looks at the shapes and dtypes that come back",
    "changed": "looks whether the call changes its inputs",
    "memory": "makes the call on memory that holds NaN and on memory that holds a number, and compares bits",
    "repeat": "repeats the call and compares bits",
    "death": "makes the call in a child process and says how that ended",
    "bounds": "makes the call in a child process, its inputs beside pages that nobody may touch, under "
    "glibc's checking malloc",
    "call": "makes the call",
}


def header(subject: Subject, call: Snippet, kind: str) -> list[str]:
    """Return the lines. Whatever a matrix says stands behind `# `, and cannot end that line."""
    head = f"{call.what}: {_headline(subject)}"
    lines = ["#!/usr/bin/env python3", "#", *_wrapped(head, "# ", "# "), "#"]
    materials = ", ".join(f"{m.name} {m.version}" for m in subject.backend.materials)
    facts = {
        "configuration": configuration(subject.case),
        "versions": materials,
        "device": f"{subject.device.name} ({subject.device.kind})",
        "found by": f"{subject.generator}, case {subject.case.id}",
        "": _command(subject),
        "kernel": subject.result.kernel,
        "seen": "; ".join(detail_lines(subject.result.detail)),
        "right there": ", ".join(subject.right),
    }
    for name, said in facts.items():
        if said:
            lines += _wrapped(said, f"# {name:15}", f"# {'':15}")
    what = f"This script {_SAID[kind]}. It needs {call.needs}."
    lines += ["#", *_wrapped(what, "# ", "# ")]
    if kind == "bounds" and (note := beyond_the_script(subject)):
        lines += _wrapped(note, "# ", "# ")
    return [*lines, "# Exit code 1 and `FAILS: ...` where the failure shows, 0 where it does not.", ""]


def configuration(case: Case) -> str:
    """Return a case in words: pass, dtype, what is not plain, and the sizes."""
    at = levels_of(case)
    shapes = {"head_dim", "head_dim_v", "heads", "batch", "seqlen_q", "seqlen_kv", "seqlen_order"}
    told = {
        a: (x,) for a, x in at.items() if a in {"pass", "dtype"} or (a not in shapes and x != AXIS[a].plain)
    }
    if case.pass_ == "forward":
        told.pop("needs_grad", None)
    numbers = [f"B {case.batch}", f"H {_pair(case.heads, case.heads_kv)}"]
    numbers += [f"S {_pair(case.seqlen_q, case.seqlen_kv)}", f"D {_pair(case.head_dim, case.head_dim_v)}"]
    numbers += [f"dropout {case.dropout}"] if case.dropout else []
    numbers += [f"softcap {case.softcap}"] if case.softcap else []
    numbers += [f"scale {case.scale}"] if case.scale is not None else []
    numbers += [f"window {case.window}"] if case.window else []
    return f"{conditions(told)}; {', '.join(numbers)}"


def _pair(q: int, kv: int) -> str:
    return str(q) if q == kv else f"{q}/{kv}"


def _headline(subject: Subject) -> str:
    from attnprobe.matrix.schema import Rule
    from attnprobe.report.words import consequence

    result = subject.result
    rule = Rule(id="", when={}, verdict=result.verdict, outputs=result.outputs)
    return consequence(rule, result.detail, subject.case.seqlen_kv)


def _command(subject: Subject) -> str:
    run, name = subject.run, subject.backend.name
    file = next((m.version for m in subject.backend.materials if m.name == "file"), None)
    if file is not None:
        name = f"{file}:{name.rpartition(':')[2]}"
    what = "--config FILE" if run.level == "config" else f"--level {run.level}"
    seed = f" --seed {run.seed}" if run.seed else ""
    return f"attnprobe scan {what}{seed} --backend {name}"


def _wrapped(text: str, first: str, rest: str) -> list[str]:
    return textwrap.wrap(
        printable(text),
        _WIDTH,
        initial_indent=first,
        subsequent_indent=rest,
        break_on_hyphens=False,
        break_long_words=False,
    )
