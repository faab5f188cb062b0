"""Where the time of a scan goes: cases per second, and what is neither kernel nor reference.

    python benchmarks/scan.py [--level quick] [--budget 2m]

Runs `attnprobe scan` on all backends of this device and reads the run's own account. Beside it, as a
floor, the same cases on the same backends in one process with nothing judged.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from attnprobe.axes import AXES, levels_of
from attnprobe.config import Case
from attnprobe.matrix.store import read_matrix
from attnprobe.probe.plan import plan

SLOWEST = 8


def main(arguments: list[str]) -> int:
    """Scan, print the account, and measure the floor."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "matrix.json"
        command = [sys.executable, "-m", "attnprobe", "scan", "-o", f"json:{path}", "--format", "json"]
        subprocess.run([*command, *arguments], check=True, stdout=subprocess.DEVNULL)  # noqa: S603
        matrix = read_matrix(path)
    run = matrix.runs[0]
    seconds = run.seconds
    total = seconds["total"]
    work = seconds.get("kernel", 0) + seconds.get("reference", 0)
    results = sum(len(backend.cases) for backend in matrix.backends)
    print(f"{run.executed} cases, {results} results, {total:.1f} s after {seconds['import']:.1f} s of import")
    print(f"{run.executed / total:.1f} cases/s, {results / total:.1f} results/s")
    for part in ("kernel", "reference", "inputs", "judge"):
        print(f"  {part:10} {seconds.get(part, 0):7.1f} s  {seconds.get(part, 0) / total:6.1%}")
    print(f"  neither kernel nor reference: {1 - work / total:.1%} of the wall time")
    level = run.level
    if level in {"quick", "standard", "full"}:
        floor(plan(level).cases[: run.executed])
    return 0


def floor(cases: tuple[Case, ...]) -> None:
    """Run the cases bare, once per backend, and print the slowest axis values."""
    import torch

    from attnprobe.backends.registry import choose
    from attnprobe.device.cpu import cpu_device
    from attnprobe.probe.inputs import make

    names = ("torch-math", "torch-flash", "torch-default")
    backends, _ = choose(names, cpu_device())
    spent: dict[tuple[str, Any], list[float]] = defaultdict(list)
    start = time.perf_counter()
    for case in cases:
        tensors = make(case, torch.device("cpu"))
        begin = time.perf_counter()
        for backend in backends.values():
            if backend.declares(case, cpu_device()) is None:
                try:
                    backend.run(case, tensors)
                except Exception:  # noqa: BLE001, S112  # a refusal costs what it costs
                    continue
        for axis, level in levels_of(case).items():
            spent[axis, level].append(time.perf_counter() - begin)
    print(f"floor: {len(names)} backends once, bare: {time.perf_counter() - start:.1f} s")
    means = {key: sum(times) / len(times) for key, times in spent.items() if len(times) >= len(AXES)}
    print("slowest axis values, mean ms a case:")
    for (axis, level), mean in sorted(means.items(), key=lambda item: -item[1])[:SLOWEST]:
        print(f"  {axis} {json.dumps(level)}: {1000 * mean:.1f}")


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
