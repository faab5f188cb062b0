"""Which calls a trial makes, in which order, under what, and what it leaves behind."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Final

import pytest
import torch
from msgspec import structs

from attnprobe.backends.interface import Outputs, Refusal
from attnprobe.config import Case, Earlier, Layout
from attnprobe.device.cpu import cpu_device
from attnprobe.device.interface import Device
from attnprobe.probe.inputs import Tensors, make
from attnprobe.probe.memory import Breach, Run
from attnprobe.probe.poison import FINITE_FILL, NAN_FILL
from attnprobe.probe.trial import Trial, as_in_a_job, busy, earlier_case

CPU: Final = torch.device("cpu")
FACTS: Final = cpu_device()
A: Final = (NAN_FILL, FINITE_FILL)
B: Final = (FINITE_FILL, NAN_FILL)
ZONE_OF_A: Final = (FINITE_FILL, FINITE_FILL)
CASE: Final = Case(heads=2, heads_kv=1, seqlen_q=3, seqlen_kv=5, head_dim=8, head_dim_v=16, seed=11)
TENSORS: Final = make(CASE, CPU)
Setting = tuple[int, int]
Kernel = Callable[[Setting | None, int], float]
"""What a kernel computes under a setting (None: none is armed) at its n-th armed call."""


@pytest.fixture(autouse=True)
def _process_state() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
    torch.set_deterministic_debug_mode("default")


class Noted:
    """One call of a backend: what it was given, and what held around it."""

    def __init__(self, case: Case, tensors: Tensors, setting: Setting | None) -> None:
        self.case = case
        self.tensors = tensors
        self.setting = setting
        self.threads = torch.get_num_threads()
        self.deterministic = torch.get_deterministic_debug_mode()
        self.drawn = float(torch.rand(()))
        self.beside = threading.active_count()


class Bench:
    """A backend and the memories around it, both noting what is done with them."""

    def __init__(self, kernel: Kernel = lambda _, __: 1.0, refuses: str = "") -> None:
        self.kernel = kernel
        self.refuses = refuses
        self.calls: list[Noted] = []
        self.armed: Setting | None = None
        self.disarmed = 0

    def arm(self, fill: int, zone: int) -> None:
        assert self.armed is None
        self.armed = (fill, zone)

    def disarm(self) -> tuple[Breach, ...]:
        assert self.armed is not None
        self.armed = None
        self.disarmed += 1
        return (Breach("q", "read", self.disarmed),)

    def declares(self, case: Case, device: Device) -> Refusal | None:
        assert device is FACTS
        return Refusal(self.refuses) if case.dtype == self.refuses else None

    def run(self, case: Case, tensors: Tensors) -> Outputs:
        self.calls.append(Noted(case, tensors, self.armed))
        number = sum(call.setting is not None for call in self.calls)
        return Outputs(out=torch.tensor([self.kernel(self.armed, number)]))

    def settings(self) -> list[Setting | None]:
        return [call.setting for call in self.calls]


def runs(bench: Bench, case: Case = CASE, threads: int = 1) -> list[Run]:
    tensors = TENSORS if case.dtype == "float32" else make(case, CPU)
    return Trial(bench, case, tensors, bench, CPU, threads).runs(FACTS)


def follows_memory(setting: Setting | None, _: int) -> float:
    return 1.0 if setting == A else 2.0


def follows_zone(setting: Setting | None, _: int) -> float:
    return 1.0 if setting is None or setting[1] == FINITE_FILL else 2.0


def never_repeats(_: Setting | None, number: int) -> float:
    return float(number)


DETERMINISTIC: Final = structs.replace(CASE, deterministic=True)
WHOLE: Final = [A, B, A, B, ZONE_OF_A, A, B]


@pytest.mark.parametrize(
    ("kernel", "case", "expected"),
    [
        (lambda _, __: 1.0, CASE, [A, B]),
        (lambda _, __: float("nan"), CASE, [A, B]),
        (lambda _, __: 1.0, DETERMINISTIC, [A, B, A]),
        (follows_memory, CASE, WHOLE),
        (follows_memory, DETERMINISTIC, WHOLE),
        (follows_zone, CASE, WHOLE),
        (never_repeats, CASE, [A, B, A]),
        (never_repeats, DETERMINISTIC, [A, B, A]),
        (lambda _, number: float(number == 2), CASE, WHOLE),
        (lambda _, number: float(number == 3), CASE, [A, B]),
    ],
    ids=[
        "steady",
        "always NaN",
        "steady and deterministic",
        "follows memory",
        "follows memory and deterministic",
        "follows the zone",
        "never repeats",
        "never repeats and deterministic",
        "differs once, in the second",
        "differs later than anyone looks",
    ],
)
def test_which_settings_are_run(kernel: Kernel, case: Case, expected: list[Setting]) -> None:
    bench = Bench(kernel)
    found = runs(bench, case)
    assert bench.settings() == expected
    assert [(run.fill, run.zone) for run in found] == expected
    assert [float(run.outputs["out"]) for run in found] == pytest.approx(
        [kernel(setting, number) for number, setting in enumerate(expected, start=1)], nan_ok=True
    )
    loaded = kernel(A, 1) == kernel(B, 2) and case.deterministic
    assert [run.loaded for run in found] == [False] * (len(found) - 1) + [loaded]


def test_all_outputs_of_a_run_are_looked_at() -> None:
    class Two(Bench):
        def run(self, case: Case, tensors: Tensors) -> Outputs:
            return Outputs(out=torch.zeros(1), dq=super().run(case, tensors)["out"])

    bench = Two(follows_memory)
    runs(bench)
    assert bench.settings() == WHOLE


def test_only_the_loaded_run_has_threads_beside_it() -> None:
    bench = Bench()
    before = threading.active_count()
    found = runs(bench, DETERMINISTIC)
    assert [run.loaded for run in found] == [False, False, True]
    assert [call.beside - before for call in bench.calls] == [0, 0, 2]
    assert threading.active_count() == before


def test_what_was_touched_outside_goes_with_its_run() -> None:
    found = runs(Bench(follows_memory))
    assert [run.breaches for run in found] == [(Breach("q", "read", n),) for n in range(1, 8)]


@pytest.mark.parametrize("kernel", [lambda _, __: 1.0, follows_memory, never_repeats])
def test_every_call_draws_the_same_random_numbers(kernel: Kernel) -> None:
    bench = Bench(kernel)
    runs(bench, DETERMINISTIC)
    torch.manual_seed(CASE.seed)
    assert {call.drawn for call in bench.calls} == {float(torch.rand(()))}


@pytest.mark.parametrize("error", [RuntimeError, MemoryError, KeyboardInterrupt])
@pytest.mark.parametrize("at", [1, 2, 3, 5])
def test_an_exception_comes_out_and_nothing_stays_armed(error: type[BaseException], at: int) -> None:
    def raises(setting: Setting | None, number: int) -> float:
        if number == at:
            raise error
        return follows_memory(setting, number)

    bench = Bench(raises)
    torch.set_num_threads(2)
    with pytest.raises(error):
        runs(bench, DETERMINISTIC, threads=2)
    assert bench.armed is None
    assert bench.disarmed == len(bench.calls) == at
    assert torch.get_deterministic_debug_mode() == 0
    assert torch.get_num_threads() == 1


# The call before.

EARLIER: Final[tuple[Earlier, ...]] = ("other-data", "other-strides", "other-dtype")


def test_without_a_call_before_there_is_none() -> None:
    assert earlier_case(CASE) is None
    bench = Bench()
    runs(bench)
    assert bench.settings() == [A, B]


@pytest.mark.parametrize("earlier", EARLIER)
@pytest.mark.parametrize("kernel", [lambda _, __: 1.0, follows_memory, never_repeats])
def test_the_call_before_is_one_and_sees_memory_as_it_is(earlier: Earlier, kernel: Kernel) -> None:
    bench = Bench(kernel)
    found = runs(bench, structs.replace(CASE, earlier=earlier))
    before, *then = bench.calls
    assert before.setting is None
    assert None not in [call.setting for call in then]
    assert len(found) == len(then)
    assert before.case.earlier == "nothing"
    assert {call.case.earlier for call in then} == {earlier}


def same_values(one: Tensors, other: Tensors) -> bool:
    return all(torch.equal(getattr(one, name), getattr(other, name)) for name in ("q", "k", "v", "grad_out"))


@pytest.mark.parametrize("earlier", EARLIER)
@pytest.mark.parametrize("layout", ["contiguous", "transposed", "packed", "expanded", "inner-stride"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_call_before_has_the_same_shape_and_differs_in_what_it_says(
    earlier: Earlier, layout: Layout, dtype: str
) -> None:
    case = structs.replace(CASE, earlier=earlier, layout=layout, dtype=dtype, batch=2, heads_kv=2)
    bench = Bench()
    own = make(case, CPU)
    Trial(bench, case, own, bench, CPU, 1).runs(FACTS)
    before = bench.calls[0]
    for name in ("q", "k", "v", "grad_out"):
        assert getattr(before.tensors, name).shape == getattr(own, name).shape
    assert (before.tensors.q.dtype == own.q.dtype) is (earlier != "other-dtype")
    strides = [[x.stride() for x in (t.q, t.k, t.v)] for t in (before.tensors, own)]
    assert (strides[0] == strides[1]) is (earlier != "other-strides")
    assert not same_values(before.tensors, own)
    same = before.case.softmax_scale == case.softmax_scale
    assert same is (earlier != "other-data")


def test_the_call_before_is_made_as_the_case_is() -> None:
    case = structs.replace(DETERMINISTIC, earlier="other-data")
    bench = Bench()
    runs(bench, case, threads=2)
    assert {(call.threads, call.deterministic) for call in bench.calls} == {(2, 2)}


@pytest.mark.parametrize("error", [RuntimeError, MemoryError, NotImplementedError])
@pytest.mark.parametrize("earlier", EARLIER)
def test_what_becomes_of_the_call_before_is_nobodys_business(
    earlier: Earlier, error: type[Exception]
) -> None:
    def raises(setting: Setting | None, _: int) -> float:
        if setting is None:
            raise error("not this one")
        assert torch.get_num_threads() == 2
        return 1.0

    bench = Bench(raises)
    found = runs(bench, structs.replace(DETERMINISTIC, earlier=earlier), threads=2)
    assert bench.settings() == [None, A, B, A]
    assert len(found) == 3
    assert torch.get_num_threads() == 1
    assert torch.get_deterministic_debug_mode() == 0


def test_an_interrupt_in_the_call_before_is_one() -> None:
    def raises(setting: Setting | None, _: int) -> float:
        if setting is None:
            raise KeyboardInterrupt
        return 1.0

    with pytest.raises(KeyboardInterrupt):
        runs(Bench(raises), structs.replace(CASE, earlier="other-data"))


def test_a_call_before_that_is_refused_is_not_made() -> None:
    bench = Bench(refuses="bfloat16")
    runs(bench, structs.replace(CASE, earlier="other-dtype"))
    assert bench.settings() == [A, B]


# State of the process.


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("raises", [False, True])
def test_a_job_has_its_state_and_takes_it_along(*, deterministic: bool, threads: int, raises: bool) -> None:
    case = structs.replace(CASE, deterministic=deterministic)
    torch.set_num_threads(1)

    def job() -> None:
        with as_in_a_job(case, CPU, threads):
            assert torch.get_num_threads() == threads
            assert torch.are_deterministic_algorithms_enabled() is deterministic
            assert not torch.is_deterministic_algorithms_warn_only_enabled()
            assert torch.initial_seed() == case.seed
            if raises:
                raise ValueError("over")

    if raises:
        with pytest.raises(ValueError, match="over"):
            job()
    else:
        job()
    assert torch.get_num_threads() == 1
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize("raises", [False, True])
def test_busy_threads_end_with_the_block(*, raises: bool) -> None:
    before = set(threading.enumerate())
    others: set[threading.Thread] = set()

    def block() -> None:
        with busy():
            others.update(set(threading.enumerate()) - before)
            assert all(other.is_alive() and other.daemon for other in others)
            if raises:
                raise ValueError("over")

    if raises:
        with pytest.raises(ValueError, match="over"):
            block()
    else:
        block()
    assert len(others) == 2
    assert not any(other.is_alive() for other in others)
    assert set(threading.enumerate()) == before
