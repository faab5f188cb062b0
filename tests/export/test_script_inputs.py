"""The numbers of a script are those of the scan: inputs to the bit, and what is right and allowed."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from attnprobe.axes import AXES, levels_of
from attnprobe.config import Case
from attnprobe.export._hazards import DATA, EARLIER, GRAD_OUT
from attnprobe.export._inputs import inputs_of
from attnprobe.export._script import script
from attnprobe.probe.inputs import DTYPES, make
from attnprobe.probe.plan import random_cases
from attnprobe.probe.reference import reference
from attnprobe.verdict import Verdict

if TYPE_CHECKING:
    from tests.export.conftest import SubjectOf

BITS = {4: torch.int32, 2: torch.int16}
CPU = torch.device("cpu")
WORK = 1 << 22
CASES = [case for case in random_cases(120, seed=5) if case.work <= WORK]
# Over packed sequences the dropout mask cannot be read.
WITH_A_REFERENCE = [case for case in CASES if not (case.dropout and case.layout == "varlen")]


def globals_of(case: Case, subject_of: SubjectOf, file: Path) -> dict[str, Any]:
    """Return the names of a script that compares values, run up to the call."""
    text = script(subject_of(case, "kernel:f", Verdict.NONFINITE, file=file))
    head, _, _ = text.partition('\nprint(f"torch')
    names: dict[str, Any] = {"__file__": str(file.with_name("repro.py"))}
    exec(compile(head, f"script of {case.id}", "exec"), names)  # noqa: S102  # written by us
    return names


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("kernel") / "kernel.py"
    file.write_text("from torch.nn.functional import scaled_dot_product_attention as f\n")
    return file


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.shape != other.shape or one.dtype is not other.dtype or one.stride() != other.stride():
        return False
    if one.dtype is torch.bool:
        return torch.equal(one, other)
    bits = BITS[one.element_size()]
    return torch.equal(one.contiguous().view(bits), other.contiguous().view(bits))


def test_the_cases_of_this_file_have_every_level_of_what_shapes_inputs() -> None:
    for axis in AXES:
        if axis.name in {"data", "grad_out", "layout", "mask", "masked_rows", "dtype", "heads", "batch"}:
            assert {levels_of(case)[axis.name] for case in CASES} == set(axis.levels), axis.name


def test_every_hazard_has_its_lines() -> None:
    levels = {axis.name: set(axis.levels) for axis in AXES}
    assert set(DATA) | {"batch-differs"} == levels["data"]
    assert set(GRAD_OUT) == levels["grad_out"]
    assert set(EARLIER) | {"nothing"} == levels["earlier"]


@pytest.mark.parametrize("case", WITH_A_REFERENCE, ids=lambda case: case.id)
def test_a_script_makes_the_inputs_of_the_scan_and_the_reference(
    case: Case, subject_of: SubjectOf, kernel: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["repro.py"])
    names = globals_of(case, subject_of, kernel)
    tensors = make(case, CPU)
    for name in inputs_of(case):
        assert same(names[name], getattr(tensors, name)), name
    keep = None
    if case.dropout:
        shape = (case.batch, case.heads, case.seqlen_q, case.seqlen_kv)
        kept = torch.rand(shape, generator=torch.Generator().manual_seed(1)) > case.dropout
        names["keep"] = keep = kept.double() / (1 - case.dropout)
    found = reference(case, tensors, keep)
    close(names["expected"](), (found.expected, found.tolerance))
    weights = found.exact.live()[0].float()
    terms = found.single.spread(weights, found.single.units(DTYPES[case.dtype]))
    for name, value in names["steps"](torch.float32)[1].items():
        assert torch.allclose(value, terms[name], rtol=1e-3), name
    assert (found.dead is not None) is ("dead" in names)
    if found.dead is None:
        return
    dead = found.dead.expand(case.batch, case.heads, case.seqlen_q, 1)
    assert torch.equal(names["dead"], dead)
    for to_scores in (True, False) if case.pass_ == "backward" else (True,):
        choice = {"to_scores": to_scores} if case.pass_ == "backward" else {}
        none = torch.zeros_like(dead)
        mine = names["expected"]({"uniform": dead, "softmax": none}, **choice)
        close(mine, found.of_dead_rows({"uniform": dead}, to_scores=to_scores))


def close(mine: Any, scans: Any) -> None:
    """Values agree to rounding; a tolerance also rests on an order of sums in float32."""
    for name, value in mine[0].items():
        size = float(scans[0][name].abs().max()) if value.numel() else 0.0
        assert torch.allclose(value, scans[0][name], rtol=1e-9, atol=1e-11 * max(1.0, size)), name
        ratio = mine[1][name] / scans[1][name]
        assert bool(((ratio > 0.1) & (ratio < 10)).all()), name
