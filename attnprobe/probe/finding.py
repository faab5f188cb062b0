"""A rule in the making, while the localiser still learns about it."""

from __future__ import annotations

from dataclasses import dataclass, field

from attnprobe.axes import Level
from attnprobe.matrix.schema import Rates
from attnprobe.probe.observed import Observation, kind


@dataclass
class Finding:
    """A rule in the making. `when` maps each axis that matters to the levels that fail."""

    when: dict[str, set[Level]]
    witness: Observation
    counter: list[str] = field(default_factory=list)
    cases: set[str] = field(default_factory=set)
    rates: Rates | None = None
    deaths: int = 0
    skipped: int = 0

    @property
    def kind(self) -> str:
        """Return the family of failures it explains."""
        return kind(self.witness.verdict)

    def covers(self, seen: Observation) -> bool:
        """Whether a case falls under it."""
        if self.cases:
            return seen.id in self.cases
        return all(seen.at[axis] in levels for axis, levels in self.when.items())
