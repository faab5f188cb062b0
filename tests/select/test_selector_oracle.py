"""The selector against a slow oracle that shares no code with it, on random matrices."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from typing import Any, NamedTuple

import msgspec
import pytest
from msgspec import UNSET, structs

from attnprobe.axes import AXES, levels_of
from attnprobe.config import AttentionConfig, Case, config_of
from attnprobe.errors import AttnprobeError, MatrixError
from attnprobe.matrix.lint import faults
from attnprobe.matrix.schema import (
    SCHEMA,
    Backend,
    CaseRecord,
    DeviceRecord,
    Generator,
    Material,
    Matrix,
    Result,
    Rule,
    Run,
    sealed,
)
from attnprobe.matrix.store import encode, parse_matrix
from attnprobe.select.explain import Candidate, Decision
from attnprobe.select.match import Live, compare
from attnprobe.select.policy import passes_gate
from attnprobe.select.selector import Selector
from attnprobe.verdict import Evidence, Verdict

FAILING = [Verdict.WRONG, Verdict.UNWRITTEN, Verdict.CRASHED, Verdict.NONFINITE, Verdict.REFUSED]
NEUTRAL = [Verdict.OUT_OF_MEMORY, Verdict.INCONCLUSIVE, Verdict.LAUNCHED]
HERE = DeviceRecord(kind="cuda", name="GPU A", sm="12.0", smem_per_block_optin=101376)
THERE = DeviceRecord(kind="cuda", name="GPU A", sm="12.1", smem_per_block_optin=101376)
TORCH = Material(name="torch", version="2.13.0", digest="a")
OTHER = Material(name="torch", version="2.13.0", digest="b")
LIVE = Live((HERE,), {"torch": TORCH}.get)
POOL: dict[str, list[Any]] = {
    "pass_": ["forward", "backward"],
    "dtype": ["float32", "bfloat16"],
    "head_dim": [64, 192],
    "head_dim_v": [64, 128, 96, 192],
    "heads": [2, 4],
    "heads_kv": [1, 2, 4],
    "batch": [1, 3],
    "seqlen_q": [1, 33, 97, 128, 256],
    "seqlen_kv": [1, 33, 128, 256],
    "mask": ["none", "causal-top-left", "float"],
    "masked_rows": ["none", "-inf"],
    "dropout": [0.0, 0.1, 0.2],
    "layout": ["contiguous", "transposed"],
    "deterministic": [False, True],
}
EVERY: dict[str, list[Any]] = POOL | {
    "dtype": ["float32", "bfloat16", "float16"],
    "mask": [*POOL["mask"], "bool", "causal-bottom-right", "bool-broadcast", "float-broadcast"],
    "masked_rows": ["none", "-inf", "false", "finfo-min"],
    "layout": [*POOL["layout"], "packed", "expanded", "inner-stride", "varlen"],
    "dropout": [0.0, 0.3],
}
OPENABLE = ("pass_", "dtype", "mask", "masked_rows", "layout", "dropout")
SIZES = ("batch", "heads", "heads_kv", "seqlen_q", "seqlen_kv", "head_dim", "head_dim_v")


def random_case(draw: random.Random) -> Case:
    narrow = draw.random() < 0.7
    fields = {
        name: values[0] if narrow and draw.random() < 0.6 else draw.choice(values)
        for name, values in POOL.items()
    }
    if draw.random() < 0.8:
        fields["head_dim_v"] = fields["head_dim"]
    if fields["mask"] != "float":
        fields["masked_rows"] = "none"
    if fields["heads"] % fields["heads_kv"]:
        fields["heads_kv"] = fields["heads"]
    fields["needs_grad"] = "none" if fields["pass_"] == "forward" else draw.choice(["all", "all", "q"])
    return Case(**fields, seed=draw.choice([0, 1]))


def random_rule(draw: random.Random, witness: Case) -> dict[str, tuple[Any, ...]]:
    at = levels_of(witness)
    when = {}
    for axis in draw.sample(AXES, draw.randint(1, 4)):
        rest = [level for level in axis.levels if level != at[axis.name]]
        when[axis.name] = (at[axis.name], *draw.sample(rest, min(len(rest), draw.choice([0, 0, 1]))))
    return when


def random_backend(draw: random.Random, name: str, cases: list[Case], runs: int, *, clean: bool) -> Backend:
    ran = [case for case in cases if draw.random() < 0.9]
    rules, results = [], []
    for index in range(draw.choice([0, 1, 1, 2])):
        witness = draw.choice(cases)
        when, verdict = random_rule(draw, witness), draw.choice(FAILING)
        rules.append(Rule(id=f"{name}-{index}", when=when, verdict=verdict, witness=witness.id))
    for case in ran:
        over = [rule for rule in rules if not rule.cases and rule.covers(case.id, levels_of(case))]
        run = draw.randrange(runs) if clean or draw.random() < 0.95 else runs
        evidence = Evidence.MEASURED
        if over:
            verdict = over[0].verdict
            evidence = draw.choice(list(Evidence))
        elif draw.random() < 0.85:
            verdict = Verdict.OK
            if not clean and draw.random() < 0.05:
                evidence = Evidence.TRACED
        elif draw.random() < 0.5:
            verdict = draw.choice(NEUTRAL)
        else:
            verdict = draw.choice(FAILING)
            exact = draw.random() < 0.5
            if exact or clean:
                when = {axis: (level,) for axis, level in levels_of(case).items()}
                alone = exact or any(levels_of(c) == levels_of(case) for c in ran if c is not case)
                rules.append(
                    Rule(
                        id=f"{name}-{case.id}",
                        when=when,
                        verdict=verdict,
                        witness=case.id,
                        cases=(case.id,) if alone else (),
                    )
                )
        results.append(Result(id=case.id, verdict=verdict, evidence=evidence, run=run))
    if not clean and rules and draw.random() < 0.1:
        rules.pop(draw.randrange(len(rules)))
    materials = (OTHER,) if draw.random() < 0.1 else (TORCH,)
    return Backend(name=name, status="probed", materials=materials, rules=tuple(rules), cases=tuple(results))


def random_matrix(draw: random.Random, *, clean: bool = False) -> Matrix:
    cases = list({case.id: case for case in (random_case(draw) for _ in range(draw.randint(5, 40)))}.values())
    devices = [(HERE,), (HERE,), (HERE,), (HERE, THERE), (THERE,)][draw.randrange(5)]
    runs = tuple(
        Run(
            started="a",
            finished="b",
            level="quick",
            seed=0,
            complete=True,
            strength=2,
            planned=1,
            executed=1,
            skipped=0,
            device=draw.randrange(len(devices)),
        )
        for _ in range(draw.choice([1, 1, 1, 2]))
    )
    backends = [random_backend(draw, name, cases, len(runs), clean=clean) for name in ("one", "two", "three")]
    return sealed(
        Matrix(
            schema=SCHEMA,
            digest="",
            devices=devices,
            backends=tuple(backends),
            runs=runs,
            generator=Generator(name="test", version="0"),
            cases=tuple(CaseRecord(id=case.id, case=case) for case in cases),
        )
    )


def random_query(draw: random.Random, matrix: Matrix) -> AttentionConfig:
    """Return a configuration near a case: other numbers on the same levels, an axis moved, fields unsaid."""
    case = draw.choice(matrix.cases).case if draw.random() < 0.9 else random_case(draw)
    fields = {name: getattr(config_of(case), name) for name in AttentionConfig.__struct_fields__}
    moved = draw.random()
    if moved < 0.2:
        name = draw.choice(list(POOL))
        fields[name] = draw.choice(POOL[name])
    elif moved < 0.4:
        fields["batch"] = draw.choice([2, 3, 4]) if case.batch > 1 else 1
        fields["dropout"] = 0.15 if case.dropout else 0.0
    if fields["heads"] % fields["heads_kv"]:
        fields["heads_kv"] = 1
    if fields["pass_"] == "forward":
        fields["needs_grad"] = "none"
    elif fields["needs_grad"] == "none":
        fields["needs_grad"] = "all"
    for name in draw.sample(OPENABLE, draw.choice([0, 0, 0, 1, 2])):
        fields[name] = UNSET
    if draw.random() < 0.05:
        fields[draw.choice(SIZES)] = UNSET
    if draw.random() < 0.5 and fields["needs_grad"] in {"all", "none"}:
        fields["needs_grad"] = UNSET
    return AttentionConfig(**fields)


class Oracle:
    """The architecture's words, executed case by case and completion by completion."""

    class Seen(NamedTuple):
        case: Case
        at: dict[str, Any]
        result: Result

    def __init__(self, matrix: Matrix, live: Live = LIVE) -> None:
        self.matrix = matrix
        known = {record.id: record.case for record in matrix.cases}
        self.device_here = any(device in live.devices for device in matrix.devices)
        self.seen = {
            b.name: [self.Seen(known[r.id], levels_of(known[r.id]), r) for r in b.cases]
            for b in matrix.backends
        }
        self.live = live
        self.known = known
        self._tuples: dict[str, set[frozenset[Any]]] = {}

    def completions(self, config: AttentionConfig) -> list[Case]:
        said = {
            n: getattr(config, n)
            for n in AttentionConfig.__struct_fields__
            if getattr(config, n) is not UNSET
        }
        free = [n for n in EVERY if n not in said and n != "deterministic"]
        found = []
        for values in itertools.product(*(EVERY[name] for name in free)):
            fields = {**said, **dict(zip(free, values, strict=True))}
            fields.setdefault("needs_grad", "none" if fields["pass_"] == "forward" else "all")
            case = Case(**fields)
            if self.can_be(case) or not free:
                found.append(case)
        return found

    @staticmethod
    def can_be(case: Case) -> bool:
        masks = {"none": None, "false": "bool", "-inf": "float", "finfo-min": "float"}
        wanted = masks[case.masked_rows]
        if wanted and not case.mask.startswith(wanted):
            return False
        if case.layout == "varlen" and case.mask.startswith(("bool", "float")):
            return False
        if case.layout == "expanded" and case.heads_kv == case.batch == 1 < case.heads:
            return False
        return (case.pass_ == "forward") == (case.needs_grad == "none")

    def denied(self, backend: Backend, config: AttentionConfig, completions: list[Case]) -> bool:
        named = [rule for rule in backend.rules if rule.cases]
        for case in completions:
            at = levels_of(case)
            for rule in backend.rules:
                if not rule.cases and all(at[axis] in levels for axis, levels in rule.when.items()):
                    return True
            for seen in self.seen[backend.name]:
                if seen.result.verdict not in FAILING or seen.at != at:
                    continue
                if not any(seen.case.id in rule.cases for rule in named):
                    return True
                said = [n for n in AttentionConfig.__struct_fields__ if getattr(config, n) is not UNSET]
                if all(getattr(seen.case, n) == getattr(config, n) for n in said):
                    return True
        return False

    def passed(self, backend: Backend) -> list[Seen]:
        if backend.materials != (TORCH,) or not self.device_here:
            return []
        runs, devices = self.matrix.runs, self.matrix.devices
        if len(runs) > 1 and self.lost_a_rule(backend):
            return []  # it may have covered what passed in another run
        return [
            seen
            for seen in self.seen[backend.name]
            if seen.result.verdict is Verdict.OK
            and seen.result.evidence is Evidence.MEASURED
            and seen.result.run < len(runs)
            and devices[runs[seen.result.run].device] in self.live.devices
        ]

    @staticmethod
    def sizes(case: Case) -> tuple[int, ...]:
        wide = max(case.head_dim, case.head_dim_v)
        tensors = (
            case.seqlen_q * case.heads * wide,
            case.seqlen_kv * case.heads_kv * wide,
        )
        heads = case.batch * case.heads
        largest = case.batch * max(tensors)
        return case.seqlen_q, case.seqlen_kv, heads, largest, heads * case.seqlen_q * case.seqlen_kv

    def proven(self, backend: Backend, config: AttentionConfig, completions: list[Case]) -> bool:
        if any(getattr(config, name) is UNSET for name in SIZES):
            return False
        passed = self.passed(backend)
        return bool(completions) and all(
            any(
                seen.at == levels_of(case)
                and seen.case.head_dim_v == case.head_dim_v
                and all(a <= b for a, b in zip(self.sizes(case), self.sizes(seen.case), strict=True))
                for seen in passed
            )
            for case in completions
        )

    def lost_a_rule(self, backend: Backend) -> bool:
        """Whether a failing case lies under no rule."""
        rules = [rule for rule in backend.rules if rule.verdict in FAILING]
        return any(
            seen.result.verdict in FAILING and not any(r.covers(seen.case.id, seen.at) for r in rules)
            for seen in self.seen[backend.name]
        )

    def strength(self, backend: Backend, case: Case) -> int:
        """Return the strength of one full configuration inside the envelope, 0 where there is none."""
        passed = self.passed(backend)
        if not passed:
            return 0
        for place in range(5):
            if self.sizes(case)[place] > max(self.sizes(seen.case)[place] for seen in passed):
                return 0
        if self.lost_a_rule(backend):
            return 0
        if backend.name not in self._tuples:
            self._tuples[backend.name] = {
                frozenset(some)
                for seen in passed
                for t in (1, 2, 3)
                for some in itertools.combinations(self._exact(seen.case), t)
            }
        known = self._tuples[backend.name]
        items = self._exact(case)
        for t in (1, 2, 3):
            if not all(frozenset(some) in known for some in itertools.combinations(items, t)):
                return t - 1
        return 3

    @staticmethod
    def _exact(case: Case) -> list[tuple[str, Any]]:
        at = levels_of(case)
        if at["head_dim_v"] != "equal":
            at["head_dim_v"] = f"{at['head_dim_v']} {case.head_dim_v}"
        return list(at.items())


def selector_of(matrix: Matrix) -> Selector:
    return Selector(matrix, compare(matrix, LIVE), devices=LIVE.devices, installed=LIVE.material)


def check(seed: int, matrices: int, queries: int) -> Counter[str]:
    """Ask many questions of many matrices and compare every answer; returns what came out."""
    counts: Counter[str] = Counter()
    for number in range(matrices):
        draw = random.Random(f"{seed}/{number}")  # noqa: S311  # no secret
        matrix = random_matrix(draw)
        selector, oracle = selector_of(matrix), Oracle(matrix)
        for _ in range(queries):
            config = random_query(draw, matrix)
            strict = selector.select(config)
            compare_candidates(strict, oracle, draw, counts)
            strength = draw.choice([1, 2, 3])
            loose = selector.select(config, strength=strength)
            check_choices(strict, loose, selector.select(config, mode="veto"), strength, counts)
            if not oracle.device_here:
                assert (strict.backend, loose.backend, strict.matches) == (None, None, False)
    assert counts["gate allowed"] >= 0.2 * counts["gate asked"], counts
    assert min(counts[status] for status in ("denied", "proven", "unrefuted", "unknown", "strengths")) > 0
    return counts


def compare_candidates(decision: Decision, oracle: Oracle, draw: random.Random, counts: Counter[str]) -> None:
    config = decision.config
    completions = oracle.completions(config)
    for backend, one in zip(oracle.matrix.backends, decision.candidates, strict=True):
        counts[one.status] += 1
        denied = oracle.denied(backend, config, completions)
        proven = oracle.proven(backend, config, completions)
        if denied:
            assert one.status == "denied", (config, one)
        if one.status == "proven":
            assert (proven, denied) == (True, False), (config, one)
        if one.status == "unrefuted":
            assert oracle.passed(backend)
        if len(completions) == 1:
            wanted = "denied" if denied else "proven" if proven else None
            assert (one.status if one.status in {"denied", "proven"} else None) == wanted, (config, one)
            if wanted is None and draw.random() < 0.3:
                counts["strengths"] += 1
                assert (one.strength or 0) == oracle.strength(backend, completions[0]), (config, one)


def check_choices(
    strict: Decision, loose: Decision, veto: Decision, strength: int, counts: Counter[str]
) -> None:
    for decision, name in ((strict, "gate"), (loose, "gate"), (veto, "veto")):
        counts["queries"] += 1
        counts[f"{name} asked"] += 1
        counts[f"{name} allowed"] += decision.backend is not None
    chosen = strict.candidate(strict.backend or "")
    assert chosen is None or chosen.status == "proven"
    chosen = loose.candidate(loose.backend or "")
    assert chosen is None or chosen.status == "proven" or (chosen.strength or 0) >= strength
    chosen = veto.candidate(veto.backend or "")
    assert chosen is None or chosen.status != "denied"


def test_no_answer_goes_beyond_the_oracle() -> None:
    assert check(seed=0, matrices=34, queries=200)["queries"] > 20_000


@pytest.mark.release
@pytest.mark.timeout(1500)
def test_no_answer_of_a_million_goes_beyond_the_oracle() -> None:
    assert check(seed=1, matrices=1000, queries=340)["queries"] > 1_000_000


def allowed(selector: Selector, config: AttentionConfig) -> set[tuple[str, int]]:
    """Return what a gate lets through: backend and strength, 0 for only what is proven."""
    candidates = selector.select(config).candidates

    def passes(one: Candidate, strength: int) -> bool:
        return passes_gate(one, strength or None)

    return {(one.backend, strength) for one in candidates for strength in range(4) if passes(one, strength)}


def assert_only_less(before: Selector, after: Selector, configs: list[AttentionConfig], what: object) -> None:
    for config in configs:
        more = allowed(after, config) - allowed(before, config)
        assert not more, (what, config, more)


def clean_matrix(draw: random.Random) -> Matrix:
    while True:
        matrix = random_matrix(draw, clean=True)
        if not [f for f in faults(encode(matrix)) if not f.path.endswith("witness")]:
            return matrix


def test_removing_a_case_a_result_or_a_rule_never_allows_more() -> None:
    for number in range(12):
        draw = random.Random(number)  # noqa: S311  # no secret
        matrix = clean_matrix(draw)
        before = selector_of(matrix)
        configs = [random_query(draw, matrix) for _ in range(30)]
        for _ in range(6):
            index = draw.randrange(len(matrix.cases))
            fewer = structs.replace(matrix, cases=matrix.cases[:index] + matrix.cases[index + 1 :])
            assert_only_less(before, selector_of(sealed(fewer)), configs, matrix.cases[index])
            place = draw.randrange(len(matrix.backends))
            backend = matrix.backends[place]
            if backend.cases:
                index = draw.randrange(len(backend.cases))
                less = structs.replace(backend, cases=backend.cases[:index] + backend.cases[index + 1 :])
                assert_only_less(
                    before, selector_of(with_backend(matrix, place, less)), configs, backend.cases[index]
                )
            if backend.rules:
                index = draw.randrange(len(backend.rules))
                rest = backend.rules[:index] + backend.rules[index + 1 :]
                if leaves_a_trace(matrix, backend, index):
                    less = structs.replace(backend, rules=rest)
                    after = selector_of(with_backend(matrix, place, less))
                    assert_only_less(before, after, configs, backend.rules[index])


def leaves_a_trace(matrix: Matrix, backend: Backend, index: int) -> bool:
    """Whether some failing case lies under this rule alone; else only the digest tells that it is gone."""
    known = {record.id: record.case for record in matrix.cases}
    rest = backend.rules[:index] + backend.rules[index + 1 :]
    return any(
        result.verdict in FAILING
        and backend.rules[index].covers(result.id, levels_of(known[result.id]))
        and not any(rule.covers(result.id, levels_of(known[result.id])) for rule in rest)
        for result in backend.cases
    )


def with_backend(matrix: Matrix, place: int, backend: Backend) -> Matrix:
    backends = (*matrix.backends[:place], backend, *matrix.backends[place + 1 :])
    return sealed(structs.replace(matrix, backends=backends))


def fields_of(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the path of every field of every object in a document."""
    if isinstance(value, dict):
        own = [(*path, key) for key in value]
        return own + [found for key, inner in value.items() for found in fields_of(inner, (*path, key))]
    if isinstance(value, list):
        return [found for index, inner in enumerate(value) for found in fields_of(inner, (*path, index))]
    return []


def without(document: Any, path: tuple[Any, ...]) -> Any:
    copy = msgspec.json.decode(msgspec.json.encode(document))
    inner = copy
    for step in path[:-1]:
        inner = inner[step]
    del inner[path[-1]]
    return copy


# Their absence is a value (`ok`, measured, first run, first device), so only the digest keeps them.
SHORT_FORM = {("backends", "verdict"), ("backends", "evidence"), ("backends", "run"), ("runs", "device")}


def test_removing_any_field_is_refused_and_even_resealed_never_allows_more() -> None:
    tried: Counter[str] = Counter()
    for number in range(12):
        draw = random.Random(f"fields/{number}")  # noqa: S311  # no secret
        matrix = clean_matrix(draw)
        before = selector_of(matrix)
        configs = [random_query(draw, matrix) for _ in range(25)]
        document = msgspec.json.decode(encode(matrix))
        paths = fields_of(document)
        for path in draw.sample(paths, min(len(paths), 60)):
            content = msgspec.json.encode(without(document, path))
            try:
                same = parse_matrix(content, "changed")
            except MatrixError:
                tried["refused"] += 1
            else:
                assert same == matrix, path
            if (path[0], path[-1]) in SHORT_FORM:
                continue
            try:
                less = sealed(msgspec.json.decode(content, type=Matrix))
                after = selector_of(less)
            except (msgspec.ValidationError, AttnprobeError):
                tried["not a matrix"] += 1
                continue
            tried["resealed"] += 1
            assert_only_less(before, after, configs, path)
    assert tried["refused"] > 300
    assert tried["resealed"] > 60
    assert tried["not a matrix"] > 60
