from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from attnprobe.config import Case
from attnprobe.errors import NoVerdictError, UsageError
from attnprobe.run.handle import WorkerHandle
from attnprobe.run.protocol import Outcome, Request, RunCase
from attnprobe.run.supervisor import Supervisor
from attnprobe.verdict import Evidence, Verdict

MISBEHAVIOURS = (
    "segfaults",
    "leaves_with_0",
    "leaves_with_1",
    "sys_exits",
    "sys_exits_with_0",
    "kills_itself",
    "aborts",
    "interrupts",
    "says_fatal",
    "says_fatal_on_stderr",
    "sys_exits_in_words",
    "chatters",
    "leaves_a_child",
    "leaves_a_child_and_dies",
    "leaves_a_session",
    "leaves_a_session_and_dies",
    "leaves_a_big_session_and_dies",
    "closes_everything",
    "hangs_up_and_goes_on",
    "talks_nonsense",
    "dies_later",
    "dies_once",
    "odd_words",
    "good",
)
HANGS = ("hangs_ignoring", "hangs_with_the_gil", "good")
# Forward only: the first backward pass of a fresh worker imports for half a second.
TINY = Case(
    pass_="forward", needs_grad="none", head_dim=8, head_dim_v=8, heads=1, heads_kv=1, seqlen_q=4, seqlen_kv=4
)
NEXT = Case(
    pass_="forward", needs_grad="none", head_dim=8, head_dim_v=8, heads=1, heads_kv=1, seqlen_q=5, seqlen_kv=5
)


@pytest.fixture(scope="module")
def supervisor(misbehaving: str, left_behind: Path) -> Iterator[Supervisor]:
    assert left_behind.exists()
    asked = ("torch-math", "torch-flash", *(f"{misbehaving}:{name}" for name in MISBEHAVIOURS))
    with Supervisor("cpu", asked, 30.0) as one:
        yield one


def outcomes(supervisor: Supervisor, case: Case, *names: str) -> dict[str, Outcome]:
    found = list(supervisor.run(case, names, {}))
    assert sorted(outcome.backend for outcome in found) == sorted(names)
    return {outcome.backend: outcome for outcome in found}


def among_neighbours(supervisor: Supervisor, name: str) -> Outcome:
    """Return the outcome of a backend that misbehaves between two that do not, then run a case more."""
    found = outcomes(supervisor, TINY, "torch-math", f"bad:{name}", "torch-flash")
    assert found["torch-math"].verdict is Verdict.OK
    assert found["torch-flash"].verdict is Verdict.OK
    after = outcomes(supervisor, NEXT, "torch-math", "bad:good", "torch-flash")
    assert {outcome.verdict for outcome in after.values()} == {Verdict.OK}
    return found[f"bad:{name}"]


def worker_of(supervisor: Supervisor) -> int:
    """Return the process of the worker, which is told late: 0 until somebody wants to know."""
    assert supervisor._worker is not None
    assert supervisor._is_born(supervisor._worker)
    return supervisor._worker.pid


def alive(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def gone_within(pids: list[int], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while any(alive(pid) for pid in pids):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def left(path: Path) -> list[int]:
    pids = [int(line) for line in path.read_text().split()]
    path.write_text("")
    return pids


@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("segfaults", "died of SIGSEGV"),
        ("leaves_with_0", "exited with code 0"),
        ("leaves_with_1", "exited with code 1"),
        ("sys_exits", "exited with code 1"),
        ("sys_exits_with_0", "exited with code 0"),
        ("kills_itself", "died of SIGKILL"),
        ("aborts", "died of SIGABRT"),
        ("interrupts", "exited with code"),
        ("says_fatal", "exited with code 3"),
        ("says_fatal_on_stderr", "exited with code 3"),
        ("sys_exits_in_words", "exited with code 1"),
    ],
)
def test_a_death_is_the_backends_own(supervisor: Supervisor, name: str, how: str) -> None:
    outcome = among_neighbours(supervisor, name)
    assert outcome.verdict is Verdict.CRASHED
    assert outcome.evidence is Evidence.MEASURED
    assert str(outcome.detail["how"]).startswith(how)
    if "fatal" in name or name.endswith("in_words"):
        assert outcome.detail["said"] == "FATAL: kernel not built"
    elif name != "interrupts":
        assert not {"children left"} & set(outcome.detail)


def test_a_crash_costs_a_fork_and_no_import(supervisor: Supervisor) -> None:
    zygote = supervisor._zygote
    assert zygote is not None
    imported = supervisor.import_seconds
    start = time.monotonic()
    for _ in range(10):
        outcome = outcomes(supervisor, TINY, "bad:leaves_with_1")["bad:leaves_with_1"]
        assert outcome.verdict is Verdict.CRASHED
        assert supervisor._zygote is zygote
    # Each is tried twice, so these were 20 workers.
    assert time.monotonic() - start < 10 * imported
    outcomes(supervisor, NEXT, "torch-math")
    assert psutil.Process(worker_of(supervisor)).ppid() == zygote.pid


def test_the_worker_lives_on_where_nothing_dies(supervisor: Supervisor) -> None:
    outcomes(supervisor, TINY, "torch-math")
    before = worker_of(supervisor)
    outcomes(supervisor, NEXT, "torch-flash", "bad:good")
    assert worker_of(supervisor) == before


def test_a_death_that_does_not_repeat_accuses_nobody(supervisor: Supervisor) -> None:
    outcome = among_neighbours(supervisor, "dies_once")
    assert outcome.verdict is Verdict.INCONCLUSIVE
    assert "once" in str(outcome.detail["how"])


def test_much_output_is_no_trouble(supervisor: Supervisor) -> None:
    assert among_neighbours(supervisor, "chatters").verdict is Verdict.OK


def test_an_error_in_odd_words_is_a_refusal(supervisor: Supervisor) -> None:
    assert among_neighbours(supervisor, "odd_words").verdict is Verdict.REFUSED


def test_a_backend_that_hangs_up_is_the_one_to_blame(supervisor: Supervisor) -> None:
    assert among_neighbours(supervisor, "closes_everything").verdict.ends_worker


@pytest.mark.parametrize("name", ["leaves_a_child_and_dies", "leaves_a_session_and_dies"])
def test_what_a_dead_backend_leaves_is_ended(supervisor: Supervisor, left_behind: Path, name: str) -> None:
    left(left_behind)
    outcome = among_neighbours(supervisor, name)
    assert outcome.verdict is Verdict.CRASHED
    assert outcome.detail["how"] == "exited with code 1"
    pids = left(left_behind)
    assert len(pids) == 2
    assert gone_within(pids, 5.0)
    if "session" in name:
        assert outcome.detail["children left"] == 1


def test_what_is_left_is_held_against_the_worker_that_left_it(
    supervisor: Supervisor, left_behind: Path
) -> None:
    left(left_behind)
    outcomes(supervisor, TINY, "bad:leaves_with_1", "torch-math")  # from here on there is a spare
    found = outcomes(supervisor, TINY, "bad:leaves_a_big_session_and_dies", "bad:leaves_with_1")
    assert found["bad:leaves_a_big_session_and_dies"].detail["children left"] == 1
    # It ended while what the other one left was still being killed.
    assert "children left" not in found["bad:leaves_with_1"].detail
    assert gone_within(left(left_behind), 5.0)


@pytest.mark.parametrize("name", ["hangs_up_and_goes_on", "talks_nonsense"])
def test_a_backend_that_breaks_the_conversation_is_ended(
    supervisor: Supervisor, left_behind: Path, name: str
) -> None:
    left(left_behind)
    outcome = among_neighbours(supervisor, name)
    assert outcome.verdict is Verdict.CRASHED
    assert outcome.detail["how"] == "hung up, and did not end"
    pids = left(left_behind)
    assert len(pids) == 2
    assert gone_within(pids, 1.0)


@pytest.mark.parametrize("name", ["leaves_a_child", "leaves_a_session"])
def test_what_a_living_backend_leaves_ends_with_its_worker(
    supervisor: Supervisor, left_behind: Path, name: str
) -> None:
    left(left_behind)
    assert among_neighbours(supervisor, name).verdict is Verdict.OK
    pids = left(left_behind)
    assert pids
    assert all(alive(pid) for pid in pids)
    supervisor._drop_worker()
    assert gone_within(pids, 5.0)


@pytest.mark.slow
def test_a_fork_that_comes_back_twice_does_not_end_the_scan(misbehaving: str, left_behind: Path) -> None:
    left(left_behind)
    names = ("torch-math", f"{misbehaving}:forks_and_both_return", f"{misbehaving}:good")
    with Supervisor("cpu", names, 30.0) as supervisor:
        found = outcomes(supervisor, TINY, "torch-math", "bad:forks_and_both_return")
        assert found["torch-math"].verdict is Verdict.OK
        # The copies have their own time to answer, also to what was asked of another.
        time.sleep(1.0)
        for case in (NEXT, TINY):
            after = outcomes(supervisor, case, "torch-math", "bad:good")
            assert not any(outcome.verdict.fails for outcome in after.values())
    assert gone_within(left(left_behind), 5.0)


def test_a_late_death_is_not_the_next_backends_failure(supervisor: Supervisor) -> None:
    assert outcomes(supervisor, TINY, "bad:dies_later")["bad:dies_later"].verdict is Verdict.OK
    time.sleep(0.6)
    after = outcomes(supervisor, NEXT, "torch-math", "torch-flash")
    assert {outcome.verdict for outcome in after.values()} <= {Verdict.OK, Verdict.INCONCLUSIVE}
    again = outcomes(supervisor, NEXT, "torch-math", "torch-flash")
    assert {outcome.verdict for outcome in again.values()} == {Verdict.OK}


def test_an_idle_workers_death_costs_no_verdict(supervisor: Supervisor) -> None:
    outcomes(supervisor, TINY, "torch-math")
    psutil.Process(worker_of(supervisor)).kill()
    found = outcomes(supervisor, NEXT, "torch-math", "torch-flash")
    assert {outcome.verdict for outcome in found.values()} == {Verdict.OK}


def test_a_spares_death_costs_no_verdict(supervisor: Supervisor) -> None:
    outcomes(supervisor, TINY, "bad:leaves_with_1", "torch-math")
    spare = supervisor._spare
    assert spare is not None
    outcomes(supervisor, NEXT, "torch-math")
    assert supervisor._is_born(spare)
    time.sleep(1.0)  # its answer is there; its end is not noticed before it is asked again
    psutil.Process(spare.pid).kill()
    found = outcomes(supervisor, TINY, "torch-math", "bad:leaves_with_1")
    assert found["bad:leaves_with_1"].verdict is Verdict.CRASHED


def test_a_run_inside_a_run_leaves_what_may_compile(
    supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    ask = WorkerHandle.ask

    def noted(self: WorkerHandle, request: Request) -> None:
        if isinstance(request, RunCase):
            asked.append(request.may_compile)
        ask(self, request)

    monkeypatch.setattr(WorkerHandle, "ask", noted)
    # As a scan does: a death is localised before the other backends' turn.
    for outcome in supervisor.run(TINY, ("bad:leaves_with_1", "torch-math"), {}, ("torch-flex",)):
        if outcome.backend != "torch-math":
            asked.clear()
            outcomes(supervisor, NEXT, "bad:good")
    assert asked == [(), ("torch-flex",)]


def test_a_zygote_that_is_lost_unnoticed_is_started_again(
    supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcomes(supervisor, TINY, "torch-math")
    supervisor._drop_worker()
    zygote = supervisor._zygote
    assert zygote is not None
    psutil.Process(zygote.pid).kill()
    zygote.wait(5.0)
    # The socket closes before the process can be waited for.
    monkeypatch.setattr(zygote, "poll", lambda: None)
    found = outcomes(supervisor, TINY, "torch-math", "torch-flash")
    assert {outcome.verdict for outcome in found.values()} == {Verdict.OK}


def test_an_interrupt_while_a_worker_is_born_ends_in_time(misbehaving: str) -> None:
    with Supervisor("cpu", ("torch-math", f"{misbehaving}:leaves_with_1"), 30.0) as supervisor:
        outcomes(supervisor, TINY, "bad:leaves_with_1", "torch-math")
        spare = supervisor._spare
        assert spare is not None
        # The word was taken from the socket, and the interrupt came before it was understood.
        if not spare.pid:
            assert supervisor._from_zygote(30.0) is not None
        start = time.monotonic()
    assert time.monotonic() - start < 30


def test_a_lost_zygote_is_started_again(supervisor: Supervisor) -> None:
    outcomes(supervisor, TINY, "torch-math")
    zygote = supervisor._zygote
    assert zygote is not None
    worker = worker_of(supervisor)
    psutil.Process(zygote.pid).kill()
    assert gone_within([worker], 5.0)
    found = outcomes(supervisor, NEXT, "torch-math", "torch-flash")
    assert not any(outcome.verdict.fails for outcome in found.values())
    again = outcomes(supervisor, TINY, "torch-math", "torch-flash")
    assert {outcome.verdict for outcome in again.values()} == {Verdict.OK}


def test_a_hang_is_ended_whatever_it_ignores(misbehaving: str) -> None:
    limit = 2.0
    before = {process.pid for process in psutil.Process().children(recursive=True)}
    with Supervisor("cpu", tuple(f"{misbehaving}:{name}" for name in HANGS), limit) as supervisor:
        start = time.monotonic()
        found = outcomes(supervisor, TINY, *(f"bad:{name}" for name in HANGS))
        assert found["bad:good"].verdict is Verdict.OK
        for name in HANGS[:-1]:
            assert found[f"bad:{name}"].verdict is Verdict.HUNG, name
            assert found[f"bad:{name}"].detail["how"] == "no answer within 2 s"
        assert time.monotonic() - start < 4 * limit + 10
        assert outcomes(supervisor, NEXT, "bad:good")["bad:good"].verdict is Verdict.OK
        assert supervisor._spare is not None
        assert supervisor._is_born(supervisor._spare)
        started = {process.pid for process in psutil.Process().children(recursive=True)} - before
        assert len(started) == 3, "the zygote, a worker and, after a death, a spare"
    assert gone_within(list(started), 5.0)


def test_leaving_leaves_no_process(misbehaving: str, left_behind: Path) -> None:
    left(left_behind)
    names = ("torch-math", f"{misbehaving}:leaves_a_session", f"{misbehaving}:leaves_a_child")
    before = {process.pid for process in psutil.Process().children(recursive=True)}
    with Supervisor("cpu", names, 30.0) as supervisor:
        outcomes(supervisor, TINY, "torch-math", "bad:leaves_a_session", "bad:leaves_a_child")
        started = {process.pid for process in psutil.Process().children(recursive=True)} - before
        assert len(started) >= 4
    assert gone_within([*started, *left(left_behind)], 5.0)


def test_a_backend_that_is_none_leaves_no_process(misbehaving: str) -> None:
    before = {process.pid for process in psutil.Process().children(recursive=True)}
    with pytest.raises(UsageError, match="has no such"), Supervisor("cpu", (f"{misbehaving}:such",), 30.0):
        pass
    assert {process.pid for process in psutil.Process().children(recursive=True)} == before


def test_a_backend_that_dies_at_import_is_named(tmp_path: Path) -> None:
    (tmp_path / "dead.py").write_text("import os\nprint('no such GPU', flush=True)\nos._exit(4)\n")
    with (
        pytest.raises((NoVerdictError, UsageError)) as caught,
        Supervisor("cpu", (f"{tmp_path / 'dead.py'}:x",), 30.0),
    ):
        pass
    assert re.search(r"dead\.py|no such GPU", str(caught.value))
