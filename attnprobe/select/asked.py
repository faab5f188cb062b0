"""What a configuration asks: the levels it may fall on, its sizes, and what was assumed.

A field that is left unsaid stands for every value it can have beside what is said. The exceptions are
documented defaults: the default scale, no softcap, no ALiBi, no window, not deterministic, and gradients
for all of q, k and v where there is a backward pass.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Final

import msgspec
from msgspec import UNSET, Struct

from attnprobe.axes import AXES, CONSTRAINTS, PLANNING_ONLY, Level
from attnprobe.config import AttentionConfig, Case
from attnprobe.errors import UsageError
from attnprobe.lengths import length_level, order

Possible = Mapping[str, tuple[Level, ...]]
"""Per axis the levels that a configuration may fall on, never empty; hazards are not in it."""

ALL: Final[dict[str, tuple[Level, ...]]] = {axis.name: axis.levels for axis in AXES if not axis.hazard}
ASSUMED: Final = {
    "scale": "default",
    "softcap": "off",
    "alibi": "off",
    "deterministic": "off",
    "window": "none",
    "needs_grad": "all (none where forward only)",
}
SIZES: Final = ("batch", "heads", "heads_kv", "seqlen_q", "seqlen_kv", "head_dim", "head_dim_v")

# Constraints that keep a scan affordable do not count: a job may well ask for what no scan can afford.
# Nor do those of hazards: a job meets any level of them.
_CONSTRAINTS: Final = tuple(
    one for one in CONSTRAINTS if one.axes not in PLANNING_ONLY and ALL.keys() >= set(one.axes)
)
_IN_PAIRS: Final = {one.axes: one.allows for one in _CONSTRAINTS if len(one.axes) == 2}  # noqa: PLR2004


class Extent(Struct, frozen=True):
    """How large a call is, in the numbers that overflow: an envelope is the largest of each."""

    seqlen_q: int
    seqlen_kv: int
    batch_heads: int
    elements: int
    scores: int
    reach: int

    def within(self, other: Extent) -> bool:
        """Whether no number is larger than the other's."""
        return (
            self.seqlen_q <= other.seqlen_q
            and self.seqlen_kv <= other.seqlen_kv
            and self.batch_heads <= other.batch_heads
            and self.elements <= other.elements
            and self.scores <= other.scores
            and self.reach <= other.reach
        )

    def exceeding(self, other: Extent) -> str:
        """Return the first number that is larger than the other's, in words."""
        for name, words in _EXTENT_WORDS.items():
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine > theirs:
                return f"{words} {mine:,} is beyond the measured {theirs:,}"
        return ""


_EXTENT_WORDS: Final = {
    "seqlen_q": "seqlen_q",
    "seqlen_kv": "seqlen_kv",
    "batch_heads": "batch x heads",
    "elements": "elements of one tensor",
    "scores": "scores",
    "reach": "largest stride x index",
}


class Asked(Struct, frozen=True):
    """A configuration as the selector sees it. `extent` is None where a size is unsaid."""

    config: AttentionConfig
    levels: Possible
    dim_v: int | None
    extent: Extent | None
    unsaid: tuple[str, ...]
    assumed: dict[str, str]


def asked(config: AttentionConfig) -> Asked:
    """Return what a configuration asks.

    Raises:
        UsageError: a value out of its range, or sizes that contradict each other.
    """
    try:
        config = msgspec.convert(msgspec.to_builtins(config), AttentionConfig)
    except (msgspec.ValidationError, TypeError) as error:
        raise UsageError(
            "this is no attention configuration", why=str(error), fix="names and spellings: docs/axes.md"
        ) from None
    if config.heads is not UNSET and config.heads_kv is not UNSET and config.heads % config.heads_kv:
        raise UsageError(
            f"heads={config.heads} is no multiple of heads_kv={config.heads_kv}",
            why="every key-value head serves the same number of query heads",
        )
    levels = _levels(config)
    open_fields = [
        name
        for name in AttentionConfig.__struct_fields__
        if name not in ASSUMED and getattr(config, name) is UNSET and _is_open(name, levels)
    ]
    assumed = {
        name: said
        for name, said in ASSUMED.items()
        if getattr(config, name) is UNSET and not (name == "window" and config.mask is not UNSET)
    }
    dim_v = None if config.head_dim_v is UNSET else config.head_dim_v
    return Asked(
        config, levels, dim_v, _extent_of(config, levels), tuple(n.rstrip("_") for n in open_fields), assumed
    )


def _is_open(name: str, levels: Possible) -> bool:
    """Whether an unsaid field still has several values: masked_rows has one where there is no mask."""
    return name in SIZES or len(levels[name.rstrip("_")]) > 1


def _levels(config: AttentionConfig) -> dict[str, tuple[Level, ...]]:
    """Return the possible levels per axis, in the order of `AXES`."""

    def one(name: str, value: object) -> tuple[Level, ...]:
        return ALL[name] if value is UNSET else (value,)  # type: ignore[return-value]  # checked above

    def switch(value: object) -> tuple[Level, ...]:
        return ("on",) if value is not UNSET and value else ("off",)

    needs_grad: tuple[Level, ...]
    if config.needs_grad is not UNSET:
        needs_grad = (config.needs_grad,)
    else:
        needs_grad = {"forward": ("none",), "backward": ("all",)}.get(str(config.pass_), ("none", "all"))
    mask = one("mask", config.mask)
    levels = {
        "pass": one("pass", config.pass_),
        "dtype": one("dtype", config.dtype),
        "head_dim": one("head_dim", config.head_dim),
        "head_dim_v": _dim_v_levels(config),
        "heads": _heads_levels(config),
        "batch": ALL["batch"] if config.batch is UNSET else ("one" if config.batch == 1 else "more",),
        "seqlen_q": _length_levels("seqlen_q", config.seqlen_q),
        "seqlen_kv": _length_levels("seqlen_kv", config.seqlen_kv),
        "seqlen_order": _order_levels(config),
        "mask": mask if len(mask) == 1 else tuple(level for level in mask if level != "window"),
        "masked_rows": one("masked_rows", config.masked_rows),
        "dropout": ALL["dropout"] if config.dropout is UNSET else switch(config.dropout),
        "scale": ("default",) if config.scale is UNSET or config.scale is None else ("custom",),
        "softcap": switch(config.softcap),
        "alibi": switch(config.alibi),
        "layout": one("layout", config.layout),
        "needs_grad": needs_grad,
        "deterministic": switch(config.deterministic),
    }
    if any(len(found) > 1 for found in levels.values()):
        _narrow(levels)
    for name in ALL.keys() - levels.keys():
        # An axis that a config has no field for yet: any of its levels.
        levels[name] = ALL[name]
    return levels


def _dim_v_levels(config: AttentionConfig) -> tuple[Level, ...]:
    if config.head_dim is UNSET or config.head_dim_v is UNSET:
        return ALL["head_dim_v"]
    if config.head_dim_v == config.head_dim:
        return ("equal",)
    return ("smaller",) if config.head_dim_v < config.head_dim else ("larger",)


def _heads_levels(config: AttentionConfig) -> tuple[Level, ...]:
    if config.heads == 1:
        return ("equal",)
    if config.heads is UNSET or config.heads_kv is UNSET:
        return ALL["heads"]
    if config.heads == config.heads_kv:
        return ("equal",)
    return ("one-kv",) if config.heads_kv == 1 else ("grouped",)


def _length_levels(name: str, length: object) -> tuple[Level, ...]:
    return (length_level(length),) if isinstance(length, int) else ALL[name]


def _order_levels(config: AttentionConfig) -> tuple[Level, ...]:
    if config.seqlen_q is UNSET or config.seqlen_kv is UNSET:
        return ALL["seqlen_order"]
    return (order(config.seqlen_q, config.seqlen_kv),)


def _narrow(levels: dict[str, tuple[Level, ...]]) -> None:
    """Take away the levels of open axes that cannot stand beside what is said; in place.

    A configuration that contradicts itself keeps its levels: nothing was measured there, so nothing is
    proven, and a job does not die of the question.
    """
    changed = True
    while changed:
        changed = False
        for one in _CONSTRAINTS:
            if all(len(levels[axis]) == 1 for axis in one.axes):
                continue
            fits = [at for at in itertools.product(*(levels[a] for a in one.axes)) if one.allows(*at)]
            for place, axis in enumerate(one.axes):
                left = tuple(lv for lv in levels[axis] if any(at[place] == lv for at in fits))
                if left and len(left) < len(levels[axis]):
                    levels[axis] = left
                    changed = True


def completions(levels: Possible, limit: int) -> list[dict[str, Level]] | None:
    """Return every choice of one level an axis that can be; None where there are more than `limit`."""
    size = 1
    for found in levels.values():
        size *= len(found)
        if size > limit:
            return None
    every = (dict(zip(levels, at, strict=True)) for at in itertools.product(*levels.values()))
    return [at for at in every if all(c.allows(*(at[a] for a in c.axes)) for c in _CONSTRAINTS)]


def can_meet(first: tuple[str, Level], second: tuple[str, Level]) -> bool:
    """Whether two levels can stand in one configuration."""
    for (axis, level), (other, beside) in ((first, second), (second, first)):
        allows = _IN_PAIRS.get((axis, other))
        if allows is not None and not allows(level, beside):
            return False
    return True


def extent_of(case: Case) -> Extent:
    """Return how large a case is."""
    sizes = (
        case.batch,
        case.heads,
        case.heads_kv,
        case.seqlen_q,
        case.seqlen_kv,
        case.head_dim,
        case.head_dim_v,
    )
    return _extent(sizes, case.layout)


def _extent_of(config: AttentionConfig, levels: Possible) -> Extent | None:
    """Return how large a configuration is, in its widest layout."""
    sizes = tuple(getattr(config, name) for name in SIZES)
    if UNSET in sizes:
        return None
    found = [_extent(sizes, str(layout)) for layout in levels["layout"]]
    return max(found, key=lambda extent: extent.reach)


def _extent(sizes: tuple[int, ...], layout: str) -> Extent:
    batch, heads, heads_kv, seqlen_q, seqlen_kv, dim, dim_v = sizes
    widths = {"q": heads * dim, "k": heads_kv * dim, "v": heads_kv * dim_v, "out": heads * dim_v}
    tokens = {"q": seqlen_q, "k": seqlen_kv, "v": seqlen_kv, "out": seqlen_q}
    return Extent(
        seqlen_q,
        seqlen_kv,
        batch * heads,
        batch * max(tokens[name] * width for name, width in widths.items()),
        batch * heads * seqlen_q * seqlen_kv,
        batch * max(_row(name, widths, layout, lone=seqlen_q != seqlen_kv) * n for name, n in tokens.items()),
    )


def _row(name: str, widths: dict[str, int], layout: str, *, lone: bool) -> int:
    """Return how many elements one token of a tensor takes in memory, neighbours in a buffer included."""
    if layout == "inner-stride" and name != "out":
        return 2 * widths[name]
    if layout == "packed" and name != "out":
        # As `probe.inputs` packs: one buffer, or where lengths differ q beside a neighbour, k beside v.
        if lone:
            return 2 * widths["q"] if name == "q" else widths["k"] + widths["v"]
        return widths["q"] + widths["k"] + widths["v"]
    return widths[name]


def said_equal(config: AttentionConfig, case: Case) -> bool:
    """Whether a case is a value of everything that a configuration says: the same numbers, not levels."""
    for name in AttentionConfig.__struct_fields__:
        value = getattr(config, name)
        if (
            value is not UNSET
            and value != getattr(case, name)
            and not (name == "window" and case.mask != "window")
        ):
            return False
    return True


def numbers(bits: int) -> Iterator[int]:
    """Yield the positions of the bits that are set, lowest first."""
    while bits:
        low = bits & -bits
        yield low.bit_length() - 1
        bits ^= low
