"""Subjects and matrices of one case, and scripts run for real."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import pytest

from attnprobe.axes import levels_of
from attnprobe.config import Case
from attnprobe.export._choose import Subject, choose
from attnprobe.matrix.schema import (
    SCHEMA,
    Backend,
    CaseRecord,
    DeviceRecord,
    Generator,
    Material,
    Matrix,
    Result,
    Rule,
    Run,
    sealed,
)
from attnprobe.verdict import Verdict

TORCH = Material(name="torch", version="2.13.0+cpu", digest="0123456789abcdef")


def make_matrix(  # noqa: PLR0913  # what a matrix of one case is of
    case: Case,
    backend: str = "torch-default",
    verdict: Verdict = Verdict.WRONG,
    *,
    detail: dict[str, Any] | None = None,
    outputs: tuple[str, ...] = ("out",),
    file: Path | None = None,
) -> Matrix:
    """Return a matrix with one case on one backend; `file` holds the callable that `backend` names."""
    materials = [TORCH]
    if file is not None:
        digest = hashlib.sha256(file.read_bytes()).hexdigest()[:16]
        materials.append(Material(name="file", version=file.name, digest=digest))
    rule = Rule(
        id="aaaaaaaa",
        when={axis: (level,) for axis, level in levels_of(case).items()},
        verdict=verdict,
        outputs=outputs,
        witness=case.id,
        failing=1,
    )
    result = Result(id=case.id, verdict=verdict, outputs=outputs, detail=detail or {})
    when = "2026-01-01T00:00:00+00:00"
    return sealed(
        Matrix(
            schema=SCHEMA,
            digest="",
            devices=(DeviceRecord(kind="cpu", name="AMD EPYC", cores=2),),
            backends=(
                Backend(
                    name=backend,
                    status="probed",
                    materials=tuple(materials),
                    rules=(rule,) if verdict.fails else (),
                    cases=(result,),
                ),
            ),
            cases=(CaseRecord(id=case.id, case=case),),
            runs=(
                Run(
                    started=when,
                    finished=when,
                    level="quick",
                    seed=0,
                    complete=True,
                    strength=2,
                    planned=1,
                    executed=1,
                    skipped=0,
                ),
            ),
            generator=Generator(name="attnprobe", version="0.1.0"),
        )
    )


def make_subject(case: Case, *arguments: Any, **options: Any) -> Subject:
    """Return what `choose` makes of such a matrix."""
    return choose(make_matrix(case, *arguments, **options), case.id, None, anything=True)


def run_alone(script: Path, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run a written script as a reader of a bug report would."""
    return subprocess.run(
        [sys.executable, script.name, *map(str, arguments)],
        cwd=script.parent,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


ENVIRONMENT = {
    name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "ATTNPROBE"))
} | {"OMP_NUM_THREADS": "1"}
WARM = """
import json, os, runpy, sys, tempfile, traceback
import torch
sys.modules["attnprobe"] = None
for line in sys.stdin:
    script, *arguments = json.loads(line)
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        child = os.fork()
        if not child:
            os.dup2(out.fileno(), 1)
            os.dup2(err.fileno(), 2)
            os.chdir(os.path.dirname(script))
            sys.argv, code = [script, *arguments], 0
            try:
                runpy.run_path(script, run_name="__main__")
            except SystemExit as end:
                code = end.code or 0
            except BaseException:
                traceback.print_exc()
                code = 1
            sys.stdout.flush()
            os._exit(code)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        out.seek(0)
        err.seek(0)
        print(json.dumps([code, out.read(), err.read()]), flush=True)
"""
"""Runs scripts in forks of a process that has imported torch, where attnprobe cannot be imported."""


class MatrixOf(Protocol):
    """Make a matrix of one case on one backend."""

    def __call__(  # noqa: PLR0913
        self,
        case: Case,
        backend: str = ...,
        verdict: Verdict = ...,
        *,
        detail: dict[str, Any] | None = ...,
        outputs: tuple[str, ...] = ...,
        file: Path | None = ...,
    ) -> Matrix: ...


class SubjectOf(Protocol):
    """Make what an export of such a matrix is about."""

    def __call__(  # noqa: PLR0913
        self,
        case: Case,
        backend: str = ...,
        verdict: Verdict = ...,
        *,
        detail: dict[str, Any] | None = ...,
        outputs: tuple[str, ...] = ...,
        file: Path | None = ...,
    ) -> Subject: ...


class RunScript(Protocol):
    """Run a written script as a reader of a bug report would."""

    def __call__(self, script: Path, *arguments: str | Path) -> subprocess.CompletedProcess[str]: ...


@pytest.fixture(scope="session")
def matrix_of() -> MatrixOf:
    return make_matrix


@pytest.fixture(scope="session")
def subject_of() -> SubjectOf:
    return make_subject


@pytest.fixture(scope="session")
def run_script() -> Iterator[RunScript]:
    """Run scripts warm, but those alone that start another process: they go by how they were started."""
    command = [sys.executable, "-c", WARM]
    with subprocess.Popen(
        command, env=ENVIRONMENT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as warm:
        assert warm.stdin is not None
        assert warm.stdout is not None
        requests, answers = warm.stdin, warm.stdout

        def call(script: Path, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
            if "sys.orig_argv" in script.read_text():
                return run_alone(script, *arguments)
            asked = [str(script), *map(str, arguments)]
            print(json.dumps(asked), file=requests, flush=True)
            code, out, err = json.loads(answers.readline())
            return subprocess.CompletedProcess(asked, code, out, err)

        yield call
        requests.close()
