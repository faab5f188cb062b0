"""What the results of several runs come to, case by case."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Final

from attnprobe.matrix.schema import Result
from attnprobe.verdict import Verdict

DISPUTED: Final = "disputed"
"""What a case comes to whose results contradict each other; it denies."""


def settled(results: Iterable[Result]) -> dict[str, str]:
    """Return for each case id the verdict that its results share, or "disputed".

    A neutral verdict says nothing for or against, so it counts only where there is no other.
    """
    found: dict[str, set[Verdict]] = defaultdict(set)
    for result in results:
        found[result.id].add(result.verdict)
    return {case_id: _settled(verdicts) for case_id, verdicts in found.items()}


def _settled(verdicts: set[Verdict]) -> str:
    if len(verdicts) == 1:
        return next(iter(verdicts)).value
    telling = [verdict for verdict in verdicts if not verdict.neutral]
    if len(telling) > 1:
        return DISPUTED
    return (telling or sorted(verdicts))[0].value
