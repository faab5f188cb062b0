"""A scan of exact configurations in a child process that ends in time, whatever it does.

The child gets its own session. It is asked to stop and write what it knows, then killed; its zygote ends
the workers when it is gone, and this waits for that.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

import msgspec
from msgspec import structs

from attnprobe.axes import Level, levels_of
from attnprobe.config import AttentionConfig, canonical
from attnprobe.errors import MatrixError
from attnprobe.matrix.schema import Matrix, Result, Rule
from attnprobe.matrix.store import read_matrix
from attnprobe.run import processes
from attnprobe.text import printable
from attnprobe.verdict import Verdict

BUDGET_SHARE: Final = 0.6
"""Share of the limit after which the scan begins no further case; importing torch comes on top."""
LEAST_TIMEOUT: Final = 20.0
"""Least seconds on one case before a backend is called hung. A slow first call must not be mistaken for a
hang, for that verdict would stay in the matrix; where the limit is shorter, it ends the scan instead."""
GRACE: Final = 10.0
"""Most seconds from asking the scan to stop to killing it."""
_KILL_LIMIT: Final = 5.0
_POLL: Final = 0.02
# With the module path of this process: `-m` would put the working directory, and a torch.py there, first.
_CHILD: Final = """
import json, os, sys
parent, sys.path[:] = int(sys.argv.pop(1)), json.loads(sys.argv.pop(1))
from attnprobe.run.processes import die_with_parent
die_with_parent()
if os.getppid() != parent:
    sys.exit(3)
from attnprobe.cli.main import main
main()
"""


def probe(
    configs: Sequence[AttentionConfig], backends: Iterable[str], limit: float
) -> tuple[Matrix | None, str]:
    """Return what a scan of exactly these configurations found within `limit` seconds, or why nothing.

    No backend named means all that are here. The second value is also there where the scan was cut short.

    Raises:
        OSError: no child or no temporary file could be made.
    """
    with tempfile.TemporaryDirectory(prefix="attnprobe-", ignore_cleanup_errors=True) as name:
        place = Path(name)
        (place / "configs.json").write_bytes(msgspec.json.encode(configs))
        output = place / "matrix.json"
        arguments = ["scan", "--config", str(place / "configs.json"), "--exact", "--no-progress"]
        arguments += ["--budget", f"{limit * BUDGET_SHARE:.3f}s", "-o", f"json:{output}"]
        arguments += ["--timeout", f"{max(LEAST_TIMEOUT, limit / 3):.3f}s"]
        for backend in backends:
            arguments += ["--backend", backend]
        with (place / "said").open("w+b") as said:
            ended = _run(arguments, said.fileno(), limit)
            said.seek(0)
            words = _last_error(said.read().decode(errors="replace"))
        try:
            found = narrowed(read_matrix(output))
        except MatrixError:
            return None, ended or words or "the scan wrote nothing"
        return found, ended


def _run(arguments: list[str], said: int, limit: float) -> str:
    """Run the command line until it ends or has to; return how it was ended, or an empty string."""
    grace = min(GRACE, limit / 4)
    # Options of a scan from the environment are those of the user's own scans.
    environment = {k: v for k, v in os.environ.items() if not k.startswith("ATTNPROBE_SCAN_")}
    process = subprocess.Popen(  # noqa: S603  # our own module, by our own interpreter
        [sys.executable, "-c", _CHILD, str(os.getpid()), json.dumps(sys.path), *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=said,
        start_new_session=True,
        env=environment,
    )
    try:
        try:
            process.wait(limit - grace)
        except subprocess.TimeoutExpired:
            started = processes.children_of(process.pid)
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(grace)
            killed = process.poll() is None
            _end(process, started)
            return f"probing took longer than {limit:g} s and was {'killed' if killed else 'stopped'}"
    finally:
        if process.poll() is None:  # interrupted
            _end(process, processes.children_of(process.pid))
    if process.returncode < 0:
        return f"the probing process was killed by signal {-process.returncode}"
    return ""


def _end(process: subprocess.Popen[bytes], started: list[int]) -> None:
    """Kill a scan, and wait until what it had started is gone; that ends by itself, or is killed."""
    if process.poll() is None:
        processes.kill_group(process.pid)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_KILL_LIMIT)
    deadline = time.monotonic() + _KILL_LIMIT
    while any(map(_is_alive, started)) and time.monotonic() < deadline:
        time.sleep(_POLL)
    for pid in filter(_is_alive, started):
        processes.kill_tree(pid)


def _is_alive(pid: int) -> bool:
    """Whether a process runs; one that only waits to be reaped does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in {"Z", "X"}
    except (OSError, IndexError):
        return False


def _last_error(text: str) -> str:
    """Return what the command line gave as its error, in one line."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    first = max((n for n, line in enumerate(lines) if line.startswith("error: ")), default=len(lines) - 1)
    kept = [line.removeprefix("error: ").removeprefix("why: ") for line in lines[max(first, 0) :]]
    return printable(": ".join(line for line in kept if not line.startswith("try: ")))


def narrowed(matrix: Matrix) -> Matrix:
    """Return a matrix of few cases, its rules no wider than what was seen.

    A refusal is as wide a rule as no case contradicts, and a rule that was cut off is not sharp yet. Among
    the many cases of a whole scan that is right; from one case it would deny all that a backend can do.
    """
    sharp = all(run.complete for run in matrix.runs)
    at = {record.id: levels_of(record.case) for record in matrix.cases}
    backends = []
    for backend in matrix.backends:
        kept = [rule for rule in backend.rules if sharp and rule.verdict.fails]
        passed = [at[result.id] for result in backend.cases if result.verdict is Verdict.OK]
        for result in backend.cases:
            mine, fails = at[result.id], result.verdict.fails
            covered = any(rule.verdict.fails == fails and rule.covers(result.id, mine) for rule in kept)
            if (fails or result.verdict is Verdict.REFUSED) and not covered:
                reason = next((rule.reason for rule in backend.rules if rule.covers(result.id, mine)), "")
                kept.append(_exactly(result, mine, reason, alone=mine in passed))
        backends.append(structs.replace(backend, rules=tuple(kept)))
    return structs.replace(matrix, backends=tuple(backends))


def _exactly(result: Result, at: dict[str, Level], reason: str, *, alone: bool) -> Rule:
    """Return the rule of one case: all its axis values; of its numbers alone where such a case passed."""
    when: dict[str, tuple[Level, ...]] = {axis: (level,) for axis, level in at.items()}
    cases = (result.id,) if alone else ()
    return Rule(
        id=hashlib.blake2b(canonical([when, result.verdict.value, cases]), digest_size=4).hexdigest(),
        when=when,
        verdict=result.verdict,
        outputs=result.outputs,
        evidence=result.evidence,
        witness=result.id,
        cases=cases,
        failing=1,
        localised=False,
        reason=reason,
    )
