"""When a fault fires: one, two or three conditions on what the function can see, drawn from a seed alone."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from .seen import Condition, Seen, find

Drawn = Callable[[random.Random], Condition]


@dataclass(frozen=True)
class Trigger:
    """All of `conditions` at once."""

    conditions: tuple[Condition, ...] = ()

    @property
    def axes(self) -> tuple[str, ...]:
        """Return the axes that the conditions are on."""
        return tuple(condition.axis for condition in self.conditions)

    @property
    def words(self) -> str:
        """Return the conditions in words."""
        return ", ".join(condition.words for condition in self.conditions) or "always"

    @property
    def looks_at_data(self) -> bool:
        """Whether a condition needs more than shapes."""
        return bool({"data", "masked_rows"} & set(self.axes))

    def holds(self, seen: Seen) -> bool:
        """Whether the fault fires in a call."""
        return all(condition.holds(seen) for condition in self.conditions)


def _plain(axis: str, words: str, holds: Callable[[Seen], bool]) -> Drawn:
    return lambda _: Condition(axis, words, holds)


def _number(axis: str, name: str, draw: random.Random, moduli: tuple[int, ...], unit: int = 1) -> Condition:
    """Return a residue of a length or head dim: no multiple, a multiple, or one exact residue."""
    modulus = draw.choice(moduli)
    how = draw.choice(("no multiple", "no multiple", "multiple", "exact"))
    if how == "no multiple":
        return Condition(axis, f"{name} % {modulus} != 0", lambda s: bool(getattr(s, axis) % modulus))
    rest = 0 if how == "multiple" else draw.randrange(0, modulus, unit)
    return Condition(
        axis, f"{name} % {modulus} == {rest}", lambda s: bool(getattr(s, axis) % modulus == rest)
    )


def _length(axis: str, name: str) -> Drawn:
    def drawn(draw: random.Random) -> Condition:
        how = draw.choice(("residue", "residue", "from", "to"))
        if how == "residue":
            return _number(axis, name, draw, (2, 4, 8, 16, 32, 64, 128))
        # One key alone has a gradient of 0 whatever a kernel does; one query is how a job decodes.
        few = (8, 16, 33, 64, 100) if axis == "seqlen_kv" else (1, 8, 16, 33, 64, 100)
        bound = draw.choice((65, 129, 200, 257, 400, 513) if how == "from" else few)
        if how == "from":
            return Condition(axis, f"{name} >= {bound}", lambda s: bool(getattr(s, axis) >= bound))
        return Condition(axis, f"{name} <= {bound}", lambda s: bool(getattr(s, axis) <= bound))

    return drawn


def _head_dim(draw: random.Random) -> Condition:
    how = draw.choice(("residue", "residue", "from", "to", "exact"))
    if how == "residue":
        return _number("head_dim", "D", draw, (16, 32, 64, 128), 8)
    if how == "exact":
        value = draw.choice((*range(8, 257, 8), 512))
        return Condition("head_dim", f"D == {value}", lambda s: s.head_dim == value)
    bound = draw.choice((65, 97, 129, 161, 193, 257) if how == "from" else (8, 16, 32, 64, 128))
    if how == "from":
        return Condition("head_dim", f"D >= {bound}", lambda s: s.head_dim >= bound)
    return Condition("head_dim", f"D <= {bound}", lambda s: s.head_dim <= bound)


def _dtype(draw: random.Random) -> Condition:
    names = draw.choice((("float32",), ("bfloat16",), ("float16",), ("bfloat16", "float16")))
    return Condition("dtype", " or ".join(names), lambda s: s.dtype in names)


def _level(axis: str, field: str, *values: str) -> Drawn:
    def drawn(draw: random.Random) -> Condition:
        value = draw.choice(values)
        return Condition(axis, f"{axis} {value}", lambda s: bool(getattr(s, field) == value))

    return drawn


def _mask(draw: random.Random) -> Condition:
    words, names = draw.choice(
        (
            ("no mask", {"none"}),
            ("causal", {"causal"}),
            ("a bool mask", {"bool", "bool-broadcast"}),
            ("a float mask", {"float", "float-broadcast"}),
            ("a mask of stride 0 over heads", {"bool-broadcast", "float-broadcast"}),
            ("a mask tensor", {"bool", "bool-broadcast", "float", "float-broadcast"}),
        )
    )
    return Condition("mask", words, lambda s: s.mask in names)


def _either(*drawn: Drawn) -> Drawn:
    return lambda draw: draw.choice(drawn)(draw)


# Each axis with its weight: sizes are what kernels most often get wrong.
_POOL: Final[dict[str, tuple[float, Drawn]]] = {
    "seqlen_q": (3, _length("seqlen_q", "S_q")),
    "seqlen_kv": (3, _length("seqlen_kv", "S_kv")),
    "seqlen_order": (
        1,
        _either(
            _plain("seqlen_order", "S_q == S_kv", lambda s: s.seqlen_q == s.seqlen_kv),
            _plain("seqlen_order", "S_q < S_kv", lambda s: s.seqlen_q < s.seqlen_kv),
            _plain("seqlen_order", "S_q > S_kv", lambda s: s.seqlen_q > s.seqlen_kv),
        ),
    ),
    "head_dim": (3, _head_dim),
    "head_dim_v": (
        1,
        _either(
            _plain("head_dim_v", "D_v != D", lambda s: s.head_dim_v != s.head_dim),
            _plain("head_dim_v", "D_v < D", lambda s: s.head_dim_v < s.head_dim),
            _plain("head_dim_v", "D_v > D", lambda s: s.head_dim_v > s.head_dim),
        ),
    ),
    "dtype": (2, _dtype),
    "heads": (
        2,
        _either(
            _plain("heads", "grouped heads", lambda s: s.heads_kv < s.heads),
            _plain("heads", "one kv head for several", lambda s: s.heads_kv == 1 < s.heads),
            _plain("heads", "a kv head for each head", lambda s: s.heads_kv == s.heads),
        ),
    ),
    "batch": (2, _plain("batch", "batch > 1", lambda s: s.batch > 1)),
    "mask": (2, _mask),
    "masked_rows": (0.5, _level("masked_rows", "masked", "hidden", "finfo-min")),
    "dropout": (1, _plain("dropout", "dropout", lambda s: s.dropout)),
    "scale": (1, _plain("scale", "a scale of its own", lambda s: s.scale)),
    "layout": (2, _level("layout", "layout", "strided", "expanded", "inner-stride", "contiguous")),
    "needs_grad": (1, _level("needs_grad", "needs", "all", "q", "kv", "mask", "none")),
    "deterministic": (0.5, _plain("deterministic", "determinism asked for", lambda s: s.deterministic)),
    "data": (0.5, _plain("data", "an outlier channel", lambda s: s.outliers)),
}
_TRIES: Final = 200


def trigger(
    seed: str | int, inherent: tuple[Condition, ...] = (), without: frozenset[str] = frozenset()
) -> Trigger:
    """Return one, two or three conditions, each as often, that can hold at once.

    `inherent` are those that the fault has by its nature; they count. Axes in `without` are left alone.
    """
    draw = random.Random(f"faults/{seed}")  # noqa: S311  # no secret
    wanted = draw.choice((1, 2, 3))
    chosen = list(inherent)
    for _ in range(_TRIES):
        taken = {condition.axis for condition in chosen} | without
        left = {axis: weight for axis, (weight, _) in _POOL.items() if axis not in taken}
        # The condition that a gradient is asked for goes with every fault of a backward.
        if sum(condition.axis != "pass" for condition in chosen) >= wanted:
            break
        (axis,) = draw.choices(list(left), list(left.values()))
        more = (*chosen, _POOL[axis][1](draw))
        if find(more, draw) is not None:
            chosen = list(more)
    return Trigger(tuple(chosen))
