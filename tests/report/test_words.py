from __future__ import annotations

from typing import Any

import pytest
from syrupy.assertion import SnapshotAssertion

from attnprobe.axes import AXES, AXIS, Level
from attnprobe.matrix.schema import Matrix, Rates, Rule
from attnprobe.report.words import conditions, consequence, detail_lines, evidence_text, rule_text
from attnprobe.verdict import Verdict


def rule(verdict: Verdict = Verdict.WRONG, **fields: Any) -> Rule:
    return Rule(id="r", **{"when": {}, "verdict": verdict, **fields})


def test_every_level_has_words(snapshot: SnapshotAssertion) -> None:
    said = {
        axis.name: {str(level): conditions({axis.name: (level,)}) for level in axis.levels} for axis in AXES
    }
    assert said == snapshot
    for axis, words in said.items():
        assert len(set(words.values())) == len(AXIS[axis].levels), axis


def test_the_rules_of_the_handmade_matrix(handmade: Matrix, snapshot: SnapshotAssertion) -> None:
    flash = handmade.backends[0]
    details = {result.id: result.detail for result in flash.cases}
    said = [f"{rule_text(r, details[r.witness], 128)} | {evidence_text(r)}" for r in flash.rules]
    assert said == snapshot


@pytest.mark.parametrize(
    ("when", "said"),
    [
        ({}, "every case"),
        ({"pass": ("backward",)}, "backward"),
        ({"dtype": ("bfloat16", "float16")}, "bfloat16 or float16"),
        ({"head_dim": (64,)}, "head dim 64"),
        ({"head_dim": tuple(range(200, 257, 8))}, "head dim 200 to 256 by 8"),
        ({"head_dim": (8, 64, 72, 80, 256, 512)}, "head dim 8, 64 to 80 by 8, 256, 512"),
        ({"mask": tuple(level for level in AXIS["mask"].levels if level != "none")}, "mask not none"),
        ({"dtype": ("float32",), "dropout": ("on",), "pass": ("backward",)}, "backward, dropout, float32"),
    ],
)
def test_conditions(when: dict[str, tuple[Level, ...]], said: str) -> None:
    assert conditions(when) == said


def test_conditions_do_not_follow_the_order_in_the_file() -> None:
    when: dict[str, tuple[Level, ...]] = {"layout": ("packed",), "mask": ("bool",), "pass": ("backward",)}
    assert conditions(when) == conditions(dict(reversed(when.items())))


def test_a_factor_is_told_where_it_is_one() -> None:
    found = {"wrong": {"dq": {"factor": 128.0}, "dk": {"factor": 0.5}, "dv": {"elements": 3}}}
    assert consequence(rule(outputs=("dq", "dk")), found, 128) == (
        "dq, dk wrong, dq 128 times too large (S_kv times)"
    )
    assert consequence(rule(outputs=("dq",)), found, 64) == "dq wrong, dq 128 times too large"
    assert consequence(rule(outputs=("dq",)), found, 0) == "dq wrong, dq 128 times too large"


@pytest.mark.parametrize("verdict", [v for v in Verdict if v.fails])
def test_every_failing_verdict_has_words(verdict: Verdict) -> None:
    said = consequence(rule(verdict), {}, 0)
    assert said
    assert "_" not in said


def test_how_a_process_ended_is_told() -> None:
    assert consequence(rule(Verdict.CRASHED), {"how": "died of SIGSEGV"}, 0) == (
        "the process dies (died of SIGSEGV)"
    )


def test_a_refusal_gives_the_librarys_words() -> None:
    assert consequence(rule(Verdict.REFUSED, reason="no kernel"), {}, 0) == "refused: no kernel"


@pytest.mark.parametrize(
    ("right", "end"), [((), "wrong"), (("a",), "; a is right"), (("a", "b"), "; a, b are right")]
)
def test_who_is_right(right: tuple[str, ...], end: str) -> None:
    assert rule_text(rule(right=right), {}, 0).endswith(end)


def test_exact_cases_are_no_conditions() -> None:
    one = rule(cases=("a", "b"), when={"pass": ("backward",)})
    assert rule_text(one, {}, 0) == "2 exact cases: wrong"


def test_evidence() -> None:
    rates = Rates(inside_failed=5, inside_tried=6, outside_failed=1, outside_tried=4)
    assert evidence_text(rule(failing=3)) == "3 cases"
    assert evidence_text(rule(failing=3, skipped=9, rates=rates, localised=False)) == (
        "3 cases; 9 more skipped; random neighbours failing: 5 of 6 inside, 1 of 4 outside; not localised"
    )


def test_one_case_is_one_case() -> None:
    assert evidence_text(rule(failing=1)) == "1 case"
    assert rule_text(rule(cases=("a",)), {}, 0) == "1 exact case: wrong"


def test_the_lines_of_a_detail_name_tensors_and_accesses() -> None:
    detail = {
        "bounds": [
            {"where": "k", "access": "read", "offset": 3, "count": 1},
            {"where": "packed q, k, v", "access": "write", "offset": -4, "count": 4},
        ],
        "wrong": {"dq": {"elements": 2, "of": 8, "where": "row 0 of 4", "error": 0.5}},
        "contract": {"dk": "not returned"},
        "how": "died of SIGFPE",
    }
    assert detail_lines(detail) == [
        "bounds: read 4 bytes past the end of k",
        "bounds: write 4 bytes before the start of packed q, k, v",
        "dq wrong: 2 of 8 elements (row 0 of 4), error 0.5",
        "dk contract: not returned",
        "how: died of SIGFPE",
    ]


def test_a_detail_cannot_steer_a_terminal() -> None:
    assert detail_lines({"says": "\x1b[31mred", "wrong": {"d\x07q": "\x9b1m"}}) == [
        "says: ?[31mred",
        "d?q wrong: ?1m",
    ]
