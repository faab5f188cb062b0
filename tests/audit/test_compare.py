"""What is a disagreement, and what is none."""

from __future__ import annotations

from msgspec import structs

from attnprobe.audit.compare import Audit, compare
from attnprobe.audit.interface import Answer
from attnprobe.config import Case
from attnprobe.matrix.schema import Backend, CaseRecord, Matrix, Result, Rule
from attnprobe.verdict import Evidence, Verdict

PLAIN = Case()
DROPPING = Case(dropout=0.2)
LARGE = Case(head_dim=256, head_dim_v=256, dropout=0.2)
FLASH = Answer("torch-flash", ("torch-cudnn",))
MATH = Answer("torch-math", ("torch-cudnn", "torch-flash"))
RULE = Rule(
    id="r1",
    when={"pass": ("backward",), "dropout": ("on",), "head_dim": (256,)},
    verdict=Verdict.UNWRITTEN,
    outputs=("dq",),
    witness=LARGE.id,
)


def matrix_of(handmade: Matrix, **results: dict[Case, Result]) -> Matrix:
    """Return a matrix of these results by backend (`_` for `-`)."""
    cases = {case.id: case for of in results.values() for case in of}
    backends = tuple(
        Backend(
            name=name.replace("_", "-"),
            status="probed",
            rules=(RULE,) if any(r.verdict.fails for r in of.values()) else (),
            cases=tuple(structs.replace(result, id=case.id) for case, result in of.items()),
        )
        for name, of in results.items()
    )
    records = tuple(CaseRecord(id=name, case=case) for name, case in cases.items())
    return structs.replace(handmade, backends=backends, cases=records)


def result(verdict: Verdict = Verdict.OK, kernel: str = "", evidence: Evidence = Evidence.MEASURED) -> Result:
    outputs = ("dq",) if verdict.fails else ()
    return Result(id="", verdict=verdict, kernel=kernel, evidence=evidence, outputs=outputs)


def audited(matrix: Matrix, answers: dict[Case, Answer]) -> Audit:
    return compare("its choice", {case.id: answer for case, answer in answers.items()}, matrix)


def test_taking_what_works_is_no_disagreement(handmade: Matrix) -> None:
    matrix = matrix_of(handmade, torch_flash={PLAIN: result()}, torch_math={PLAIN: result()})
    found = audited(matrix, {PLAIN: FLASH})
    assert (found.asked, found.agreed, found.found, found.unsafe) == (1, 1, (), False)


def test_taking_what_fails_is_told_with_its_rule(handmade: Matrix) -> None:
    failing = result(Verdict.UNWRITTEN)
    matrix = matrix_of(handmade, torch_flash={PLAIN: result(), DROPPING: result(), LARGE: failing})
    found = audited(matrix, dict.fromkeys((PLAIN, DROPPING, LARGE), FLASH))
    (one,) = found.found
    assert found.unsafe
    assert (found.asked, found.agreed) == (3, 2)
    assert (one.kind, one.backend, one.rule, one.witness) == (
        "accepts-but-fails",
        "torch-flash",
        "r1",
        LARGE.id,
    )
    assert (one.verdict, one.outputs, one.cases) == (Verdict.UNWRITTEN, ("dq",), (LARGE.id,))
    assert one.when == RULE.when


def test_not_taking_what_fails_is_no_disagreement(handmade: Matrix) -> None:
    matrix = matrix_of(handmade, torch_flash={LARGE: result(Verdict.UNWRITTEN)}, torch_math={LARGE: result()})
    assert audited(matrix, {LARGE: MATH}).found == ()


def test_passing_over_what_works_is_told_with_what_those_cases_share(handmade: Matrix) -> None:
    matrix = matrix_of(
        handmade,
        torch_flash={PLAIN: result(kernel="flash"), DROPPING: result(kernel="flash")},
        torch_math={PLAIN: result(kernel="math"), DROPPING: result(kernel="math")},
    )
    found = audited(matrix, {PLAIN: FLASH, DROPPING: MATH})
    (one,) = found.found
    assert not found.unsafe
    assert (one.kind, one.backend, one.instead) == ("refuses-but-works", "torch-flash", "torch-math")
    assert one.cases == (DROPPING.id,)
    assert one.when == {"dropout": ("on",)}


def test_a_fallback_to_the_same_kernel_was_not_passed_over(handmade: Matrix) -> None:
    matrix = matrix_of(
        handmade, torch_flash={PLAIN: result(kernel="math")}, torch_math={PLAIN: result(kernel="math")}
    )
    assert audited(matrix, {PLAIN: MATH}).found == ()


def test_a_call_that_is_refused_whole_though_something_works(handmade: Matrix) -> None:
    matrix = matrix_of(handmade, torch_math={PLAIN: result()})
    (one,) = audited(matrix, {PLAIN: Answer(None)}).found
    assert (one.kind, one.backend, one.instead) == ("refuses-but-works", "torch-math", None)


def test_only_what_was_measured_is_held_to_work(handmade: Matrix) -> None:
    for evidence in (Evidence.TRACED, Evidence.COMPILED, Evidence.DECLARED, Evidence.REPORTED):
        matrix = matrix_of(handmade, torch_flash={PLAIN: result(evidence=evidence)})
        assert audited(matrix, {PLAIN: MATH}).found == ()


def test_what_was_not_asked_is_left_out(handmade: Matrix) -> None:
    matrix = matrix_of(handmade, torch_flash={LARGE: result(Verdict.UNWRITTEN), PLAIN: result()})
    found = audited(matrix, {PLAIN: FLASH})
    assert (found.asked, found.found) == (1, ())
