"""Loading: which file, one read, and what a matrix is worth on another machine."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec import structs

import attnprobe
from attnprobe.config import Case, config_of
from attnprobe.device.interface import Device
from attnprobe.errors import MatrixError, NoVerdictError
from attnprobe.matrix.schema import Backend, CaseRecord, Material, Matrix, Result, Rule, sealed
from attnprobe.matrix.store import encode, write_atomically
from attnprobe.select import loading
from attnprobe.select.match import Live, compare, here
from attnprobe.verdict import Verdict

TORCH = Material(name="torch", version="2.13.0", digest="a")
FLASH = Material(name="flash-attn", version="2.8.3", digest="f")
GOOD, BAD = Case(), Case(layout="packed")


@pytest.fixture
def two(handmade: Matrix) -> Matrix:
    """Return a matrix of this machine: one backend on torch, one on torch and flash-attn."""
    rule = Rule(id="r", when={"layout": ("packed",)}, verdict=Verdict.WRONG, witness=BAD.id)
    results = (Result(id=GOOD.id), Result(id=BAD.id, verdict=Verdict.WRONG))
    backends = tuple(
        Backend(name=name, status="probed", materials=materials, rules=(rule,), cases=results)
        for name, materials in (("with-flash", (TORCH, FLASH)), ("with-torch", (TORCH,)))
    )
    records = tuple(CaseRecord(id=case.id, case=case) for case in (GOOD, BAD))
    return sealed(structs.replace(handmade, devices=here().devices, backends=backends, cases=records))


@pytest.fixture
def file(two: Matrix, tmp_path: Path) -> Path:
    path = tmp_path / "two.json"
    path.write_bytes(encode(two))
    return path


def live_with(*materials: Material) -> Live:
    return Live(here().devices, {one.name: one for one in materials}.get)


def test_a_difference_expires_only_the_backends_that_rest_on_it(file: Path) -> None:
    newer = structs.replace(FLASH, version="2.8.4")
    selector = loading.load(file, live=live_with(TORCH, newer))
    decision = selector.select(config_of(GOOD))
    assert decision.backend == "with-torch"
    one = decision.candidate("with-flash")
    assert one is not None
    assert (one.status, one.expired) == ("unknown", True)
    assert "flash-attn 2.8.3 was measured, 2.8.4 is here" in decision.explain()
    assert not decision.matches


@pytest.mark.parametrize(
    "materials",
    [
        (),
        (structs.replace(TORCH, digest="other build"),),
        (structs.replace(TORCH, version="2.14.0"),),
        (structs.replace(TORCH, digest=""),),
    ],
)
def test_denials_stay_when_allows_expire(file: Path, materials: tuple[Material, ...]) -> None:
    selector = loading.load(file, live=live_with(*materials))
    assert selector.select(config_of(GOOD)).backend is None
    decision = selector.select(config_of(BAD), "veto")
    assert decision.backend is None
    assert {one.status for one in decision.candidates} == {"denied"}
    assert "measured" in decision.candidates[0].reason
    assert (
        loading.load(file, live=live_with(*materials), tolerate=["torch", "flash-attn"])
        .select(config_of(GOOD))
        .backend
    )


def test_expired_denials_can_be_reduced_to_a_report(file: Path) -> None:
    selector = loading.load(file, live=live_with(), veto_expired=False)
    decision = selector.select(config_of(BAD), "veto")
    assert decision.backend == "with-flash"
    assert decision.candidates[0].reason.startswith("was denied elsewhere")
    assert selector.select(config_of(BAD), strength=1).backend is None
    fresh = loading.load(file, live=live_with(TORCH, FLASH), veto_expired=False)
    assert fresh.select(config_of(BAD), "veto").backend is None


def test_another_device_proves_nothing(file: Path, two: Matrix) -> None:
    elsewhere = Live((structs.replace(two.devices[0], name="Other CPU"),), live_with(TORCH, FLASH).material)
    selector = loading.load(file, live=elsewhere)
    assert selector.select(config_of(GOOD), strength=1).backend is None
    assert "here Other CPU" in selector.select(config_of(GOOD)).explain()
    assumed = loading.load(file, live=elsewhere, assume_device=True)
    assert assumed.select(config_of(GOOD)).backend == "with-flash"


def test_how_many_cores_a_process_may_use_is_no_other_device(two: Matrix) -> None:
    many = Live((structs.replace(two.devices[0], cores=512),), live_with(TORCH, FLASH).material)
    assert compare(two, many).device == ""


def test_a_backend_without_materials_matches_nothing(two: Matrix) -> None:
    bare = structs.replace(two.backends[0], materials=())
    match = compare(structs.replace(two, backends=(bare,)), live_with(TORCH, FLASH))
    assert "does not say" in match.expired("with-flash")


def test_a_result_of_a_run_that_is_not_there_proves_nothing(two: Matrix, file: Path) -> None:
    gone = sealed(structs.replace(two, runs=()))
    file.write_bytes(encode(gone))
    selector = loading.load(file, live=live_with(TORCH, FLASH))
    assert selector.select(config_of(GOOD)).backend is None


def test_a_changed_file_is_refused(file: Path) -> None:
    file.write_bytes(file.read_bytes().replace(b'"packed"', b'"varlen"'))
    with pytest.raises(MatrixError, match="changed"):
        attnprobe.load(file)


def test_the_order_of_places(two: Matrix, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data, shipped = tmp_path / "data", tmp_path / "shipped"
    monkeypatch.setenv("ATTNPROBE_DATA_DIR", str(data))
    monkeypatch.delenv("ATTNPROBE_MATRIX", raising=False)
    monkeypatch.setattr(loading, "published", lambda: shipped)
    live = live_with(TORCH, FLASH)
    slug = Device(live.devices[0], "cpu").slug
    with pytest.raises(NoVerdictError, match="no matrix for"):
        loading.find(live)
    expected = []
    for place, level in ((shipped, "quick"), (shipped, "full"), (data, "quick"), (data, "standard")):
        path = place / f"{slug}.{level}.json"
        write_atomically(path, encode(two))
        expected.append(path)
        assert loading.find(live) == path
    write_atomically(data / "other-machine.full.json", encode(two))
    assert loading.find(live) == expected[-1]
    monkeypatch.setenv("ATTNPROBE_MATRIX", str(tmp_path / "named.json"))
    assert loading.find(live) == tmp_path / "named.json"
    with pytest.raises(MatrixError, match="does not exist"):
        attnprobe.load(live=live)


def test_of_several_builds_the_one_that_is_here_is_taken(
    two: Matrix, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ATTNPROBE_DATA_DIR", str(tmp_path))
    monkeypatch.delenv("ATTNPROBE_MATRIX", raising=False)
    live = live_with(TORCH, FLASH)
    slug = Device(live.devices[0], "cpu").slug
    newer = structs.replace(TORCH, version="9.0")
    other = tuple(structs.replace(b, materials=(newer,)) for b in two.backends)
    write_atomically(tmp_path / f"{slug}.full.json", encode(sealed(structs.replace(two, backends=other))))
    write_atomically(tmp_path / f"{slug}.torch-2.full.json", encode(two))
    assert loading.find(live).name == f"{slug}.torch-2.full.json"
    assert loading.find(live_with(newer)).name == f"{slug}.full.json"
    # Where none fits, what they deny is still worth having.
    assert loading.find(live_with(structs.replace(TORCH, version="8.0"))).name == f"{slug}.full.json"


def test_published_matrices_are_found_in_a_checkout_and_in_a_wheel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (loading.published() / "advisories").is_dir()
    package = tmp_path / "attnprobe"
    (package / "select").mkdir(parents=True)
    monkeypatch.setattr(loading, "__file__", str(package / "select" / "loading.py"))
    assert loading.published() == tmp_path / "matrices"
    (package / "_matrices").mkdir()
    assert loading.published() == package / "_matrices"


READER = """
    import sys, attnprobe
    from attnprobe.config import Case, config_of
    from attnprobe.errors import MatrixError
    path, known = sys.argv[1], set(sys.argv[2].split(","))
    for _ in range(int(sys.argv[3])):
        matrix = attnprobe.load(path, assume_device=True)
        assert matrix.digest in known, matrix.digest
        chosen = matrix.select(config_of(Case())).backend
        assert chosen == ("with-torch" if matrix.digest == sys.argv[4] else "with-flash"), chosen
"""


@pytest.mark.slow
def test_many_processes_load_while_a_writer_replaces_the_file(two: Matrix, tmp_path: Path) -> None:
    flipped = sealed(structs.replace(two, backends=two.backends[1:]))
    path = tmp_path / "shared.json"
    contents = [encode(two), encode(flipped)]
    write_atomically(path, contents[0])
    arguments = [str(path), f"{two.digest},{flipped.digest}", "20", flipped.digest]
    readers = [
        subprocess.Popen([sys.executable, "-c", textwrap.dedent(READER), *arguments], stderr=subprocess.PIPE)
        for _ in range(64)
    ]
    written = 0
    while written < 1000 or any(reader.poll() is None for reader in readers):
        write_atomically(path, contents[written % 2])
        written += 1
    for reader in readers:
        _, complaint = reader.communicate(timeout=60)
        assert reader.returncode == 0, complaint.decode()


def test_ranks_compare_digests(file: Path, two: Matrix) -> None:
    load: Callable[..., attnprobe.Selector] = attnprobe.load
    assert load(file).digest == load(file, assume_device=True).digest == two.digest
