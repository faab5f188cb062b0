"""Random cases near one case: inside a rule, and just outside it."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from itertools import islice
from typing import Final

from attnprobe.axes import AXES, AXIS, Axis, Level, levels_of
from attnprobe.config import Case
from attnprobe.probe.moves import step

_SPECIAL_SHARE: Final = 0.25


def in_turn(draw: random.Random, keep: Iterable[str]) -> Iterator[Axis]:
    """Yield the axes that are not kept, again and again, each as often as any other."""
    axes = [axis for axis in AXES if axis.name not in keep and axis.name != "seqlen_order"]
    while axes:
        yield from draw.sample(axes, len(axes))


def vary(draw: random.Random, case: Case, axes: Iterable[Axis], keep: Iterable[str]) -> Case | None:
    """Return the case with these axes at other levels, mostly ordinary ones, those of `keep` untouched."""
    before = levels_of(case)
    moved = case
    for axis in axes:
        # Special levels are mostly refused; one in four is tried all the same.
        every = draw.random() < _SPECIAL_SHARE
        levels = [v for v in axis.levels if v != before[axis.name] and (every or v not in axis.special)]
        moved = (step(moved, axis.name, draw.choice(levels)) if levels else None) or moved
    if moved.id == case.id:
        return None
    at = levels_of(moved)
    return moved if all(at[axis] == before[axis] for axis in keep) else None


def leave(
    draw: random.Random, case: Case, when: Mapping[str, AbstractSet[Level]], axes: Iterator[Axis]
) -> Case | None:
    """Return the case with one axis of a rule at a random level outside it, and one more varied."""
    if not when:
        return None
    axis = draw.choice(sorted(when))
    levels = [level for level in AXIS[axis].levels if level not in when[axis]]
    moved = step(case, axis, draw.choice(levels)) if levels else None
    return None if moved is None else vary(draw, moved, islice(axes, 1), when)
