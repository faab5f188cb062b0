"""The union of documents: its laws, against a slow union of sets, and what it refuses."""

from __future__ import annotations

import random
from collections.abc import Iterable
from itertools import permutations
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec import structs

from attnprobe.axes import Level, levels_of
from attnprobe.config import Case, canonical
from attnprobe.errors import MatrixError
from attnprobe.matrix.lint import faults
from attnprobe.matrix.merge import Union, merged
from attnprobe.matrix.schema import (
    SCHEMA,
    Backend,
    CaseRecord,
    DeviceRecord,
    Generator,
    Material,
    Matrix,
    Rates,
    Result,
    Rule,
    Run,
    expanded,
    sealed,
)
from attnprobe.matrix.settled import DISPUTED, settled
from attnprobe.matrix.store import encode, parse_matrix
from attnprobe.verdict import Evidence, Verdict

few = settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])
CASES = [
    Case(),
    Case(seed=1),
    Case(dropout=0.1),
    Case(layout="packed"),
    Case(pass_="forward", needs_grad="none"),
    Case(head_dim=200, head_dim_v=200),
]
TORCH = Material(name="torch", version="2.13.0", digest="a")
SMALL = DeviceRecord(kind="cpu", name="CPU A", cores=2, capabilities=("x86_64", "avx2"))
LARGE = structs.replace(SMALL, cores=64)
# What a union that works on lines of JSON could mistake for its own.
TRICKY: list[dict[str, Any]] = [
    {},
    {"run": -1, "says": ',"run":-1'},
    {"a": 1, "outputs": [], "says": '{"id":"@one"}', "verdict": "ok"},
    {"verdict": {"verdict": ["wrong"]}, "run": 3},
    {"kernel": ',"outputs":', "x": [{"a": 1, "detail": {"b": 2, "kernel": "k"}}]},
]


def run_of(number: int, device: int = 0) -> Run:
    return Run(
        started=f"2026-01-0{number + 1}T00:00:00+00:00",
        finished="",
        level="quick",
        seed=number,
        complete=True,
        strength=2,
        planned=6,
        executed=6,
        skipped=0,
        device=device,
    )


results = st.builds(
    Result,
    id=st.just(""),
    verdict=st.sampled_from([Verdict.OK, Verdict.OK, Verdict.WRONG, Verdict.REFUSED, Verdict.INCONCLUSIVE]),
    evidence=st.sampled_from(Evidence),
    run=st.integers(0, 1),
    outputs=st.sampled_from([(), ("dq",)]),
    kernel=st.sampled_from(["", "k"]),
    detail=st.sampled_from(TRICKY),
)


@st.composite
def backends(draw: st.DrawFn, name: str) -> Backend:
    """Return a backend of a valid document: no rule covers what passed in it."""
    if draw(st.integers(0, 4)) == 0:
        reason = draw(st.sampled_from(["not installed", "no kernel or no device"]))
        return Backend(name=name, status="absent", reason=reason)
    seen = [structs.replace(draw(results), id=case.id) for case in CASES if draw(st.booleans())]
    bad = [one for one in seen if one.verdict.fails or one.verdict is Verdict.REFUSED]
    at = {case.id: levels_of(case) for case in CASES}
    rules = []
    for one in bad:
        axes = draw(st.sampled_from([("layout",), ("dropout",), ("pass", "layout"), tuple(at[one.id])]))
        when: dict[str, tuple[Level, ...]] = {axis: (at[one.id][axis],) for axis in axes}
        rule = Rule(
            id=draw(st.sampled_from(["r", "s"])),
            when=when,
            verdict=one.verdict,
            outputs=draw(st.sampled_from([(), ("dq",), ("dk", "dq"), ("out", "other")])),
            evidence=draw(st.sampled_from([Evidence.MEASURED, Evidence.DECLARED])),
            witness=one.id,
            failing=draw(st.integers(0, 3)),
            skipped=draw(st.integers(0, 2)),
            localised=draw(st.booleans()),
            right=draw(st.sampled_from([(), ("two",)])),
            rates=draw(
                st.sampled_from(
                    [None, Rates(inside_failed=1, inside_tried=2, outside_failed=0, outside_tried=1)]
                )
            ),
        )
        if any(rule.covers(r.id, at[r.id]) for r in seen if r.verdict is Verdict.OK):
            rule = structs.replace(rule, when={}, cases=(one.id,))
        rules.append(rule)
    return Backend(
        name=name,
        status="probed",
        materials=(TORCH,),
        traits=draw(st.dictionaries(st.sampled_from(["t", "u"]), st.sampled_from(TRAITS), max_size=2)),
        rules=tuple(rules),
        cases=tuple(seen),
    )


TRAITS = ["gives zeros", "gives NaN", "gives NaN or gives zeros", "or", "", " or or ", "a or", "or b"]


@st.composite
def documents(draw: st.DrawFn) -> Matrix:
    """Return a valid document; two of them often share runs, cases and rules, and do not agree."""
    devices = draw(st.sampled_from([(SMALL,), (LARGE,), (SMALL, LARGE), (LARGE, SMALL)]))
    numbers = draw(st.lists(st.integers(0, 3), min_size=2, max_size=2))
    runs = tuple(run_of(number, draw(st.integers(0, len(devices) - 1))) for number in numbers)
    found = [draw(backends(name)) for name in draw(st.sets(st.sampled_from(["one", "two", "@one"])))]
    return sealed(
        Matrix(
            schema=SCHEMA,
            digest="",
            devices=devices,
            backends=tuple(found),
            runs=runs,
            generator=Generator(name="attnprobe", version="0.0.1"),
            cases=tuple(CaseRecord(id=case.id, case=case) for case in CASES),
        )
    )


def union(*matrices: Matrix) -> Matrix:
    return merged((f"{number}.json", matrix) for number, matrix in enumerate(matrices))


def check_laws(a: Matrix, b: Matrix, c: Matrix) -> None:
    together = encode(union(a, b, c))
    for order in permutations((a, b, c)):
        assert encode(union(*order)) == together
    assert encode(union(union(a, b), c)) == together
    assert encode(union(a, union(b, c))) == together
    assert encode(union(a, b, c, b, a)) == together
    whole = parse_matrix(together, "it")
    assert encode(union(whole)) == encode(union(whole, whole, a)) == together


@few
@given(documents(), documents(), documents())
def test_the_order_and_the_number_of_documents_do_not_matter(a: Matrix, b: Matrix, c: Matrix) -> None:
    check_laws(a, b, c)


@pytest.mark.release
@pytest.mark.timeout(1800)
@settings(max_examples=10_000, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(documents(), documents(), documents())
def test_the_laws_in_ten_thousand_examples(a: Matrix, b: Matrix, c: Matrix) -> None:
    check_laws(a, b, c)


def observations(matrices: Iterable[Matrix]) -> set[tuple[str, bytes, bytes, bytes]]:
    """Return what was observed: backend, run, its device and the result, whatever their places are."""
    return {
        (
            backend.name,
            canonical(structs.replace(matrix.runs[result.run], device=0)),
            canonical(matrix.devices[matrix.runs[result.run].device]),
            canonical(structs.replace(result, run=0)),
        )
        for matrix in matrices
        for backend in matrix.backends
        for result in backend.cases
    }


@few
@given(st.lists(documents(), min_size=1, max_size=4))
def test_nothing_is_lost_and_nothing_is_added(several: list[Matrix]) -> None:
    found = union(*several)
    assert observations([found]) == observations(several)
    count = sum(len(backend.cases) for backend in found.backends)
    assert count == len(observations(several))
    assert {canonical(d) for d in found.devices} == {canonical(d) for m in several for d in m.devices}
    assert {one.name for one in found.backends} == {one.name for m in several for one in m.backends}
    for backend in found.backends:
        every = [one for m in several for one in m.backends if one.name == backend.name]
        probed = [one for one in every if one.status == "probed"]
        assert backend.status == ("probed" if probed else "absent")
        assert backend.materials == ((TORCH,) if probed else ())
        covering = {(r.id, canonical(r.when), r.verdict, r.cases) for one in every for r in one.rules}
        assert {(r.id, canonical(r.when), r.verdict, r.cases) for r in backend.rules} == covering
        assert len(backend.rules) == len(covering)


@few
@given(st.lists(documents(), min_size=1, max_size=3))
def test_the_union_of_valid_documents_is_valid_and_its_file_is_its_encoding(several: list[Matrix]) -> None:
    # Two documents that tell different things of one and the same run are no scans.
    several = [
        sealed(structs.replace(one, runs=tuple(structs.replace(r, level=f"run of {n}") for r in one.runs)))
        for n, one in enumerate(several)
    ]
    assert [fault for one in several for fault in faults(encode(one))] == []
    gathered = Union()
    for number, matrix in enumerate(several):
        gathered.add(matrix, str(number))
    content = gathered.content()
    found = parse_matrix(content, "it")
    assert encode(found) == content
    assert sealed(found).digest == found.digest
    assert faults(content, strict=True) == []
    words = [word for backend in found.backends for word in settled(backend.cases).values()]
    assert gathered.disputes() == words.count(DISPUTED)


def test_a_real_scan_and_its_expanded_shape_are_one_document(small_matrix: Any) -> None:
    from attnprobe.matrix.store import read_matrix
    from attnprobe.report.json import format_

    matrix = read_matrix(small_matrix)
    whole = parse_matrix(format_.text(matrix, width=100, color=False).encode(), "it")
    found = union(matrix, whole)
    assert observations([found]) == observations([matrix])
    assert (found.runs, found.devices, found.cases) == (matrix.runs, matrix.devices, matrix.cases)
    for before, after in zip(matrix.backends, found.backends, strict=True):
        assert before.cases == after.cases
        assert {canonical(rule) for rule in before.rules} == {canonical(rule) for rule in after.rules}
    assert set(expanded(found)["backends"][0]["cases"][0]) >= {"id", "at", "case", "verdict", "run"}


def test_many_runs_of_one_plan_are_told_apart(handmade: Matrix) -> None:
    several = [
        structs.replace(handmade, runs=(structs.replace(handmade.runs[0], started=f"{number:02}"),))
        for number in range(30)
    ]
    draw = random.Random(1)  # noqa: S311  # no secret
    draw.shuffle(several)
    found = union(*several)
    assert [run.started for run in found.runs] == [f"{number:02}" for number in range(30)]
    for before, after in zip(handmade.backends, found.backends, strict=True):
        assert len(after.cases) == 30 * len(before.cases)
        assert [r.run for r in after.cases[:30]] == list(range(30 if before.cases else 0))
        assert len(after.rules) == len(before.rules)
    assert len(found.cases) == len(handmade.cases)


# Rules that are one.


def test_variants_of_a_rule_are_one_that_rests_on_most(handmade: Matrix) -> None:
    rule = handmade.backends[0].rules[0]
    rates = Rates(inside_failed=1, inside_tried=1, outside_failed=0, outside_tried=0)
    weaker = structs.replace(
        rule,
        outputs=("dmask",),
        failing=9,
        skipped=3,
        localised=False,
        rates=rates,
        right=(),
        witness="other",
    )
    flash = structs.replace(handmade.backends[0], rules=(weaker,))
    found = union(handmade, structs.replace(handmade, backends=(flash,)))
    (one,) = (each for each in found.backends[0].rules if each.id == rule.id)
    assert (one.outputs, one.failing, one.skipped, one.localised) == (("dq", "dk", "dv", "dmask"), 9, 3, True)
    assert (one.rates, one.right, one.witness) == (rule.rates, rule.right, rule.witness)


# What is refused.


def doc(handmade: Matrix, **changed: Any) -> Matrix:
    return structs.replace(handmade, **changed)


def refusal(*matrices: Matrix) -> str:
    """Return the refusal, which is the same in substance in any order."""
    said = set()
    for order in permutations(range(len(matrices))):
        with pytest.raises(MatrixError) as caught:
            merged((f"{number}.json", matrices[number]) for number in order)
        assert caught.value.fix
        assert caught.value.exit_code == 2
        said.add(caught.value.what)
    assert len(said) == 1
    with pytest.raises(MatrixError) as caught:
        union(*matrices)
    return str(caught.value)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("kind", "cpu"),
        ("name", "Other"),
        ("sm", "9.0"),
        ("smem_per_block_optin", 1),
        ("capabilities", ("x",)),
    ],
)
def test_another_device_is_refused_by_name(handmade: Matrix, field: str, value: Any) -> None:
    other = structs.replace(handmade.devices[0], **{field: value})
    said = refusal(handmade, doc(handmade, devices=(other,)))
    assert "different devices" in said
    assert (
        f"1.json of {field.replace('_', ' ')} {' '.join(value) if field == 'capabilities' else value}" in said
    )
    # Also within one document.
    with pytest.raises(MatrixError, match="different devices"):
        union(doc(handmade, devices=(handmade.devices[0], other)))


def test_how_many_cores_a_scan_had_is_no_other_device(handmade: Matrix) -> None:
    other = structs.replace(handmade.devices[0], cores=7)
    found = union(handmade, doc(handmade, devices=(other,)))
    assert {device.cores for device in found.devices} == {0, 7}
    assert sorted(found.devices[run.device].cores for run in found.runs) == [0, 7]


@pytest.mark.parametrize(
    ("materials", "said"),
    [
        ((Material(name="torch", version="2.12.0", digest="0123456789abcdef"),), "torch 2.12.0"),
        ((Material(name="torch", version="2.13.0+cpu", digest="other"),), "torch 2.13.0+cpu (other)"),
        ((), "no torch in 1.json"),
    ],
)
def test_another_build_is_refused_by_name(
    handmade: Matrix, materials: tuple[Material, ...], said: str
) -> None:
    math = structs.replace(handmade.backends[2], materials=materials)
    refused = refusal(handmade, doc(handmade, backends=(math,)))
    assert "torch-math was measured in different builds" in refused
    assert said in refused


def test_what_was_absent_has_no_build(handmade: Matrix) -> None:
    math = Backend(name="torch-math", status="absent", reason="no", materials=(TORCH,))
    also = structs.replace(math, materials=(), reason="neither")
    found = union(doc(handmade, backends=(math,)), doc(handmade, backends=(also,)), handmade)
    assert found.backends[2] == handmade.backends[2]
    assert union(doc(handmade, backends=(math,)), doc(handmade, backends=(also,))).backends == (also,)


def test_one_id_of_two_cases_is_refused(handmade: Matrix) -> None:
    record = structs.replace(handmade.cases[0], case=Case(seed=99))
    assert "is not the same in all files" in refusal(
        handmade, doc(handmade, cases=(record, *handmade.cases[1:]))
    )


def test_what_leads_nowhere_is_refused(handmade: Matrix) -> None:
    flash, absent, math = handmade.backends
    lost = structs.replace(math.cases[0], run=1)
    for changed, what in (
        ({"devices": ()}, "run 0 is on no device"),
        ({"runs": (structs.replace(handmade.runs[0], device=-1),)}, "run 0 is on no device"),
        ({"backends": (structs.replace(math, cases=(lost,)),)}, "a result on torch-math is of no run"),
        ({"cases": handmade.cases[1:]}, "is of no case"),
        ({"backends": (structs.replace(absent, cases=flash.cases),)}, "flash-attn-3 is absent and has cases"),
    ):
        with pytest.raises(MatrixError, match=r"0\.json cannot be merged") as caught:
            union(doc(handmade, **changed))
        assert what in caught.value.why


def test_nothing_is_no_union() -> None:
    with pytest.raises(MatrixError, match="nothing to merge"):
        union()


# What the results of a case come to.


@pytest.mark.parametrize(
    ("verdicts", "word"),
    [
        ("ok", "ok"),
        ("ok ok", "ok"),
        ("wrong wrong", "wrong"),
        ("ok wrong", DISPUTED),
        ("wrong ok refused", DISPUTED),
        ("ok refused", DISPUTED),
        ("wrong crashed", DISPUTED),
        ("ok inconclusive out_of_memory", "ok"),
        ("launched wrong", "wrong"),
        ("out_of_memory inconclusive", "inconclusive"),
    ],
)
def test_what_results_come_to(verdicts: str, word: str) -> None:
    several = [Result(id="x", verdict=Verdict(one), run=n) for n, one in enumerate(verdicts.split())]
    for order in permutations(several):
        assert settled(order) == {"x": word}


# What `validate` makes of several runs.


def two_runs(first: Verdict, second: Verdict, runs: tuple[int, int], *, same: bool) -> list[str]:
    """Return the faults where two results lie under one rule: of one case, or of two on its levels."""
    cases = CASES[:1] if same else CASES[:2]
    seen = tuple(
        Result(id=case.id, verdict=verdict, run=run)
        for case, verdict, run in zip((cases * 2)[:2], (first, second), runs, strict=True)
    )
    rule = Rule(id="r", when={"layout": ("contiguous",)}, verdict=Verdict.WRONG, witness=CASES[0].id)
    matrix = Matrix(
        schema=SCHEMA,
        digest="",
        devices=(SMALL,),
        backends=(Backend(name="one", status="probed", materials=(TORCH,), rules=(rule,), cases=seen),),
        runs=(run_of(0), run_of(1)),
        generator=Generator(name="test", version="0"),
        cases=tuple(CaseRecord(id=case.id, case=case) for case in cases),
    )
    return [fault.what for fault in faults(encode(sealed(matrix)))]


def test_a_rule_over_what_passed_must_rest_on_another_run() -> None:
    assert two_runs(Verdict.OK, Verdict.WRONG, (0, 1), same=True) == []
    assert two_runs(Verdict.OK, Verdict.WRONG, (0, 1), same=False) == []
    assert two_runs(Verdict.OK, Verdict.REFUSED, (1, 0), same=False) == []
    covered = "ok, and rule r covers it"
    assert two_runs(Verdict.OK, Verdict.WRONG, (1, 1), same=False) == [covered]
    assert two_runs(Verdict.OK, Verdict.INCONCLUSIVE, (0, 1), same=False) == [covered]
    assert two_runs(Verdict.OK, Verdict.OK, (0, 1), same=True) == [covered, covered]
    # Two documents that tell of one run different things of one case are both kept, and it is denied.
    assert two_runs(Verdict.OK, Verdict.WRONG, (0, 0), same=True) == []


def test_a_result_stands_once_a_run() -> None:
    assert two_runs(Verdict.WRONG, Verdict.WRONG, (0, 1), same=True) == []
    assert two_runs(Verdict.WRONG, Verdict.WRONG, (1, 1), same=True) == [f"{CASES[0].id} stands twice"]
