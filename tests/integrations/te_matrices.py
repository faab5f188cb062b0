"""Matrices for the tests of the guard in Transformer Engine. None of them was measured."""

from __future__ import annotations

from typing import Any

from attnprobe.config import Case
from attnprobe.integrations.guard import Guard
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
from attnprobe.select import advisories
from attnprobe.select.match import assume
from attnprobe.select.selector import Selector
from attnprobe.verdict import Evidence, Verdict

Rules = dict[str, tuple[Rule, ...]]
FUSED = "transformer-engine-fused"
UNFUSED = "transformer-engine-unfused"
WIDE = tuple(range(200, 257, 8))


def rule(name: str, when: dict[str, tuple[Any, ...]], verdict: Verdict = Verdict.UNWRITTEN) -> Rule:
    return Rule(id=name, when=when, verdict=verdict, outputs=("dq", "dk", "dv"), evidence=Evidence.TRACED)


SOLE = {"pass": ("backward",)}
MATERIALS = {"flash-attn-4": (Material(name="flash-attn-4", version="4.0.0b11"),)}
UNWRITTEN = rule("fixture1", {"pass": ("backward",), "dropout": ("on",), "head_dim": WIDE})


def fixture(
    sm: str = "12.0", rules: Rules | None = None, right: dict[str, tuple[Case, ...]] | None = None
) -> Matrix:
    """Return a FIXTURE: made by hand from the launch code of flash-attn 2.8.3, nothing of it was measured.

    It stands for the traced matrix of a device with 101376 B of shared memory per block until there is one.
    `rules` and cases that were `right` by backend; flash-attn 2 on SM 12.0 has a rule of its own. Everything
    is denied that the public reports deny.
    """
    small = sm == "12.0"
    denied = {"flash-attn-2": (UNWRITTEN,) if small else ()} | (rules or {})
    right = right or {}
    names = sorted({*denied, *right, "flash-attn-4"})
    cases = {case.id: case for found in right.values() for case in found}
    device = DeviceRecord(
        kind="cuda",
        name=f"fixture, SM {sm}, not measured",
        sm=sm,
        smem_per_block_optin=101376 if small else 232448,
    )
    run = Run(
        started="2026-01-01T00:00:00+00:00",
        finished="2026-01-01T00:00:00+00:00",
        level="quick",
        seed=0,
        complete=True,
        strength=2,
        planned=len(cases),
        executed=len(cases),
        skipped=0,
    )
    backends = tuple(
        Backend(
            name=name,
            status="probed" if name in denied or name in right else "absent",
            materials=MATERIALS.get(name, ()),
            rules=denied.get(name, ()),
            cases=tuple(Result(id=case.id) for case in right.get(name, ())),
        )
        for name in names
    )
    return sealed(
        Matrix(
            schema=SCHEMA,
            digest="",
            devices=(device,),
            backends=backends,
            runs=(run,),
            generator=Generator(name="a fixture of the tests", version="0"),
            cases=tuple(CaseRecord(id=i, case=case) for i, case in cases.items()),
        )
    )


def guard(matrix: Matrix, mode: Any = "veto", **options: Any) -> Guard:
    selector = Selector(
        matrix,
        assume(matrix),
        devices=matrix.devices,
        installed=None,
        advisories=advisories.read(),
    )
    return Guard(selector, mode, **options)
