"""What is known so far of one backend: each case with its levels and what became of it."""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import Struct

from attnprobe.axes import Level, levels_of
from attnprobe.config import Case
from attnprobe.matrix.schema import Result
from attnprobe.verdict import Verdict


class Observation(Struct, frozen=True):
    """One case on one backend."""

    case: Case
    at: dict[str, Level]
    result: Result

    @property
    def id(self) -> str:
        """Return the id of the case."""
        return self.result.id

    @property
    def verdict(self) -> Verdict:
        """Return the verdict."""
        return self.result.verdict


def kind(verdict: Verdict) -> str:
    """Return the family of a failure; a dtype may turn wrong into not finite, no more."""
    if verdict.ends_worker:
        return "death"
    if verdict in {Verdict.WRONG, Verdict.NONFINITE}:
        return "values"
    return str(verdict.value)


class Observed:
    """Observations of one backend, in the order they were made."""

    def __init__(self) -> None:
        """Start with none."""
        self._by_id: dict[str, Observation] = {}

    def add(self, case: Case, result: Result) -> Observation:
        """Keep what became of a case."""
        seen = Observation(case, levels_of(case), result)
        self._by_id[result.id] = seen
        return seen

    def get(self, case_id: str) -> Observation | None:
        """Return an observation by case id."""
        return self._by_id.get(case_id)

    def __iter__(self) -> Iterator[Observation]:
        """Iterate in the order of observation; safe while more are added."""
        return iter(list(self._by_id.values()))

    def __len__(self) -> int:
        """Return how many there are."""
        return len(self._by_id)
