"""What a library's own selector is to an audit, and how all of them are found."""

from __future__ import annotations

import importlib
import pkgutil
from typing import TYPE_CHECKING, Protocol

from msgspec import Struct

if TYPE_CHECKING:
    from attnprobe.config import Case


class Answer(Struct, frozen=True):
    """What a selector would do with a case.

    `takes`: the backend of the matrix that stands for what it would run, None where it refuses the call.
    `passes_over`: backends that it would have run before that one, had it let them.
    """

    takes: str | None
    passes_over: tuple[str, ...] = ()


class HostSelector(Protocol):
    """A library's own selector, asked and never changed."""

    name: str

    def missing(self) -> str | None:
        """Return why it cannot be asked here, or None."""

    def ask(self, case: Case) -> Answer | None:
        """Return its answer; None where the call cannot be put to it."""


def selectors() -> tuple[HostSelector, ...]:
    """Return every module's `selector` of this package, by name."""
    package = importlib.import_module("attnprobe.audit")
    found = [
        getattr(importlib.import_module(f"{package.__name__}.{module.name}"), "selector", None)
        for module in pkgutil.iter_modules(package.__path__)
    ]
    return tuple(sorted((one for one in found if one is not None), key=lambda one: one.name))
