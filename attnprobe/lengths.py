"""Sequence lengths: the levels that they fall on, and the numbers that stand for a level."""

from __future__ import annotations

import functools
from typing import Final

LENGTHS: Final = ("0", "1", "odd", "even", "x32", "x64", "x128", "long")
LONG: Final = 512
SPELLING: Final = {
    "odd": "3 to 511, odd",
    "even": "2 to 510, even, no multiple of 32",
    "x32": "32 or 96 modulo 128, below 512",
    "x64": "64 modulo 128, below 512",
    "x128": "multiple of 128, below 512",
    "long": "512 and more",
}

# Several each, so that a level is not one number; the least first.
_REPRESENTATIVES: Final[dict[str | int, tuple[int, ...]]] = {
    "0": (0,),
    "1": (1,),
    "odd": (7, 33, 97, 129, 193),
    "even": (10, 34, 66, 130, 200),
    "x32": (32, 96, 160),
    "x64": (64, 192),
    "x128": (128, 256),
    "long": (512, 513, 640, 800),
}


def representatives(level: str | int) -> tuple[int, ...]:
    """Return a few lengths that stand for a level of `seqlen_q` or `seqlen_kv`."""
    return _REPRESENTATIVES[level]


@functools.cache
def lengths_on(level: str | int) -> tuple[int, ...]:
    """Return every length on a level; of the one without an end, up to its longest representative."""
    return tuple(n for n in range(_REPRESENTATIVES["long"][-1] + 1) if length_level(n) == level)


def length_level(length: int) -> str:
    """Return the level that a sequence length falls on."""
    if length in {0, 1}:
        return str(length)
    if length >= LONG:
        return "long"
    if length % 128 == 0:
        return "x128"
    if length % 64 == 0:
        return "x64"
    if length % 32 == 0:
        return "x32"
    return "odd" if length % 2 else "even"


def order(seqlen_q: int, seqlen_kv: int) -> str:
    """Return the level of `seqlen_order` for two lengths."""
    if seqlen_q == seqlen_kv:
        return "equal"
    return "q-shorter" if seqlen_q < seqlen_kv else "q-longer"


def orders(q: str | int, kv: str | int) -> frozenset[str]:
    """Return the orders that some pair of representatives of two levels shows."""
    pairs = ((a, b) for a in _REPRESENTATIVES[q] for b in _REPRESENTATIVES[kv])
    return frozenset(order(a, b) for a, b in pairs)
