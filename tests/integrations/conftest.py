"""A real scan of this machine that all workers share, selectors made by hand, and which kernels ran."""

from __future__ import annotations

import fcntl
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, Protocol

import pytest

from attnprobe.axes import Level
from attnprobe.config import Case
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
from attnprobe.select.match import assume
from attnprobe.select.selector import Selector
from attnprobe.verdict import Verdict

JOB = "- {head_dim: 8, heads: 4, batch: 2, seqlen_q: 8, dtype: float32, mask: float-broadcast}\n"
"""What the small models of these tests call; its neighbours on one axis hold a defect of torch on CPUs."""
NAMES = ("torch-flash", "torch-math")
When = dict[str, tuple[Level, ...]]


@pytest.fixture(scope="session")
def matrix_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the matrix of one real scan; the first worker that needs it makes it for all."""
    base = tmp_path_factory.getbasetemp()
    place = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "integrations"
    place.mkdir(exist_ok=True)
    file = place / "job.json"
    with (place / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not file.exists():
            (place / "job.yaml").write_text(JOB)
            named = [argument for name in NAMES for argument in ("--backend", name)]
            command = [sys.executable, "-m", "attnprobe", "scan", "--config", "job.yaml", *named]
            environment = {name: value for name, value in os.environ.items() if "ATTNPROBE_" not in name}
            environment |= {"ATTNPROBE_DATA_DIR": str(place), "OMP_NUM_THREADS": "1"}
            done = subprocess.run(
                [*command, "-o", "json:new.json"],
                cwd=place,
                env=environment,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                check=False,
            )
            assert done.returncode == 0, done.stderr
            (place / "new.json").rename(file)
    return file


class SelectorOf(Protocol):
    """Make a selector: what is denied per backend, and cases that passed on every one."""

    def __call__(
        self,
        denied: Mapping[str, When] | None = None,
        passed: tuple[Case, ...] = (),
        kind: Literal["cpu", "cuda"] = "cpu",
    ) -> Selector: ...


@pytest.fixture(scope="session")
def matrix_of() -> Callable[..., Matrix]:
    def make(
        denied: Mapping[str, When] | None = None,
        passed: tuple[Case, ...] = (),
        kind: Literal["cpu", "cuda"] = "cpu",
    ) -> Matrix:
        device = DeviceRecord(kind=kind, name=f"a {kind} device")
        torch = Material(name="torch", version="2.13.0", digest="0123456789abcdef")
        backends = tuple(
            Backend(
                name=name,
                status="probed",
                materials=(torch,),
                rules=(
                    Rule(
                        id=f"{number:08x}",
                        when=when,
                        verdict=Verdict.WRONG,
                        outputs=("dq",),
                        witness="0" * 12,
                        failing=1,
                    ),
                )
                if (when := (denied or {}).get(name)) is not None
                else (),
                cases=tuple(Result(id=case.id) for case in passed),
            )
            for number, name in enumerate(NAMES)
        )
        run = Run(
            started="2026-01-01T00:00:00+00:00",
            finished="2026-01-01T00:01:00+00:00",
            level="quick",
            seed=0,
            complete=True,
            strength=2,
            planned=len(passed),
            executed=len(passed),
            skipped=0,
        )
        return sealed(
            Matrix(
                schema=SCHEMA,
                digest="",
                devices=(device,),
                backends=backends,
                cases=tuple(CaseRecord(id=case.id, case=case) for case in passed),
                runs=(run,),
                generator=Generator(name="attnprobe", version="0.1.0"),
            )
        )

    return make


@pytest.fixture(scope="session")
def selector_of(matrix_of: Callable[..., Matrix]) -> SelectorOf:
    def make(
        denied: Mapping[str, When] | None = None,
        passed: tuple[Case, ...] = (),
        kind: Literal["cpu", "cuda"] = "cpu",
    ) -> Selector:
        matrix = matrix_of(denied, passed, kind)
        return Selector(matrix, assume(matrix), devices=matrix.devices, installed=None)

    return make


@pytest.fixture
def kernels() -> Callable[[Callable[[], Any]], str]:
    """Return what runs a function and says which attention kernel ran: compiled, math has no name left."""
    from torch.profiler import ProfilerActivity, profile

    def of(function: Callable[[], Any]) -> str:
        with profile(activities=[ProfilerActivity.CPU]) as seen:
            function()
        names = {event.key for event in seen.key_averages()}
        if "aten::_scaled_dot_product_flash_attention_for_cpu" in names:
            assert "aten::_scaled_dot_product_attention_math" not in names
            return "flash"
        assert names & {"aten::bmm", "aten::baddbmm"}, names
        return "math"

    return of


@pytest.fixture
def logged(caplog: pytest.LogCaptureFixture) -> Iterator[Callable[[], list[str]]]:
    """Return what gives the warnings of attnprobe so far."""
    with caplog.at_level(logging.WARNING, logger="attnprobe"):
        yield lambda: [one.getMessage() for one in caplog.records if one.name == "attnprobe"]
