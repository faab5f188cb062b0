"""What is not known is probed, once, in time; what goes wrong is said and raises nothing."""

from __future__ import annotations

import fcntl
import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from msgspec import structs

import attnprobe
from attnprobe.config import AttentionConfig, Case, config_of
from attnprobe.device.cpu import cpu_device
from attnprobe.ensure import ensure, plain
from attnprobe.errors import UsageError
from attnprobe.matrix.lint import faults
from attnprobe.matrix.schema import (
    SCHEMA,
    Backend,
    CaseRecord,
    Generator,
    Material,
    Matrix,
    Result,
    Rule,
    Run,
    sealed,
)
from attnprobe.matrix.store import encode, read_matrix
from attnprobe.run.probing import narrowed
from attnprobe.select.match import here
from attnprobe.verdict import Verdict

PAGE = Path(__file__).parents[1] / "docs/ensure.md"
SLUG = cpu_device().slug
MATH = ["torch-math"]
SMALL = AttentionConfig(pass_="backward", dtype="float32", head_dim=8, heads=1, seqlen_q=4)
OTHER = structs.replace(SMALL, head_dim=16, dtype="bfloat16")
"""Not what `small_matrix` proves: two axes away from what it scanned."""
SLEEPS = "import time\ndef attention(*arguments, **options):\n    time.sleep(3600)\n"
RIGHT = "from torch.nn.functional import scaled_dot_product_attention as attention\n"
# Prints what `ensure` returned as one line of JSON.
ASK = """
import json, sys
import attnprobe
configs = [attnprobe.AttentionConfig(**one) for one in json.loads(sys.argv[1])]
found = attnprobe.ensure(configs, **json.loads(sys.argv[2]))
print(json.dumps({
    "probed": found.probed, "reason": found.reason, "torch": "torch" in sys.modules,
    "digest": found.selector.digest if found.selector else None,
    "chosen": [found.selector.select(c, mode="veto").backend for c in configs] if found.selector else [],
}))
"""
FIELDS = {"pass_": "backward", "dtype": "float32", "head_dim": 8, "heads": 1, "seqlen_q": 4}


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the data directory of this test; nothing else of the user's is seen."""
    for name in [one for one in os.environ if one.startswith("ATTNPROBE_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("ATTNPROBE_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return tmp_path / "data"


@pytest.fixture
def mark(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Yield a word in the environment of all that this test starts, and check that none of it is left."""
    word = uuid.uuid4().hex
    monkeypatch.setenv("TEST_MARK", word)
    yield word
    deadline = time.monotonic() + 10
    while (left := marked(word)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert left == []


def marked(word: str) -> list[str]:
    return [said for process in psutil.process_iter() if (said := started_here(process, word))]


def started_here(process: psutil.Process, word: str) -> str:
    try:
        if process.pid != os.getpid() and process.environ().get("TEST_MARK") == word:
            return " ".join(process.cmdline())[:200]
    except (psutil.Error, OSError):
        pass
    return ""


def start(*configs: dict[str, Any], **options: Any) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", ASK, json.dumps(configs), json.dumps(options)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def answer(process: subprocess.Popen[str], timeout: float = 120) -> dict[str, Any]:
    stdout, stderr = process.communicate(timeout=timeout)
    assert process.returncode == 0, stderr
    found: dict[str, Any] = json.loads(stdout)
    return found


def wait_for(what: Callable[[], object], limit: float = 60) -> None:
    deadline = time.monotonic() + limit
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.05)


# What is probed, and where it goes.


@pytest.mark.usefixtures("mark")
def test_two_processes_at_once_probe_once_and_later_ones_not_at_all(data: Path) -> None:
    first, second = (start(FIELDS, backends=MATH) for _ in range(2))
    found = [answer(first), answer(second)]
    assert sorted(one["probed"] for one in found) == [0, 1]
    assert found[0]["digest"] == found[1]["digest"]
    for one in found:
        assert (one["reason"], one["torch"], one["chosen"]) == ("", False, MATH)
    own = data / f"{SLUG}.config.json"
    assert faults(own.read_bytes(), strict=True) == []
    matrix = read_matrix(own)
    assert [record.case for record in matrix.cases] == [
        Case(head_dim=8, head_dim_v=8, heads=1, heads_kv=1, seqlen_q=4, seqlen_kv=4)
    ]
    assert matrix.digest == found[0]["digest"]
    # A second time nothing is probed, and no process is started for it.
    begin = time.monotonic()
    again = ensure([SMALL], backends=MATH)
    assert time.monotonic() - begin < 2
    assert (again.probed, again.reason) == (0, "")
    assert again.selector is not None
    assert again.selector.select(plain(SMALL)).backend == "torch-math"
    assert own.read_bytes() == encode(matrix)
    # What the user asks of the matrix later is answered from the same file.
    assert attnprobe.load().digest == matrix.digest


def test_what_is_probed_is_added_to_the_users_scan(data: Path, small_matrix: Path) -> None:
    data.mkdir()
    scan = data / f"{SLUG}.quick.json"
    scan.write_bytes(small_matrix.read_bytes())
    forward = structs.replace(SMALL, pass_="forward", head_dim=24)
    found = ensure([SMALL, OTHER], backends=["torch-math", "flex-attention"])
    # The first is proven on torch-math, and was never asked of flex-attention, which refuses it here.
    assert (found.probed, found.reason) == (2, "")
    assert found.selector is not None
    assert found.selector.source == str(scan)
    matrix = read_matrix(scan)
    assert len(matrix.runs) == 2
    assert faults(scan.read_bytes(), strict=True) == []
    for config in (SMALL, OTHER):
        assert found.selector.select(plain(config), backends=MATH).backend == "torch-math"
    before = attnprobe.load(small_matrix)
    for record in before.matrix.cases:
        config = config_of(record.case)
        for name in ("torch-math", "torch-flash"):
            old, new = (s.select(config, backends=[name]).candidates[0] for s in (before, found.selector))
            assert new.status == old.status or (old.status, new.status) == ("unrefuted", "proven")
    # A refusal of one configuration is no rule on others.
    refused = found.selector.select(plain(OTHER), backends=["flex-attention"]).candidates[0]
    assert (refused.status, refused.verdict) == ("denied", Verdict.REFUSED)
    assert "does not support backward on CPU" in refused.reason
    other = found.selector.select(plain(forward), backends=["flex-attention"]).candidates[0]
    assert other.status == "unknown"
    assert sorted(one.name for one in data.iterdir()) == [f".{SLUG}.ensure.lock", scan.name]


@pytest.mark.slow
def test_a_scan_of_other_builds_stays_and_what_it_denied_is_probed_again(
    data: Path, small_matrix: Path
) -> None:
    data.mkdir()
    matrix = read_matrix(small_matrix)
    rule = Rule(id="r", when={}, verdict=Verdict.WRONG, witness=matrix.cases[0].id, failing=1)
    older = [
        structs.replace(
            b,
            rules=(rule,),
            cases=(),
            materials=tuple(structs.replace(m, version="2.0") for m in b.materials),
        )
        for b in matrix.backends
    ]
    stale = data / f"{SLUG}.standard.json"
    stale.write_bytes(encode(sealed(structs.replace(matrix, backends=tuple(older)))))
    content = stale.read_bytes()
    found = ensure([SMALL], backends=MATH)
    assert (found.probed, found.reason) == (1, "")
    assert found.selector is not None
    assert found.selector.source == str(data / f"{SLUG}.config.json")
    assert found.selector.select(plain(SMALL)).backend == "torch-math"
    assert stale.read_bytes() == content
    assert ensure([SMALL], backends=MATH).probed == 0
    # What was ensured with other builds is replaced, backend by backend.
    own = Path(found.selector.source)
    mine = read_matrix(own)
    old = [
        structs.replace(b, materials=(structs.replace(b.materials[0], digest="old"),)) for b in mine.backends
    ]
    extra = structs.replace(mine.backends[0], name="torch-flash")
    own.write_bytes(encode(sealed(structs.replace(mine, backends=(*old, extra)))))
    found = ensure([SMALL], backends=MATH)
    assert (found.probed, found.reason) == (1, "")
    names = {b.name: b for b in read_matrix(own).backends}
    assert names["torch-math"].materials == mine.backends[0].materials
    assert names["torch-flash"].cases == extra.cases


@pytest.mark.slow
def test_a_matrix_elsewhere_is_not_written_and_not_lost(
    data: Path, small_matrix: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ATTNPROBE_MATRIX", str(small_matrix))
    content = small_matrix.read_bytes()
    found = ensure([OTHER, SMALL], backends=MATH)
    assert (found.probed, found.reason) == (1, "")
    assert small_matrix.read_bytes() == content
    assert found.selector is not None
    assert Path(found.selector.source).parent == data
    held = {record.id for record in found.selector.matrix.cases}
    assert held > {record.id for record in read_matrix(small_matrix).cases}
    assert ensure([OTHER, SMALL], backends=MATH).probed == 0


@pytest.mark.slow
def test_a_callable_is_known_while_its_file_is_unchanged(data: Path, tmp_path: Path) -> None:
    kernel = tmp_path / "mine.py"
    kernel.write_text(RIGHT)
    spec = [f"{kernel}:attention"]
    found = ensure([SMALL], backends=spec)
    assert (found.probed, found.reason) == (1, "")
    assert found.selector is not None
    assert found.selector.select(plain(SMALL)).backend == "mine:attention"
    assert ensure([SMALL], backends=spec).probed == 0
    # Without its name it cannot be found again, and nothing else is open.
    assert ensure([SMALL]).probed == 0
    kernel.write_text(RIGHT + "\n\ndef other(*a):\n    pass\n")
    found = ensure([SMALL], backends=spec)
    assert (found.probed, found.reason) == (1, "")
    assert data.is_dir()
    kernel.write_text(f"{RIGHT}right = attention\ndef attention(*a, **b):\n    return right(*a, **b) * 1.5\n")
    found = ensure([SMALL], backends=spec)
    assert (found.probed, found.reason) == (1, "")
    assert found.selector is not None
    (one,) = found.selector.select(plain(SMALL)).candidates
    assert (one.status, one.verdict, one.expired) == ("denied", Verdict.WRONG, False)
    # One that refuses all is not here, and is said to be.
    kernel.write_text("def attention(*arguments, **options):\n    raise ValueError('not this one')\n")
    found = ensure([SMALL], backends=spec)
    assert (found.probed, found.reason) == (
        0,
        "no backend to probe: mine:attention: ValueError: not this one",
    )


@pytest.mark.slow
def test_what_stays_unknown_does_not_grow_the_file(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "of_no_distribution.py").write_text(RIGHT)
    monkeypatch.syspath_prepend(tmp_path)
    spec = ["of_no_distribution:attention"]
    first = ensure([SMALL], backends=spec)
    assert first.probed == 1
    assert first.reason.startswith("probed, and still not known: of_no_distribution:attention: expired: ")
    content = (data / f"{SLUG}.config.json").read_bytes()
    assert ensure([SMALL], backends=spec).probed == 1
    assert (data / f"{SLUG}.config.json").read_bytes() == content


def test_what_is_not_installed_any_more_is_not_probed(data: Path) -> None:
    matrix = proven()
    gone = Backend(name="gone", status="probed", materials=(Material(name="no-such-library", version="1"),))
    data.mkdir()
    path = data / f"{SLUG}.quick.json"
    path.write_bytes(encode(sealed(structs.replace(matrix, backends=(*matrix.backends, gone)))))
    found = ensure([SMALL])
    assert (found.probed, found.reason) == (0, "")
    assert found.selector is not None
    assert found.selector.select(plain(SMALL)).backend == "torch-math"


# What takes too long.


@pytest.mark.usefixtures("mark", "data")
def test_a_hanging_backend_is_ended_in_time_and_not_tried_by_each(tmp_path: Path) -> None:
    kernel = tmp_path / "sleeps.py"
    kernel.write_text(SLEEPS)
    begin = time.monotonic()
    both = [start(FIELDS, backends=[f"{kernel}:attention"], time_limit=8) for _ in range(2)]
    found = [answer(one) for one in both]
    assert time.monotonic() - begin < 8 + 6
    for one in found:
        assert (one["probed"], one["digest"]) == (0, None)
        assert one["reason"] == "probing took longer than 8 s and was stopped"


@pytest.mark.slow
@pytest.mark.usefixtures("mark", "data")
def test_a_scan_that_does_not_stop_is_killed(tmp_path: Path) -> None:
    kernel = tmp_path / "stops.py"
    # Stops the scan itself: its worker's parent's parent.
    kernel.write_text(
        "import os, psutil, signal\nos.kill(psutil.Process(os.getppid()).ppid(), signal.SIGSTOP)\n"
    )
    begin = time.monotonic()
    found = ensure([SMALL], backends=[f"{kernel}:attention"], time_limit=16)
    assert 16 <= time.monotonic() - begin < 16 + 6
    assert found.reason == "probing took longer than 16 s and was killed"


@pytest.mark.slow
@pytest.mark.usefixtures("data")
def test_whoever_waits_goes_on_where_the_prober_is_killed(tmp_path: Path, mark: str) -> None:
    kernel = tmp_path / "sleeps.py"
    kernel.write_text(f"open({str(tmp_path / 'began')!r}, 'w').close()\n{SLEEPS}")
    first = start(FIELDS, backends=[f"{kernel}:attention"], time_limit=300)
    wait_for((tmp_path / "began").exists)
    second = start(FIELDS, backends=MATH, time_limit=60)
    time.sleep(1)
    assert second.poll() is None
    first.send_signal(signal.SIGKILL)
    first.communicate()
    found = answer(second)
    assert (found["probed"], found["reason"]) == (1, "")
    assert marked(mark) == []


@pytest.mark.usefixtures("mark")
def test_whoever_waits_does_so_for_so_long(data: Path) -> None:
    data.mkdir()
    with (data / f".{SLUG}.ensure.lock").open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        begin = time.monotonic()
        found = ensure([SMALL], wait_limit=0.5)
        assert 0.5 <= time.monotonic() - begin < 2
        assert (found.selector, found.probed) == (None, 0)
        assert found.reason == "another process is still probing after 0.5 s"
    # Nothing is waited for where nothing is missing.
    matrix = proven()
    (data / f"{SLUG}.config.json").write_bytes(encode(matrix))
    with (data / f".{SLUG}.ensure.lock").open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert ensure([SMALL], backends=MATH, wait_limit=0).reason == ""


def proven() -> Matrix:
    """Return a matrix of this machine in which SMALL passed on torch-math."""
    torch = here().material("torch")
    assert torch is not None
    case = Case(head_dim=8, head_dim_v=8, heads=1, heads_kv=1, seqlen_q=4, seqlen_kv=4)
    backend = Backend(name="torch-math", status="probed", materials=(torch,), cases=(Result(id=case.id),))
    run = Run(
        started="a",
        finished="b",
        level="config",
        seed=0,
        complete=True,
        strength=1,
        planned=1,
        executed=1,
        skipped=0,
    )
    return sealed(
        Matrix(
            schema=SCHEMA,
            digest="",
            devices=(cpu_device().record,),
            backends=(backend,),
            runs=(run,),
            generator=Generator(name="test", version="0"),
            cases=(CaseRecord(id=case.id, case=case),),
        )
    )


# What goes wrong.


@pytest.mark.parametrize("place", ["file/data", "file"])
def test_a_data_directory_that_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    monkeypatch.delenv("ATTNPROBE_MATRIX", raising=False)
    monkeypatch.setenv("ATTNPROBE_DATA_DIR", str(tmp_path / place))
    (tmp_path / "file").write_text("")
    found = ensure([SMALL], backends=MATH)
    assert (found.selector, found.probed) == (None, 0)
    assert found.reason.startswith("nothing was probed: ")
    assert str(tmp_path / "file") in found.reason


@pytest.mark.slow
def test_a_file_that_cannot_be_written_is_said_and_what_was_found_counts(data: Path) -> None:
    own = data / f"{SLUG}.config.json"
    own.mkdir(parents=True)
    found = ensure([SMALL], backends=MATH)
    assert found.probed == 1
    assert found.reason.startswith(f"{own} cannot be written: ")
    assert found.selector is not None
    assert found.selector.select(plain(SMALL)).backend == "torch-math"


@pytest.mark.parametrize("content", [b"", b"{", b'{"schema": "other/1"}'])
def test_a_matrix_that_cannot_be_read_is_said_and_left_alone(data: Path, content: bytes) -> None:
    data.mkdir()
    own = data / f"{SLUG}.quick.json"
    own.write_bytes(content)
    found = ensure([SMALL], backends=MATH)
    assert (found.selector, found.probed) == (None, 0)
    assert found.reason.startswith(str(own))
    assert own.read_bytes() == content


@pytest.mark.usefixtures("mark", "data")
def test_what_the_scan_refuses_is_the_reason() -> None:
    found = ensure([SMALL], backends=["no-such-backend"])
    assert (found.selector, found.probed) == (None, 0)
    assert found.reason.startswith("--backend no-such-backend is not known: known are ")
    assert "\n" not in found.reason


@pytest.mark.usefixtures("data")
@pytest.mark.parametrize(
    ("configs", "options", "what"),
    [
        ([], {}, "no configuration to ensure"),
        ([SMALL, AttentionConfig(heads=5, heads_kv=2)], {}, "heads=5 is no multiple"),
        ([AttentionConfig(head_dim=0)], {}, "no attention configuration"),
        ([AttentionConfig(mask="float", masked_rows="false")], {}, "contradicts itself"),
        ([SMALL], {"time_limit": 0}, "time_limit=0"),
        ([SMALL], {"wait_limit": -1}, "wait_limit=-1"),
        ([SMALL], {"time_limit": float("nan")}, "time_limit=nan"),
        ([SMALL], {"wait_limit": float("inf")}, "wait_limit=inf"),
        ([SMALL], {"backends": ["a/one.py:f", "b/one.py:f"]}, "have one name"),
    ],
)
def test_a_bad_request_raises(configs: list[AttentionConfig], options: dict[str, Any], what: str) -> None:
    with pytest.raises(UsageError, match=re.escape(what)):
        ensure(configs, **options)


# With torch.distributed.

RANK = """
import json, os, sys, time
import torch.distributed
rank, place, options = int(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])
torch.distributed.init_process_group(
    "gloo", init_method=f"file://{place}/store", rank=rank, world_size=4
)
import attnprobe
from attnprobe.config import AttentionConfig
open(f"{place}/began-{rank}", "w").close()
begin = time.monotonic()
found = attnprobe.ensure([AttentionConfig(**json.loads(sys.argv[4]))], **options)
print(json.dumps({
    "probed": found.probed, "reason": found.reason, "seconds": time.monotonic() - begin,
    "digest": found.selector.digest if found.selector else None,
}), flush=True)
os._exit(0)  # the job's own group may have lost a rank, and waits for it at exit
"""


def ranks(place: Path, **options: Any) -> list[subprocess.Popen[str]]:
    return [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(rank), str(place), json.dumps(options), json.dumps(FIELDS)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        for rank in range(4)
    ]


@pytest.mark.slow
@pytest.mark.usefixtures("mark", "data")
def test_all_ranks_get_what_rank_0_found(tmp_path: Path) -> None:
    found = [answer(one) for one in ranks(tmp_path, backends=MATH)]
    assert [one["probed"] for one in found] == [1, 0, 0, 0]
    assert {one["reason"] for one in found} == {""}
    assert len({one["digest"] for one in found}) == 1
    assert found[0]["digest"] is not None


@pytest.mark.slow
@pytest.mark.usefixtures("mark")
def test_ranks_go_on_where_the_probing_one_is_killed(data: Path, tmp_path: Path) -> None:
    kernel = tmp_path / "sleeps.py"
    kernel.write_text(f"open({str(tmp_path / 'probing')!r}, 'w').close()\n{SLEEPS}")
    data.mkdir()
    (data / f"{SLUG}.config.json").write_bytes(encode(proven()))
    every = ranks(tmp_path, backends=[f"{kernel}:attention"], time_limit=60)
    wait_for((tmp_path / "probing").exists)
    assert [one.poll() for one in every] == [None] * 4
    every[0].send_signal(signal.SIGKILL)
    killed = time.monotonic()
    every[0].communicate()
    for one in every[1:]:
        found = answer(one, timeout=60)
        assert found["reason"].startswith("rank 0 was not heard: ")
        # What was on disk counts for every one of them.
        assert (found["probed"], found["digest"]) == (0, proven().digest)
    assert time.monotonic() - killed < 10


@pytest.mark.slow
@pytest.mark.usefixtures("mark", "data")
def test_ranks_go_on_where_rank_0_is_stopped(tmp_path: Path) -> None:
    kernel = tmp_path / "sleeps.py"
    kernel.write_text(f"open({str(tmp_path / 'probing')!r}, 'w').close()\n{SLEEPS}")
    every = ranks(tmp_path, backends=[f"{kernel}:attention"], time_limit=14, wait_limit=0)
    wait_for((tmp_path / "probing").exists)
    every[0].send_signal(signal.SIGSTOP)
    try:
        for one in every[1:]:
            found = answer(one, timeout=120)
            assert found["reason"].startswith("rank 0 was not heard: ")
            assert found["seconds"] < 14 + 30 + 10
    finally:
        every[0].send_signal(signal.SIGKILL)
        every[0].communicate()


# Rules of few cases.


def test_rules_are_no_wider_than_what_was_seen() -> None:
    matrix = proven()
    (backend,) = matrix.backends
    good = matrix.cases[0].case
    twin = structs.replace(good, seed=1)
    wrong = structs.replace(good, layout="packed")
    refused = structs.replace(good, alibi=True)
    results = (
        Result(id=good.id),
        Result(id=twin.id, verdict=Verdict.CRASHED),
        Result(id=wrong.id, verdict=Verdict.WRONG),
        Result(id=refused.id, verdict=Verdict.REFUSED),
    )
    rules = (
        Rule(id="a", when={"alibi": ("on",)}, verdict=Verdict.REFUSED, witness=refused.id, reason="no ALiBi"),
        Rule(id="b", when={"layout": ("packed",)}, verdict=Verdict.WRONG, witness=wrong.id),
        Rule(id="c", when={}, verdict=Verdict.CRASHED, witness=twin.id, cases=(twin.id,)),
    )
    cases = tuple(CaseRecord(id=one.id, case=one) for one in (good, twin, wrong, refused))
    seen = structs.replace(backend, rules=rules, cases=results)
    whole = sealed(structs.replace(matrix, backends=(seen,), cases=cases))
    (found,) = narrowed(whole).backends
    by_verdict = {rule.verdict: rule for rule in found.rules}
    assert len(found.rules) == 3
    assert by_verdict[Verdict.WRONG] == rules[1]
    assert by_verdict[Verdict.CRASHED] == rules[2]
    assert len(by_verdict[Verdict.REFUSED].when) > 15
    assert by_verdict[Verdict.REFUSED].reason == "no ALiBi"
    assert faults(encode(sealed(narrowed(whole)))) == []
    # What was cut off is no rule yet; what passed beside its numbers stays allowed.
    cut = structs.replace(whole, runs=(structs.replace(whole.runs[0], complete=False),))
    (found,) = narrowed(cut).backends
    assert {len(rule.when) > 15 for rule in found.rules} == {True}
    assert {rule.cases for rule in found.rules} == {(), (twin.id,)}
    assert faults(encode(sealed(narrowed(cut)))) == []


# The name.


@pytest.mark.parametrize(
    "first",
    [
        "import attnprobe",
        "import attnprobe; attnprobe.ensure",
        "import attnprobe.ensure",
        "from attnprobe import ensure",
        "from attnprobe.ensure import ensure, Ensured",
    ],
)
def test_the_name_can_be_called_whatever_was_imported_first(first: str) -> None:
    script = f"""
        import sys
        {first}
        import attnprobe
        for _ in range(2):
            try:
                attnprobe.ensure([])
            except attnprobe.UsageError as error:
                assert "no configuration" in str(error)
        heavy = [name for name in ("torch", "click", "rich", "numpy") if name in sys.modules]
        assert not heavy, heavy
        assert attnprobe.Ensured.__name__ == "Ensured"
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=True)


# The page.


@pytest.mark.slow
def test_the_page(data: Path, tmp_path: Path) -> None:
    text = PAGE.read_text(encoding="utf-8")
    (snippet,) = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    exec(compile(snippet, "ensure.md", "exec"), {})  # noqa: S102  # our own page
    assert (data / f"{SLUG}.config.json").is_file()
    command = re.search(r"^    attnprobe (ensure --config job.toml) &&", text, re.MULTILINE)
    assert command is not None
    (tmp_path / "job.toml").write_text(
        '[[configs]]\ndtype = "float32"\nhead_dim = 16\nheads = 1\nseqlen_q = 4\n'
    )
    arguments = [sys.executable, "-m", "attnprobe", *command[1].split()]
    done = subprocess.run(arguments, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[1].startswith("torch-math ")
