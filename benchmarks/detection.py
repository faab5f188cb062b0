"""What a scan finds of attention functions that are known to be faulty, and whom it accuses wrongly.

    python benchmarks/detection.py [--level quick] [--seed 0] [--seeds 3] [--kinds 1 2] [--faults NAME]

The functions are those of `tests/faults`: per seed every fault with a trigger drawn from that seed alone, and
healthy ones. `attnprobe scan` is run on them for real, one scan for each kind: a scan runs the witness of
each rule on every other backend too, which for ninety functions at once takes longer than all the rest.
Beside it two common practices on the same functions (`detection_peers.py`).
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from attnprobe.axes import AXIS, levels_of
from attnprobe.config import Case
from attnprobe.matrix.schema import Backend, Matrix, Rule
from attnprobe.matrix.store import read_matrix
from attnprobe.probe.plan import plan
from attnprobe.probe.poison import ENVIRONMENT

if TYPE_CHECKING:
    from tests.faults import Fault, Healthy, Trigger
    from tests.faults.seen import Seen

HERE: Final = Path(__file__).resolve().parent
DEATH: Final = 12
HEALTHY: Final = 0
"""Stands for the healthy functions among the kinds."""
TIMEOUT: Final = {DEATH: "4s"}
"""A function of this kind hangs on purpose, in case after case; four seconds are enough to see it."""


@dataclass
class Found:
    """What a scan made of one faulty function."""

    fault: Fault
    trigger: Trigger
    met: int = 0
    """Cases of the plan in which the function is at fault."""
    plain: int = 0
    """Those of them in which neither length is 0 or 1: in the others few faults do harm."""
    first: int = 0
    """The number, in the plan, of the first case that failed; 0 where none did."""
    met_first: int = 0
    """How many cases that met the trigger had been run by then."""
    verdicts: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    beside: list[str] = field(default_factory=list)
    """Cases held against it in which its trigger did not hold."""
    named: bool = False
    more: set[str] = field(default_factory=set)
    precision: float = 0.0
    recall: float = 0.0
    peers: dict[str, bool] = field(default_factory=dict)

    @property
    def expected(self) -> bool:
        """Whether a verdict is one that says what the fault is."""
        return bool(set(self.verdicts) & set(self.fault.expected))


def library() -> Any:
    """Return `tests/faults`, by path: another `tests` may be installed."""
    if "attention_faults" not in sys.modules:
        place = HERE.parent / "tests" / "faults" / "__init__.py"
        spec = importlib.util.spec_from_file_location("attention_faults", place)
        assert spec is not None
        assert spec.loader is not None
        sys.modules["attention_faults"] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules["attention_faults"]


def scan(module: Path, names: list[str], level: str, seed: int, timeout: str) -> tuple[Matrix, float]:
    """Scan functions of a module for real; return the matrix and the seconds it took."""
    path = module.with_name(f"{module.stem}_{names[0]}.json")
    command = [sys.executable, "-m", "attnprobe", "scan", "--level", level, "--seed", str(seed)]
    for name in names:
        command += ["--backend", f"{module}:{name}"]
    start = time.monotonic()
    command += ["--timeout", timeout, "--no-progress", "-o", f"json:{path}"]
    done = subprocess.run(command, check=False, capture_output=True, text=True)  # noqa: S603
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}: exit {done.returncode}\n{done.stderr}")
    return read_matrix(path), time.monotonic() - start


def peers(module: Path, found: list[Found], healthy: list[str]) -> dict[str, dict[str, list[str]]]:
    """Return where the two common practices object."""
    names = [("deadly:" if one.fault.kind == DEATH else "") + one.fault.name for one in found]
    command = [sys.executable, str(HERE / "detection_peers.py"), str(module), *healthy, *names]
    environment = {**os.environ, **ENVIRONMENT}
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, env=environment)  # noqa: S603
    said: dict[str, dict[str, list[str]]] = json.loads(done.stdout)
    return said


def shown(cases: Iterable[Case]) -> dict[str, tuple[Case, Seen]]:
    """Return what a callable sees of each case that it is given, by the id of the case."""
    import torch

    from attnprobe.backends._sdpa import signature_refuses
    from attnprobe.backends.calling import Call
    from attnprobe.probe.inputs import make

    library()
    seen_in = sys.modules["attention_faults.seen"].seen_in
    found = {}
    for case in cases:
        if case.layout == "varlen" or signature_refuses(case) is not None:
            continue
        call = Call(case, make(case, torch.device("cpu")), plain_mask=True)
        seen = seen_in(call.q, call.k, call.v, **call.options)
        found[case.id] = (case, replace(seen, deterministic=case.deterministic))
    return found


def meets(found: Found, case: Case, seen: Seen) -> bool:
    """Whether a function is at fault in a case: its trigger holds, and the hazards are there that show it."""
    hazards = found.fault.shows.items()
    plain = {"data": "gaussian", "grad_out": "contiguous", "earlier": "nothing"}
    there = all(getattr(case, axis, plain.get(axis)) in levels for axis, levels in hazards)
    return there and found.trigger.holds(seen)


def read(found: Found, backend: Backend, matrix: Matrix, cases: dict[str, tuple[Case, Seen]]) -> None:
    """Note in `found` what the matrix holds of its function."""
    order = list(cases)
    met = {one for one in order if meets(found, *cases[one])}
    failing = {result.id for result in backend.cases if result.verdict.fails}
    for result in backend.cases:
        if result.verdict.fails:
            found.verdicts[str(result.verdict.value)] += 1
            case = matrix.case(result.id)
            if case is not None and result.id not in met and result.id in cases:
                found.beside.append(result.id)
    found.met = len(met)
    found.plain = sum(min(cases[one][0].seqlen_q, cases[one][0].seqlen_kv) > 1 for one in met)
    in_plan = [number for number, one in enumerate(order) if one in failing]
    if in_plan:
        found.first = in_plan[0] + 1
        found.met_first = sum(one in met for one in order[: found.first])
    rules = [rule for rule in backend.rules if rule.verdict.fails]
    _explained(found, rules, met, cases)


def _explained(found: Found, rules: list[Rule], met: set[str], cases: dict[str, tuple[Case, Seen]]) -> None:
    """Note how far the rules that were found say what the trigger is."""
    wanted = (set(found.trigger.axes) | set(found.fault.shows)) - {"pass"}
    # What goes with a condition says the same: a gradient that is asked for, a mask that hides a row.
    same = {"needs_grad": {"pass"}, "masked_rows": {"mask"}, "mask": {"masked_rows"}}
    for rule in rules:
        named = set(rule.when)
        for axis in tuple(named):
            named |= same.get(axis, set())
        if rule.localised and wanted <= named:
            found.named = True
            # That lengths of 0 or 1 show no harm is true of most faults, and in no trigger.
            trivial = {
                axis for axis, of in rule.when.items() if set(AXIS[axis].levels) - set(of) <= {"0", "1"}
            }
            found.more = set(rule.when) - wanted - trivial - {"pass", "needs_grad"}
            break
    at = {one: levels_of(case) for one, (case, _) in cases.items()}
    covered = {one for one in at if any(rule.covers(one, at[one]) for rule in rules)}
    found.precision = len(covered & met) / len(covered) if covered else 0.0
    found.recall = len(covered & met) / len(met) if met else 0.0


def of_seed(
    options: argparse.Namespace, seed: int, folder: Path
) -> tuple[list[Found], list[str], dict[int, float]]:
    """Return what was found of the faults of a seed, the false alarms, and the seconds of each scan."""
    faults = library()
    module = folder / f"functions_{seed}.py"
    faults.write_module(module, seed)
    cases = shown(plan(options.level, seed).cases)
    wanted = [one for one in faults.FAULTS if one.kind in options.kinds]
    found = [Found(one, one.draw(seed)) for one in wanted if one.name in (options.faults or (one.name,))]
    alarms: list[str] = []
    seconds: dict[int, float] = {}
    for kind in options.kinds:
        mine = [one for one in found if one.fault.kind == kind]
        functions: list[Fault | Healthy] = [one.fault for one in mine] if kind else list(faults.HEALTHY)
        if not functions:
            continue
        names = [function.name for function in functions]
        matrix, seconds[kind] = scan(module, names, options.level, seed, TIMEOUT.get(kind, "60s"))
        backends = {backend.name.rpartition(":")[2]: backend for backend in matrix.backends}
        for one in mine:
            read(one, backends[one.fault.name], matrix, cases)
            if one.beside:
                alarms.append(f"seed {seed}: {one.fault.name} beside its trigger: {', '.join(one.beside)}")
        if not kind:
            for name in names:
                alarms += [f"seed {seed}: {name} {said}" for said in _accused(backends[name])]
        print(f"seed {seed}, {_kind(kind)}: {seconds[kind]:.0f} s", file=sys.stderr, flush=True)
    if options.peers:
        _beside_peers(found, peers(module, found, [one.name for one in faults.HEALTHY]), alarms, seed)
    return found, alarms, seconds


def _accused(backend: Backend) -> list[str]:
    """Return what a healthy function is accused of: each verdict, how often, and one case."""
    failing = [result for result in backend.cases if result.verdict.fails]
    said = []
    for verdict in sorted({result.verdict.value for result in failing}):
        of = [result for result in failing if result.verdict.value == verdict]
        said.append(f"{verdict} in {len(of)} cases, as {of[0].id}: {json.dumps(of[0].detail)}")
    return said


def _beside_peers(found: list[Found], said: dict[str, Any], alarms: list[str], seed: int) -> None:
    """Note what the peers caught: where they object to a fault and not to the healthy base."""
    base = said["healthy_tiled"]
    for one in found:
        one.peers = {peer: bool(set(said[one.fault.name][peer]) - set(base[peer])) for peer in base}
    for name, points in said.items():
        if name.startswith("healthy_"):
            alarms += [f"seed {seed}: peer {p}: {name} at {len(at)} shapes" for p, at in points.items() if at]


def _kind(kind: int) -> str:
    return f"{kind} {library().KINDS[kind]}" if kind else "healthy"


def table(found: list[Found], seconds: dict[int, float], *, markdown: bool) -> list[str]:
    """Return one row for each kind."""
    head = ["kind", "caught", "of", "verdict", "named", "exactly", "precision", "recall", "case", "s"]
    head += sorted(found[0].peers) if found else []
    rows = [head]
    kinds: list[int | None] = [*dict.fromkeys(one.fault.kind for one in found), None]
    for kind in kinds:
        of = [one for one in found if kind is None or one.fault.kind == kind]
        caught = [one for one in of if one.first]
        firsts = sorted(one.first for one in caught)
        row: list[Any] = [
            "all" if kind is None else _kind(kind),
            len(caught),
            len(of),
            sum(one.expected for one in caught),
            sum(one.named for one in caught),
            sum(one.named and not one.more for one in caught),
            f"{sum(one.precision for one in caught) / max(len(caught), 1):.2f}",
            f"{sum(one.recall for one in caught) / max(len(caught), 1):.2f}",
            firsts[len(firsts) // 2] if firsts else "-",
            f"{sum(seconds.values()) if kind is None else seconds[kind]:.0f}",
        ]
        rows.append([*map(str, row), *(str(sum(one.peers[p] for one in of)) for p in sorted(of[0].peers))])
    if markdown:
        rows.insert(1, ["---"] * len(head))
        return [f"| {' | '.join(row)} |" for row in rows]
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]


def report(
    found: list[tuple[int, Found]], alarms: list[str], seconds: dict[int, float], options: Any
) -> None:
    """Print the table, what was missed, what was taken for something else, and the false alarms."""
    print(f"\nlevel {options.level}, seeds {options.seed} to {options.seed + options.seeds - 1}")
    print("verdict: the expected one; named: a rule names every axis of the trigger, exactly: and no other;")
    print("precision, recall: of all its rules over the plan; case: median number of the first catch\n")
    rows = [one for _, one in found]
    print("\n".join(table(rows, seconds, markdown=options.format == "markdown")))
    print("\nMissed")
    for seed, one in found:
        if not one.first:
            why = (
                f"met in {one.met} cases, {one.plain} of them of lengths above 1" if one.met else "never met"
            )
            shows = "".join(f", {axis} {' or '.join(map(str, of))}" for axis, of in one.fault.shows.items())
            print(f"  seed {seed}, {one.fault.kind} {one.fault.name}: {one.trigger.words}{shows}: {why}")
    print("\nCaught under another verdict")
    for seed, one in found:
        if one.first and not one.expected:
            print(f"  seed {seed}, {one.fault.kind} {one.fault.name}: {dict(one.verdicts)}")
    print("\nNot named")
    for seed, one in found:
        if one.first and not one.named:
            print(f"  seed {seed}, {one.fault.kind} {one.fault.name}: {one.trigger.words}")
    print("\nFalse alarms")
    print("\n".join(f"  {alarm}" for alarm in alarms) or "  none")


def main(arguments: list[str]) -> int:
    """Run the seeds and print what was found."""
    parser = argparse.ArgumentParser(
        description="What a scan finds of functions that are known to be faulty."
    )
    parser.add_argument("--level", choices=("quick", "standard"), default="quick")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--kinds", type=int, nargs="+", default=[HEALTHY, *library().KINDS])
    parser.add_argument("--faults", nargs="+", help="only these; a level holds the cases of those below it")
    parser.add_argument("--format", choices=("text", "markdown"), default="text")
    parser.add_argument("--no-peers", dest="peers", action="store_false")
    parser.add_argument("--keep", type=Path, help="keep modules and matrices in this folder")
    options = parser.parse_args(arguments)
    found: list[tuple[int, Found]] = []
    alarms: list[str] = []
    seconds: dict[int, float] = defaultdict(float)
    with contextlib.ExitStack() as stack:
        folder = options.keep or stack.enter_context(tempfile.TemporaryDirectory())
        for seed in range(options.seed, options.seed + options.seeds):
            more, said, spent = of_seed(options, seed, Path(folder))
            found += [(seed, one) for one in more]
            alarms += said
            for kind, took in spent.items():
                seconds[kind] += took
    found.sort(key=lambda one: one[1].fault.kind)
    report(found, alarms, seconds, options)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
