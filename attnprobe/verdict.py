"""What can be said of one backend on one case, and how it is known."""

from __future__ import annotations

from enum import Enum


class Verdict(str, Enum):
    """Outcome of one case on one backend. A case that did not run has no verdict at all."""

    OK = "ok"
    REFUSED = "refused"
    UNWRITTEN = "unwritten"
    WRONG = "wrong"
    NONFINITE = "nonfinite"
    OUT_OF_BOUNDS = "out_of_bounds"
    NONDETERMINISTIC = "nondeterministic"
    CRASHED = "crashed"
    HUNG = "hung"
    OUT_OF_MEMORY = "out_of_memory"
    INCONCLUSIVE = "inconclusive"
    LAUNCHED = "launched"
    COMPILES = "compiles"

    @property
    def fails(self) -> bool:
        """Whether a job that ran this would be damaged by it."""
        return self in _FAILING

    @property
    def neutral(self) -> bool:
        """Whether this says nothing for or against the backend."""
        return self in _NEUTRAL

    @property
    def ends_worker(self) -> bool:
        """Whether the process that ran the case did not live on."""
        return self in {Verdict.CRASHED, Verdict.HUNG}


_FAILING = frozenset(
    {
        Verdict.UNWRITTEN,
        Verdict.WRONG,
        Verdict.NONFINITE,
        Verdict.OUT_OF_BOUNDS,
        Verdict.NONDETERMINISTIC,
        Verdict.CRASHED,
        Verdict.HUNG,
    }
)
_NEUTRAL = frozenset({Verdict.OUT_OF_MEMORY, Verdict.INCONCLUSIVE, Verdict.LAUNCHED, Verdict.COMPILES})


class Evidence(str, Enum):
    """How a verdict is known. Only `measured` can prove; any can deny."""

    MEASURED = "measured"
    TRACED = "traced"
    COMPILED = "compiled"
    DECLARED = "declared"
    REPORTED = "reported"
