"""Find backends: every module here that holds a `backend`, entry points, and callables by name."""

from __future__ import annotations

import functools
import importlib
import pkgutil
from importlib import metadata
from typing import TYPE_CHECKING, Final

from msgspec import Struct

from attnprobe.backends.callable import load
from attnprobe.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from attnprobe.backends.interface import Backend
    from attnprobe.device.interface import Device

GROUP: Final = "attnprobe.backends"
_NO_BACKENDS: Final = frozenset({"interface", "registry", "calling", "callable"})


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
    loaders: dict[str, Callable[[], Backend]] = {}
    for module in pkgutil.iter_modules(package.__path__):
        if module.name not in _NO_BACKENDS and module.name[0] != "_":
            path = f"{package.__name__}.{module.name}"
            loaders[module.name.replace("_", "-")] = functools.partial(_backend_of, path)
    loaders |= {entry.name: entry.load for entry in metadata.entry_points(group=GROUP)}
    for name, loader in sorted(loaders.items()):
        try:
            found[name] = loader()
        except Exception as error:  # noqa: BLE001, PERF203  # a library may fail in any way on import
            absent.append(Absent(name, f"{type(error).__name__}: {error}"))
    return found, absent


def _backend_of(path: str) -> Backend:
    found: Backend = importlib.import_module(path).backend
    return found


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
            if backend.name in wanted:
                raise UsageError(
                    f"--backend {spec}: another one is named {backend.name} already",
                    why="a matrix names a callable by file and function",
                    fix="rename one of the files",
                )
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
