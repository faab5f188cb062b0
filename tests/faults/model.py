"""What a fault is, and how it becomes a function that is healthy wherever its trigger does not hold."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from torch import Tensor

from .base import Kernel, attend
from .seen import Condition, asked_for, seen_in
from .triggers import Trigger, trigger

KINDS: Final = {
    1: "unwritten",
    2: "wrong values",
    3: "not finite",
    4: "depends on data",
    5: "not its own gradient",
    6: "outside its tensors",
    7: "depends on earlier calls",
    8: "does not repeat",
    9: "layout",
    10: "dropout",
    11: "some gradients only",
    12: "death",
}
BASE: Final = Kernel()


class Attention(Protocol):
    """The call shape of torch.nn.functional.scaled_dot_product_attention."""

    def __call__(  # noqa: PLR0913, PLR0917
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,  # noqa: FBT001, FBT002
        scale: float | None = None,
        enable_gqa: bool = False,  # noqa: FBT001, FBT002
    ) -> Tensor: ...


@dataclass(frozen=True)
class Fault:
    """One wrong line of an attention.

    `expected` are the verdicts that say what it is. `inherent` conditions belong to its nature, `without`
    are axes on which a further condition would make no sense. `shows` are the hazards without which it does
    no harm, by the axis of attnprobe and its levels: a fault that depends on data needs that data. `grads`
    are the gradients that it concerns, of q, k, v and m(ask); without any the forward is at fault.
    """

    name: str
    kind: int
    about: str
    kernel: Callable[[], Kernel]
    expected: tuple[str, ...]
    inherent: tuple[Condition, ...] = ()
    without: frozenset[str] = frozenset()
    shows: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    grads: str = ""

    def draw(self, seed: int) -> Trigger:
        """Return the trigger that belongs to a seed."""
        known = (asked_for(self.grads),) if self.grads else ()
        taken = self.without | set(self.shows)
        return trigger(f"{seed}/{self.name}", (*known, *self.inherent), frozenset(taken))

    def make(self, when: Trigger) -> Attention:
        """Return the function: at fault where the trigger holds, healthy elsewhere."""
        wrong = self.kernel()

        def attention(*given: Any, **options: Any) -> Tensor:
            seen = seen_in(*given, **options, data=when.looks_at_data)
            return attend(wrong, *given, **options, instead=None if when.holds(seen) else BASE)

        return attention


def grouped() -> Condition:
    """Return that several query heads share a key-value head."""
    return Condition("heads", "grouped heads", lambda seen: seen.heads_kv < seen.heads)


def lengths(axis: str, words: str, holds: Callable[[int], bool]) -> Condition:
    """Return a condition on one length or head dim."""
    return Condition(axis, words, lambda seen: holds(getattr(seen, axis)))


def level(axis: str, words: str, name: str, *values: Any) -> Condition:
    """Return that a field has one of some values."""
    return Condition(axis, words, lambda seen: getattr(seen, name) in values)


MORE_BATCH: Final = level("batch", "batch > 1", "batch", *range(2, 65))
FLOAT_MASK: Final = level("mask", "a float mask", "mask", "float", "float-broadcast")
MASK: Final = level("mask", "a mask tensor", "mask", "bool", "bool-broadcast", "float", "float-broadcast")
CAUSAL: Final = level("mask", "causal", "mask", "causal")
OWN_SCALE: Final = level("scale", "a scale of its own", "scale", True)
HIDDEN_ROWS: Final = level("masked_rows", "a row hidden whole", "masked", "hidden")
DROPOUT: Final = level("dropout", "dropout", "dropout", True)


@dataclass(frozen=True)
class Healthy:
    """An attention that nothing is wrong with."""

    name: str
    about: str
    make: Callable[[], Attention]
