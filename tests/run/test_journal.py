from __future__ import annotations

import contextlib
import gc
import json
import random
from pathlib import Path

import pytest

from attnprobe.config import Case
from attnprobe.errors import AttnprobeError, NoVerdictError, UsageError
from attnprobe.run.journal import Header, Journal, journal_path
from attnprobe.run.protocol import Outcome
from attnprobe.verdict import Verdict

HEADER = Header(plan="p", identity="i")
CASES = [Case(seed=seed) for seed in range(5)]


def outcome(seed: int, backend: str = "one") -> Outcome:
    return Outcome(
        backend=backend,
        case=Case(seed=seed).id,
        verdict=Verdict.WRONG,
        outputs=("dq",),
        detail={"seed": seed, "é": [0.5]},
    )


@pytest.fixture
def written(tmp_path: Path) -> Path:
    """Return a journal of which the scan was killed after five outcomes on two backends."""
    path = tmp_path / ".m.json.journal"
    journal = Journal(path, HEADER, resume=False, durable=False)
    for seed, case in enumerate(CASES):
        journal.launch(case, ("one", "two"))
        for backend in ("one", "two"):
            journal.outcome(case, outcome(seed, backend))
    journal.close(keep=True)
    return path


def resumed(path: Path) -> dict[tuple[str, str], Outcome]:
    journal = Journal(path, HEADER, resume=True, durable=False)
    journal.close(keep=True)
    return journal.known


def test_what_was_learned_is_known_again(written: Path) -> None:
    assert resumed(written) == {
        (case.id, backend): outcome(seed, backend)
        for seed, case in enumerate(CASES)
        for backend in ("one", "two")
    }


def test_every_line_is_json_and_on_disk_at_once(tmp_path: Path) -> None:
    path = tmp_path / "j"
    journal = Journal(path, HEADER, resume=False, durable=True)
    assert len(path.read_bytes().splitlines()) == 1
    journal.launch(CASES[0], ("one",))
    assert CASES[0].id in path.read_text()
    journal.outcome(CASES[0], outcome(0))
    lines = path.read_text().splitlines()
    assert len(lines) == 3
    assert all(isinstance(json.loads(line), dict) for line in lines)
    journal.close(keep=True)


def test_a_finished_scan_leaves_none(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j", HEADER, resume=False, durable=False)
    journal.close(keep=False)
    assert list(tmp_path.iterdir()) == []


def test_it_lies_beside_the_output(tmp_path: Path) -> None:
    assert journal_path(tmp_path / "m.json") == tmp_path / ".m.json.journal"


def test_cut_off_anywhere_only_the_torn_line_is_lost(written: Path) -> None:
    content = written.read_bytes()
    whole = resumed(written)
    first = content.index(b"\n") + 1
    draw = random.Random(0)  # noqa: S311  # no secret
    for offset in [first, len(content) - 1, *(draw.randrange(first, len(content)) for _ in range(60))]:
        written.write_bytes(content[:offset])
        known = resumed(written)
        entries = content[:offset].count(b'\n{"case"') - (not content[:offset].endswith(b"\n"))
        assert len(known) >= entries - 1
        assert known.items() <= whole.items()
        # What is added now must not be glued to the torn line.
        journal = Journal(written, HEADER, resume=True, durable=False)
        journal.outcome(Case(seed=99), outcome(99))
        journal.close(keep=True)
        assert resumed(written) == {**known, (Case(seed=99).id, "one"): outcome(99)}


def test_a_launch_without_an_outcome_is_not_known(written: Path) -> None:
    journal = Journal(written, HEADER, resume=True, durable=False)
    journal.launch(Case(seed=50), ("one",))
    journal.close(keep=True)
    assert (Case(seed=50).id, "one") not in resumed(written)


@pytest.mark.parametrize(
    ("other", "why"),
    [
        (Header(plan="other", identity="i"), "the plan"),
        (Header(plan="p", identity="other"), "the device or an installed build"),
        (Header(journal=99, plan="p", identity="i"), ""),
    ],
)
def test_another_scans_journal_is_refused_and_kept(written: Path, other: Header, why: str) -> None:
    content = written.read_bytes()
    with pytest.raises(UsageError, match="cannot be resumed") as caught:
        Journal(written, other, resume=True, durable=False)
    assert why in caught.value.why
    assert caught.value.fix
    assert written.read_bytes() == content


@pytest.mark.parametrize(
    "content", [b"", b"\n", b"hello\n", b"\xff\x00", b"[]\n", b'{"plan": 1}\n', b'{"plan"']
)
def test_what_is_no_journal_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "j").write_bytes(content)
    with pytest.raises(UsageError, match="no journal"):
        Journal(tmp_path / "j", HEADER, resume=True, durable=False)
    assert (tmp_path / "j").read_bytes() == content


def test_nothing_to_resume(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="nothing to resume"):
        Journal(tmp_path / "j", HEADER, resume=True, durable=False)
    assert list(tmp_path.iterdir()) == []


def test_a_journal_that_cannot_be_read_or_written(tmp_path: Path) -> None:
    for resume in (True, False):
        with pytest.raises(UsageError, match="cannot be"):
            Journal(tmp_path, HEADER, resume=resume, durable=False)


def test_a_damaged_line_is_no_traceback(written: Path) -> None:
    content = written.read_bytes()
    draw = random.Random(1)  # noqa: S311  # no secret
    first = content.index(b"\n") + 1
    for _ in range(150):
        damaged = bytearray(content)
        damaged[draw.randrange(first, len(content))] ^= 1 << draw.randrange(8)
        written.write_bytes(bytes(damaged))
        with contextlib.suppress(AttnprobeError):
            resumed(written)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_told(tmp_path: Path) -> None:
    (tmp_path / "j").symlink_to("/dev/full")
    with pytest.raises(NoVerdictError, match="cannot be written") as caught:
        Journal(tmp_path / "j", HEADER, resume=False, durable=False)
    assert "No space left" in caught.value.why
    # A file that was left open shows here and not at the end of all tests.
    del caught
    gc.collect()


@pytest.mark.parametrize("resume", [False, True])
def test_a_second_scan_leaves_a_journal_in_use_alone(written: Path, *, resume: bool) -> None:
    before = written.read_bytes()
    first = Journal(written, HEADER, resume=True, durable=False)
    with pytest.raises(UsageError, match="another scan is writing"):
        Journal(written, HEADER, resume=resume, durable=False)
    assert written.read_bytes() == before
    first.outcome(CASES[0], outcome(9))
    first.close(keep=True)
    assert resumed(written)[CASES[0].id, "one"] == outcome(9)
