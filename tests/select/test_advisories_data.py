"""Advisories: the data that comes with attnprobe, and how a report and a measurement meet."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from attnprobe.config import AttentionConfig, Case, config_of
from attnprobe.errors import UsageError
from attnprobe.matrix.schema import Backend, CaseRecord, DeviceRecord, Material, Matrix, Result, sealed
from attnprobe.select.advisories import Advisory, DeviceCondition, applying, faults, read
from attnprobe.select.asked import asked
from attnprobe.select.match import Live, assume, compare
from attnprobe.select.selector import Selector
from attnprobe.verdict import Verdict

KNOWN = {one.id: one for one in read()}
SMALL = DeviceRecord(kind="cuda", name="RTX", sm="12.0", smem_per_block_optin=101376)
SM90 = DeviceRecord(kind="cuda", name="H100", sm="9.0", smem_per_block_optin=232448)
SM100 = DeviceRecord(kind="cuda", name="B200", sm="10.0", smem_per_block_optin=232448)

BACK: dict[str, Any] = {"pass_": "backward", "dropout": 0.0, "layout": "contiguous", "deterministic": False}
WIDE = BACK | {"head_dim": 256, "head_dim_v": 256}
# A device, a version and a configuration that each advisory denies, and what lies just outside its bounds.
INSIDE: dict[str, tuple[DeviceRecord, str, dict[str, Any]]] = {
    "flash-attention-3053": (SMALL, "2.7.3", WIDE | {"dropout": 0.1}),
    "flash-attention-3053-v": (SMALL, "2.8.3", BACK | {"dropout": 0.1, "head_dim": 192, "head_dim_v": 256}),
    "flash-attention-2552": (SM100, "4.0.0b11", BACK | {"head_dim": 128, "head_dim_v": 96}),
    "transformer-engine-3216": (SM100, "4.0.0b11", WIDE | {"batch": 2}),
    "flash-attention-2665": (SM100, "4.0.0b18", WIDE | {"layout": "contiguous"}),
    "flash-attention-2541": (SM100, "4.0.0b11", WIDE | {"layout": "packed"}),
    "flash-attention-2896": (SM90, "4.0.0b24", BACK | {"head_dim": 72, "head_dim_v": 72}),
    "flash-attention-2902": (SMALL, "4.0.0b24", BACK | {"head_dim": 192, "head_dim_v": 192}),
    "flash-attention-2244": (SM90, "3.0.0", WIDE | {"deterministic": True}),
    "kernels-707": (SM100, "3.0.0", WIDE),
    "pytorch-196678": (SM90, "2.13.0", WIDE | {"mask": "bool", "dtype": "bfloat16", "seqlen_kv": 704}),
    "transformer-engine-fa4-256-cross": (SM100, "4.0.0b18", WIDE | {"seqlen_q": 64, "seqlen_kv": 128}),
}
OUTSIDE: dict[str, list[tuple[DeviceRecord | None, str | None, dict[str, Any]]]] = {
    "flash-attention-3053": [
        (SM90, None, {}),
        (None, "2.7.2", {}),
        (None, None, {"dropout": 0.0}),
        (None, None, {"head_dim": 192}),
        (None, None, {"pass_": "forward"}),
        (structs.replace(SMALL, smem_per_block_optin=147456), None, {}),
    ],
    "flash-attention-3053-v": [(None, "2.7.2", {}), (None, None, {"head_dim_v": 200, "head_dim": 200})],
    "flash-attention-2552": [
        (None, "4.0.0b12", {}),
        (None, None, {"head_dim_v": 64}),
        (None, None, {"head_dim": 192, "head_dim_v": 128}),
    ],
    "transformer-engine-3216": [(None, "4.0.0b12", {}), (None, None, {"batch": 1}), (SM90, None, {})],
    "flash-attention-2665": [(None, "4.0.0b19", {}), (None, None, {"layout": "transposed"})],
    "flash-attention-2541": [(None, "4.0.0b12", {}), (None, None, {"layout": "transposed"})],
    "flash-attention-2896": [(None, None, {"head_dim": 80}), (SM100, None, {}), (None, "3.9", {})],
    "flash-attention-2902": [(None, None, {"head_dim_v": 128}), (SM100, None, {})],
    "flash-attention-2244": [(None, None, {"deterministic": False}), (SM100, None, {})],
    "kernels-707": [(SM90, None, {}), (None, "2.8.3", {})],
    "pytorch-196678": [
        (None, None, {"mask": "causal-top-left"}),
        (None, None, {"seqlen_kv": 768}),
        (None, "2.10.0", {}),
        (None, "2.13.1", {}),
        (SM100, None, {}),
    ],
    "transformer-engine-fa4-256-cross": [(None, None, {"seqlen_q": 128}), (None, None, {"head_dim": 128})],
}


def denies(one: Advisory, device: DeviceRecord, version: str, config: dict[str, Any]) -> bool:
    (backend, *_) = one.backends
    found = applying((one,), (device,), version, backend)
    return any(each.covers(asked(AttentionConfig(**config))) for each in found)


def test_every_advisory_has_a_test() -> None:
    assert KNOWN.keys() == INSIDE.keys() == OUTSIDE.keys()


@pytest.mark.parametrize("name", sorted(KNOWN))
def test_an_advisory_denies_inside_its_bounds_and_leaves_alone_what_is_outside(name: str) -> None:
    one, (device, version, config) = KNOWN[name], INSIDE[name]
    assert denies(one, device, version, config)
    for other_device, other_version, changed in OUTSIDE[name]:
        args = (other_device or device, other_version or version, config | changed)
        assert not denies(one, *args), (other_device, other_version, changed)


@pytest.mark.parametrize("name", sorted(KNOWN))
def test_an_advisory_is_linked_bounded_and_conditioned(name: str) -> None:
    assert list(faults(KNOWN[name])) == []
    assert KNOWN[name].id == name


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"affected": ""}, "no bound"),
        ({"affected": "newer"}, "affected"),
        ({"fixed_in": "soon"}, "fixed_in"),
        ({"device": DeviceCondition()}, "no condition"),
        ({"verdict": Verdict.OK}, "denies nothing"),
        ({"when": {"colour": ("red",)}}, "no such axis"),
        ({"when": {"head_dim": (100,)}}, "no levels"),
        ({"residues": {"head_dim": (8, 1)}}, "residues"),
        ({"hazard": {"dtype": "float16"}}, "belongs in when"),
    ],
)
def test_the_lint_names_what_is_wrong(changed: dict[str, Any], said: str) -> None:
    one = structs.replace(KNOWN["flash-attention-3053"], **changed)
    assert said in " ".join(faults(one))


@pytest.mark.parametrize("content", ["{", "{}", '{"id": "x", "mood": "bad"}', "\udcff"])
def test_a_file_that_is_no_advisory_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "bad.json").write_bytes(content.encode(errors="surrogateescape"))
    with pytest.raises(UsageError, match=r"bad\.json"):
        read(tmp_path)


def test_a_version_that_cannot_be_told_is_affected() -> None:
    one = KNOWN["flash-attention-3053"]
    assert one.concerns(None)
    assert one.concerns("main@abc")
    assert one.concerns("2.8.3+cu13torch2.13")
    assert not structs.replace(one, fixed_in="2.9.0").concerns("2.9.0+local")
    assert structs.replace(one, fixed_in="2.9.0").concerns("2.8.9")


CASE = Case(head_dim=256, head_dim_v=256, dropout=0.1)
FLASH = Material(name="flash-attn", version="2.8.3", digest="f")


@pytest.fixture
def passed(handmade: Matrix) -> Matrix:
    """Return a matrix in which FlashAttention 2 passed what an advisory denies."""
    backend = Backend(name="flash-attn-2", status="probed", materials=(FLASH,), cases=(Result(id=CASE.id),))
    records = (CaseRecord(id=CASE.id, case=CASE),)
    return sealed(structs.replace(handmade, devices=(SMALL,), backends=(backend,), cases=records))


def status(
    matrix: Matrix, config: AttentionConfig, live: Live | None = None, **changed: Any
) -> tuple[str, str | None]:
    one = structs.replace(KNOWN["flash-attention-3053"], **changed)
    match = assume(matrix) if live is None else compare(matrix, live)
    installed = None if live is None else live.material
    devices = matrix.devices if live is None else live.devices
    selector = Selector(matrix, match, devices=devices, installed=installed, advisories=(one,))
    (candidate,) = selector.select(config).candidates
    return candidate.status, candidate.rule


def test_a_pass_of_this_config_on_the_affected_build_beats_an_advisory(passed: Matrix) -> None:
    assert status(passed, config_of(CASE)) == ("proven", None)
    without = sealed(structs.replace(passed, backends=(structs.replace(passed.backends[0], cases=()),)))
    assert status(without, config_of(CASE)) == ("denied", "flash-attention-3053")
    wider = structs.replace(config_of(CASE), batch=2)
    assert status(passed, wider) == ("denied", "flash-attention-3053")


def test_a_pass_without_the_hazard_beats_nothing(passed: Matrix) -> None:
    assert status(passed, config_of(CASE), hazard={"data": "activations"})[0] == "denied"
    assert status(passed, config_of(CASE), hazard={"data": "gaussian"})[0] == "proven"


def test_a_pass_of_another_build_beats_nothing(passed: Matrix) -> None:
    newer = structs.replace(FLASH, digest="rebuilt")
    live = Live((SMALL,), {"flash-attn": newer}.get)
    assert status(passed, config_of(CASE), live)[0] == "denied"
    fixed = Live((SMALL,), {"flash-attn": structs.replace(FLASH, version="2.9.0")}.get)
    assert status(passed, config_of(CASE), fixed, fixed_in="2.9.0")[0] == "unknown"
