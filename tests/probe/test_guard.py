"""Guard bands around inputs and allocations: what reads or writes outside is reported, and only that.

The functions named `within_...` run in forks of one process that has the library preloaded, as a worker is
a fork of the zygote. This file is also that process: `python test_guard.py`.
"""

from __future__ import annotations

import ctypes
import json
import os
import platform
import signal
import subprocess
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final, get_args

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec import structs
from torch import Tensor

from attnprobe import config
from attnprobe.backends.registry import choose
from attnprobe.config import Case
from attnprobe.device.cpu import cpu_device
from attnprobe.probe.guard import Guard
from attnprobe.probe.guard_build import ABSENT, build, environment
from attnprobe.probe.inputs import Tensors, make, seed_generators
from attnprobe.probe.memory import Breach

CPU: Final = torch.device("cpu")
NAN, FINITE = 0xFF, 0x42
NAMES: Final = ("q", "k", "v", "mask", "grad_out")
PLAIN: Final = Case(batch=2, heads=3, heads_kv=3, seqlen_q=5, seqlen_kv=8, head_dim=8, mask="float")
"""Every tensor a multiple of 16 bytes, so that nothing lies between its end and the gap."""
PAGE: Final = os.sysconf("SC_PAGESIZE")


def kind(access: str) -> str:
    """Return how an access is named that only a page told."""
    return access if platform.machine() == "x86_64" else "access"


def read(address: int) -> float:
    return float(ctypes.c_float.from_address(address).value)


def write(address: int, value: float = 1.0) -> None:
    ctypes.c_float.from_address(address).value = value


def look_around(start: int, end: int, nbytes: int, into: list[bytes]) -> None:
    into.extend([ctypes.string_at(start - nbytes, nbytes), ctypes.string_at(end, nbytes)])


def named(tensors: Tensors) -> dict[str, Tensor]:
    return {name: value for name in NAMES if (value := getattr(tensors, name)) is not None}


def ends(tensor: Tensor) -> tuple[int, int]:
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.data_ptr() + storage.nbytes()


def libc() -> Any:
    found = ctypes.CDLL(None)
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    for name in ("malloc", "calloc", "realloc", "aligned_alloc", "memalign"):
        getattr(found, name).restype = pointer
    found.malloc.argtypes = (size,)
    found.calloc.argtypes = found.aligned_alloc.argtypes = found.memalign.argtypes = (size, size)
    found.realloc.argtypes = (pointer, size)
    found.free.argtypes = found.malloc_usable_size.argtypes = (pointer,)
    found.malloc_usable_size.restype = size
    return found


def seen(guard: Guard, misdeed: Callable[[], object], fill: int = NAN, zone: int = FINITE) -> list[Breach]:
    """Return what is reported of one function."""
    guard.arm(fill, zone)
    try:
        misdeed()
    finally:
        found = guard.disarm()
    return list(found)


# ---- within: inputs ----------------------------------------------------------------------------------


def within_inputs_past_the_end() -> None:
    guard = Guard()
    tensors = guard.place(make(PLAIN, CPU))
    for name, tensor in named(tensors).items():
        _, end = ends(tensor)
        assert seen(guard, partial(read, end)) == [Breach(name, kind("read"), 0, 1)]
        written = seen(guard, partial(write, end + 8))
        assert Breach(name, "write", 8, 4) in written
        assert {one.offset for one in written} == {8}


def within_inputs_of_odd_sizes_are_aligned_and_end_in_a_zone() -> None:
    guard = Guard()
    tensors = guard.place(make(structs.replace(PLAIN, head_dim=9, dtype="float16"), CPU))
    start, end = ends(tensors.q)
    assert start % 16 == 0
    assert end % 16
    assert seen(guard, partial(write, end)) == [Breach("q", "write", 0, 4)]
    assert seen(guard, partial(read, (end + 15) // 16 * 16))[0].access == kind("read")


def within_inputs_before_the_start() -> None:
    guard = Guard()
    tensors = guard.place(make(PLAIN, CPU))
    for name, tensor in named(tensors).items():
        start, _ = ends(tensor)
        assert seen(guard, partial(write, start - 4)) == [Breach(name, "write", -4, 4)]
        far = start - 2 * 4096 - PAGE
        assert seen(guard, partial(read, far)) == [Breach(name, kind("read"), far - start, 1)]


def within_inputs_a_read_brings_the_zone() -> None:
    guard = Guard()
    tensors = guard.place(make(PLAIN, CPU))
    got: list[bytes] = []
    for zone in (FINITE, NAN):
        for tensor in named(tensors).values():
            start, end = ends(tensor)
            breaches = seen(guard, partial(look_around, start, end, 64, got), 0, zone)
            assert len(breaches) == 1
            assert got == [bytes([zone]) * 64] * 2
            got.clear()


def within_inputs_inside_is_no_breach() -> None:
    guard = Guard()
    tensors = guard.place(make(PLAIN, CPU))

    def inside() -> None:
        for tensor in named(tensors).values():
            start, end = ends(tensor)
            write(start, read(start))
            write(end - 4, read(end - 4))

    assert seen(guard, inside) == []
    assert named(tensors).keys() == set(NAMES)
    assert all(torch.equal(value, named(make(PLAIN, CPU))[name]) for name, value in named(tensors).items())


def within_inputs_a_long_overrun_is_one_breach_each_time() -> None:
    guard = Guard()
    _, end = ends(guard.place(make(PLAIN, CPU)).q)
    for _ in range(3):
        found = seen(guard, lambda: ctypes.memset(end, 7, 3 * PAGE))
        assert found[-1] == Breach("q", "write", 0, 3 * PAGE)
        assert len(found) == (1 if kind("write") == "write" else 2)
        assert seen(guard, lambda: ctypes.string_at(end, 3 * PAGE)) == [Breach("q", kind("read"), 0, 3)]
    assert seen(guard, lambda: None) == []


def within_inputs_that_grow_and_shrink() -> None:
    guard = Guard()
    for length in (4, 3000, 1, 70_000, 257, 1):
        case = structs.replace(PLAIN, seqlen_q=length, seqlen_kv=3, mask="none")
        tensors = guard.place(make(case, CPU))
        assert torch.equal(tensors.q, make(case, CPU).q)
        start, end = ends(tensors.q)
        assert seen(guard, partial(write, start - 4)) == [Breach("q", "write", -4, 4)]
        assert seen(guard, partial(read, end)) == [Breach("q", kind("read"), 0, 1)]


def within_inputs_packed_are_named_together() -> None:
    guard = Guard()
    case = structs.replace(PLAIN, seqlen_kv=5, layout="packed", mask="none")
    tensors = guard.place(make(case, CPU))
    assert ends(tensors.q) == ends(tensors.k) == ends(tensors.v)
    _, end = ends(tensors.v)
    assert seen(guard, lambda: read(end)) == [Breach("packed q, k, v", kind("read"), 0, 1)]


def within_layouts() -> None:
    check_layouts(Guard())


# ---- within: allocations -----------------------------------------------------------------------------


def within_a_fresh_tensor() -> None:
    guard = Guard()
    fresh: list[Tensor] = []

    def misdeed(offset: int, act: Callable[[int], object]) -> None:
        fresh.append(torch.empty(1024))
        assert fresh[-1].isnan().all()
        start, end = ends(fresh[-1])
        assert start % 64 == 0
        act(start + offset if offset < 0 else end + offset)

    what = "an allocation of 4096 bytes"
    assert seen(guard, lambda: misdeed(0, read)) == [Breach(what, kind("read"), 0, 1)]
    assert seen(guard, lambda: misdeed(12, write))[-1] == Breach(what, "write", 12, 4)
    assert seen(guard, lambda: misdeed(-4, write))[-1] == Breach(what, "write", -4, 4)
    far = -4096 - PAGE
    assert seen(guard, lambda: misdeed(far, read)) == [Breach(what, kind("read"), far, 1)]
    assert seen(guard, lambda: misdeed(0, lambda _: None)) == []


def within_a_block_that_does_not_end_with_its_alignment() -> None:
    guard = Guard()
    fresh: list[Tensor] = []

    def misdeed(offset: int, act: Callable[[int], object]) -> None:
        fresh.append(torch.empty(1001))  # 4004 bytes: 28 up to the next multiple of 64
        act(ends(fresh[-1])[1] + offset)

    what = "an allocation of 4004 bytes"
    assert seen(guard, lambda: misdeed(0, write)) == [Breach(what, "write", 0, 4)]
    assert seen(guard, lambda: misdeed(24, write)) == [Breach(what, "write", 24, 4)]
    assert seen(guard, lambda: misdeed(28, read)) == [Breach(what, kind("read"), 28, 1)]


def within_blocks_of_malloc() -> None:
    guard = Guard()
    c = libc()
    for size, allocate in (
        (2048, lambda: c.malloc(2048)),
        (4096, lambda: c.calloc(64, 64)),
        (8192, lambda: c.realloc(None, 8192)),
        (512, lambda: c.aligned_alloc(64, 512)),
        (256, lambda: c.memalign(256, 256)),
    ):
        what = f"an allocation of {size} bytes"
        blocks: list[int] = []

        past = partial(allocated, allocate, size, blocks)
        assert seen(guard, partial(past, read)) == [Breach(what, kind("read"), 0, 1)]
        assert seen(guard, partial(past, write))[-1] == Breach(what, "write", 0, 4)
        assert seen(guard, partial(write, blocks[-1] - 4)) == [Breach(what, "write", -4, 4)]
        for block in blocks:
            c.free(block)


def allocated(allocate: Callable[[], int], size: int, into: list[int], act: Callable[[int], object]) -> None:
    into.append(allocate())
    act(into[-1] + size)


def within_a_write_is_seen_when_its_block_is_freed() -> None:
    guard = Guard()
    c = libc()

    def misdeed() -> None:
        block = c.malloc(1500)
        write(block - 8)
        c.free(block)

    assert seen(guard, misdeed) == [Breach("an allocation of 1500 bytes", "write", -8, 4)]


def within_calloc_and_realloc() -> None:
    guard = Guard()
    c = libc()
    guard.arm(NAN, FINITE)
    block = c.calloc(100, 30)
    assert ctypes.string_at(block, 3000) == bytes(3000)
    assert c.malloc_usable_size(block) == 3000
    ctypes.memset(block, 7, 3000)
    block = c.realloc(block, 50_000)
    assert ctypes.string_at(block, 3001) == b"\7" * 3000 + bytes([NAN])
    block = c.realloc(block, 2000)
    assert ctypes.string_at(block, 2000) == b"\7" * 2000
    small = c.realloc(c.realloc(None, 1024), 16)
    real = c.malloc(16)
    assert c.realloc(c.malloc(5000), 0) is None
    assert c.calloc(1 << 40, 1 << 40) is None
    assert guard.disarm() == ()
    block = c.realloc(block, 4000)  # out of the guarded range, not armed any more
    assert ctypes.string_at(block, 2000) == b"\7" * 2000
    real = c.realloc(real, 3000)
    for one in (block, small, real):
        c.free(one)


def within_many_allocations() -> None:
    guard = Guard()
    c = libc()
    guard.arm(NAN, FINITE)
    for turn in range(200_000):
        c.free(c.malloc(1024 + turn % 7 * 1000))
    held = [c.malloc(1024) for _ in range(40_000)]  # more than there are places: the rest are real ones
    assert all(held)
    assert 10_000 < c.attnprobe_guard_live() < 20_000
    for one in held[-3:]:
        ctypes.memset(one, 1, 1024)
    for one in held:
        c.free(one)
    assert c.attnprobe_guard_live() < 1000
    assert guard.disarm() == ()
    with Path("/proc/self/maps").open() as maps:
        assert sum(1 for _ in maps) < 40_000


def within_large_blocks_give_their_memory_back() -> None:
    guard = Guard()
    c = libc()
    guard.arm(NAN, FINITE)
    for turn in range(1, 60):
        c.free(c.malloc(turn << 20))
    guard.disarm()
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * PAGE
    assert resident < 1 << 30


def within_outputs_may_outlive_the_run() -> None:
    guard = Guard()
    held: list[Tensor] = []
    assert seen(guard, lambda: held.append(torch.ones(1000))) == []
    write(ends(held[0])[0] - 4)
    assert held[0].sum() == 1000
    assert seen(guard, lambda: None) == [Breach("an allocation of 4000 bytes", "write", -4, 4)]
    assert seen(guard, lambda: None) == []
    held.clear()
    assert seen(guard, lambda: None) == []


def within_many_threads() -> None:
    guard = Guard()
    c = libc()
    tensors = guard.place(make(PLAIN, CPU))
    _, end = ends(tensors.k)

    def work(number: int) -> None:
        for _ in range(50):
            size = 2048 + 16 * number
            block = c.malloc(size)
            read(block + size)
            read(end + number * 4)
            ctypes.memset(block, 0, size)
            c.free(block)
            c.free(c.malloc(100_000))

    def all_at_once() -> None:
        threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    found = seen(guard, all_at_once)
    assert {one.where for one in found} == {
        "k",
        *(f"an allocation of {2048 + 16 * n} bytes" for n in range(8)),
    }
    assert {one.access for one in found} == {kind("read")}


def within_a_fork() -> None:
    guard = Guard()
    tensors = guard.place(make(PLAIN, CPU))
    _, end = ends(tensors.v)
    guard.arm(NAN, FINITE)
    held = torch.empty(1024)
    child = os.fork()
    read(end + 4 * bool(child))
    del held
    found = guard.disarm()
    if not child:
        os._exit(found != (Breach("v", kind("read"), 0, 1),))
    assert os.waitpid(child, 0)[1] == 0
    assert found == (Breach("v", kind("read"), 4, 1),)


def within_the_parent_of_other_programs() -> None:
    guard = Guard()
    assert guard.covers == "inputs and all allocations, with byte offsets"
    assert "LD_PRELOAD" not in os.environ
    guard.arm(NAN, FINITE)
    done = subprocess.run(["/bin/sh", "-c", "echo ${LD_PRELOAD:-nothing}"], capture_output=True, check=True)
    assert guard.disarm() == ()
    assert done.stdout == b"nothing\n"


# ---- within: other faults ----------------------------------------------------------------------------


def dies_of_an_unrelated_fault() -> None:
    Guard().arm(NAN, FINITE)
    read(64)


def dies_of_a_signal_that_was_sent() -> None:
    Guard().arm(NAN, FINITE)
    os.kill(os.getpid(), signal.SIGSEGV)


def dies_of_freeing_twice() -> None:
    guard = Guard()
    guard.arm(NAN, FINITE)
    block = libc().malloc(5000)
    libc().free(block)
    libc().free(block)


def dies_of_a_write_into_code() -> None:
    Guard().arm(NAN, FINITE)
    write(ctypes.cast(ctypes.CDLL(None).getpid, ctypes.c_void_p).value or 0)


# ---- within: healthy kernels -------------------------------------------------------------------------


def healthy(case: Case) -> None:
    """Run every CPU path on a case, twice, as a worker does: nobody is outside, and the bits agree."""
    guard = Guard()
    backends, _ = choose((), cpu_device())
    for name in ("aten-flash", "torch-default", "torch-flash", "torch-math"):
        backend = backends[name]
        if backend.declares(case, cpu_device()) is not None or backend.kernel_key(case) is not None:
            continue
        tensors = guard.place(make(case, CPU))
        results: list[dict[str, Tensor]] = []
        for fill, zone in ((NAN, FINITE), (FINITE, NAN)):
            seed_generators(case.seed, CPU)
            guard.arm(fill, zone)
            try:
                results.append(dict(backend.run(case, tensors)))
            except RuntimeError:  # a refusal
                results.append({})
            finally:
                found = guard.disarm()
            assert found == (), (name, case, found)
        for output, value in results[0].items():
            assert torch.equal(value.nan_to_num(7.0), results[1][output].nan_to_num(7.0)), (name, case)


def within_healthy_kernels() -> None:
    lengths = ((1, 1), (7, 33), (64, 64), (65, 31), (129, 129))
    masks = get_args(config.Mask)
    layouts = [one for one in get_args(config.Layout) if one != "varlen"]
    for turn, head_dim in enumerate((8, 13, 32, 72, 100, 128, 200, 256, 512)):
        for number, dtype in enumerate(get_args(config.Dtype)):
            q, kv = lengths[(turn + number) % len(lengths)]
            healthy(
                Case(
                    batch=1 + turn % 2,
                    heads=4,
                    heads_kv=(4, 2, 1)[(turn + number) % 3],
                    seqlen_q=q,
                    seqlen_kv=kv,
                    head_dim=head_dim,
                    head_dim_v=head_dim,
                    dtype=dtype,
                    mask=masks[(3 * turn + number) % (len(masks) - 1)],
                    layout=layouts[(turn + 2 * number) % len(layouts)],
                )
            )


# ---- layouts: with the library and without -----------------------------------------------------------


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Draw a small case with any layout, mask and gradient layout."""
    heads_kv = draw(st.integers(1, 3))
    layout = draw(st.sampled_from(get_args(config.Layout)))
    masks = ("none",) if layout == "varlen" else get_args(config.Mask)
    return Case(
        dtype=draw(st.sampled_from(get_args(config.Dtype))),
        head_dim=draw(st.integers(1, 20)),
        head_dim_v=draw(st.integers(1, 20)),
        heads=heads_kv * draw(st.integers(1, 2)),
        heads_kv=heads_kv,
        batch=draw(st.integers(1, 3)),
        seqlen_q=draw(st.integers(0, 40)),
        seqlen_kv=draw(st.integers(0, 40)),
        mask=draw(st.sampled_from(masks)),
        layout=layout,
        grad_out=draw(st.sampled_from(get_args(config.GradOut))),
        seed=draw(st.integers(0, 9)),
    )


def check_layouts(guard: Guard) -> None:
    @settings(max_examples=150, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(cases())
    def bit_for_bit(case: Case) -> None:
        given_ = make(case, CPU)
        tensors = guard.place(given_)
        before, after = named(given_), named(tensors)
        assert before.keys() == after.keys()
        assert (tensors.lengths_q, tensors.lengths_kv) == (given_.lengths_q, given_.lengths_kv)
        for name, one in before.items():
            other = after[name]
            assert other.shape == one.shape
            assert other.dtype is one.dtype
            assert other.stride() == one.stride()
            assert other.storage_offset() == one.storage_offset()
            assert other.untyped_storage().nbytes() == one.untyped_storage().nbytes()
            assert bytes_of(other) == bytes_of(one)
        shares = {(a, b) for a in before for b in before if ends(before[a]) == ends(before[b])}
        assert shares == {(a, b) for a in after for b in after if ends(after[a]) == ends(after[b])}
        assert seen(guard, lambda: [value.clone() for value in after.values()]) == []
        assert [bytes_of(one) for one in after.values()] == [bytes_of(one) for one in before.values()]

    bit_for_bit()


def bytes_of(tensor: Tensor) -> bytes:
    start, end = ends(tensor)
    return ctypes.string_at(start, end - start) if end > start else b""


def test_layouts_without_the_library() -> None:
    check_layouts(Guard())


# ---- without the library -----------------------------------------------------------------------------


def test_without_the_library_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CC", raising=False)
    for name, value in environment().items():
        monkeypatch.setenv(name, value)
    assert Guard().covers == "inputs, by value only: no C compiler"
    monkeypatch.delenv(ABSENT)
    assert Guard().covers == "inputs, by value only: the library is not preloaded"


def test_without_the_library_writes_show() -> None:
    guard = Guard()
    tensors = guard.place(make(PLAIN, CPU))
    for name, tensor in named(tensors).items():
        start, end = ends(tensor)
        assert seen(guard, partial(write, end)) == [Breach(name, "write", 0, 4)]
        assert seen(guard, partial(write, end + 4092)) == [Breach(name, "write", 4092, 4)]
        assert seen(guard, partial(write, start - 4)) == [Breach(name, "write", -4, 4)]
        assert seen(guard, partial(ctypes.memset, start - 6, 1, end - start + 9)) == [
            Breach(name, "write", -6, 6),
            Breach(name, "write", 0, 3),
        ]


@pytest.mark.parametrize("zone", [NAN, FINITE])
def test_without_the_library_a_read_brings_the_zone(zone: int) -> None:
    guard = Guard()
    tensors = guard.place(make(PLAIN, CPU))
    got: list[bytes] = []
    for tensor in named(tensors).values():
        start, end = ends(tensor)
        assert seen(guard, partial(look_around, start, end, 4096, got), 0, zone) == []
    assert got == [bytes([zone]) * 4096] * 10


def test_tensors_without_a_byte_and_on_other_devices_come_back() -> None:
    guard = Guard()
    empty = make(structs.replace(PLAIN, seqlen_q=0), CPU)
    tensors = guard.place(empty)
    assert tensors.q is empty.q
    assert tensors.k is not empty.k
    assert torch.equal(tensors.k, empty.k)
    elsewhere = make(PLAIN, torch.device("meta"))
    assert guard.place(elsewhere) is elsewhere


# ---- the process with the library --------------------------------------------------------------------


class Host:
    """The process with the library, and how it is told what to run."""

    def __init__(self, added: dict[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            env={**os.environ, **added, "OMP_NUM_THREADS": "2", "OMP_WAIT_POLICY": "PASSIVE"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, name: str) -> tuple[int, str]:
        """Return the exit code of one function in a fork, and what it printed."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(name + "\n")
        self._process.stdin.flush()
        code, said = json.loads(self._process.stdout.readline())
        return code, said

    def close(self) -> None:
        self._process.communicate()


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        found = build()
        if found in {"no C compiler", "not Linux"}:
            pytest.skip(str(found))  # the fallback has tests of its own
        assert isinstance(found, Path), found
        host = Host(environment())
    yield host
    host.close()


@pytest.mark.parametrize("name", sorted(name for name in globals() if name.startswith("within_")))
def test_with_the_library(host: Host, name: str) -> None:
    code, said = host.run(name)
    assert code == 0, said


@pytest.mark.parametrize(
    ("name", "number"),
    [
        ("dies_of_an_unrelated_fault", signal.SIGSEGV),
        ("dies_of_a_signal_that_was_sent", signal.SIGSEGV),
        ("dies_of_a_write_into_code", signal.SIGSEGV),
        ("dies_of_freeing_twice", signal.SIGABRT),
    ],
)
def test_dies_as_it_would_have(host: Host, name: str, number: int) -> None:
    assert host.run(name)[0] == -number


def serve() -> None:
    """Run the functions that are named on standard input, each in a fork."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(2)
    for line in sys.stdin:
        out, into = os.pipe()
        child = os.fork()
        if not child:
            code = 1
            try:
                os.dup2(into, 1)
                os.dup2(into, 2)
                os.close(out)
                globals()[line.strip()]()
                code = 0
            except BaseException:  # noqa: BLE001  # whatever it is belongs into the report
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(code)
        os.close(into)
        with os.fdopen(out, errors="replace") as pipe:
            said = pipe.read()
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        sys.stdout.write(json.dumps([code, said[-6000:]]) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    serve()
