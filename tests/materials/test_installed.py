from __future__ import annotations

from importlib import metadata
from typing import TYPE_CHECKING

from attnprobe.materials.installed import installed

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def test_an_installed_distribution_has_version_and_digest() -> None:
    found = installed("torch")
    assert found is not None
    assert found.version == metadata.version("torch")
    assert len(found.digest) == 16
    assert installed("torch") == found


def test_what_is_not_installed_is_none() -> None:
    assert installed("no-such-distribution-anywhere") is None


def test_the_digest_follows_the_files_and_not_the_bytecode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = tmp_path / "thing-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: thing\nVersion: 1.0\n", encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))

    def digest(record: str) -> str:
        installed.cache_clear()
        (info / "RECORD").write_text(record, encoding="utf-8")
        found = installed("thing")
        assert found is not None
        return found.digest

    base = digest("thing.py,sha256=aaa,3\n")
    assert digest("thing.py,sha256=aaa,3\n__pycache__/thing.cpython-311.pyc,,\n") == base
    assert digest("thing.py,sha256=bbb,3\n") != base
