"""Put the script of one failure together: header, inputs, call, what is right, comparison.

What a script must show follows from the verdict and its detail (`kind_of`). The text is built from
templates and typed fields of the case; free words of a matrix only ever stand in comments.
"""

from __future__ import annotations

import re
from string import Template
from typing import TYPE_CHECKING, Any, Final

from attnprobe.errors import UsageError
from attnprobe.export import _bounds, _expected, _inputs
from attnprobe.export import _checks as checks
from attnprobe.export._calls import Snippet, functions, grads, snippet
from attnprobe.export._hazards import EARLIER
from attnprobe.export._header import header
from attnprobe.export._inputs import Names, inputs_of
from attnprobe.export._template import fill, wrapped
from attnprobe.probe.trial import earlier_case
from attnprobe.verdict import Evidence, Verdict

if TYPE_CHECKING:
    from attnprobe.export._choose import Subject

_BITS: Final = '''
def bits(tensor):
    """Return the bits of a tensor as integers."""
    return tensor.contiguous().view({4: torch.int32, 2: torch.int16}[tensor.element_size()])
'''
_AXES: Final = ("batch entries", "heads", "rows", "columns")
_PACKED_AXES: Final = ("tokens", "heads", "columns")
_OF_DROPOUT: Final = {"rate": checks.RATE, "alike": checks.ALIKE}
_REPEATS: Final = 20
_LIMIT: Final = 60


def kind_of(subject: Subject) -> str:
    """Return what a script has to show.

    Raises:
        UsageError: nothing was run that a script could run again.
    """
    result = subject.result
    if result.evidence is not Evidence.MEASURED:
        raise UsageError(
            f"{subject.backend.name} refuses case {result.id} before anything is run",
            why=str(result.detail.get("says", result.verdict.value)),
        )
    if result.verdict is Verdict.WRONG:
        named = {"contract": "contract", "inputs changed": "changed", "dropout": "rate"}
        for key, kind in named.items():
            if key in result.detail:
                return "alike" if "alike" in result.detail[key] else kind
        return "own" if "against" in result.detail else "values"
    return {
        Verdict.OK: "values",
        Verdict.NONFINITE: "values",
        Verdict.UNWRITTEN: "memory",
        Verdict.NONDETERMINISTIC: "repeat",
        Verdict.CRASHED: "death",
        Verdict.HUNG: "death",
        Verdict.OUT_OF_BOUNDS: "bounds",
    }.get(result.verdict, "call")


def script(subject: Subject) -> str:
    """Return the script.

    Raises:
        UsageError: there is none for this backend or this verdict.
    """
    return "\n".join(_Script(subject).lines()) + "\n"


class _Script:
    """One script in the making."""

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        self.case = subject.case
        self.kind = kind_of(subject)
        self.device = subject.device.kind
        if self.device != "cpu" and self.kind in {"memory", "bounds"}:
            raise UsageError(f"no script for {subject.result.verdict.value} on {self.device} yet")
        self.call = snippet(self.case, subject.backend)
        self.names = Names(self.case)
        own = self.kind == "own"
        self.features = _expected.Features(self.case, own=own, device=self.device)
        self.flags = self.features.flags
        self.flags |= {"seed"} if self.case.dropout or self.call.draws else set()
        self.given = inputs_of(self.case)
        self.earlier = ""
        self.judged = self.kind in {"values", "own", *_OF_DROPOUT}

    def lines(self) -> list[str]:
        """Return the lines of the script."""
        top = [*header(self.subject, self.call, self.kind), *self._imports(), *self._begin()]
        body = [*self._make(), *self.call.setup, *self._functions(), *self._judging(), *self._main()]
        return [part for line in _spaced([*top, *body]) for part in wrapped(line)]

    def _imports(self) -> list[str]:
        standard = {"import sys"}
        if self.case.earlier != "nothing":
            standard.add("import contextlib")
        if self.kind in {"memory", "death", "bounds"}:
            standard |= {"import ctypes", "import os"}
        if self.kind in {"death", "bounds"}:
            standard |= {"import signal", "import subprocess"}
        if self.kind == "bounds":
            standard |= {"import mmap"}
        if self.kind == "repeat":
            standard.add("import threading")
        others = {"import torch"}
        for line in self.call.imports:
            (others if "torch" in line or line.split()[1] not in _STANDARD else standard).add(line)
        return [*_sorted(standard), "", *_sorted(others), ""]

    def _begin(self) -> list[str]:
        flags = {"reexec"} if self.kind == "memory" else set()
        flags |= {"child"} if self.kind in {"death", "bounds"} else set()
        filled = self.kind in {"memory", "death", "bounds"}
        flags |= {"fills", "nofill"} if filled and self.case.deterministic else set()
        how = re.search(r"within ([\d.]+) s", str(self.subject.result.detail.get("how", "")))
        lines = fill(checks.BEGIN, flags, limit=max(1, round(float(how[1]))) if how else _LIMIT)
        return [*lines, *self.names.lines(), ""]

    def _make(self) -> list[str]:
        """Return the functions that make the inputs, of this case and of the call before it."""
        earlier = earlier_case(self.case)
        made = _inputs.helpers([self.case, *([earlier] if earlier else [])])
        made += _inputs.function(
            self.case,
            self.names,
            name="inputs",
            device=self.device,
            said="Make the inputs, bit for bit those of the scan.",
        )
        if earlier is not None:
            made += _inputs.function(
                earlier,
                Names(earlier),
                name="earlier_inputs",
                device=self.device,
                said=f"Make the inputs of a call before, {EARLIER[self.case.earlier]}.",
            )
        return made

    def _earlier(self, mine: list[str]) -> tuple[list[str], str]:
        """Return the functions of the call before, where they are not those of the case, and that call."""
        other = earlier_case(self.case)
        if other is None:
            return [], ""
        lines = functions(other, snippet(other, self.subject.backend), lse=False)
        if lines == mine:
            return [], "run(*earlier_inputs())"
        named = [
            re.sub(r"(?<=def )(?=run|attention)|(?<=out = )(?=attention)", "earlier_", line) for line in lines
        ]
        return named, "earlier_run(*earlier_inputs())"

    def _functions(self) -> list[str]:
        steady = self.kind in {"memory", "repeat"}
        lines = functions(self.case, self.call, lse=steady)
        more, self.earlier = self._earlier(functions(self.case, self.call, lse=False))
        lines += more
        if self.call.whole and self.judged and self.flags & {"own", "dropout"}:
            called = ", ".join(name for name in self.given if name != "grad_out")
            lines += ["", f"def attention({called}):", '    """Make the forward call alone."""']
            lines += [*(f"    {line}".rstrip() for line in self.call.forward), ""]
        lines += ["", *checks.END.strip("\n").replace("              |", "").splitlines(), ""]
        if self.kind not in {"contract", "call", "death", "bounds", *_OF_DROPOUT}:
            packed = self.case.layout == "varlen" and not self.judged
            where = Template(checks.WHERE).substitute(
                axes=repr(_PACKED_AXES if packed else _AXES).replace("'", '"')
            )
            lines += ["", *where.strip("\n").splitlines(), ""]
        if steady:
            lines += ["", *_BITS.strip("\n").splitlines(), ""]
        return lines

    def _words(self) -> dict[str, Any]:
        called = [name for name in self.given if name != "grad_out"]
        by_q, by_kv = self.names.lengths
        return {
            "s_q": self.names.seqlen_q,
            "s_kv": self.names.seqlen_kv,
            "d_v": self.names.dim_v,
            "h_kv": self.names.heads_kv,
            "seed": self.case.seed,
            "rate": self.case.dropout,
            "by_q": by_q,
            "by_kv": by_kv,
            "cpu": self.features.cpu,
            "called": ", ".join(called),
            "zero_q": ", ".join(["torch.zeros_like(q)", *called[1:]]),
        }

    def _judging(self) -> list[str]:
        """Return the inputs as globals and what is right for them."""
        if self.kind in {"death", "bounds"}:
            return []
        lines = [f"{', '.join(self.given)} = inputs()"]
        if not self.judged:
            return ["", *lines]
        reference = _expected.lines(self.features)
        if self.kind in _OF_DROPOUT:
            reference = reference[
                : next(i for i, line in enumerate(reference) if line.startswith(("@", "def over")))
            ]
            return ["", *lines, *reference, "", *checks.weights(self.flags, **self._words()), ""]
        return ["", *lines, *reference, "", *checks.values(self.flags, **self._words())[0]]

    def _main(self) -> list[str]:
        """Return the lines that run it and say how it went."""
        if self.kind in {"death", "bounds"}:
            return self._children()
        arguments = ", ".join(self.given)
        earlier = ["with contextlib.suppress(Exception):", f"    {self.earlier}"] if self.earlier else []
        lines = ["", 'print(f"torch {torch.__version__}")', *earlier]
        body = {
            "memory": "runs = [filled(byte) for byte in (0xFF, 0x42, 0xFF, 0x42)]",
            "repeat": "runs = repeated()",
            "call": f"run({arguments})",
        }.get(self.kind, f"got = run({arguments})")
        if self.kind == "memory":
            lines = [
                "",
                *Template(checks.MEMORY).substitute(given=arguments).strip("\n").splitlines(),
                "",
                *lines,
            ]
            lines += ['mallopt = getattr(ctypes.CDLL(None), "mallopt", None)']
            lines += [
                "if mallopt is None:",
                '    print("no glibc here: memory cannot be filled")',
                '    end("")',
            ]
        if self.kind == "repeat":
            busy = Template(checks.BUSY).substitute(given=arguments, times=_REPEATS)
            lines = ["", *busy.strip("\n").splitlines(), "", *lines]
        if self.kind == "changed":
            pairs = ", ".join(f'"{name}": {name}' for name in self.given)
            lines += [f"given = {{{pairs}}}"]
            lines += ["before = {name: tensor.clone() for name, tensor in given.items()}"]
        lines += Template(checks.REFUSED).substitute(body=body).strip("\n").splitlines()
        return [*lines, *self._verdict()]

    def _verdict(self) -> list[str]:
        if self.kind in {"values", "own"}:
            return checks.values(self.flags, **self._words())[1]
        if self.kind in _OF_DROPOUT:
            told = self.subject.result.detail["dropout"].get("alike", "")
            words = {"alike": told, "axis": int(told == "heads")}
            return fill(_OF_DROPOUT[self.kind], self.flags, **words, **self._words())
        if self.kind == "contract":
            likes = ", ".join(f'"d{name}": {name}' for name in grads(self.case))
            shape = self.names.shapes()["grad_out"].strip("()")
            words = {"out": shape, "likes": likes, "dtype": f"torch.{self.case.dtype}"}
            text = Template(checks.CONTRACT).substitute(words).replace(", }", "}")
            return text.strip("\n").splitlines()
        if self.kind == "call":
            return ['print("it returns")', 'end("")']
        if self.kind == "repeat":
            return fill(checks.REPEAT, self.flags)
        return (checks.CHANGED if self.kind == "changed" else checks.UNWRITTEN).strip("\n").splitlines()

    def _children(self) -> list[str]:
        earlier = {"earlier"} if self.earlier else set()
        if self.kind == "bounds":
            return _bounds.main(earlier | _bounds.sides(self.subject), self.earlier)
        child = fill(checks.CHILD, self.flags | earlier, earlier=self.earlier)
        return ["", *child, "", "", *checks.parent(GLIBC_TUNABLES="glibc.malloc.tcache_count=0")]


_STANDARD: Final = frozenset({"hashlib", "importlib.util", "pathlib"})


def _sorted(imports: set[str]) -> list[str]:
    return sorted(imports, key=lambda line: (line.startswith("from"), line.lower()))


def _spaced(lines: list[str]) -> list[str]:
    """Return lines with the blank lines of a formatter: two around functions, one after a block of code."""
    text = "\n".join(lines)
    text = re.sub(r"\n{2,}(?=(?:@[^\n]+\n)?def )", "\n\n\n", text)
    text = re.sub(r"(\n    [^\n]+)\n{2,}(?=[^\s@d#])", r"\1\n\n\n", text)
    return re.sub(r"\n{4,}", "\n\n\n", text).strip("\n").split("\n")


__all__ = ["Snippet", "kind_of", "script"]
