"""Everything attnprobe raises on purpose.

    AttnprobeError              exit 2 unless a subclass says otherwise
    ├── UsageError              exit 2: an option, a file or a callable the user named is unusable
    │   └── MatrixError         exit 2: a matrix that cannot be read, or whose digest is wrong
    ├── NoVerdictError          exit 3: nothing to probe, or the probe could not finish
    └── NoBackendError          exit 1: what the matrix says leaves no backend for a call

Each error says what happened, why, and what to do next; the command line prints exactly that and no
traceback. Verdicts about a backend are values, never exceptions: these are for "cannot go on".
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from attnprobe.select.explain import Decision


class AttnprobeError(Exception):
    """What happened, why, and the next step, as three short strings."""

    exit_code = 2

    def __init__(self, what: str, *, why: str = "", fix: str = "") -> None:
        """Keep the three parts; `str()` joins those that are there."""
        super().__init__(what)
        self.what = what
        self.why = why
        self.fix = fix

    def __str__(self) -> str:
        """Return the parts on one line, as a log would want them."""
        text = self.what
        if self.why:
            text += f": {self.why}"
        if self.fix:
            text += f" ({self.fix})"
        return text


class UsageError(AttnprobeError):
    """Something the user named cannot be used."""


class MatrixError(UsageError):
    """A matrix file that cannot be trusted."""


class NoVerdictError(AttnprobeError):
    """No verdict can be reached here."""

    exit_code = 3


class NoBackendError(AttnprobeError):
    """No backend may run a configuration; `decision` says why, backend by backend."""

    exit_code = 1

    def __init__(self, what: str, decision: Decision) -> None:
        """Keep the decision; its explanation is the reason."""
        super().__init__(what, why=decision.explain())
        self.decision = decision
