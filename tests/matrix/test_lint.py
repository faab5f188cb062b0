from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec import structs

from attnprobe.config import Case
from attnprobe.errors import MatrixError
from attnprobe.matrix.lint import faults
from attnprobe.matrix.schema import Backend, Matrix, expanded, sealed
from attnprobe.matrix.store import encode, parse_matrix
from attnprobe.verdict import Verdict

few = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
# The backends of the handmade matrix, by name.
FLASH, ABSENT, MATH = 0, 1, 2


def found(matrix: Matrix) -> dict[str, str]:
    """Return the faults of a document that was sealed again, by path."""
    listed = faults(encode(sealed(matrix)))
    by_path = {fault.path: fault.what for fault in listed}
    assert len(by_path) == len(listed)
    return by_path


def with_backend(matrix: Matrix, index: int, change: Callable[[Backend], Backend]) -> Matrix:
    backends = list(matrix.backends)
    backends[index] = change(backends[index])
    return structs.replace(matrix, backends=tuple(backends))


def index_of(backend: Backend, verdict: Verdict) -> int:
    return next(i for i, result in enumerate(backend.cases) if result.verdict is verdict)


@few
@given(data=st.data())
def test_a_valid_document_has_no_fault(data: st.DataObject, documents: st.SearchStrategy[Matrix]) -> None:
    matrix = data.draw(documents)
    assert faults(encode(matrix), strict=True) == []
    assert faults(json.dumps(expanded(matrix)).encode()) == []


def test_the_handmade_document_has_no_fault(handmade: Matrix) -> None:
    assert [backend.name for backend in handmade.backends] == ["broken-flash", "flash-attn-3", "torch-math"]
    assert faults(encode(handmade), strict=True) == []


def test_a_scans_document_has_no_fault(small_matrix: Path) -> None:
    assert faults(small_matrix.read_bytes(), strict=True) == []


PLACES: list[tuple[tuple[str | int, ...], object, str]] = [
    (("devices", 0, "kind"), "tpu", "$.devices[0].kind"),
    (("backends", 0, "status"), 1, "$.backends[0].status"),
    (("backends", 0, "rules", 1, "verdict"), "bad", "$.backends[0].rules[1].verdict"),
    (("backends", 0, "rules", 2, "when"), [], "$.backends[0].rules[2].when"),
    (("backends", 0, "materials", 1), None, "$.backends[0].materials[1]"),
    (("backends", 2, "cases"), {}, "$.backends[2].cases"),
    (("cases", 3, "case", "heads"), 0, "$.cases[3].case.heads"),
    (("cases", 3, "case", "dropout"), 1.5, "$.cases[3].case.dropout"),
    (("runs", 0, "complete"), None, "$.runs[0].complete"),
    (("generator",), "me", "$.generator"),
]


def put(document: Any, path: tuple[str | int, ...], value: object) -> None:
    for step in path[:-1]:
        document = document[step]
    document[path[-1]] = value


@pytest.mark.parametrize(("path", "value", "at"), PLACES, ids=[at for _, _, at in PLACES])
def test_a_wrong_type_is_named_with_its_path(
    handmade: Matrix, path: tuple[str | int, ...], value: object, at: str
) -> None:
    document = json.loads(encode(handmade))
    put(document, path, value)
    assert [fault.path for fault in faults(json.dumps(document).encode())] == [at]


def test_every_wrong_type_is_named(handmade: Matrix) -> None:
    document = json.loads(encode(handmade))
    for path, value, _ in PLACES:
        put(document, path, value)
    named = [fault.path for fault in faults(json.dumps(document).encode())]
    assert sorted(named) == sorted(at for _, _, at in PLACES)


def test_every_wrong_value_of_a_mapping_is_named(handmade: Matrix) -> None:
    document = json.loads(encode(handmade))
    document["backends"][0]["traits"] = {"one": 1, "two": "fine", "three": 3}
    document["runs"][0]["seconds"] = {"judge": "long"}
    document["backends"][0]["rules"][0]["when"]["dropout"] = "on"
    named = {fault.path for fault in faults(json.dumps(document).encode())}
    assert named == {
        "$.backends[0].traits.one",
        "$.backends[0].traits.three",
        "$.runs[0].seconds.judge",
        "$.backends[0].rules[0].when.dropout",
    }


def test_every_wrong_type_of_an_optional_struct_is_named(handmade: Matrix) -> None:
    document = json.loads(json.dumps(expanded(handmade)))
    document["backends"][0]["cases"][1]["case"].update(heads=0, dtype="int8")
    document["backends"][0]["rules"][0]["rates"].update(inside_failed="x", outside_tried=None)
    named = {fault.path for fault in faults(json.dumps(document).encode())}
    assert named == {
        "$.backends[0].cases[1].case.heads",
        "$.backends[0].cases[1].case.dtype",
        "$.backends[0].rules[0].rates.inside_failed",
        "$.backends[0].rules[0].rates.outside_tried",
    }


def test_every_missing_field_is_named(handmade: Matrix) -> None:
    document = json.loads(encode(handmade))
    del document["generator"]["version"], document["runs"][0]["level"], document["runs"][0]["seed"]
    listed = [(fault.path, fault.what) for fault in faults(json.dumps(document).encode())]
    assert [path for path, _ in listed] == ["$.runs[0]", "$.runs[0]", "$.generator"]
    assert "level" in listed[0][1]
    assert "seed" in listed[1][1]


@pytest.mark.parametrize("content", [b"", b"  ", b"{", b"\xff", b"[" * 100_000, b"nul"])
def test_what_is_not_json_is_an_error(content: bytes) -> None:
    with pytest.raises(MatrixError):
        faults(content)


@pytest.mark.parametrize(
    ("content", "path"),
    [(b"{}", "$.schema"), (b'{"schema": "attnprobe.matrix/9"}', "$.schema"), (b"[]", "$"), (b"7", "$")],
)
def test_what_is_another_document_is_one_fault(content: bytes, path: str) -> None:
    assert [fault.path for fault in faults(content)] == [path]


def test_an_unknown_field_counts_only_when_strict(handmade: Matrix) -> None:
    document = json.loads(encode(handmade))
    document["later"] = 1
    document["backends"][0]["cases"][2]["later"] = 1
    document["cases"][0]["case"]["later"] = 1
    content = json.dumps(document).encode()
    assert faults(content) == []
    assert {fault.path for fault in faults(content, strict=True)} == {
        "$.later",
        "$.backends[0].cases[2].later",
        "$.cases[0].case.later",
    }


def test_a_wrong_digest(handmade: Matrix) -> None:
    listed = faults(encode(structs.replace(handmade, digest="0" * 64)))
    assert [fault.path for fault in listed] == ["$.digest"]


def test_a_failing_case_without_a_rule(handmade: Matrix) -> None:
    flash = handmade.backends[FLASH]
    crashed = index_of(flash, Verdict.CRASHED)
    kept = tuple(rule for rule in flash.rules if rule.verdict is not Verdict.CRASHED)
    listed = found(with_backend(handmade, FLASH, lambda b: structs.replace(b, rules=kept)))
    assert list(listed) == [f"$.backends[0].cases[{crashed}]"]
    assert "no rule covers it" in listed[f"$.backends[0].cases[{crashed}]"]


def test_a_refusals_rule_is_no_rule_for_a_failure(handmade: Matrix) -> None:
    flash = handmade.backends[FLASH]
    rules = tuple(
        structs.replace(rule, verdict=Verdict.REFUSED) if rule.verdict is Verdict.CRASHED else rule
        for rule in flash.rules
    )
    listed = found(with_backend(handmade, FLASH, lambda b: structs.replace(b, rules=rules)))
    assert list(listed) == [f"$.backends[0].cases[{index_of(flash, Verdict.CRASHED)}]"]


def test_an_ok_case_under_a_rule(handmade: Matrix) -> None:
    flash = handmade.backends[FLASH]
    rules = (structs.replace(flash.rules[0], when={"pass": ("backward",)}), *flash.rules[1:])
    listed = found(with_backend(handmade, FLASH, lambda b: structs.replace(b, rules=rules)))
    backward = {i for i, r in enumerate(flash.cases) if r.verdict is Verdict.OK and r.id == Case(seed=7).id}
    assert set(listed) == {f"$.backends[0].cases[{i}]" for i in backward}
    assert all("rule aaaaaaaa covers it" in what for what in listed.values())


def test_axes_and_levels_that_are_none(handmade: Matrix) -> None:
    flash = handmade.backends[FLASH]
    when = {
        **flash.rules[0].when,
        "colour": ("red",),
        "dropout": ("on", "maybe"),
        "head_dim": (200, 208, 256, 512, "7"),
    }
    rules = (structs.replace(flash.rules[0], when=when), *flash.rules[1:])
    listed = found(with_backend(handmade, FLASH, lambda b: structs.replace(b, rules=rules)))
    rules_at = {path: what for path, what in listed.items() if ".rules[" in path}
    assert set(rules_at) == {
        "$.backends[0].rules[0].when.colour",
        "$.backends[0].rules[0].when.dropout",
        "$.backends[0].rules[0].when.head_dim",
    }


def test_a_level_that_is_none(handmade: Matrix) -> None:
    flash = handmade.backends[FLASH]
    when = {**flash.rules[0].when, "dropout": ("on", "maybe"), "head_dim": (200, 208, 256, 512, "7")}
    rules = (structs.replace(flash.rules[0], when=when), *flash.rules[1:])
    listed = found(with_backend(handmade, FLASH, lambda b: structs.replace(b, rules=rules)))
    assert set(listed) == {"$.backends[0].rules[0].when.dropout", "$.backends[0].rules[0].when.head_dim"}


def test_an_id_that_is_not_its_cases(handmade: Matrix) -> None:
    cases = list(handmade.cases)
    cases[2] = structs.replace(cases[2], case=structs.replace(cases[2].case, seed=8))
    listed = found(structs.replace(handmade, cases=tuple(cases)))
    assert list(listed) == ["$.cases[2].id"]
    assert cases[2].case.id in listed["$.cases[2].id"]


def test_a_result_of_an_unknown_case(handmade: Matrix) -> None:
    first, *rest = handmade.cases
    listed = found(structs.replace(handmade, cases=tuple(rest)))
    where = {
        f"$.backends[{b}].cases[{i}].id"
        for b, backend in enumerate(handmade.backends)
        for i, result in enumerate(backend.cases)
        if result.id == first.id
    }
    assert where <= set(listed)


@pytest.mark.parametrize("witness", ["", "000000000000"])
def test_a_witness_that_did_not_run(handmade: Matrix, witness: str) -> None:
    flash = handmade.backends[FLASH]
    rules = (structs.replace(flash.rules[0], witness=witness), *flash.rules[1:])
    listed = found(with_backend(handmade, FLASH, lambda b: structs.replace(b, rules=rules)))
    assert list(listed) == ["$.backends[0].rules[0].witness"]


def test_a_counter_witness_that_did_not_run(handmade: Matrix) -> None:
    flash = handmade.backends[FLASH]
    rules = (structs.replace(flash.rules[0], counter_witnesses=("000000000000",)), *flash.rules[1:])
    listed = found(with_backend(handmade, FLASH, lambda b: structs.replace(b, rules=rules)))
    assert list(listed) == ["$.backends[0].rules[0].counter_witnesses"]


def test_a_case_that_stands_twice(handmade: Matrix) -> None:
    listed = found(structs.replace(handmade, cases=(*handmade.cases, handmade.cases[0])))
    assert list(listed) == ["$.cases[1].id"]


def test_a_result_that_stands_twice(handmade: Matrix) -> None:
    listed = found(with_backend(handmade, MATH, lambda b: structs.replace(b, cases=(*b.cases, b.cases[0]))))
    assert list(listed) == ["$.backends[2].cases[1].id"]


def test_a_backend_that_stands_twice(handmade: Matrix) -> None:
    listed = found(structs.replace(handmade, backends=(*handmade.backends, handmade.backends[MATH])))
    assert listed == {"$.backends": "torch-math stands twice"}


def test_an_absent_backend_with_cases(handmade: Matrix) -> None:
    listed = found(
        with_backend(handmade, ABSENT, lambda b: structs.replace(b, cases=handmade.backends[MATH].cases))
    )
    assert list(listed) == ["$.backends[1].cases"]


@pytest.mark.parametrize("run", [-1, 1])
def test_a_run_that_was_none(handmade: Matrix, run: int) -> None:
    def change(backend: Backend) -> Backend:
        return structs.replace(
            backend, cases=(structs.replace(backend.cases[0], run=run), *backend.cases[1:])
        )

    assert list(found(with_backend(handmade, MATH, change))) == ["$.backends[2].cases[0].run"]


junk: st.SearchStrategy[Any] = st.sampled_from(
    [None, True, -1, 2**70, 0.5, "", "x", [], {}, [[]], {"a": None}]
)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_what_cannot_be_read_has_a_fault(data: st.DataObject, handmade: Matrix) -> None:
    document: Any = json.loads(encode(handmade))
    place, steps = document, []
    while True:
        keys = sorted(place) if isinstance(place, dict) else range(len(place))
        key: Any = data.draw(st.sampled_from(list(keys)))
        steps.append(key)
        if isinstance(place[key], (dict, list)) and place[key] and data.draw(st.integers(0, 3)):
            place = place[key]
        else:
            break
    if data.draw(st.booleans()):
        place[key] = data.draw(junk)
    else:
        del place[key]
    content = json.dumps(document).encode()
    listed = faults(content)
    try:
        read = parse_matrix(content, "it")
    except MatrixError:
        assert listed, steps
    else:
        assert read == handmade
        assert listed == []
