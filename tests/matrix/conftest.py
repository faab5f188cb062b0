"""Random valid documents."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st

from attnprobe.axes import levels_of
from attnprobe.config import Case
from attnprobe.matrix.schema import (
    SCHEMA,
    Backend,
    CaseRecord,
    DeviceRecord,
    Generator,
    Material,
    Matrix,
    Rates,
    Result,
    Rule,
    Run,
    sealed,
)
from attnprobe.verdict import Verdict

OTHERS = [verdict for verdict in Verdict if verdict is not Verdict.OK]

words = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
names = st.from_regex(r"[a-z][a-z0-9-]{0,9}", fullmatch=True)
counts = st.integers(0, 2**40)
figures = st.floats(allow_nan=False, allow_infinity=False)
values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**62), 2**62) | figures | words,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=3),
    max_leaves=5,
)
cases = st.builds(
    Case,
    pass_=st.sampled_from(["forward", "backward"]),
    dtype=st.sampled_from(["float32", "bfloat16", "float16"]),
    head_dim=st.sampled_from([8, 64, 200, 256, 512]),
    head_dim_v=st.sampled_from([8, 64, 256]),
    heads=st.sampled_from([2, 4]),
    heads_kv=st.sampled_from([1, 2]),
    batch=st.integers(1, 3),
    seqlen_q=st.integers(0, 600),
    seqlen_kv=st.integers(0, 600),
    mask=st.sampled_from(["none", "causal-top-left", "bool", "float"]),
    dropout=st.sampled_from([0.0, 0.1]),
    scale=st.none() | st.floats(0.01, 4),
    deterministic=st.booleans(),
    seed=st.integers(0, 2**31),
)
materials = st.builds(Material, name=names, version=words, digest=words, architectures=st.just(("9.0",)))
devices = st.builds(
    DeviceRecord,
    kind=st.sampled_from(["cpu", "cuda"]),
    name=words,
    sm=st.sampled_from(["", "12.0"]),
    cores=counts,
    capabilities=st.lists(names, max_size=2).map(tuple),
)
runs = st.builds(
    Run,
    started=words,
    finished=words,
    level=names,
    seed=counts,
    complete=st.booleans(),
    strength=st.integers(0, 3),
    planned=counts,
    executed=counts,
    skipped=counts,
    seconds=st.dictionaries(names, figures, max_size=2),
    notes=st.lists(words, max_size=2).map(tuple),
)


@st.composite
def backends(draw: st.DrawFn, name: str, known: list[Case], run_count: int) -> Backend:
    """Return a backend whose every bad case lies under a rule, and no good one does."""
    if draw(st.booleans()) and not known:
        return Backend(name=name, status="absent", reason=draw(words))
    results, rules = [], []
    for case in known:
        verdict = draw(st.sampled_from([Verdict.OK, *OTHERS]))
        bad = verdict.fails or verdict is Verdict.REFUSED
        results.append(
            Result(
                id=case.id,
                verdict=verdict,
                run=draw(st.integers(0, run_count - 1)),
                outputs=draw(st.sampled_from([(), ("out",), ("dq", "dk")])),
                detail=draw(st.dictionaries(words, values, max_size=2)),
            )
        )
        if bad:
            rules.append(
                Rule(
                    id=case.id[:8],
                    when={axis: (level,) for axis, level in levels_of(case).items()},
                    verdict=verdict,
                    witness=case.id,
                    cases=(case.id,),
                    failing=1,
                    localised=draw(st.booleans()),
                    reason=draw(words),
                    rates=draw(
                        st.none()
                        | st.builds(
                            Rates,
                            inside_failed=counts,
                            inside_tried=counts,
                            outside_failed=counts,
                            outside_tried=counts,
                        )
                    ),
                )
            )
    return Backend(
        name=name,
        status="probed",
        materials=tuple(draw(st.lists(materials, max_size=2))),
        traits=draw(st.dictionaries(words, words, max_size=3)),
        rules=tuple(rules),
        cases=tuple(results),
    )


@st.composite
def matrices(draw: st.DrawFn) -> Matrix:
    """Return a sealed document without a fault."""
    all_cases = draw(st.lists(cases, max_size=4, unique_by=lambda case: case.id))
    all_runs = tuple(draw(st.lists(runs, min_size=1, max_size=2)))
    found = []
    for name in draw(st.lists(names, max_size=3, unique=True)):
        ran = [case for case in all_cases if draw(st.booleans())]
        found.append(draw(backends(name, ran, len(all_runs))))
    used = {result.id for backend in found for result in backend.cases}
    return sealed(
        Matrix(
            schema=SCHEMA,
            digest="",
            devices=tuple(draw(st.lists(devices, max_size=2))),
            backends=tuple(found),
            cases=tuple(CaseRecord(id=case.id, case=case) for case in all_cases if case.id in used),
            runs=all_runs,
            generator=Generator(name="attnprobe", version=draw(words)),
        )
    )


@pytest.fixture(scope="session")
def documents() -> st.SearchStrategy[Matrix]:
    """Return the strategy of sealed documents without a fault."""
    return matrices()
