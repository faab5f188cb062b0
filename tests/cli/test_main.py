from __future__ import annotations

import fcntl
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import attnprobe as package

if TYPE_CHECKING:
    from tests.cli.conftest import Terminal
    from tests.conftest import Attnprobe

HEAVY = ("torch", "click", "rich", "numpy", "pynvml", "cuda", "yaml", "attnprobe.cli", "attnprobe.run")
COMMANDS = ("doctor", "scan", "show", "validate")


@pytest.mark.parametrize("arguments", [(), ("--help",), ("-h",)])
def test_help_teaches(attnprobe: Attnprobe, arguments: tuple[str, ...]) -> None:
    done = attnprobe(*arguments)
    assert done.returncode == 0
    assert done.stderr == ""
    for command in COMMANDS:
        assert re.search(rf"^  {command} ", done.stdout, re.MULTILINE), command
    assert "attnprobe scan  " in done.stdout
    assert "Exit codes: 0 done" in done.stdout
    assert "130 interrupted" in done.stdout


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_a_command(attnprobe: Attnprobe, command: str) -> None:
    done = attnprobe(command, "--help")
    assert done.returncode == 0
    assert done.stderr == ""
    options = re.findall(r"^  (?:-\w, )?(--[a-z-]+)", done.stdout, re.MULTILINE)
    assert options[-1] == "--help"
    assert len(done.stdout.splitlines()) > 5
    assert max(map(len, done.stdout.splitlines())) <= 80


def test_help_of_scan_has_examples_and_defaults(attnprobe: Attnprobe) -> None:
    text = attnprobe("scan", "--help").stdout
    assert "attnprobe scan --level quick" in text
    assert "attnprobe scan --budget 5m -o json:m.json" in text
    assert "my_kernel.py:attention" in text
    assert re.search(r"default:\s+standard", text)
    assert re.search(r"default:\s+60s", text)


def test_the_version(attnprobe: Attnprobe) -> None:
    done = attnprobe("--version")
    assert done.returncode == 0
    assert package.__version__ in done.stdout


@pytest.mark.parametrize(
    "arguments",
    [
        ("no-such-command",),
        ("--no-such-option",),
        ("scan", "--no-such-option"),
        ("scan", "--level", "huge"),
        ("scan", "--seed", "-1"),
        ("scan", "--seed", "x"),
        ("scan", "extra"),
        ("show", "--format", "yaml", "x.json"),
        ("doctor", "--format", "table"),
        ("validate",),
    ],
)
def test_wrong_usage_is_2_and_says_so(attnprobe: Attnprobe, arguments: tuple[str, ...]) -> None:
    done = attnprobe(*arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    assert "error" in done.stderr.lower()
    assert "Traceback" not in done.stderr


def test_a_mistyped_command_is_not_guessed_to_be_a_private_module(attnprobe: Attnprobe) -> None:
    for name in ("_output", "_scanning", "main", "__init__"):
        assert attnprobe(name).returncode == 2


def _first_lines(arguments: list[str], environment: dict[str, str]) -> tuple[int, str, str]:
    """Read one byte of the output, then close it while the command still writes."""
    read_end, write_end = os.pipe()
    # One page is all the pipe takes, so the command is still writing when the reader leaves.
    fcntl.fcntl(write_end, fcntl.F_SETPIPE_SZ, 4096)
    process = subprocess.Popen(
        [sys.executable, "-m", "attnprobe", *arguments],
        stdin=subprocess.DEVNULL,
        stdout=write_end,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )
    os.close(write_end)
    first = os.read(read_end, 1).decode()
    os.close(read_end)
    _, stderr = process.communicate(timeout=60)
    return process.returncode, first, stderr


def test_a_reader_that_leaves_is_no_error(environment: dict[str, str], small_matrix: Path) -> None:
    code, first, stderr = _first_lines(["show", "--format", "json", str(small_matrix)], environment)
    assert first == "{"
    assert stderr == ""
    assert code == 0


def test_a_reader_that_left_before_is_no_error(environment: dict[str, str]) -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    for arguments in ([], ["--help"], ["scan", "--level", "quick", "--plan"]):
        done = subprocess.run(
            [sys.executable, "-m", "attnprobe", *arguments],
            stdout=write_end,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
            check=False,
        )
        assert "Traceback" not in done.stderr
        assert "Exception" not in done.stderr
        assert done.returncode == 0
    os.close(write_end)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_an_error_without_a_traceback(environment: dict[str, str], small_matrix: Path) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "attnprobe", "show", str(small_matrix)],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
            check=False,
        )
    assert done.returncode != 0
    assert "Traceback" not in done.stderr
    assert "No space left" in done.stderr


def test_importing_the_package_loads_nothing_heavy() -> None:
    heavy = [*HEAVY, "attnprobe.matrix"]
    program = (
        "import sys, attnprobe; attnprobe.__version__; dir(attnprobe)\n"
        f"print([name for name in {heavy!r} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_reading_a_matrix_loads_neither_torch_nor_the_command_line(small_matrix: Path) -> None:
    heavy = [*HEAVY, "attnprobe.probe"]
    program = (
        f"import sys, attnprobe; attnprobe.read_matrix({str(small_matrix)!r})\n"
        f"print([name for name in {heavy!r} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_every_public_name_is_there() -> None:
    for name in package.__all__:
        assert getattr(package, name) is not None
    assert set(dir(package)) >= set(package.__all__)
    name = "scan_all"
    with pytest.raises(AttributeError, match="no attribute 'scan_all'"):
        getattr(package, name)


def test_help_needs_neither_torch_nor_rich(environment: dict[str, str], tmp_path: Path) -> None:
    for name in ("torch", "rich"):
        (tmp_path / f"{name}.py").write_text("raise RuntimeError('loaded')")
    done = subprocess.run(
        [sys.executable, "-m", "attnprobe", "scan", "--level", "quick", "--plan"],
        env={**environment, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_help_on_a_terminal(terminal: Terminal) -> None:
    seen = terminal("--help", width=60)
    assert seen.code == 0
    assert "Exit codes" in seen.stdout
    assert seen.stderr == ""
