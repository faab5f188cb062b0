"""Which cases a scan runs, and in what order: the sooner it stops, the more pairs it has covered."""

from __future__ import annotations

import functools
import random
from pathlib import Path
from typing import Final

import msgspec
from msgspec import Struct, structs

from attnprobe.axes import AXES, At, allowed, levels_of
from attnprobe.config import AttentionConfig, Case, case_from
from attnprobe.errors import AttnprobeError
from attnprobe.probe.concrete import concretise
from attnprobe.probe.moves import step

LEVELS: Final = {
    "quick": "every pair of axis values",
    "standard": "every triple of axis values",
    "full": "every triple, and a random share that changes with the seed",
}
ROWS_FILE: Final = Path(__file__).with_name("covering_rows.txt")
ALPHABET: Final = "0123456789abcdefghijklmnopqrstuvwxyz"
RANDOM_SHARE: Final = 0.5
"""Random cases of level `full`, as a share of the triple cases."""


class Plan(Struct, frozen=True):
    """Cases in the order in which to run them.

    `strength_at[s]`: after how many cases every allowed s-tuple of axis values was met.
    """

    level: str
    seed: int
    cases: tuple[Case, ...]
    strength_at: dict[int, int]

    def strength(self, executed: int) -> int:
        """Return the strength that the first `executed` cases reach: 3, 2, or 1 for less."""
        reached = [s for s, count in self.strength_at.items() if executed >= count]
        return max(reached, default=min(executed, 1))

    @property
    def digest(self) -> str:
        """Return a digest over the case ids in order; two equal scans have the same."""
        import hashlib

        ids = ",".join(case.id for case in self.cases)
        return hashlib.sha256(ids.encode()).hexdigest()[:16]


@functools.lru_cache(maxsize=1)
def covering_rows() -> tuple[tuple[At, ...], int]:
    """Return the kept covering array as levels, and how many of its rows cover all pairs.

    Raises:
        AttnprobeError: the file does not belong to the axes of this version.
    """
    lines = ROWS_FILE.read_text(encoding="ascii").splitlines()
    head = [line for line in lines if line.startswith("#")]
    wanted = [f"# {axis.name} {' '.join(map(str, axis.levels))}" for axis in AXES]
    if head[:-1] != wanted:
        raise AttnprobeError(
            "the covering array does not belong to these axes",
            fix="python -m attnprobe.probe.covering",
        )
    rows = tuple(
        {axis.name: axis.levels[ALPHABET.index(digit)] for axis, digit in zip(AXES, line, strict=True)}
        for line in lines
        if not line.startswith("#")
    )
    return rows, int(head[-1].split()[2])


def plan(level: str, seed: int = 0) -> Plan:
    """Return the plan of a level: pairs, boundary cases, triples, random ones; `quick` is the pairs."""
    rows, pairs = covering_rows()
    cases = [concretise(at, seed) for at in rows[:pairs]]
    strength_at = {2: pairs}
    if level != "quick":
        cases += boundary_cases(seed)
        cases += [concretise(at, seed) for at in rows[pairs:]]
        strength_at[3] = len(cases)
    if level == "full":
        cases += random_cases(int(len(rows) * RANDOM_SHARE), seed)
    return Plan(level, seed, _distinct(cases), strength_at)


def plan_of_configs(configs: list[AttentionConfig], seed: int = 0, *, neighbours: bool = True) -> Plan:
    """Return the plan for a job's own configurations, exactly, and all that differ on one axis.

    Without `neighbours` the configurations only.
    """
    exact = [case_from(config, seed=seed) for config in configs]
    cases = list(exact)
    for case in exact if neighbours else ():
        for axis in AXES:
            for level in axis.levels:
                moved = step(case, axis.name, level)
                if moved is not None:
                    cases.append(moved)
    return Plan("config", seed, _distinct(cases), {})


def boundary_cases(seed: int) -> list[Case]:
    """Return cases one off the sizes that kernels tile by, each in two dtypes."""
    lengths = [n + off for n in (16, 32, 64, 128, 256, 512) for off in (-1, 1)]
    small = Case(head_dim=32, head_dim_v=32, heads=1, heads_kv=1, seed=seed)
    cases = [structs.replace(small, seqlen_q=n, seqlen_kv=n) for n in (1, *lengths)]
    cases += [structs.replace(small, seqlen_q=1, seqlen_kv=n, mask="causal-bottom-right") for n in lengths]
    return [structs.replace(c, dtype=d) for c in cases for d in ("float32", "bfloat16")]


def random_cases(count: int, seed: int) -> list[Case]:
    """Return cases with a random allowed level on every axis."""
    draw = random.Random(f"attnprobe/{seed}")  # noqa: S311  # no secret
    cases: list[Case] = []
    while len(cases) < count:
        at = {axis.name: draw.choice(axis.levels) for axis in AXES}
        if at["pass"] == "forward":
            at["needs_grad"], at["grad_out"] = "none", "contiguous"
        if allowed(at):
            cases.append(concretise(at, seed))
    return cases


def _distinct(cases: list[Case]) -> tuple[Case, ...]:
    return tuple({case.id: case for case in cases}.values())


def described(case: Case) -> dict[str, object]:
    """Return a case as id, levels and numbers, for printing."""
    return {"id": case.id, "at": levels_of(case), "case": msgspec.to_builtins(case)}
