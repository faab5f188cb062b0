from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.conftest import Attnprobe


def test_as_json(attnprobe: Attnprobe, environment: dict[str, str], small_matrix: Path) -> None:
    data = Path(environment["ATTNPROBE_DATA_DIR"])
    data.mkdir()
    (data / "mine.json").write_bytes(small_matrix.read_bytes())
    done = attnprobe("doctor", "--format", "json")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    found = json.loads(done.stdout)
    assert found["can_scan"] is True
    assert found["devices"][0]["kind"] == "cpu"
    assert found["devices"][0]["cores"] > 0
    assert found["matrices"] == ["mine.json"]
    status = {backend["name"]: backend["status"] for backend in found["backends"]}
    assert status["torch-math"] == "present"
    absent = [backend for backend in found["backends"] if backend["status"] == "absent"]
    assert all(backend["reason"] for backend in absent)
    present = [backend for backend in found["backends"] if backend["status"] == "present"]
    assert all("torch" in {m["name"] for m in backend["materials"]} for backend in present)


@pytest.mark.parametrize("format_name", ["text", "json"])
def test_a_torch_that_cannot_be_imported(attnprobe: Attnprobe, tmp_path: Path, format_name: str) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise ImportError('libcudart.so.13 is not here')")
    done = attnprobe("doctor", "--format", format_name, env={"PYTHONPATH": str(tmp_path)})
    assert done.returncode == 3
    assert "Traceback" not in done.stderr
    assert "libcudart.so.13 is not here" in done.stdout
    if format_name == "json":
        found = json.loads(done.stdout)
        assert found["can_scan"] is False
        assert len(found["missing"]) >= 1
    else:
        assert done.stdout.splitlines()[-1] == "cannot scan yet"


@pytest.mark.skipif(shutil.which("unshare") is None, reason="needs unshare")
def test_as_the_first_process_of_a_container(environment: dict[str, str], tmp_path: Path) -> None:
    alone = ["unshare", "--pid", "--fork", "--mount-proc"]
    if subprocess.run([*alone, "true"], capture_output=True, check=False).returncode:
        pytest.skip("may not make a process namespace")
    done = subprocess.run(
        [*alone, sys.executable, "-m", "attnprobe", "doctor"],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "ready: attnprobe scan"
