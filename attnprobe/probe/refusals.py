"""Group refusals by the library's own words into rules, from what was seen alone.

For each wording: take the axis value that tells its refused cases best from cases that ran, then exclude,
one axis value after the other, the cases that ran all the same, each time by the value that loses fewest
refused cases. What is still not covered starts the next rule.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import Final

from msgspec import Struct

from attnprobe.axes import AXES, AXIS, Level
from attnprobe.probe.observed import Observation
from attnprobe.verdict import Verdict

_EXCLUSIONS: Final = 8
_WEIGHT: Final = 3
"""A condition may hold for one case that ran per this many refused ones, to begin with."""


class Group(Struct, frozen=True):
    """Refused cases that one rule covers: no case that ran is under `when`, unless `exact`."""

    when: dict[str, frozenset[Level]]
    under: tuple[Observation, ...]
    exact: bool = False


def words(seen: Observation) -> str:
    """Return the words of a refusal without the numbers and sizes in them, so that equal reasons match."""
    said = str(seen.result.detail.get("says", ""))
    return re.sub(r"\d+", "#", said.partition(" Got ")[0])


def group(observed: Iterable[Observation]) -> list[Group]:
    """Return rules that together cover every refusal and no case that ran."""
    everything = list(observed)
    ran = [s for s in everything if s.verdict is not Verdict.REFUSED and not s.verdict.neutral]
    by_words: dict[str, list[Observation]] = defaultdict(list)
    for seen in everything:
        if seen.verdict is Verdict.REFUSED:
            by_words[words(seen)].append(seen)
    return [found for refused in by_words.values() for found in _cover(refused, ran)]


def _cover(refused: list[Observation], ran: list[Observation]) -> list[Group]:
    if not ran:
        return [Group({}, tuple(refused))]
    left, found = list(refused), []
    ran_at = Counter((axis, level) for seen in ran for axis, level in seen.at.items())
    while left:
        counts = Counter((axis, level) for seen in left for axis, level in seen.at.items())
        axis, level = max(counts, key=lambda c: (counts[c] - _WEIGHT * ran_at[c], -_RANK[c[0]], str(c[1])))
        when = {axis: frozenset({level})}
        if counts[axis, level] > _WEIGHT * ran_at[axis, level]:
            when = _exclude(when, left, ran)
        under = tuple(s for s in left if _covers(when, s))
        if not under or any(_covers(when, s) for s in ran):
            found.append(Group({}, tuple(left), exact=True))
            break
        found.append(Group(when, under))
        left = [s for s in left if not _covers(when, s)]
    return _joined(found)


def _exclude(
    when: dict[str, frozenset[Level]], refused: list[Observation], ran: list[Observation]
) -> dict[str, frozenset[Level]]:
    """Return a condition narrowed until no case that ran is under it, or as far as that goes."""
    for _ in range(_EXCLUSIONS):
        inside = [seen for seen in ran if _covers(when, seen)]
        if not inside:
            break
        under = [seen for seen in refused if _covers(when, seen)]
        lost = {axis.name: Counter(seen.at[axis.name] for seen in under) for axis in AXES}
        example = inside[0]
        axis = min(
            (name for name in lost if when.get(name) != frozenset({example.at[name]})),
            key=lambda name: (
                lost[name][example.at[name]],
                -sum(seen.at[name] == example.at[name] for seen in inside),
                _RANK[name],
            ),
        )
        levels = when.get(axis, frozenset(AXIS[axis].levels))
        when = {**when, axis: levels - {example.at[axis]}}
    return when


def _covers(when: dict[str, frozenset[Level]], seen: Observation) -> bool:
    return all(seen.at[axis] in levels for axis, levels in when.items())


def _joined(found: list[Group]) -> list[Group]:
    """Join rules that differ on one axis only."""
    result: list[Group] = []
    for one in found:
        for index, other in enumerate(result):
            off = [a for a in one.when if one.when[a] != other.when.get(a)]
            if one.when.keys() == other.when.keys() and len(off) == 1 and not one.exact:
                when = {**one.when, off[0]: one.when[off[0]] | other.when[off[0]]}
                result[index] = Group(when, other.under + one.under)
                break
        else:
            result.append(one)
    return result


_RANK: Final = {axis.name: rank for rank, axis in enumerate(AXES)}
