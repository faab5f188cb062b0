"""What an answer costs a training job, with peers beside it, all in one run.

    python benchmarks/selector.py [--cases 2400] [--backends 10]

Makes a matrix for this machine (its device, its torch), and measures import, load, first and repeated
select, explanation and memory, against json.load of the same file, a bare dict lookup with the same key,
and the checks of torch and xformers where they can be called.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import attnprobe
from attnprobe.axes import AXES, Level, levels_of
from attnprobe.config import AttentionConfig, Case, config_of
from attnprobe.device.cpu import cpu_device
from attnprobe.materials.installed import installed
from attnprobe.matrix.schema import (
    SCHEMA,
    Backend,
    CaseRecord,
    Generator,
    Material,
    Matrix,
    Result,
    Rule,
    Run,
    sealed,
)
from attnprobe.matrix.store import encode
from attnprobe.probe.plan import plan
from attnprobe.select.selector import Selector
from attnprobe.verdict import Verdict

STARTS = 9
RULES = 20


def main(arguments: list[str]) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--cases", type=int, default=2400)
    parser.add_argument("--backends", type=int, default=10)
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "matrix.json"
        matrix = synthetic(options.cases, options.backends)
        path.write_bytes(encode(matrix))
        size = path.stat().st_size
        print(f"{len(matrix.cases)} cases, {options.backends} backends, {size / 1e6:.2f} MB")
        starting(path)
        loading(path)
        answering(attnprobe.load(path))
    return 0


def synthetic(count: int, backends: int) -> Matrix:
    """Return a matrix of planned cases for this machine, with random rules and what follows from them."""
    draw = random.Random(0)  # noqa: S311  # no secret
    cases = plan("standard").cases[:count]
    seed = 1
    while len(cases) < count:
        cases = (*cases, *plan("standard", seed).cases)[:count]
        seed += 1
    torch = installed("torch") or Material(name="torch", version="none")
    return sealed(
        Matrix(
            schema=SCHEMA,
            digest="",
            devices=(cpu_device().record,),
            backends=tuple(_backend(f"backend-{index}", cases, torch, draw) for index in range(backends)),
            runs=(
                Run(
                    started="2026-01-01T00:00:00+00:00",
                    finished="2026-01-01T01:00:00+00:00",
                    level="standard",
                    seed=0,
                    complete=True,
                    strength=3,
                    planned=count,
                    executed=count,
                    skipped=0,
                ),
            ),
            generator=Generator(name="benchmark", version="0"),
            cases=tuple(CaseRecord(id=case.id, case=case) for case in cases),
        )
    )


def _backend(name: str, cases: tuple[Case, ...], torch: Material, draw: random.Random) -> Backend:
    rules = []
    for index in range(RULES):
        witness = draw.choice(cases)
        at = levels_of(witness)
        when: dict[str, tuple[Level, ...]] = {axis.name: (at[axis.name],) for axis in draw.sample(AXES, 4)}
        verdict = draw.choice([Verdict.WRONG, Verdict.REFUSED])
        rules.append(Rule(id=f"{name}-{index}", when=when, verdict=verdict, witness=witness.id))
    results = []
    for case in cases:
        at = levels_of(case)
        over = next((rule for rule in rules if rule.covers(case.id, at)), None)
        results.append(Result(id=case.id, verdict=over.verdict if over else Verdict.OK))
    return Backend(name=name, status="probed", materials=(torch,), rules=tuple(rules), cases=tuple(results))


def starting(path: Path) -> None:
    """Print what a process pays before its first answer, over a bare interpreter."""
    query = (
        "attnprobe.AttentionConfig(pass_='backward', dtype='bfloat16', head_dim=64, head_dim_v=64, heads=2,"
        " heads_kv=2, batch=1, seqlen_q=128, seqlen_kv=128, mask='none', layout='contiguous', dropout=0.0)"
    )
    scripts = {
        "bare Python": "pass",
        "+ import attnprobe": "import attnprobe",
        "+ import msgspec, json, hashlib (any reader of the file)": "import msgspec, json, hashlib",
        "+ attnprobe.load": f"import attnprobe; attnprobe.load({str(path)!r})",
        "+ attnprobe.load, first select": f"import attnprobe; attnprobe.load({str(path)!r}).select({query})",
        "+ json.load": f"import json; json.load(open({str(path)!r}))",
    }
    times: dict[str, list[float]] = {name: [] for name in scripts}
    for _ in range(STARTS):
        for name, script in scripts.items():
            begin = time.perf_counter()
            subprocess.run([sys.executable, "-c", script], check=True)  # noqa: S603  # our own interpreter
            times[name].append(time.perf_counter() - begin)
    bare = statistics.median(times["bare Python"])
    print(f"process start, median of {STARTS} (and least), ms over bare Python:")
    for name, found in times.items():
        over, least = statistics.median(found) - bare, min(found) - min(times["bare Python"])
        print(f"  {name:70} {1000 * (bare if name == 'bare Python' else over):8.1f} ({1000 * least:.1f})")


def loading(path: Path) -> None:
    """Print load against json.load, and what stays in memory."""
    print("in a running process, best of 5, ms:")
    calls: dict[str, Callable[[], object]] = {
        "attnprobe.load": lambda: attnprobe.load(path),
        "json.loads of the same bytes": lambda: json.loads(path.read_bytes()),
    }
    for name, call in calls.items():
        print(f"  {name:70} {1e3 * best(call, 1, 5):8.1f}")
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    selector = attnprobe.load(path)
    held = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    print(f"memory held by a loaded matrix: {held / 1e6:.1f} MB ({len(selector.matrix.cases)} cases)")


def answering(selector: Selector) -> None:
    """Print what one answer costs, by kind of question."""
    backends = len(selector.matrix.backends)
    configs = [config_of(record.case) for record in selector.matrix.cases[:400]]
    exact: list[float] = []
    other: list[float] = []
    statuses = {"proven": 0, "denied": 0, "unrefuted": 0, "unknown": 0}
    for config in configs:
        moved = moved_from(config)
        for query, times in ((config, exact), (moved, other)):
            begin = time.perf_counter()
            decision = selector.select(query)
            times.append(time.perf_counter() - begin)
            for one in decision.candidates:
                statuses[one.status] += 1
    print(f"first answer to a question, {backends} backends, median us (largest):")
    print(f"  {'a case that was run':70} {1e6 * statistics.median(exact):8.1f} ({1e6 * max(exact):.0f})")
    print(f"  {'one that was not':70} {1e6 * statistics.median(other):8.1f} ({1e6 * max(other):.0f})")
    print(f"  {'the same, a backend':70} {1e6 * statistics.median(other) / backends:8.1f}")
    print(f"  candidates: {', '.join(f'{count} {status}' for status, count in statuses.items())}")
    config = configs[0]
    table = dict.fromkeys(configs, 1)
    decision = selector.select(config)
    print("repeated, best of 5, us:")
    rows: dict[str, Callable[[], object]] = {
        "select, the same question": lambda: selector.select(config),
        "a bare dict lookup with the same key": lambda: table[config],
        "explain, all backends": decision.explain,
        **peers(),
    }
    for name, call in rows.items():
        print(f"  {name:70} {1e6 * best(call, 2000, 5):8.2f}")


def moved_from(config: AttentionConfig) -> AttentionConfig:
    """Return a config beside a case: another dtype, the other side of determinism."""
    import msgspec

    other = "float16" if config.dtype == "bfloat16" else "bfloat16"
    return msgspec.structs.replace(config, dtype=other, deterministic=not config.deterministic)


def peers() -> dict[str, Callable[[], object]]:
    """Return the checks of other libraries that can be called here."""
    found: dict[str, Callable[[], object]] = {}
    try:
        import torch

        q = torch.zeros(1, 2, 128, 64, dtype=torch.bfloat16)
        make = torch.backends.cuda.SDPAParams
        ask = torch.backends.cuda.can_use_flash_attention
        found["torch can_use_flash_attention, with its params"] = lambda: ask(
            make(q, q, q, None, 0.0, False, False)
        )
        found["torch _fused_sdp_choice"] = lambda: torch._fused_sdp_choice(q, q, q)  # noqa: SLF001
    except (ImportError, AttributeError, TypeError) as error:
        print(f"  torch: not measured, {error}")
    try:
        from xformers.ops import fmha  # type: ignore[import-not-found]  # not a dependency

        inputs = fmha.Inputs(q, q, q)
        found["xformers not_supported_reasons, one operator"] = lambda: fmha.flash.FwOp.not_supported_reasons(
            inputs
        )
    except ImportError:
        print("  xformers: not installed")
    return found


def best(call: Callable[[], object], number: int, repeat: int) -> float:
    """Return the least time of one call in seconds."""
    least = float("inf")
    for _ in range(repeat):
        begin = time.perf_counter()
        for _ in range(number):
            call()
        least = min(least, (time.perf_counter() - begin) / number)
    return least


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
