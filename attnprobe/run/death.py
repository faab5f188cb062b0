"""How a worker ended, and what that says of the backend it was on."""

from __future__ import annotations

import contextlib
import signal

from attnprobe.config import Case
from attnprobe.run.processes import output_limit
from attnprobe.run.protocol import Outcome
from attnprobe.verdict import Verdict


class Death(Exception):  # noqa: N818  # not an error of ours: the worker's end, with its cause
    """The worker ended, or was ended for overstaying, while on `backend`."""

    def __init__(  # noqa: PLR0913  # what is known of it
        self, backend: str, verdict: Verdict, how: str, said: str, left: int, *, alone: bool, begun: bool
    ) -> None:
        """Keep what is known of it.

        `alone`: the worker had run nothing else before; `begun`: it had begun with the case.
        """
        super().__init__(how)
        self.begun = begun
        self.alone = alone
        self.backend = backend
        self.verdict = verdict
        self.how = how
        self.said = said
        self.left = left

    def outcome(self, case: Case) -> Outcome:
        """Return the verdict that this death is."""
        detail: dict[str, object] = {"how": self.how}
        if self.said:
            detail["said"] = self.said
        if self.left:
            detail["children left"] = self.left
        return Outcome(backend=self.backend, case=case.id, verdict=self.verdict, detail=detail)


def how_it_ended(code: int) -> str:
    """Return an exit code in words: the signal's name, or the code."""
    if code == -signal.SIGXFSZ:
        limit = output_limit()
        size = f"{limit >> 20} MiB" if limit >> 20 else f"{limit} bytes"
        return f"died of SIGXFSZ: wrote more than {size} into one file, such as its output"
    if code < 0:
        with contextlib.suppress(ValueError):
            return f"died of {signal.Signals(-code).name}"
        return f"died of signal {-code}"
    return f"exited with code {code}"


def inconclusive(name: str, case: Case, death: Death) -> Outcome:
    """Return the outcome of a death that is held against nobody."""
    detail = {"how": f"{death.how}, once; not when run alone" if death.backend else death.how}
    return Outcome(backend=name, case=case.id, verdict=Verdict.INCONCLUSIVE, detail=detail)


def unanswered(name: str, case: Case) -> Outcome:
    """Return the outcome of a case that a worker left out."""
    return Outcome(backend=name, case=case.id, verdict=Verdict.INCONCLUSIVE, detail={"how": "no answer"})
