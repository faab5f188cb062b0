"""Faulty attention of every kind that a scan must find, and healthy attention that it must not accuse.

Each fault is one wrong line of one clean implementation (`base`), and fires only where its trigger holds: one
to three conditions on what the function can see of its arguments, drawn from a seed (`triggers`). Elsewhere
the function is the clean one. `write_module` writes a seed's functions as a module for `FILE.py:NAME`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from . import data, deadly, dropout, earlier, gradients, layout, outside, repeat, unwritten, values
from .healthy import HEALTHY
from .model import KINDS, Attention, Fault, Healthy
from .triggers import Trigger

FAULTS: Final[tuple[Fault, ...]] = tuple(
    sorted(
        (
            fault
            for module in (
                unwritten,
                values,
                data,
                gradients,
                outside,
                earlier,
                repeat,
                layout,
                dropout,
                deadly,
            )
            for fault in module.FAULTS
        ),
        key=lambda fault: fault.kind,
    )
)

__all__ = [
    "FAULTS",
    "HEALTHY",
    "KINDS",
    "Attention",
    "Fault",
    "Healthy",
    "Trigger",
    "build",
    "build_one",
    "write_module",
]


def build_one(seed: int, name: str) -> Attention:
    """Return one function by name.

    Raises:
        AttributeError: there is none of that name.
    """
    for fault in FAULTS:
        if fault.name == name:
            return fault.make(fault.draw(seed))
    for healthy in HEALTHY:
        if healthy.name == name:
            return healthy.make()
    raise AttributeError(name)


def build(seed: int) -> dict[str, Attention]:
    """Return every function by name, each fault with the trigger that belongs to the seed."""
    names = (*(fault.name for fault in FAULTS), *(healthy.name for healthy in HEALTHY))
    return {name: build_one(seed, name) for name in names}


def write_module(path: Path, seed: int) -> None:
    """Write a module whose names are the functions of a seed.

    Each is made when it is asked for: a scan imports the module anew for each, after every death.
    """
    path.write_text(
        f'''"""Attention functions of seed {seed}, written by {__name__}."""

import importlib.util
import sys

if "attention_faults" not in sys.modules:
    place = {str(Path(__file__).resolve())!r}
    spec = importlib.util.spec_from_file_location("attention_faults", place)
    sys.modules["attention_faults"] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)


def __getattr__(name):
    return sys.modules["attention_faults"].build_one({seed}, name)
''',
        encoding="utf-8",
    )
