from __future__ import annotations

import json
import random
from typing import Any

import msgspec
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec import structs

from attnprobe.axes import levels_of
from attnprobe.config import Case, canonical
from attnprobe.matrix.schema import (
    OUTPUTS,
    SCHEMA,
    Backend,
    Generator,
    Matrix,
    Rule,
    compact,
    digest_of,
    expanded,
    sealed,
)
from attnprobe.matrix.store import encode, parse_matrix
from attnprobe.verdict import Verdict

few = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def expanded_again(document: dict[str, Any]) -> Matrix:
    return compact(msgspec.json.decode(msgspec.json.encode(document), type=Matrix))


@few
@given(data=st.data())
def test_the_expanded_shape_is_the_same_document(
    data: st.DataObject, documents: st.SearchStrategy[Matrix]
) -> None:
    matrix = data.draw(documents)
    again = expanded_again(expanded(matrix))
    assert again == matrix
    assert digest_of(again) == matrix.digest


@few
@given(data=st.data())
def test_sealing_orders_whatever_it_gets(data: st.DataObject, documents: st.SearchStrategy[Matrix]) -> None:
    matrix = data.draw(documents)
    draw = random.Random(data.draw(st.integers(0, 99)))  # noqa: S311  # no secret

    def shuffled(items: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(draw.sample(items, len(items)))

    mixed = structs.replace(
        matrix,
        digest="of something else",
        cases=shuffled(matrix.cases),
        backends=shuffled(
            tuple(
                structs.replace(b, cases=shuffled(b.cases), traits=dict(shuffled(tuple(b.traits.items()))))
                for b in matrix.backends
            )
        ),
    )
    assert sealed(mixed) == matrix


def test_the_digest_is_over_everything_but_itself(handmade: Matrix) -> None:
    assert digest_of(structs.replace(handmade, digest="")) == handmade.digest
    run = structs.replace(handmade.runs[0], seed=8)
    assert digest_of(structs.replace(handmade, runs=(run,))) != handmade.digest
    backend = structs.replace(handmade.backends[0], rules=handmade.backends[0].rules[1:])
    assert digest_of(structs.replace(handmade, backends=(backend, *handmade.backends[1:]))) != handmade.digest


def test_the_expanded_shape_has_the_published_names(handmade: Matrix) -> None:
    document = expanded(handmade)
    assert set(document) == {"schema", "digest", "devices", "backends", "runs", "generator"}
    for backend in document["backends"]:
        assert {"name", "status", "rules", "cases"} <= set(backend)
        for rule in backend["rules"]:
            assert {"id", "when", "verdict", "witness"} <= set(rule)
        for result in backend["cases"]:
            assert {"id", "at", "verdict", "evidence", "run", "detail"} <= set(result)
            assert result["at"] == levels_of(msgspec.convert(result["case"], Case))
    run = document["runs"][0]
    named = "started finished level seed complete strength planned executed skipped"
    assert set(named.split()) <= set(run)


def test_a_field_of_a_later_version_is_ignored(handmade: Matrix) -> None:
    document = json.loads(json.dumps(msgspec.to_builtins(handmade)))
    document["later"] = {"anything": [1]}
    document["backends"][0]["cases"][0]["later"] = 1
    assert msgspec.convert(document, Matrix) == handmade


def test_a_rule_covers_by_every_axis_it_names() -> None:
    case = Case(head_dim=256, head_dim_v=256, dropout=0.1)
    at = levels_of(case)
    rule = Rule(id="r", when={"head_dim": (248, 256), "dropout": ("on",)}, verdict=Verdict.WRONG)
    assert rule.covers(case.id, at)
    assert not rule.covers(case.id, {**at, "head_dim": 512})
    assert not rule.covers(case.id, {**at, "dropout": "off"})
    assert structs.replace(rule, when={}).covers(case.id, at)


def test_a_rule_of_exact_cases_covers_no_other() -> None:
    case = Case()
    rule = Rule(id="r", when={}, verdict=Verdict.WRONG, cases=(case.id,))
    assert rule.covers(case.id, levels_of(case))
    assert not rule.covers(Case(seed=1).id, levels_of(case))


def test_a_case_is_found_by_its_id(handmade: Matrix) -> None:
    assert handmade.case(Case(seed=7).id) == Case(seed=7)
    assert handmade.case("no such id") is None


def test_a_computed_empty_tuple_is_no_other_document() -> None:
    # In Python 3.10 it is not the same object as the default.
    computed = tuple(name for name in OUTPUTS if not name)
    rules = [
        Rule(id="1", when={}, verdict=Verdict.WRONG, outputs=outputs, cases=outputs)
        for outputs in ((), computed)
    ]
    first, second = (
        sealed(
            Matrix(
                schema=SCHEMA,
                digest="",
                devices=(),
                backends=(Backend(name="b", status="probed", rules=(rule,)),),
                runs=(),
                generator=Generator(name="g", version="1"),
            )
        )
        for rule in rules
    )
    assert canonical(first) == canonical(second)
    assert parse_matrix(encode(second), "here") == second
