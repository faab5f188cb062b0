"""What all tests share: the real command in a clean environment, a real scan and a hand-built matrix."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

import pytest

from attnprobe.axes import levels_of
from attnprobe.config import Case
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
    sealed,
)
from attnprobe.verdict import Evidence, Verdict

COMMAND = (sys.executable, "-m", "attnprobe")
TINY = '[{"head_dim": 8, "heads": 1, "seqlen_q": 4, "dtype": "float32"}]\n'
"""One small configuration: with its neighbours on one axis about 75 cases."""


class Attnprobe(Protocol):
    """Run the command with these arguments; `env` adds to the clean environment."""

    def __call__(
        self,
        *arguments: str | os.PathLike[str],
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        timeout: float = 120,
    ) -> subprocess.CompletedProcess[str]: ...


def clean_environment(data: Path) -> dict[str, str]:
    """Return the environment without anything that changes what the command prints."""
    changing = {"NO_COLOR", "FORCE_COLOR", "CI", "COLUMNS", "LINES", "TERM"}
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in changing and not name.startswith("ATTNPROBE_")
    }
    return environment | {"ATTNPROBE_DATA_DIR": str(data), "OMP_NUM_THREADS": "1"}


def run(
    arguments: Sequence[str | os.PathLike[str]],
    environment: Mapping[str, str],
    cwd: Path,
    timeout: float = 120,
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *[os.fspath(one) for one in arguments]],
        env=environment,
        cwd=cwd,
        timeout=timeout,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(scope="session", autouse=True)
def _interruptible() -> None:
    """Let children be interrupted also where the tests run in the background of a shell."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    return clean_environment(tmp_path / "data")


@pytest.fixture
def attnprobe(environment: dict[str, str], tmp_path: Path) -> Attnprobe:
    def call(
        *arguments: str | os.PathLike[str],
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        timeout: float = 120,
    ) -> subprocess.CompletedProcess[str]:
        return run(arguments, {**environment, **(env or {})}, cwd or tmp_path, timeout)

    return call


@pytest.fixture
def tiny_config(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.json"
    path.write_text(TINY)
    return path


@pytest.fixture(scope="session")
def small_scan(tmp_path_factory: pytest.TempPathFactory) -> tuple[subprocess.CompletedProcess[str], Path]:
    """Return what one real scan printed, and the matrix it wrote."""
    place = tmp_path_factory.mktemp("small")
    (place / "tiny.json").write_text(TINY)
    arguments = ["scan", "--config", "tiny.json", "--backend", "torch-math", "--backend", "torch-flash"]
    done = run([*arguments, "-o", "json:small.json"], clean_environment(place / "data"), place)
    assert done.returncode == 0, done.stderr
    return done, place / "small.json"


@pytest.fixture(scope="session")
def small_matrix(small_scan: tuple[subprocess.CompletedProcess[str], Path]) -> Path:
    """Return the matrix that one real scan wrote."""
    return small_scan[1]


@pytest.fixture(scope="session")
def handmade() -> Matrix:
    """Return a matrix with a rule of every kind, traits and an absent backend."""
    plain = Case(seed=7)
    forward = Case(pass_="forward", needs_grad="none", seed=7)
    masked = Case(mask="float", masked_rows="-inf", dtype="bfloat16", seed=7)
    wide = [
        Case(head_dim=d, head_dim_v=d, dropout=0.1, dtype="bfloat16", seed=7) for d in (200, 208, 256, 512)
    ]
    strided = Case(layout="inner-stride", seed=7)
    grouped = Case(heads=8, heads_kv=2, seed=7)
    windowed = Case(mask="window", window=64, seed=7)
    cases = [plain, forward, masked, *wide, strided, grouped, windowed]
    torch = Material(name="torch", version="2.13.0+cpu", digest="0123456789abcdef")
    refusal = "RuntimeError: no kernel for a window"
    wrong = {"wrong": {"dq": {"elements": 64, "of": 8192, "factor": 128.0, "where": "row 0"}}}
    flash = Backend(
        name="broken-flash",
        status="probed",
        materials=(torch, Material(name="flash-attn", version="2.8.3", architectures=("8.0", "9.0"))),
        traits={"a row masked whole": "gives zeros"},
        rules=(
            Rule(
                id="aaaaaaaa",
                when={"pass": ("backward",), "dropout": ("on",), "head_dim": (200, 208, 256, 512)},
                verdict=Verdict.UNWRITTEN,
                outputs=("dq", "dk", "dv"),
                witness=wide[0].id,
                counter_witnesses=(plain.id,),
                failing=4,
                right=("torch-math",),
                rates=Rates(inside_failed=6, inside_tried=6, outside_failed=0, outside_tried=5),
            ),
            Rule(
                id="bbbbbbbb",
                when={"masked_rows": ("-inf",), "mask": ("float", "float-broadcast")},
                verdict=Verdict.WRONG,
                outputs=("dq",),
                witness=masked.id,
                failing=1,
            ),
            Rule(
                id="cccccccc",
                when={"layout": ("inner-stride",)},
                verdict=Verdict.CRASHED,
                witness=strided.id,
                failing=1,
                skipped=12,
            ),
            Rule(
                id="dddddddd",
                when=dict.fromkeys(levels_of(grouped), ()) | {a: (x,) for a, x in levels_of(grouped).items()},
                verdict=Verdict.HUNG,
                witness=grouped.id,
                failing=1,
                cases=(grouped.id,),
                localised=False,
            ),
            Rule(
                id="eeeeeeee",
                when={"mask": ("window",)},
                verdict=Verdict.REFUSED,
                evidence=Evidence.DECLARED,
                witness=windowed.id,
                failing=1,
                reason=refusal,
            ),
        ),
        cases=(
            Result(id=plain.id),
            Result(id=forward.id, kernel="flash_fwd"),
            *(
                Result(
                    id=c.id, verdict=Verdict.UNWRITTEN, outputs=("dq", "dk", "dv"), detail={"unwritten": {}}
                )
                for c in wide
            ),
            Result(id=masked.id, verdict=Verdict.WRONG, outputs=("dq",), detail=wrong),
            Result(id=strided.id, verdict=Verdict.CRASHED, detail={"how": "died of SIGSEGV"}),
            Result(id=grouped.id, verdict=Verdict.HUNG, detail={"how": "no answer within 60 s"}),
            Result(
                id=windowed.id, verdict=Verdict.REFUSED, evidence=Evidence.DECLARED, detail={"says": refusal}
            ),
        ),
    )
    math = Backend(
        name="torch-math",
        status="probed",
        materials=(torch,),
        traits={"a row masked whole": "gives NaN", "NaN in a masked value": "reaches the output"},
        cases=tuple(
            Result(id=c.id, verdict=Verdict.OUT_OF_MEMORY if c is wide[3] else Verdict.OK) for c in cases
        ),
    )
    absent = Backend(name="flash-attn-3", status="absent", reason="flash-attn 3 is not installed")
    return sealed(
        Matrix(
            schema=SCHEMA,
            digest="",
            devices=(
                DeviceRecord(kind="cuda", name="NVIDIA RTX 5090", sm="12.0", smem_per_block_optin=101376),
            ),
            backends=(math, flash, absent),
            cases=tuple(CaseRecord(id=case.id, case=case) for case in cases),
            runs=(
                Run(
                    started="2026-01-01T00:00:00+00:00",
                    finished="2026-01-01T00:01:00+00:00",
                    level="quick",
                    seed=7,
                    complete=True,
                    strength=2,
                    planned=10,
                    executed=10,
                    skipped=12,
                    seconds={"judge": 1.5, "kernel": 2.25},
                ),
            ),
            generator=Generator(name="attnprobe", version="0.1.0"),
        )
    )
