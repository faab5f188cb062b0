"""What scripts look like: golden files, formatted as ours are, and safe whatever the matrix says."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from msgspec import structs
from syrupy.assertion import SnapshotAssertion

from attnprobe.config import Case
from attnprobe.errors import UsageError
from attnprobe.export._choose import Subject
from attnprobe.export._script import kind_of, script
from attnprobe.export._template import fill, unrounded
from attnprobe.matrix.schema import Material
from attnprobe.probe.plan import random_cases
from attnprobe.verdict import Evidence, Verdict

if TYPE_CHECKING:
    from tests.export.conftest import SubjectOf

SMALL = Case(head_dim=8, head_dim_v=8, seqlen_q=16, seqlen_kv=16)
FACTS = {"elements": 64, "of": 256, "where": "row 0", "error": 0.31, "tolerance": 1e-06, "factor": 16.0}
MEMORY = {"memory": {"out": {"elements": 16, "of": 256, "where": "column 0 of 8"}}}
KINDS: dict[str, tuple[Verdict, dict[str, Any]]] = {
    "values": (Verdict.WRONG, {"wrong": {"dq": FACTS}}),
    "own": (Verdict.WRONG, {"wrong": {"dq": FACTS}, "against": "the weights of its own forward"}),
    "rate": (Verdict.WRONG, {"dropout": {"asked": 0.2, "dropped": 0.4}}),
    "alike": (Verdict.WRONG, {"dropout": {"alike": "heads"}}),
    "contract": (Verdict.WRONG, {"contract": {"out": "not returned"}}),
    "changed": (Verdict.WRONG, {"inputs changed": ["k"]}),
    "memory": (Verdict.UNWRITTEN, MEMORY),
    "repeat": (Verdict.NONDETERMINISTIC, {"repeat": {"dq": FACTS}, "only": "beside other threads"}),
    "death": (Verdict.CRASHED, {"how": "died of SIGSEGV"}),
    "bounds": (
        Verdict.OUT_OF_BOUNDS,
        {"bounds": [{"where": "k", "access": "read", "offset": -4, "count": 1}]},
    ),
    "call": (Verdict.OUT_OF_MEMORY, {}),
}


@pytest.fixture
def kernel(tmp_path: Path) -> Path:
    file = tmp_path / "my_kernel.py"
    file.write_text("attention = None\n")
    return file


@pytest.mark.parametrize(
    ("kind", "name", "case"),
    [
        ("values", "torch-default", Case(mask="float", masked_rows="finfo-min")),
        (
            "own",
            "my_kernel:attention",
            Case(dtype="bfloat16", heads=4, heads_kv=2, mask="causal-bottom-right", data="outliers"),
        ),
        ("memory", "aten-flash", structs.replace(SMALL, layout="packed", deterministic=True)),
        ("death", "torch-flash", structs.replace(SMALL, layout="varlen", batch=2, earlier="other-data")),
        (
            "bounds",
            "flex-attention",
            structs.replace(SMALL, pass_="forward", needs_grad="none", mask="window", window=4),
        ),
        (
            "repeat",
            "torch-math",
            structs.replace(SMALL, dropout=0.2, grad_out="expanded", deterministic=True),
        ),
    ],
)
def test_golden(  # noqa: PLR0913, PLR0917  # what a script is of
    kind: str, name: str, case: Case, subject_of: SubjectOf, kernel: Path, snapshot: SnapshotAssertion
) -> None:
    verdict, detail = KINDS[kind]
    file = kernel if ":" in name else None
    assert script(subject_of(case, name, verdict, detail=detail, outputs=("dq",), file=file)) == snapshot


def every_script(subject_of: SubjectOf, kernel: Path) -> dict[str, str]:
    """Return scripts of every kind on every backend that a case can be written for."""
    names = ["torch-default", "torch-flash", "aten-flash", "flex-attention", "my_kernel:attention"]
    found = {}
    for number, case in enumerate(random_cases(120, seed=2)):
        kind = list(KINDS)[number % len(KINDS)]
        # The weights of the keys cannot be had of packed sequences.
        read = kind in {"own", "rate", "alike"}
        if read and (
            case.layout == "varlen" or case.pass_ == "forward" or bool(case.dropout) is (kind == "own")
        ):
            continue
        name = names[number % len(names)]
        verdict, detail = KINDS[kind]
        subject = subject_of(case, name, verdict, detail=detail, file=kernel if ":" in name else None)
        assert kind_of(subject) == kind
        found[f"{number}_{kind}.py"] = script(subject)
    return found


def test_scripts_are_formatted_and_without_lint(subject_of: SubjectOf, kernel: Path, tmp_path: Path) -> None:
    place = tmp_path / "scripts"
    place.mkdir()
    for name, text in every_script(subject_of, kernel).items():
        (place / name).write_text(text)
    rules = "E,F,W,I,B,C4,PIE,SIM,UP"
    common = ["--isolated", "--no-cache", "--line-length", "110", "--target-version", "py310", str(place)]
    for command in (["check", "--select", rules], ["format", "--diff"]):
        done = subprocess.run(
            [sys.executable, "-m", "ruff", *command, *common], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout


def test_free_words_of_a_matrix_stand_in_comments_only(subject_of: SubjectOf) -> None:
    evil = '\n"""; import os; os.system("x")\r\u2028\n# -*- coding: rot13 -*-'
    case = SMALL
    plain = subject_of(case, "torch-math", Verdict.CRASHED, detail={"how": "died"}, outputs=())
    backend = structs.replace(plain.backend, materials=(Material(name=evil, version=evil),))
    bad = Subject(
        case=case,
        backend=backend,
        result=structs.replace(plain.result, kernel=evil, detail={"how": evil, "said": evil}),
        run=structs.replace(plain.run, level=evil),
        device=structs.replace(plain.device, name=evil),
        right=(evil,),
        generator=evil,
    )
    assert ast.dump(ast.parse(script(bad).encode())) == ast.dump(ast.parse(script(plain).encode()))


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("k:f();x", "k.py"),
        ("k:f", "../k.py"),
        ("k:f", 'k".py'),
        ("a b:f", None),
        ("k:import", "k.py"),
    ],
)
def test_a_callable_that_is_no_name_is_refused(name: str, file: str | None, subject_of: SubjectOf) -> None:
    subject = subject_of(SMALL, name, Verdict.WRONG, detail=KINDS["values"][1])
    if file is not None:
        materials = (*subject.backend.materials, Material(name="file", version=file, digest="00"))
        subject = structs.replace(subject, backend=structs.replace(subject.backend, materials=materials))
    with pytest.raises(UsageError, match="no name of a callable"):
        script(subject)


def test_a_callable_of_a_package_is_imported(subject_of: SubjectOf) -> None:
    text = script(subject_of(SMALL, "some.kernels:Fast.apply", Verdict.NONFINITE))
    assert "import some.kernels\n" in text
    assert "user_attention = some.kernels.Fast.apply" in text
    assert "It needs torch and some." in text


def test_a_backend_says_its_call_itself(subject_of: SubjectOf) -> None:
    with pytest.raises(UsageError, match="no script for other-library"):
        script(subject_of(SMALL, "other-library", Verdict.NONFINITE))


def test_what_was_refused_unrun_has_no_script(subject_of: SubjectOf) -> None:
    subject = subject_of(
        structs.replace(SMALL, softcap=5.0), "torch-math", Verdict.REFUSED, detail={"says": "no softcap"}
    )
    result = structs.replace(subject.result, evidence=Evidence.DECLARED)
    with pytest.raises(UsageError, match=r"refuses case .* before anything is run: no softcap"):
        script(structs.replace(subject, result=result))


def test_templates() -> None:
    template = "\n      |always $x\na     |a\na !b  |a without b\n"
    assert fill(template, {"a"}, x=1) == ["always 1", "a", "a without b"]
    assert fill(template, {"a", "b"}, x=1) == ["always 1", "a"]
    assert fill(template, set(), x=1) == ["always 1"]


@pytest.mark.parametrize(
    ("line", "written"),
    [
        ("    p = r(f(a, b))", "    p = f(a, b)"),
        ("    x = r(r(a @ b) * 2)", "    x = (a @ b) * 2"),
        ('    t = {"out": r(p @ v)}', '    t = {"out": p @ v}'),
        ("    p = r(f(x)).g(y)", "    p = f(x).g(y)"),
        ("    y = over(r(a.mT @ b))", "    y = over(a.mT @ b)"),
    ],
)
def test_roundings_that_a_float32_script_does_without(line: str, written: str) -> None:
    assert unrounded(line) == written
