"""What is done with a decision: let through, replaced, refused or only written down."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from attnprobe.axes import AXES, Level, levels_of
from attnprobe.config import AttentionConfig, Case, config_of
from attnprobe.errors import NoBackendError, UsageError
from attnprobe.integrations.guard import Guard
from attnprobe.select.selector import Selector

PLAIN = Case(head_dim=8, head_dim_v=8, seqlen_q=8, seqlen_kv=8)
ASKED = config_of(PLAIN)
ALL = {"pass": ("forward", "backward")}
FLASH, MATH, OTHER = "torch-flash", "torch-math", "my-kernel"


def lines(log: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]


def test_veto_is_the_default_and_lets_the_first_through_unless_it_is_denied(
    selector_of: Callable[..., Selector],
) -> None:
    guard = Guard(selector_of())
    assert guard.mode == "veto"
    assert guard.decide(ASKED, [FLASH, MATH]).backend == FLASH
    assert guard.decide(ASKED, [MATH, FLASH]).backend == MATH
    assert guard.decide(ASKED, [OTHER, MATH]).backend == OTHER  # nothing is known of it


def test_what_is_denied_is_replaced_by_the_next_that_the_host_can_run(
    selector_of: Callable[..., Selector],
) -> None:
    guard = Guard(selector_of({FLASH: ALL}))
    decision = guard.decide(ASKED, [FLASH, OTHER, MATH])
    assert decision.backend == OTHER
    assert [one.status for one in decision.candidates] == ["denied", "unknown", "unknown"]


def test_where_none_is_left_the_error_says_where_and_why(selector_of: Callable[..., Selector]) -> None:
    guard = Guard(selector_of({FLASH: ALL, MATH: ALL}))
    with pytest.raises(NoBackendError, match="no attention backend may run this call at layer 3") as caught:
        guard.decide(ASKED, [FLASH, MATH], where="layer 3")
    assert caught.value.exit_code == 1
    assert caught.value.decision.backend is None
    assert [one.backend for one in caught.value.decision.candidates] == [FLASH, MATH]
    assert str(caught.value).count("dq wrong") == 2
    with pytest.raises(NoBackendError) as nowhere:
        guard.decide(ASKED, [FLASH])
    assert " at " not in nowhere.value.what
    with pytest.raises(NoBackendError):
        guard.decide(ASKED, [])


def test_gate_lets_through_what_is_proven_and_with_a_strength_what_is_unrefuted(
    selector_of: Callable[..., Selector],
) -> None:
    other = structs.replace(PLAIN, mask="causal-top-left")
    selector = selector_of(passed=(PLAIN, structs.replace(PLAIN, dtype="bfloat16"), other))
    assert Guard(selector, "gate").decide(ASKED, [FLASH, MATH]).backend == FLASH
    unseen = structs.replace(ASKED, dtype="bfloat16", mask="causal-top-left")
    with pytest.raises(NoBackendError):
        Guard(selector, "gate").decide(unseen, [FLASH, MATH])
    assert Guard(selector, "gate", strength=1).decide(unseen, [FLASH, MATH]).backend == FLASH
    with pytest.raises(NoBackendError):
        Guard(selector, "gate", strength=2).decide(unseen, [FLASH, MATH])


@pytest.mark.parametrize(("mode", "strength"), [("vote", None), ("gate", 0), ("gate", 4)])
def test_a_mode_or_a_strength_that_does_not_exist(
    mode: Any, strength: int | None, selector_of: Callable[..., Selector]
) -> None:
    with pytest.raises(UsageError):
        Guard(selector_of(), mode, strength=strength)


def test_a_question_that_contradicts_itself_is_an_error_in_every_mode(
    selector_of: Callable[..., Selector], tmp_path: Path
) -> None:
    for mode in ("veto", "gate", "observe"):
        with pytest.raises(UsageError):
            Guard(selector_of(), mode, log=tmp_path / "log").decide(
                AttentionConfig(heads=3, heads_kv=2), [MATH]
            )


def test_observe_changes_nothing_and_writes_what_the_others_would_do(
    selector_of: Callable[..., Selector], tmp_path: Path
) -> None:
    log = tmp_path / "observed.jsonl"
    selector = selector_of({FLASH: ALL}, passed=(PLAIN,))
    guard = Guard(selector, "observe", log=log)
    assert guard.decide(ASKED, [FLASH, MATH], where="layer 0").backend == FLASH
    assert guard.decide(ASKED, [MATH, FLASH], where="layer 1").backend == MATH
    first, second = lines(log)
    assert (first["where"], first["host"], first["veto"], first["gate"]) == ("layer 0", FLASH, MATH, MATH)
    assert first["changes"] == ["gate", "veto"]
    assert (second["where"], second["host"], second["changes"]) == ("layer 1", MATH, [])
    assert first["matrix"] == selector.digest
    assert first["config"]["head_dim"] == 8
    assert [one["status"] for one in first["candidates"]] == ["denied", "proven"]


def test_observe_never_raises_for_what_is_denied_and_says_none(
    selector_of: Callable[..., Selector], tmp_path: Path
) -> None:
    log = tmp_path / "observed.jsonl"
    guard = Guard(selector_of({FLASH: ALL, MATH: ALL}), "observe", log=log)
    assert guard.decide(ASKED, [FLASH, MATH]).backend == FLASH
    (line,) = lines(log)
    assert (line["veto"], line["gate"], line["changes"]) == (None, None, ["gate", "veto"])


def test_a_place_and_configuration_is_written_once(
    selector_of: Callable[..., Selector], tmp_path: Path
) -> None:
    log = tmp_path / "observed.jsonl"
    guard = Guard(selector_of(), "observe", log=log)
    other = structs.replace(ASKED, batch=2)
    for _ in range(3):
        for place, config in itertools.product(("a", "b"), (ASKED, other)):
            guard.decide(config, [FLASH, MATH], where=place)
    assert [(line["where"], line["config"]["batch"]) for line in lines(log)] == [
        ("a", 1),
        ("a", 2),
        ("b", 1),
        ("b", 2),
    ]
    guard.decide(ASKED, [MATH], where="a")  # other candidates are another question
    assert len(lines(log)) == 5


def test_without_a_log_and_in_the_other_modes_nothing_is_written(
    selector_of: Callable[..., Selector], tmp_path: Path
) -> None:
    Guard(selector_of(), "observe").decide(ASKED, [MATH])
    Guard(selector_of(), "veto", log=tmp_path / "log").decide(ASKED, [MATH])
    Guard(selector_of(passed=(PLAIN,)), "gate", log=tmp_path / "log").decide(ASKED, [MATH])
    assert list(tmp_path.iterdir()) == []


def test_threads_and_ranks_share_a_log(selector_of: Callable[..., Selector], tmp_path: Path) -> None:
    """Two guards are two ranks: each writes a line once, and no line is torn."""
    log = tmp_path / "observed.jsonl"
    selector = selector_of({FLASH: ALL})
    ranks = [Guard(selector, "observe", log=log) for _ in range(2)]
    configs = [structs.replace(ASKED, batch=batch) for batch in range(1, 9)]
    start = threading.Barrier(8)

    def work(guard: Guard) -> None:
        start.wait()
        for config in configs:
            guard.decide(config, [FLASH, MATH], where="x" * 2000)

    threads = [threading.Thread(target=work, args=(ranks[n % 2],)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    batches = [line["config"]["batch"] for line in lines(log)]
    assert sorted(batches) == sorted(2 * list(range(1, 9)))


@st.composite
def denials(draw: st.DrawFn) -> dict[str, dict[str, tuple[Level, ...]]]:
    """Rules of one to three axes, a level each, for some backends."""
    rule = st.lists(st.sampled_from([axis for axis in AXES if not axis.hazard]), min_size=1, max_size=3)
    return {
        name: {axis.name: (draw(st.sampled_from([axis.plain, *axis.levels])),) for axis in draw(rule)}
        for name in (FLASH, MATH)
        if draw(st.booleans())
    }


@settings(max_examples=200, deadline=None)
@given(denied=denials(), names=st.permutations([FLASH, MATH, OTHER]))
def test_veto_takes_the_first_that_no_rule_covers(
    denied: dict[str, dict[str, tuple[Level, ...]]], names: list[str], selector_of: Callable[..., Selector]
) -> None:
    case = Case()  # every axis on its plain level
    at = levels_of(case)
    covered = {name for name, when in denied.items() if all(at[axis] in lv for axis, lv in when.items())}
    left = [name for name in names if name not in covered]
    assert Guard(selector_of(denied)).decide(config_of(case), names).backend == left[0]


def test_nothing_here_imports_a_host() -> None:
    code = "import sys, attnprobe.integrations.guard; print({'torch', 'transformers'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
