"""The statuses and modes, one example each."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from collections.abc import Callable

import pytest
from msgspec import UNSET, structs

from attnprobe.axes import AXIS, levels_of
from attnprobe.config import AttentionConfig, Case, config_of
from attnprobe.errors import MatrixError, UsageError
from attnprobe.matrix.schema import Backend, CaseRecord, Material, Matrix, Result, Rule, sealed
from attnprobe.select.match import Live, assume, compare
from attnprobe.select.selector import Selector
from attnprobe.verdict import Evidence, Verdict

TORCH = Material(name="torch", version="2.13.0", digest="a")
PLAIN = Case()
PAIRS = (
    [Case(seqlen_q=q, seqlen_kv=q, head_dim=d, head_dim_v=d, seed=1) for q in (128, 512) for d in (64, 128)]
    + [Case(head_dim=d, head_dim_v=d, dtype="bfloat16") for d in (64, 128)]
    + [Case(seqlen_q=512, seqlen_kv=512, dtype="bfloat16")]
)


@pytest.fixture
def matrix_of(handmade: Matrix) -> Callable[..., Matrix]:
    """Return a matrix of one backend with these results and rules."""

    def make(results: dict[Case, Verdict], rules: tuple[Rule, ...] = (), **changed: object) -> Matrix:
        backend = Backend(
            name="kernel",
            status="probed",
            materials=(TORCH,),
            rules=rules,
            cases=tuple(Result(id=case.id, verdict=verdict) for case, verdict in results.items()),
        )
        backend = structs.replace(backend, **changed)
        records = tuple(CaseRecord(id=case.id, case=case) for case in results)
        return sealed(structs.replace(handmade, backends=(backend,), cases=records))

    return make


def ask(matrix: Matrix, live: Live | None = None) -> Selector:
    match = assume(matrix) if live is None else compare(matrix, live)
    return Selector(matrix, match, devices=matrix.devices, installed=None)


def test_the_very_config_that_ran_is_proven(matrix_of: Callable[..., Matrix]) -> None:
    selector = ask(matrix_of({PLAIN: Verdict.OK}))
    decision = selector.select(config_of(PLAIN))
    (one,) = decision.candidates
    assert decision.backend == "kernel"
    assert (one.status, one.verdict, one.evidence, one.witness) == (
        "proven",
        Verdict.OK,
        Evidence.MEASURED,
        PLAIN.id,
    )
    assert selector.select(config_of(PLAIN)) is decision


@pytest.mark.parametrize(
    "changed",
    [
        {"batch": 2},
        {"seqlen_q": 256},
        {"heads": 4, "heads_kv": 4},
        {"head_dim": 72, "head_dim_v": 72},
        {"batch": UNSET},
    ],
)
def test_what_is_larger_or_not_said_is_not_proven(
    matrix_of: Callable[..., Matrix], changed: dict[str, object]
) -> None:
    config = structs.replace(config_of(PLAIN), **changed)
    assert ask(matrix_of({PLAIN: Verdict.OK})).select(config).backend is None


def test_a_smaller_size_on_the_same_levels_is_proven(matrix_of: Callable[..., Matrix]) -> None:
    large = Case(seqlen_q=256, seqlen_kv=256, dropout=0.2)
    small = structs.replace(large, seqlen_q=128, seqlen_kv=128, dropout=0.1)
    assert ask(matrix_of({large: Verdict.OK})).select(config_of(small)).backend == "kernel"
    assert ask(matrix_of({small: Verdict.OK})).select(config_of(large)).backend is None


def test_another_head_dim_of_v_is_not_proven(matrix_of: Callable[..., Matrix]) -> None:
    case = Case(head_dim=192, head_dim_v=128)
    selector = ask(matrix_of({case: Verdict.OK}))
    assert selector.select(config_of(case)).backend == "kernel"
    assert selector.select(structs.replace(config_of(case), head_dim_v=96)).candidates[0].status == "unknown"


def test_both_passes_ran_so_an_unsaid_pass_is_proven(matrix_of: Callable[..., Matrix]) -> None:
    forward = Case(pass_="forward", needs_grad="none")
    config = structs.replace(config_of(PLAIN), pass_=UNSET, needs_grad=UNSET)
    assert ask(matrix_of({PLAIN: Verdict.OK, forward: Verdict.OK})).select(config).backend == "kernel"
    assert ask(matrix_of({PLAIN: Verdict.OK})).select(config).backend is None


@pytest.mark.parametrize("evidence", [e for e in Evidence if e is not Evidence.MEASURED])
def test_only_measured_evidence_proves(matrix_of: Callable[..., Matrix], evidence: Evidence) -> None:
    results = (Result(id=PLAIN.id, evidence=evidence),)
    assert ask(matrix_of({PLAIN: Verdict.OK}, cases=results)).select(config_of(PLAIN)).backend is None


@pytest.mark.parametrize("verdict", [v for v in Verdict if v is not Verdict.OK])
def test_no_other_verdict_proves(matrix_of: Callable[..., Matrix], verdict: Verdict) -> None:
    (one,) = ask(matrix_of({PLAIN: verdict})).select(config_of(PLAIN)).candidates
    assert one.status == ("unknown" if verdict.neutral else "denied")


@pytest.mark.parametrize("evidence", list(Evidence))
def test_any_evidence_denies_with_a_rule(matrix_of: Callable[..., Matrix], evidence: Evidence) -> None:
    rule = Rule(
        id="r", when={"dtype": ("float32",)}, verdict=Verdict.UNWRITTEN, evidence=evidence, witness="w"
    )
    selector = ask(matrix_of({PLAIN: Verdict.OK}, (rule,)))
    (one,) = selector.select(config_of(PLAIN)).candidates
    assert (one.status, one.rule, one.evidence) == ("denied", "r", evidence)
    (one,) = selector.select(AttentionConfig()).candidates
    assert one.status == "denied"
    assert "which is unsaid" in one.reason


def test_the_denial_that_needs_no_unsaid_value_is_named_first(matrix_of: Callable[..., Matrix]) -> None:
    rules = (
        Rule(id="open", when={"layout": ("packed",)}, verdict=Verdict.WRONG, witness="w"),
        Rule(id="refused", when={"dtype": ("float32",)}, verdict=Verdict.REFUSED, witness="w"),
        Rule(id="wrong", when={"pass": ("backward",)}, verdict=Verdict.WRONG, witness="w"),
    )
    selector = ask(matrix_of({PLAIN: Verdict.OK}, rules))
    asked_for = {
        "open": AttentionConfig(dtype="float16", pass_="forward"),
        "refused": AttentionConfig(dtype="float32", pass_="forward"),
        "wrong": AttentionConfig(dtype="float32", pass_="backward"),
    }
    for rule, config in asked_for.items():
        assert selector.select(config).candidates[0].rule == rule


def test_a_rule_of_exact_cases_denies_only_those(matrix_of: Callable[..., Matrix]) -> None:
    bad = Case(seqlen_q=192, seqlen_kv=192)
    good = Case(seqlen_q=64, seqlen_kv=64)
    rule = Rule(id="r", when={}, verdict=Verdict.WRONG, witness=bad.id, cases=(bad.id,))
    matrix = matrix_of({bad: Verdict.WRONG, good: Verdict.OK}, (rule,))
    assert ask(matrix).select(config_of(bad)).candidates[0].rule == "r"
    assert ask(matrix).select(config_of(good)).backend == "kernel"
    without_case = sealed(structs.replace(matrix, cases=tuple(r for r in matrix.cases if r.id != bad.id)))
    assert ask(without_case).select(config_of(good)).candidates[0].status == "denied"


def test_a_rule_with_an_unknown_axis_or_level_covers_more(matrix_of: Callable[..., Matrix]) -> None:
    for when in ({"rotation": ("left",)}, {"mask": ("spiral",)}, {"mask": ()}):
        rule = Rule(id="r", when={**when, "dtype": ("float32",)}, verdict=Verdict.WRONG, witness="w")
        assert ask(matrix_of({PLAIN: Verdict.OK}, (rule,))).select(config_of(PLAIN)).backend is None


def test_unrefuted_at_a_strength(matrix_of: Callable[..., Matrix]) -> None:
    selector = ask(matrix_of(dict.fromkeys(PAIRS, Verdict.OK)))
    config = config_of(Case(seqlen_q=512, seqlen_kv=512, head_dim=128, head_dim_v=128, dtype="bfloat16"))
    (one,) = selector.select(config).candidates
    assert (one.status, one.strength) == ("unrefuted", 2)
    assert "head_dim 128 with seqlen_q long" in one.reason
    assert selector.select(config).backend is None
    assert selector.select(config, strength=2).backend == "kernel"
    assert selector.select(config, strength=3).backend is None
    assert "seqlen_q 4,096 is beyond" in selector.select(structs.replace(config, seqlen_q=4096)).explain()


def test_a_failing_case_under_no_rule_ends_what_is_unrefuted(matrix_of: Callable[..., Matrix]) -> None:
    results = dict.fromkeys(PAIRS, Verdict.OK) | {Case(layout="packed"): Verdict.WRONG}
    config = config_of(Case(seqlen_q=512, seqlen_kv=512, head_dim=128, head_dim_v=128, dtype="bfloat16"))
    assert ask(matrix_of(results)).select(config).candidates[0].status == "unknown"


def test_modes(matrix_of: Callable[..., Matrix]) -> None:
    selector = ask(matrix_of({PLAIN: Verdict.OK}))
    other = config_of(Case(layout="packed"))
    assert selector.select(other, "veto").backend == "kernel"
    seen = selector.select(other, "observe")
    assert (seen.backend, seen.would) == ("kernel", {"veto": "kernel", "gate": None})
    assert selector.select(config_of(PLAIN), backends=["elsewhere", "kernel"]).backend == "kernel"
    assert selector.select(config_of(PLAIN), "veto", backends=["elsewhere", "kernel"]).backend == "elsewhere"
    with pytest.raises(UsageError, match="mode"):
        selector.select(other, "guess")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="strength"):
        selector.select(other, strength=4)


def test_an_absent_backend_is_not_offered(matrix_of: Callable[..., Matrix]) -> None:
    matrix = matrix_of({}, status="absent", reason="not installed", materials=())
    for mode in ("gate", "veto", "observe"):
        assert ask(matrix).select(AttentionConfig(), mode).backend is None


def test_a_case_that_lost_a_field_is_refused(matrix_of: Callable[..., Matrix]) -> None:
    matrix = matrix_of({PLAIN: Verdict.OK})
    changed = CaseRecord(id=PLAIN.id, case=Case(layout="packed"))
    with pytest.raises(MatrixError, match="not what its id says"):
        ask(sealed(structs.replace(matrix, cases=(changed,))))


def test_the_words_name_rule_witness_and_what_was_assumed(handmade: Matrix) -> None:
    decision = ask(handmade).select(AttentionConfig(pass_="backward", head_dim=256, dropout=0.1), "veto")
    text = decision.explain()
    one = decision.candidate("broken-flash")
    assert one is not None
    assert one.status == "denied"
    assert one.rule is not None
    assert f"rule {one.rule}, case {one.witness}" in text
    assert "assumed: scale default" in text
    assert "unsaid, so any value: dtype" in text
    document = json.loads(json.dumps(decision.builtins()))
    assert set(document["candidates"][0]) == {
        "backend",
        "status",
        "verdict",
        "evidence",
        "reason",
        "rule",
        "witness",
        "strength",
    }


def test_selecting_imports_nothing_heavy() -> None:
    script = """
        import sys, attnprobe, attnprobe.select.loading, attnprobe.select.advisories
        attnprobe.select.advisories.read()
        names = ("torch", "click", "rich", "numpy", "attnprobe.probe", "attnprobe.run", "attnprobe.backends")
        found = [name for name in names if name in sys.modules]
        assert not found, found
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=True)


def test_levels_of_a_full_config_are_those_of_its_case() -> None:
    from attnprobe.select.asked import asked

    for case in PAIRS:
        promised = {a: (level,) for a, level in levels_of(case).items() if not AXIS[a].hazard}
        assert asked(config_of(case)).levels == promised


def test_a_configuration_that_contradicts_itself_was_seen_by_no_case(
    matrix_of: Callable[..., Matrix],
) -> None:
    """Rows are masked by -inf in a float mask only; each of the two passed, and never together."""
    rows = {Case(mask=mask): Verdict.OK for mask in ("causal-top-left", "float")}
    selector = ask(matrix_of({**rows, Case(mask="float", masked_rows="-inf"): Verdict.OK}))
    asked = structs.replace(config_of(PLAIN), mask="causal-top-left", masked_rows="-inf")
    (one,) = selector.select(asked).candidates
    assert (one.status, one.strength) == ("unrefuted", 1)
    assert one.reason.endswith("no passed case has mask causal-top-left with masked_rows -inf")


def test_a_factor_that_is_the_key_length_is_said_to_be_it(handmade: Matrix) -> None:
    """At another length than the witness's "128 times too large" alone would be another number."""
    masked = next(r.case for r in handmade.cases if r.case.masked_rows == "-inf")
    decision = ask(handmade).select(config_of(structs.replace(masked, seqlen_kv=64)))
    one = decision.candidate("broken-flash")
    assert one is not None
    assert one.status == "denied"
    assert "dq 128 times too large (S_kv times)" in one.reason
