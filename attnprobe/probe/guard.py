"""Put tensors at the edge of memory that nobody may touch, and report who touched it all the same.

With the library of `guard.c` preloaded, a read or write outside an input, or outside memory that a backend
allocates while armed, is reported with its distance in bytes, and the backend goes on. Without it the
inputs lie between zones of a known byte: a write shows there, a read only by the value it brings. CPU only.

Not covered: small blocks of malloc, accesses that land inside another tensor, and reads that stay within
the alignment of the block behind its end (for those the zone's value has to tell).
"""

from __future__ import annotations

import ctypes
import dataclasses
import mmap
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch

from attnprobe.probe.guard_build import ABSENT, STEM
from attnprobe.probe.memory import Breach

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

    from attnprobe.probe.inputs import Tensors

_INPUTS: Final = ("q", "k", "v", "mask", "grad_out")
_VERSION: Final = 1
"""Of the library; another one is left alone."""
_PAGE: Final = mmap.PAGESIZE
_ZONE: Final = 4096
_ALIGNED: Final = 16
"""What kernels may expect of an input's address: a vector of them loads no wider than this without asking."""
"""Bytes of a zone, at least."""
_RESERVE: Final = 1 << 36
_RESERVE_LEAST: Final = 1 << 26
"""Bytes of address space, not of memory, that an input may grow into."""
_SIDE: Final = 1 << 20
"""Bytes behind the end of an arena: closed, or open and unused where nobody could catch the fault."""
_GIVEN_BACK: Final = 16 << 20
"""Bytes that an arena must shrink by before it gives pages back."""
_RECORDS: Final = 64
_ACCESS: Final = {0: "access", 1: "read", 2: "write"}
_PROT_NONE: Final = 0
_PROT_OPEN: Final = 3
_MAP: Final = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)
_MADV_DONTNEED: Final = 4


class Guard:
    """The guard bands of this process. `covers` says in a few words what is guarded."""

    covers: str

    def __init__(self) -> None:
        """Find out whether the library is here, and keep it from the programs this process will start."""
        self._library = _library()
        self._arenas: list[_Arena] = []
        self._used: list[_Arena] = []
        if self._library is None:
            reason = os.environ.get(ABSENT) or "the library is not preloaded"
            self.covers = f"inputs, by value only: {reason}"
            return
        _keep_from_children()
        self.covers = "inputs and all allocations, with byte offsets"
        if self._library.attnprobe_guard_arm(0, 0):
            self.covers = "inputs, with byte offsets: no address space for allocations"
        self._library.attnprobe_guard_disarm()

    def place(self, tensors: Tensors) -> Tensors:
        """Return the same tensors, bit for bit and stride for stride, between guard bands.

        Tensors that share a storage share one again; storages are kept whole, also what no tensor shows.
        The end of each storage is the end of the accessible memory. Tensors placed earlier lose their
        memory: place all of a case at once. Tensors on another device, or without a byte, come back as
        they are. Raises MemoryError where there is no room.
        """
        if tensors.q.device.type != "cpu":
            return tensors
        if self._library is not None:
            self._library.attnprobe_guard_reset()  # no page may be open where an arena changes its size
        sharing: dict[int, dict[str, Tensor]] = {}
        for name in _INPUTS:
            tensor = getattr(tensors, name)
            if tensor is not None and tensor.untyped_storage().nbytes():
                sharing.setdefault(tensor.untyped_storage().data_ptr(), {})[name] = tensor.detach()
        self._used = []
        moved: dict[str, Any] = {}
        for number, (address, group) in enumerate(sharing.items()):
            if number == len(self._arenas):
                self._arenas.append(_Arena(number, self._library))
            arena = self._arenas[number]
            nbytes = next(iter(group.values())).untyped_storage().nbytes()
            start = arena.hold(nbytes, " ".join(["packed"] * (len(group) > 1) + [", ".join(group)]))
            ctypes.memmove(start, address, nbytes)
            memory = torch.frombuffer(_view(start, nbytes), dtype=torch.uint8)
            for name, tensor in group.items():
                placed = torch.empty(0, dtype=tensor.dtype)
                offset, size, stride = tensor.storage_offset(), tensor.size(), tensor.stride()
                moved[name] = placed.set_(memory.untyped_storage(), offset, size, stride)
            self._used.append(arena)
        return dataclasses.replace(tensors, **moved)

    def arm(self, fill: int, zone: int) -> None:
        """Let new allocations hold the byte `fill`, and all zones around them and the inputs `zone`."""
        for arena in self._used:
            arena.set_zones(zone)
        if self._library is not None:
            self._library.attnprobe_guard_arm(fill, zone)

    def disarm(self) -> tuple[Breach, ...]:
        """Stop, and return the accesses outside since `arm`, one for each place, kind and side.

        `where` names the place: "q", "packed q, k, v", "an allocation of 4096 bytes". `access` is "read",
        "write", or "access" where the processor does not say which. `offset`: 0 is the first byte behind the
        end, -1 the last before the start; of several the nearest that was seen, but the lowest of what was
        written into a zone. `count`: bytes that writes changed, pages that the others touched. Blocks of an
        earlier run that are still held count as well.
        """
        seen = _Seen()
        if self._library is not None:
            self._library.attnprobe_guard_disarm()
        for arena in self._used:
            for offset, count in arena.changed():
                seen.add(arena.holds, "write", offset, count)
        if self._library is not None:
            self._library.attnprobe_guard_check()
            self._library.attnprobe_guard_reset()
            self._take(seen)
        return seen.breaches()

    def _take(self, seen: _Seen) -> None:
        assert self._library is not None
        records = (_Record * _RECORDS)()
        lost = ctypes.c_uint64()
        taken = self._library.attnprobe_guard_take(records, _RECORDS, ctypes.byref(lost))
        for record in records[:taken]:
            where = f"an allocation of {record.size} bytes"
            if 0 <= record.region < len(self._arenas):
                where = self._arenas[record.region].holds
            seen.add(where, _ACCESS[record.access], record.offset, record.count)
        if lost.value:
            seen.add("further allocations", "access", 0, lost.value)


class _Record(ctypes.Structure):
    """`struct record` of guard.c."""

    _fields_ = (
        ("region", ctypes.c_int32),
        ("access", ctypes.c_int32),
        ("size", ctypes.c_uint64),
        ("offset", ctypes.c_int64),
        ("count", ctypes.c_uint64),
    )


class _Seen:
    """Accesses, put together by tensor, kind and side."""

    def __init__(self) -> None:
        self._by: dict[tuple[str, str, bool], tuple[int, int]] = {}

    def add(self, where: str, access: str, offset: int, count: int) -> None:
        key = (where, access, offset < 0)
        nearest, total = self._by.get(key, (offset, 0))
        self._by[key] = (min(nearest, offset, key=abs), total + count)

    def breaches(self) -> tuple[Breach, ...]:
        return tuple(
            Breach(where, access, offset, max(count, 1))
            for (where, access, _), (offset, count) in self._by.items()
        )


class _Arena:
    """Address space whose last accessible byte stays where it is; a storage lies at that end.

    With the library, everything before the front zone and behind the end is closed to access.
    """

    def __init__(self, number: int, library: Any) -> None:
        """Reserve address space; raises MemoryError where none is to be had."""
        self.holds = ""
        self._number = number
        self._library = library
        self._libc = _libc()
        reserve = _RESERVE
        while (base := self._libc.mmap(None, reserve, _PROT_NONE, _MAP, -1, 0)) in {None, _FAILED}:
            reserve //= 2
            if reserve < _RESERVE_LEAST:
                raise MemoryError("no address space for the inputs")
        self._base, self._limit = base, base + reserve
        self._end = self._low = self._limit - _SIDE
        """The accessible bytes are those from `_low` to `_end`."""
        self._start = self._stop = self._end
        self._zone = 0
        self._zones: list[tuple[int, int]] = []
        if library is None:
            self._protect(self._end, self._limit, _PROT_OPEN)

    def hold(self, nbytes: int, holds: str) -> int:
        """Make room for `nbytes` > 0 bytes as near the end of the arena as alignment allows.

        Returns their address. Sizes that are no multiple of `_ALIGNED` leave a zone of a few bytes behind.
        """
        self.holds = holds
        self._start = start = (self._end - nbytes) // _ALIGNED * _ALIGNED
        self._stop = stop = start + nbytes
        before = _ZONE if self._library is not None else _ZONE + _SIDE
        low = (start - before) // _PAGE * _PAGE
        if low < self._base + _PAGE:
            raise MemoryError(f"{nbytes} bytes are too many for an input")
        if low < self._low:
            self._protect(low, self._low, _PROT_OPEN)
            self._low = low
        elif low > self._low and self._library is not None:
            self._protect(self._low, low, _PROT_NONE)
            if low - self._low > _GIVEN_BACK:
                self._libc.madvise(self._low, low - self._low, _MADV_DONTNEED)
            self._low = low
        if self._library is None:
            self._zones = [(start - _ZONE, start), (stop, self._end + _ZONE)]
        else:
            self._zones = [(low, start), (stop, self._end)]
            self._library.attnprobe_guard_region(self._number, self._base, self._limit, start, stop)
        return int(start)

    def set_zones(self, zone: int) -> None:
        """Fill the zones with a byte."""
        self._zone = zone
        for first, last in self._zones:
            ctypes.memset(first, zone, last - first)

    def changed(self) -> Iterable[tuple[int, int]]:
        """Yield, for each zone that does not hold its byte any more, where and how many bytes."""
        for first, last in self._zones:
            held = ctypes.string_at(first, last - first)
            untouched = bytes([self._zone])
            if held == untouched * len(held):
                continue
            at = first + len(held) - len(held.lstrip(untouched))
            yield at - (self._start if at < self._start else self._stop), len(held) - held.count(untouched)

    def _protect(self, first: int, last: int, protection: int) -> None:
        if self._libc.mprotect(first, last - first, protection):
            raise MemoryError(f"no memory for {last - first} bytes of an input")


_FAILED: Final = ctypes.c_void_p(-1).value
"""What mmap returns where it cannot."""


_PYBUF_WRITE: Final = 0x200


def _view(address: int, nbytes: int) -> memoryview:
    """Return memory as a buffer; ctypes would keep a type for every size, for good."""
    make = ctypes.pythonapi.PyMemoryView_FromMemory
    make.restype = ctypes.py_object
    make.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)
    view: memoryview = make(address, nbytes, _PYBUF_WRITE)
    return view


def _libc() -> Any:
    libc = ctypes.CDLL(None)
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    libc.mmap.restype = pointer
    libc.mmap.argtypes = (pointer, size, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
    libc.mprotect.argtypes = libc.madvise.argtypes = (pointer, size, ctypes.c_int)
    return libc


def _library() -> Any:
    """Return the functions of the preloaded library; None where it is not in this process."""
    library = ctypes.CDLL(None)
    if not hasattr(library, "attnprobe_guard_version") or library.attnprobe_guard_version() != _VERSION:
        return None
    pointer = ctypes.c_void_p
    library.attnprobe_guard_region.argtypes = (ctypes.c_int, pointer, pointer, pointer, pointer)
    library.attnprobe_guard_take.argtypes = (pointer, ctypes.c_int, pointer)
    return library


def _keep_from_children() -> None:
    """Take the library out of LD_PRELOAD: a compiler that a backend starts has no use for it."""
    given = os.environ.get("LD_PRELOAD", "").split(":")
    left = [one for one in given if one and not Path(one).name.startswith(STEM)]
    if left:
        os.environ["LD_PRELOAD"] = ":".join(left)
    else:
        os.environ.pop("LD_PRELOAD", None)
