"""Build the guard library: cached, atomic, never raising, and loadable into this interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from attnprobe.probe import guard_build
from attnprobe.probe.guard_build import ABSENT, STEM, build, environment

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Linux only")
ASK = "import ctypes; print(ctypes.CDLL(None).attnprobe_guard_version())"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("LD_PRELOAD", raising=False)
    guard_build._private.cache_clear()
    return tmp_path / "cache" / "attnprobe"


@pytest.fixture
def counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Let $CC be a compiler that adds a line to a file each time it runs."""
    log, compiler = tmp_path / "compiled", tmp_path / "counted-cc"
    compiler.write_text(f'#!/bin/sh\necho x >> {log}\nexec cc "$@"\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", f"{compiler} -g0")
    return log


def answer(library: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-c", ASK],
        env={**os.environ, "LD_PRELOAD": str(library)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert not done.stderr
    return done.stdout.strip()


def test_builds_once_into_the_cache(cache: Path, counted: Path) -> None:
    first, second = build(), build()
    assert first == second
    assert isinstance(first, Path)
    assert first.parent == cache
    assert first.name.startswith(STEM)
    assert counted.read_text() == "x\n"
    assert [one.name for one in cache.iterdir()] == [first.name]
    assert answer(first) == "1"


def test_another_compiler_or_source_builds_anew(
    cache: Path, counted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = build()
    other = tmp_path / "other.c"
    other.write_text(guard_build.SOURCE.read_text() + "\n")
    monkeypatch.setattr(guard_build, "SOURCE", other)
    second = build()
    monkeypatch.setenv("CC", "cc")
    third = build()
    assert isinstance(first, Path)
    assert isinstance(second, Path)
    assert isinstance(third, Path)
    assert len({first, second, third}) == len(list(cache.iterdir())) == 3
    assert counted.read_text() == "x\nx\n"


def test_builders_at_the_same_time_get_the_same_library(cache: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: build(), range(4)))
    assert len(set(found)) == 1
    assert [one.name for one in cache.iterdir()] == [Path(found[0]).name]


@pytest.mark.parametrize("name", ["CC", "PATH"])
def test_without_a_compiler(cache: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv(name, "/nowhere/at/all")
    assert build() == "no C compiler"
    assert environment() == {ABSENT: "no C compiler"}
    assert not cache.exists()


def test_a_compiler_that_fails_says_why(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "broken.c"
    broken.write_text("#error no such machine\n")
    monkeypatch.setattr(guard_build, "SOURCE", broken)
    found = build()
    assert isinstance(found, str)
    assert found.startswith("the C compiler says: broken.c:")
    assert found.endswith("no such machine")
    assert list(cache.iterdir()) == []


def test_what_is_no_library_of_ours_is_not_kept(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path / "other.c"
    other.write_text("int nothing;\n")
    monkeypatch.setattr(guard_build, "SOURCE", other)
    found = build()
    assert isinstance(found, str)
    assert found.startswith("cannot be preloaded: ")
    assert list(cache.iterdir()) == []


def test_an_unreadable_source_and_an_odd_command_are_reasons(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guard_build, "SOURCE", tmp_path / "none.c")
    assert str(build()).startswith("FileNotFoundError: ")
    monkeypatch.setenv("CC", "'cc")
    assert str(build()).startswith("ValueError: ")
    assert not cache.exists()


@pytest.mark.usefixtures("cache")
def test_not_linux(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert build() == "not Linux"


@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize("place", ["a file", "with space", "with:colon"])
def test_a_cache_that_will_not_do_gives_way_to_a_private_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    where = tmp_path / place.replace("a ", "")
    if place == "a file":
        where.write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(where))
    found = build()
    assert isinstance(found, Path)
    assert found.parent.parent == Path(os.environ.get("TMPDIR", "/tmp"))  # noqa: S108
    assert found.parent.stat().st_mode & 0o777 == 0o700
    assert answer(found) == "1"
    assert build() == found


@pytest.mark.usefixtures("cache")
def test_the_private_folder_goes_with_the_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "with space"))
    code = "from attnprobe.probe.guard_build import build; found = build(); print(found, found.is_file())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    path, existed = done.stdout.split()
    assert existed == "True"
    assert not Path(path).parent.exists()


@pytest.mark.usefixtures("cache")
def test_the_environment_keeps_what_the_user_preloads(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = build()
    assert environment() == {"LD_PRELOAD": str(ours)}
    also = str(ours).replace(".so", "-also.so")
    Path(also).write_bytes(Path(ours).read_bytes())
    monkeypatch.setenv("LD_PRELOAD", also)
    assert environment() == {"LD_PRELOAD": f"{ours}:{also}"}
