from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from attnprobe import UsageError, read_matrix
from attnprobe.axes import AXES
from attnprobe.device.cpu import cpu_device
from attnprobe.matrix.lint import faults
from attnprobe.matrix.store import parse_matrix
from attnprobe.report.table import format_ as table
from attnprobe.verdict import Verdict

if TYPE_CHECKING:
    from tests.cli.conftest import Terminal
    from tests.conftest import Attnprobe

PROBING = "plan: "
"""What a scan says on standard error before its first case."""

KERNELS = """
from torch.nn.functional import scaled_dot_product_attention as right

def good(*arguments, **options):
    return right(*arguments, **options)

def wrong(*arguments, **options):
    return right(*arguments, **options) * 1.5

def nothing(*arguments, **options):
    return None

def short(*arguments, **options):
    return right(*arguments, **options)[..., :1]

def raises(*arguments, **options):
    raise ValueError('not this one')

number = 7
"""


@pytest.fixture
def kernels(tmp_path: Path) -> str:
    (tmp_path / "kernels.py").write_text(KERNELS)
    return "kernels.py"


def escapes(text: str) -> set[str]:
    """Return the colours that a text sets, without cursor movements and weights."""
    codes = {code for group in re.findall(r"\x1b\[([0-9;]*)m", text) for code in group.split(";")}
    return {code for code in codes if re.fullmatch(r"[349]\d|10[0-7]", code)}


# What one scan prints and writes.


def test_a_scan(small_scan: tuple[subprocess.CompletedProcess[str], Path]) -> None:
    done, path = small_scan
    assert done.returncode == 0
    matrix = read_matrix(path)
    assert done.stdout == table.text(matrix, width=100, color=False)
    lines = done.stderr.splitlines()
    assert lines[0].startswith("device: ")
    assert lines[-1] == "written: small.json"
    assert "\x1b" not in done.stderr
    assert "\r" not in done.stderr
    assert len(lines) < 10


def test_a_scans_matrix(small_matrix: Path) -> None:
    assert faults(small_matrix.read_bytes(), strict=True) == []
    matrix = read_matrix(small_matrix)
    run = matrix.runs[0]
    assert (run.level, run.seed, run.complete) == ("config", 0, True)
    assert run.planned == run.executed == len(matrix.cases)
    assert [backend.name for backend in matrix.backends] == ["torch-flash", "torch-math"]
    for backend in matrix.backends:
        assert {result.id for result in backend.cases} == {record.id for record in matrix.cases}
        for result in backend.cases:
            if result.verdict is Verdict.REFUSED:
                assert result.detail["says"]
    assert sorted(path.name for path in small_matrix.parent.iterdir()) == ["small.json", "tiny.json"]


def test_nothing_that_names_this_machine_is_in_the_file(small_matrix: Path) -> None:
    import getpass
    import platform

    content = small_matrix.read_text()
    for named in (platform.node(), str(small_matrix.parent), str(Path.home()), f'"{getpass.getuser()}"'):
        assert named not in content


def test_outputs_gates_and_formats(
    attnprobe: Attnprobe, tiny_config: Path, kernels: str, tmp_path: Path
) -> None:
    done = attnprobe(
        *("scan", "--config", tiny_config, "--backend", f"{kernels}:wrong", "--backend", f"{kernels}:good"),
        *("-o", "json:deep/one.json", "-o", "table:two.txt", "-o", "json:three.json"),
        *("--format", "json", "--fail-on", "failing"),
    )
    assert done.returncode == 1, done.stderr
    matrix = read_matrix(tmp_path / "deep" / "one.json")
    assert parse_matrix(done.stdout.encode(), "stdout") == matrix
    assert (tmp_path / "three.json").read_bytes() == (tmp_path / "deep" / "one.json").read_bytes()
    assert (tmp_path / "two.txt").read_text() == table.text(matrix, width=100, color=False)
    written = [line for line in done.stderr.splitlines() if line.startswith("written: ")]
    assert written == ["written: deep/one.json", "written: two.txt", "written: three.json"]
    assert faults((tmp_path / "three.json").read_bytes(), strict=True) == []
    by_name = {backend.name: backend for backend in matrix.backends}
    bad, good = by_name["kernels:wrong"], by_name["kernels:good"]
    assert {result.verdict for result in good.cases} == {Verdict.OK, Verdict.REFUSED}
    assert good.rules == tuple(rule for rule in good.rules if rule.verdict is Verdict.REFUSED)
    assert Verdict.OK not in {result.verdict for result in bad.cases if "out" in result.outputs}
    assert any(rule.verdict is Verdict.WRONG for rule in bad.rules)
    assert {material.name for material in bad.materials} >= {"torch", "file"}


def test_a_budget_that_ends_early_and_failures_are_0(
    attnprobe: Attnprobe, kernels: str, environment: dict[str, str]
) -> None:
    start = time.monotonic()
    done = attnprobe("scan", "--level", "quick", "--backend", f"{kernels}:wrong", "--budget", "2s")
    assert time.monotonic() - start < 30
    assert done.returncode == 0, done.stderr
    assert "Failing" in done.stdout
    assert "incomplete" in done.stdout
    (written,) = Path(environment["ATTNPROBE_DATA_DIR"]).glob("*.json")
    assert f"written: {written}" in done.stderr
    run = read_matrix(written).runs[0]
    assert (run.level, run.complete) == ("quick", False)
    assert 0 < run.executed < run.planned
    assert faults(written.read_bytes(), strict=True) == []


# What is wrong is said before anything is probed.


@pytest.mark.parametrize(
    ("spec", "what"),
    [
        ("no-such-backend", "--backend no-such-backend is not known"),
        ("raising.py:attention", "RuntimeError: at import"),
        ("leaving.py:attention", "leaving.py"),
    ],
)
def test_a_backend_that_is_none_is_2_before_any_probing(
    attnprobe: Attnprobe, tmp_path: Path, spec: str, what: str
) -> None:
    (tmp_path / "raising.py").write_text("raise RuntimeError('at import')")
    (tmp_path / "leaving.py").write_text("import sys\nsys.exit(0)\nattention = print")
    done = attnprobe("scan", "--level", "quick", "--backend", spec)
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    assert what in done.stderr
    assert "Traceback" not in done.stderr
    assert PROBING not in done.stderr


@pytest.mark.parametrize(
    ("spec", "what"),
    [
        ("none.py:attention", "none.py does not exist"),
        (".:attention", "--backend .:attention"),
        ("kernels.py:absent", "kernels.py has no absent"),
        ("kernels.py:good.absent", "kernels.py has no good.absent"),
        ("kernels.py:number", "is a int, not callable"),
        ("syntax.py:attention", "SyntaxError"),
        ("binary.py:attention", "cannot be imported"),
        ("no_such_package.module:attention", "No module named 'no_such_package'"),
        ("kernels.py:", "kernels.py:"),
        (":attention", ":attention"),
        ("", "--backend"),
    ],
)
def test_a_callable_that_is_none(
    kernels: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spec: str, what: str
) -> None:
    from attnprobe.backends.registry import choose

    assert kernels
    (tmp_path / "syntax.py").write_text("def attention(:")
    (tmp_path / "binary.py").write_bytes(b"\x00\xff")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=re.escape(what)):
        choose((spec,), cpu_device())


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (("-o", "json:blocked/m.json"), "blocked/m.json cannot be written"),
        (("-o", "json:/proc/none/m.json"), "/proc/none/m.json cannot be written"),
        (("-o", "json:."), ". is a directory"),
        (("-o", "json:good.json", "-o", "json:blocked/m.json"), "blocked/m.json cannot be written"),
        (("-o", "m.json"), "-o m.json names no format"),
        (("-o", "json:"), "names no format"),
        (("-o", "yaml:m.yaml"), "no format 'yaml'"),
        (("--format", "yaml"), "no format 'yaml'"),
        (("--budget", "0"), "0"),
        (("--budget", "-5s"), "-5s"),
        (("--budget", "soon"), "'soon' is no duration"),
        (("--budget", "5 m"), "'5 m' is no duration"),
        (("--budget", "1d"), "'1d' is no duration"),
        (("--timeout", "0s"), "'0s' is no duration"),
        (("--config", "none.yaml"), "none.yaml cannot be read"),
        (("--config", "."), ". cannot be read"),
        (("--config", "kernels.py"), "unknown kind of file"),
        (("--config", "empty.yaml"), "holds no configurations"),
        (("--config", "bad.yaml"), "head_dim"),
        (("--config", "torn.json"), "cannot be parsed as json"),
        (("--config", "binary.yaml"), "cannot be parsed as yaml"),
        (("--resume", "-o", "json:new.json"), "nothing to resume"),
    ],
)
def test_a_bad_option_is_2_before_any_probing(
    attnprobe: Attnprobe, kernels: str, tmp_path: Path, arguments: tuple[str, ...], what: str
) -> None:
    assert kernels
    (tmp_path / "blocked").write_text("a file, no directory")
    (tmp_path / "empty.yaml").write_text("")
    (tmp_path / "bad.yaml").write_text("- {head_dim: many}")
    (tmp_path / "torn.json").write_text('[{"head_dim": 8')
    (tmp_path / "binary.yaml").write_bytes(b"\x00\xff\xfe")
    done = attnprobe("scan", "--backend", "torch-math", *arguments)
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    assert what in done.stderr
    assert "Traceback" not in done.stderr
    assert PROBING not in done.stderr
    assert not (tmp_path / "good.json").exists()


def test_an_output_that_cannot_be_written_is_told_before_torch_is_loaded(
    attnprobe: Attnprobe, tmp_path: Path
) -> None:
    (tmp_path / "torch.py").write_text(
        f"open({str(tmp_path / 'loaded')!r}, 'w'); raise ImportError('loaded')"
    )
    (tmp_path / "file").write_text("")
    path = {"PYTHONPATH": str(tmp_path)}
    done = attnprobe("scan", "--level", "quick", "-o", "json:file/m.json", env=path)
    assert done.returncode == 2
    assert not (tmp_path / "loaded").exists()
    # And the trap works.
    assert attnprobe("scan", "--level", "quick", "-o", "json:m.json", env=path).returncode == 3
    assert (tmp_path / "loaded").exists()


def test_two_callables_of_one_name_are_not_mistaken_for_each_other(
    attnprobe: Attnprobe, tiny_config: Path, tmp_path: Path
) -> None:
    for place in ("one", "two"):
        (tmp_path / place).mkdir()
        (tmp_path / place / "kernel.py").write_text(KERNELS)
    done = attnprobe(
        *("scan", "--config", tiny_config, "--budget", "2s", "-o", "json:m.json"),
        *("--backend", "one/kernel.py:good", "--backend", "two/kernel.py:good"),
    )
    if done.returncode == 2:
        assert "kernel" in done.stderr
    else:
        assert len(read_matrix(tmp_path / "m.json").backends) == 2


def test_no_backend_at_all_is_3(
    attnprobe: Attnprobe, tiny_config: Path, kernels: str, tmp_path: Path
) -> None:
    done = attnprobe("scan", "--config", tiny_config, "--backend", f"{kernels}:raises", "-o", "json:m.json")
    assert done.returncode == 3, done.stderr
    assert done.stdout == ""
    assert "no backend to probe" in done.stderr
    assert "ValueError: not this one" in done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["kernels.py", "tiny.json"]


def test_a_callable_that_returns_something_else_has_not_crashed(
    attnprobe: Attnprobe, tiny_config: Path, kernels: str, tmp_path: Path
) -> None:
    done = attnprobe(
        *("scan", "--config", tiny_config, "--budget", "6s", "-o", "json:m.json"),
        *(part for name in ("nothing", "short", "good") for part in ("--backend", f"{kernels}:{name}")),
    )
    assert done.returncode == 0, done.stderr
    by_name = {backend.name: backend for backend in read_matrix(tmp_path / "m.json").backends}
    assert Verdict.OK in {result.verdict for result in by_name["kernels:good"].cases}
    for name in ("nothing", "short"):
        verdicts = {result.verdict for result in by_name[f"kernels:{name}"].cases}
        assert verdicts <= {Verdict.WRONG, Verdict.REFUSED}, verdicts


# The plan.


def test_the_plan_as_text(attnprobe: Attnprobe, tiny_config: Path) -> None:
    done = attnprobe("scan", "--config", tiny_config, "--plan")
    assert done.returncode == 0
    lines = done.stdout.splitlines()
    assert all(re.match(r"[0-9a-f]{12}  \S", line) for line in lines)
    assert len({line.split()[0] for line in lines}) == len(lines)
    assert done.stderr.strip() == f"{len(lines)} cases, level config, seed 0"


@pytest.mark.parametrize("level", ["quick", "standard", "full"])
def test_the_plan_as_json(attnprobe: Attnprobe, level: str) -> None:
    done = attnprobe("scan", "--level", level, "--plan", "--format", "json", "--seed", "5")
    assert done.returncode == 0
    document = json.loads(done.stdout)
    assert (document["level"], document["seed"]) == (level, 5)
    assert len({case["id"] for case in document["cases"]}) == len(document["cases"])
    names = [axis.name for axis in AXES]
    assert all(list(case["at"]) == names for case in document["cases"])
    for axis in AXES:
        assert {case["at"][axis.name] for case in document["cases"]} == set(axis.levels)


def test_the_plan_writes_nothing(attnprobe: Attnprobe, tiny_config: Path, tmp_path: Path) -> None:
    done = attnprobe("scan", "--config", tiny_config, "--plan", "-o", "json:new/m.json")
    assert done.returncode == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["tiny.json"]


def test_the_plan_follows_the_seed(attnprobe: Attnprobe) -> None:
    plans = [
        attnprobe("scan", "--level", "quick", "--plan", "--seed", seed).stdout for seed in ("1", "1", "2")
    ]
    assert plans[0] == plans[1]
    assert plans[0] != plans[2]


# Options from the environment.


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("LEVEL", "quick", '"level": "quick"'),
        ("SEED", "5", '"seed": 5'),
        ("CONFIG", "tiny.json", '"level": "config"'),
    ],
)
def test_an_option_from_the_environment(
    attnprobe: Attnprobe, tiny_config: Path, name: str, value: str, said: str
) -> None:
    assert tiny_config.name == "tiny.json"
    done = attnprobe("scan", "--plan", "--format", "json", env={f"ATTNPROBE_SCAN_{name}": value})
    assert done.returncode == 0, done.stderr
    assert said in done.stdout


def test_plan_and_format_from_the_environment(attnprobe: Attnprobe, tiny_config: Path) -> None:
    environment = {"ATTNPROBE_SCAN_PLAN": "1", "ATTNPROBE_SCAN_FORMAT": "json"}
    done = attnprobe(
        "scan", "--config", tiny_config, "--budget", "1s", "--backend", "torch-math", env=environment
    )
    assert done.returncode == 0
    assert "cases" in json.loads(done.stdout)
    assert "backends" not in json.loads(done.stdout)


def test_backends_and_outputs_from_the_environment(attnprobe: Attnprobe, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for name, value, what in (
        ("BACKEND", "no-such-backend", "no-such-backend is not known"),
        ("OUTPUT", "json:file/m.json", "file/m.json cannot be written"),
        ("BUDGET", "never", "'never' is no duration"),
    ):
        arguments = ["scan", "--level", "quick"]
        arguments += ["--backend", "torch-math"] if name != "BACKEND" else []
        arguments += ["--budget", "1s"] if name != "BUDGET" else []
        done = attnprobe(*arguments, env={f"ATTNPROBE_SCAN_{name}": value})
        assert done.returncode == 2, (name, done.stderr)
        assert what in done.stderr


def test_the_command_line_is_before_the_environment(attnprobe: Attnprobe) -> None:
    done = attnprobe(
        *("scan", "--level", "quick", "--plan", "--format", "json"), env={"ATTNPROBE_SCAN_LEVEL": "standard"}
    )
    assert json.loads(done.stdout)["level"] == "quick"


# The terminal.


def test_a_progress_bar_on_a_terminal(terminal: Terminal, tiny_config: Path) -> None:
    seen = terminal(
        *("scan", "--config", tiny_config, "--backend", "torch-math", "-o", "json:m.json", "--budget", "2s"),
        on=("stderr",),
    )
    assert seen.code == 0
    assert "probing" in seen.stderr
    assert re.search(r"\d+/\d+", seen.stderr)
    assert escapes(seen.stderr)
    assert "\x1b" not in seen.stdout
    assert "probing" not in seen.stdout


def test_no_color_on_a_terminal(terminal: Terminal, tiny_config: Path) -> None:
    seen = terminal(
        *("scan", "--config", tiny_config, "--backend", "torch-math", "-o", "json:m.json", "--budget", "3s"),
        env={"NO_COLOR": "1"},
    )
    assert seen.code == 0
    assert "probing" in seen.stderr
    assert escapes(seen.stderr) == set()
    assert "\x1b" not in seen.stdout


@pytest.mark.parametrize(
    ("options", "env"),
    [((), {"CI": "true"}), pytest.param(("--no-progress",), {}, marks=pytest.mark.slow)],
)
def test_no_progress_where_none_is_wanted(
    terminal: Terminal, tiny_config: Path, options: tuple[str, ...], env: dict[str, str]
) -> None:
    arguments = (
        "scan",
        "--config",
        tiny_config,
        "--backend",
        "torch-math",
        "-o",
        "json:m.json",
        "--budget",
        "1s",
    )
    seen = terminal(*arguments, *options, env=env)
    assert seen.code == 0
    assert "probing" not in seen.stderr
    assert "written: m.json" in seen.stderr


def test_a_closed_standard_output_does_not_cost_the_matrix(
    environment: dict[str, str], tiny_config: Path, tmp_path: Path
) -> None:
    process = subprocess.Popen(
        [
            *(
                sys.executable,
                "-m",
                "attnprobe",
                "scan",
                "--config",
                str(tiny_config),
                "--backend",
                "torch-math",
            ),
            *("-o", "json:m.json", "--budget", "2s"),
        ],
        env=environment,
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    stderr = process.stderr.read()
    process.stderr.close()
    assert process.wait(60) == 0, stderr
    assert "Traceback" not in stderr
    assert read_matrix(tmp_path / "m.json").runs[0].executed > 0
