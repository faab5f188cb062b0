"""Build the covering array that a scan walks: every pair of levels first, then every triple.

Run once, by hand: `python -m attnprobe.probe.covering` writes `covering_rows.txt` beside this file
(needs numpy, which a scan does not); `--check` fails where the file differs. A scan only reads it.

Three things set it apart from the arrays that general generators make:

* Rows come in tiers by how many special levels they hold (see `axes`). A library that refuses dropout
  refuses half of a balanced array, and every triple in those rows stays unmeasured on it. Here a triple
  of ordinary levels is covered by a row without any special level, one with a special level by a row
  with that one alone, and so on.
* Any prefix is useful: pairs come before triples, rows that cover much before rows that cover little.
* Free positions take the level seen least so far, so that more than the promised strength is exercised.
* Long lengths meet many heads only where a tuple asks for it: work counts against a row.

Greedy with local search: for the first uncovered tuple, several rows are grown level by level, each
choice the one that covers most, and the best row is kept.
"""

from __future__ import annotations

import itertools
import sys
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from attnprobe.axes import AXES, AXIS, CONSTRAINTS, HEAD_DIMS, WORK_CAP
from attnprobe.lengths import representatives
from attnprobe.probe.plan import ALPHABET, ROWS_FILE

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

_SIZES: Final = [len(axis.levels) for axis in AXES]
_POSITION: Final = {axis.name: index for index, axis in enumerate(AXES)}
_SPECIAL: Final = [np.array([level in axis.special for level in axis.levels]) for axis in AXES]
_TRIES: Final = 5
_WORK_AXES: Final = ("seqlen_q", "seqlen_kv", "head_dim", "heads", "batch")
_DEARNESS: Final = 20.0
"""Tuples that a row as dear as the cap must cover more of than a free one to be preferred."""


class Tuples:
    """All tuples of `strength` levels: which are possible, and which no row covers yet."""

    def __init__(self, strength: int, space: Space) -> None:
        """Enumerate the tuples and strike out the impossible ones."""
        self.combos = np.array(list(itertools.combinations(range(len(AXES)), strength)))
        shape = np.array(_SIZES)[self.combos]
        self.strides = np.ones_like(shape)
        for column in range(strength - 2, -1, -1):
            self.strides[:, column] = self.strides[:, column + 1] * shape[:, column + 1]
        counts = shape.prod(axis=1)
        self.offsets = np.concatenate([[0], counts.cumsum()])[:-1]
        self.open = np.zeros(counts.sum(), dtype=bool)
        self.tier = np.zeros(counts.sum(), dtype=np.int8)
        self._with_axis = [np.flatnonzero((self.combos == a).any(axis=1)) for a in range(len(AXES))]
        for rows in space.sample():
            self.open[self.of(rows)] = True
        for index in range(len(self.open)):
            fixed = self.levels(index)
            self.open[index] = self.open[index] or space.possible(fixed)
            if self.open[index]:
                self.tier[index] = _tier({**fixed, **space.forced(fixed)})

    def of(self, rows: NDArray[Any], axis: int | None = None) -> NDArray[Any]:
        """Return the indices of the tuples in each row, or of those that hold `axis`."""
        which = slice(None) if axis is None else self._with_axis[axis]
        levels = rows[:, self.combos[which]]
        return np.asarray((levels * self.strides[which]).sum(axis=2) + self.offsets[which])

    def gain(self, rows: NDArray[Any], tier: int, axis: int | None = None) -> NDArray[Any]:
        """Return how many uncovered tuples each row of a tier would cover."""
        indices = self.of(rows, axis)
        return np.asarray((self.open[indices] & (self.tier[indices] == tier)).sum(axis=1))

    def close(self, row: NDArray[Any]) -> None:
        """Mark what a row covers: the tuples that need every special level of it."""
        tier = _tier(dict(enumerate(row)))
        indices = self.of(row[None, :])[0]
        self.open[indices[self.tier[indices] == tier]] = False

    def levels(self, index: int) -> dict[int, int]:
        """Return the tuple at an index as axis -> level."""
        combo = int(np.searchsorted(self.offsets, index, side="right")) - 1
        rest, levels = index - int(self.offsets[combo]), {}
        for axis, stride in zip(self.combos[combo], self.strides[combo], strict=True):
            levels[int(axis)], rest = divmod(rest, int(stride))
        return levels


class Space:
    """The constraints as tables, and the search for a row that holds given levels."""

    def __init__(self) -> None:
        """Tabulate every constraint over the levels of its axes."""
        self.tables: list[tuple[list[int], NDArray[Any]]] = []
        for constraint in CONSTRAINTS:
            axes = [_POSITION[name] for name in constraint.axes]
            table = np.zeros([_SIZES[a] for a in axes], dtype=bool)
            for levels in itertools.product(*(range(_SIZES[a]) for a in axes)):
                at = [AXES[a].levels[v] for a, v in zip(axes, levels, strict=True)]
                table[levels] = constraint.allows(*at)
            self.tables.append((axes, table))
        self._constrained = sorted({a for axes, _ in self.tables for a in axes})
        self._known: dict[tuple[tuple[int, int], ...], bool] = {}
        self._forced: dict[tuple[tuple[int, int], ...], dict[int, int]] = {}

    def valid(self, rows: NDArray[Any]) -> NDArray[Any]:
        """Whether each full row meets every constraint."""
        result = np.ones(len(rows), dtype=bool)
        for axes, table in self.tables:
            result &= table[tuple(rows[:, a] for a in axes)]
        return result

    def sample(self, batches: int = 40) -> Iterator[NDArray[Any]]:
        """Yield valid rows at random: most possible tuples are in some, and need no search."""
        random = np.random.default_rng(0)
        for _ in range(batches):
            rows = np.stack([random.integers(size, size=100_000) for size in _SIZES], axis=1)
            yield rows[self.valid(rows)]

    def _open_levels(self, axis: int, fixed: dict[int, int]) -> NDArray[Any]:
        """Whether each level of a free axis fits the fixed ones, one constraint at a time."""
        fits = np.ones(_SIZES[axis], dtype=bool)
        for axes, table in self.tables:
            if axis in axes:
                part = table[tuple(fixed.get(a, slice(None)) for a in axes)]
                left = [a for a in axes if a not in fixed]
                others = tuple(i for i, a in enumerate(left) if a != axis)
                fits &= part.any(axis=others)
        return fits

    def _consistent(self, fixed: dict[int, int]) -> bool:
        """Whether no constraint is already impossible under a partial choice."""
        return all(
            np.any(table[tuple(fixed.get(a, slice(None)) for a in axes)]) for axes, table in self.tables
        )

    def possible(self, fixed: dict[int, int]) -> bool:
        """Whether some valid row holds these levels."""
        key = self._key(fixed)
        if key not in self._known:
            self._known[key] = self.complete(dict(key), None, None) is not None
        return self._known[key]

    def forced(self, fixed: dict[int, int]) -> dict[int, int]:
        """Return the fewest special levels that any valid row holds beside these possible ones."""
        key = self._key(fixed)
        if key not in self._forced:
            free = [a for a in self._constrained if a not in fixed]
            specials = [(a, int(v)) for a in free for v in np.flatnonzero(_SPECIAL[a])]
            self._forced[key] = next(
                dict(more)
                for count in range(len(specials) + 1)
                for more in itertools.combinations(specials, count)
                if len(dict(more)) == count
                and self.complete({**dict(key), **dict(more)}, 0, None) is not None
            )
        return self._forced[key]

    def _key(self, fixed: dict[int, int]) -> tuple[tuple[int, int], ...]:
        """Return the levels that constraints know of."""
        return tuple(sorted((a, v) for a, v in fixed.items() if a in self._constrained))

    def complete(
        self, fixed: dict[int, int], tier: int | None, random: np.random.Generator | None
    ) -> dict[int, int] | None:
        """Return a valid choice of all constrained axes that holds `fixed`, by backtracking.

        With `tier`, free axes take no special level; with `random`, in random order.
        """
        if not self._consistent(fixed):
            return None
        choices = {a: self._open_levels(a, fixed) for a in self._constrained if a not in fixed}
        if not choices:
            return fixed
        if tier is not None:
            choices = {a: fits & ~_SPECIAL[a] for a, fits in choices.items()}
        # The axis with the fewest levels left first: a contradiction shows before the search branches.
        axis = min(choices, key=lambda a: int(choices[a].sum()))
        levels = np.flatnonzero(choices[axis])
        for level in levels if random is None else random.permutation(levels):
            found = self.complete({**fixed, axis: int(level)}, tier, random)
            if found is not None:
                return found
        return None


def _tier(levels: dict[int, int]) -> int:
    """Return how many of these levels are special."""
    return sum(int(_SPECIAL[a][v]) for a, v in levels.items())


def _grow(  # noqa: PLR0913, PLR0917  # the state of one search
    fixed: dict[int, int],
    target: Tuples,
    beyond: Tuples | None,
    space: Space,
    random: np.random.Generator,
    seen: list[NDArray[Any]],
) -> tuple[float, NDArray[Any]]:
    """Return a row that holds `fixed`, no other special level, and covers much, with its score."""
    start = space.complete(dict(fixed), 0, random)
    assert start is not None, "the fixed levels hold what they force"
    tier = _tier(fixed)
    row = np.zeros(len(AXES), dtype=np.int64)
    for axis in range(len(AXES)):
        ordinary = np.flatnonzero(~_SPECIAL[axis])
        row[axis] = start.get(axis, fixed.get(axis, int(random.choice(ordinary))))
    free = [a for a in range(len(AXES)) if a not in fixed]
    for _ in range(3):
        before = row.copy()
        for axis in random.permutation(free):
            levels = np.flatnonzero(~_SPECIAL[axis])
            rows = np.repeat(row[None, :], len(levels), axis=0)
            rows[:, axis] = levels
            score = target.gain(rows, tier, axis).astype(float)
            if beyond is not None:
                score += beyond.gain(rows, tier, axis) * 1e-3
            score -= seen[axis][levels] * 1e-7 + _work(rows) * _DEARNESS
            score[~space.valid(rows)] = -np.inf
            row = rows[int(score.argmax())]
        if (row == before).all():
            break
    total = float(target.gain(row[None, :], tier)[0]) - float(_work(row[None, :])[0]) * _DEARNESS
    if beyond is not None:
        total += float(beyond.gain(row[None, :], tier)[0]) * 1e-3
    return total, row


def _work(rows: NDArray[Any]) -> NDArray[Any]:
    """Return the least multiply-adds that each row's case takes, as a share of the cap."""
    q, kv, dim, heads, batch = (rows[:, _POSITION[name]] for name in _WORK_AXES)
    lengths = np.array([representatives(level)[0] for level in AXIS["seqlen_q"].levels])
    return np.asarray(
        lengths[q]
        * lengths[kv]
        * np.array(HEAD_DIMS)[dim]
        * np.array([2, 4, 3])[heads]
        * (1 + batch)
        / WORK_CAP
    )


def generate(seed: int = 0) -> tuple[list[str], int]:
    """Return the rows, and how many of them cover all pairs."""
    random = np.random.default_rng(seed)
    space = Space()
    pairs, triples = Tuples(2, space), Tuples(3, space)
    seen = [np.zeros(size) for size in _SIZES]
    rows: list[NDArray[Any]] = []
    pair_rows = 0
    for target, beyond in ((pairs, triples), (triples, None)):
        for tier in range(int(target.tier.max()) + 1):
            mine = np.flatnonzero(target.open & (target.tier == tier))
            mine = mine[random.permutation(len(mine))]
            for index in mine:
                if not target.open[index]:
                    continue
                fixed = target.levels(int(index))
                fixed |= space.forced(fixed)
                grown = [_grow(fixed, target, beyond, space, random, seen) for _ in range(_TRIES)]
                row = max(grown, key=lambda g: g[0])[1]
                assert space.valid(row[None, :]).all()
                rows.append(row)
                for axis, level in enumerate(row):
                    seen[axis][level] += 1
                for tuples in (pairs, triples):
                    tuples.close(row)
                assert not target.open[index]
        if target is pairs:
            pair_rows = len(rows)
    return ["".join(ALPHABET[v] for v in row) for row in rows], pair_rows


def text(rows: list[str], pair_rows: int) -> str:
    """Return the content of the rows file: what the columns mean, then a row a line."""
    head = [f"# {axis.name} {' '.join(map(str, axis.levels))}" for axis in AXES]
    return "\n".join([*head, f"# pairs {pair_rows}", *rows]) + "\n"


def main(arguments: list[str]) -> int:
    """Write the rows file, or with `--check` compare it."""
    rows, pair_rows = generate()
    content = text(rows, pair_rows)
    print(f"{len(rows)} rows, the first {pair_rows} cover all pairs", file=sys.stderr)  # noqa: T201
    if "--check" in arguments:
        return 0 if ROWS_FILE.read_text(encoding="ascii") == content else 1
    ROWS_FILE.write_text(content, encoding="ascii")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
