from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import structs

from attnprobe.matrix.schema import DeviceRecord, Matrix, sealed
from attnprobe.matrix.store import encode

if TYPE_CHECKING:
    from tests.conftest import Attnprobe

SMALL = DeviceRecord(kind="cuda", name="RTX", sm="12.0", smem_per_block_optin=101376)


def test_none_applies_on_a_cpu(attnprobe: Attnprobe) -> None:
    done = attnprobe("advisories", "--fail-on", "any")
    assert done.returncode == 0, done.stdout
    assert done.stdout == ""
    assert "0 of " in done.stderr


def test_all_are_listed_with_their_links(attnprobe: Attnprobe) -> None:
    done = attnprobe("advisories", "--all")
    assert done.returncode == 0
    assert "https://github.com/Dao-AILab/flash-attention/issues/3053" in done.stdout
    documents = json.loads(attnprobe("advisories", "--all", "--format", "json").stdout)
    assert {one["applies"] for one in documents} == {False}
    assert all(one["link"].startswith("https://") and one["checked"] for one in documents)


def test_those_of_the_machine_of_a_matrix(attnprobe: Attnprobe, handmade: Matrix, tmp_path: Path) -> None:
    path = tmp_path / "rtx.json"
    path.write_bytes(encode(sealed(structs.replace(handmade, devices=(SMALL,)))))
    done = attnprobe("advisories", "-m", path, "--assume-device", "--fail-on", "any", "--format", "json")
    assert done.returncode == 1
    assert {one["id"] for one in json.loads(done.stdout)} == {
        "flash-attention-3053",
        "flash-attention-3053-v",
    }
    assert attnprobe("advisories", "-m", path).returncode == 2
