"""Find backends: every module here that holds a `backend`, entry points, and callables by name."""

from __future__ import annotations

import importlib
import pkgutil
from importlib import metadata
from typing import TYPE_CHECKING, Final

from msgspec import Struct

from attnprobe.backends.callable import load
from attnprobe.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from attnprobe.backends.interface import Backend
    from attnprobe.device.interface import Device

GROUP: Final = "attnprobe.backends"


class Absent(Struct, frozen=True):
    """A backend that is known and not here, with the reason."""

    name: str
    reason: str


def known() -> tuple[dict[str, Backend], list[Absent]]:
    """Return the backends of this package and of others' entry points, by name.

    One that cannot be imported, whatever it raises, is absent with the reason.
    """
    package = importlib.import_module("attnprobe.backends")
    found: dict[str, Backend] = {}
    absent: list[Absent] = []
    for module in pkgutil.iter_modules(package.__path__):
        if module.name in {"interface", "registry", "calling", "callable"} or module.name[0] == "_":
            continue
        name = module.name.replace("_", "-")
        try:
            backend: Backend = importlib.import_module(f"{package.__name__}.{module.name}").backend
            found[backend.name] = backend
        except Exception as error:  # noqa: BLE001  # a library may fail in any way on import
            absent.append(Absent(name, f"{type(error).__name__}: {error}"))
    for entry in metadata.entry_points(group=GROUP):
        try:
            found[entry.name] = entry.load()
        except Exception as error:  # noqa: BLE001
            absent.append(Absent(entry.name, f"{type(error).__name__}: {error}"))
    return dict(sorted(found.items())), absent


def choose(asked: Iterable[str], device: Device) -> tuple[dict[str, Backend], list[Absent]]:
    """Return the backends to probe and those that are not here; nothing asked means all known.

    Raises:
        UsageError: a name that is neither known nor a callable that can be imported.
    """
    backends, absent = known()
    wanted: dict[str, Backend] = {}
    gone: list[Absent] = []
    names = list(asked)
    for spec in names or backends:
        if spec in backends:
            reason = backends[spec].missing(device)
            if reason is None:
                wanted[spec] = backends[spec]
            else:
                gone.append(Absent(spec, reason))
        elif ":" in spec:
            backend = load(spec)
            wanted[backend.name] = backend
        elif any(spec == one.name for one in absent):
            gone.extend(one for one in absent if one.name == spec)
        else:
            raise UsageError(
                f"--backend {spec} is not known",
                why=f"known are {', '.join(sorted(backends))}",
                fix="a callable of your own is FILE.py:NAME or package.module:NAME",
            )
    return wanted, gone if names else [*gone, *absent]
