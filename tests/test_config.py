"""Configs and cases: canonical form, ids, following rules, errors that name the field."""

from __future__ import annotations

import json
from typing import Any, Final, get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import UNSET, structs

from attnprobe import config
from attnprobe.config import AttentionConfig, Case, canonical, case_from, config_of, parse_config
from attnprobe.errors import UsageError

LATE: Final = Case(
    pass_="forward",
    needs_grad="none",
    dtype="bfloat16",
    head_dim=72,
    head_dim_v=72,
    scale=0.25,
    dropout=0.2,
    seed=7,
)


def equal_copy(value: Any) -> Any:
    """Return an equal value that is another object, as a parser or a computation would give."""
    if isinstance(value, str):
        return "".join(list(value))
    if isinstance(value, float):
        return float(repr(value))
    return value


@st.composite
def cases(draw: st.DrawFn) -> Case:
    heads_kv = draw(st.integers(1, 64))
    mask = draw(st.sampled_from(get_args(config.Mask)))
    pass_ = draw(st.sampled_from(get_args(config.Pass)))
    return Case(
        pass_=pass_,
        dtype=draw(st.sampled_from(get_args(config.Dtype))),
        head_dim=draw(st.integers(1, 1024)),
        head_dim_v=draw(st.integers(1, 1024)),
        heads=heads_kv * draw(st.integers(1, 8)),
        heads_kv=heads_kv,
        batch=draw(st.integers(1, 1 << 31)),
        seqlen_q=draw(st.integers(0, 1 << 31)),
        seqlen_kv=draw(st.integers(0, 1 << 31)),
        mask=mask,
        window=draw(st.integers(1, 1 << 31)) if mask == "window" else 0,
        dropout=draw(st.floats(0, 1, exclude_max=True)),
        scale=draw(st.none() | st.floats(0, 1e6, exclude_min=True)),
        softcap=draw(st.floats(0, 1e6)),
        alibi=draw(st.booleans()),
        layout=draw(st.sampled_from(["contiguous", "transposed", "packed", "expanded", "inner-stride"])),
        needs_grad="none" if pass_ == "forward" else draw(st.sampled_from(["all", "q", "kv"])),
        deterministic=draw(st.booleans()),
        seed=draw(st.integers(0, 1 << 31)),
    )


def test_ids_are_pinned() -> None:
    # A change here makes every case of every published matrix unknown.
    assert Case().id == "b4b8bf78e9ad"
    assert LATE.id == "421058e949a5"


def test_the_plain_case_is_empty_in_canonical_form() -> None:
    assert canonical(Case()) == b"{}"


def test_canonical_form_is_json_without_spaces_in_the_order_of_the_fields() -> None:
    assert canonical(LATE).decode() == json.dumps(msgspec.to_builtins(LATE), separators=(",", ":"))
    value = {"b": 1, "a": {"d": [1, 2], "c": None}}
    assert canonical(value).decode() == json.dumps(value, sort_keys=True, separators=(",", ":"))


def test_canonical_form_does_not_depend_on_the_order_of_a_mapping() -> None:
    assert canonical({"b": 1, "a": 2}) == canonical({"a": 2, "b": 1}) == b'{"a":2,"b":1}'


@given(cases())
def test_a_case_survives_its_canonical_form(case: Case) -> None:
    again = msgspec.json.decode(canonical(case), type=Case)
    assert again == case
    assert again.id == case.id


@given(cases())
def test_equal_cases_have_equal_ids(case: Case) -> None:
    names = Case.__struct_fields__
    copy = Case(**{name: equal_copy(getattr(case, name)) for name in names})
    assert copy == case
    assert copy.id == case.id


@given(cases(), cases())
def test_different_cases_have_different_ids(one: Case, other: Case) -> None:
    assert (one == other) == (one.id == other.id)


@pytest.mark.parametrize(
    "change",
    [
        {"pass_": "forward"},
        {"head_dim": 72},
        {"seed": 1},
        {"scale": 0.125},
        {"deterministic": True},
        {"window": 1},
        {"alibi": True},
    ],
)
def test_each_field_is_in_the_id(change: dict[str, Any]) -> None:
    assert structs.replace(Case(), **change).id != Case().id


def test_work_counts_multiply_adds_of_the_wider_head_dim() -> None:
    case = Case(batch=2, heads=3, heads_kv=1, seqlen_q=5, seqlen_kv=7, head_dim=8, head_dim_v=11)
    assert case.work == 2 * 3 * 5 * 7 * 11
    assert structs.replace(case, head_dim=13).work == 2 * 3 * 5 * 7 * 13


def test_softmax_scale_defaults_to_the_root_of_the_head_dim() -> None:
    assert Case(head_dim=64).softmax_scale == 0.125
    assert Case(head_dim=64, scale=0.3).softmax_scale == 0.3


@given(cases())
def test_config_of_round_trips(case: Case) -> None:
    asked = config_of(case)
    assert case_from(asked, seed=case.seed) == case
    spelled = msgspec.to_builtins(asked)
    assert parse_config(spelled, "here") == asked


def test_config_of_says_every_field_but_a_window_that_is_none() -> None:
    asked = config_of(Case())
    assert [name for name in asked.__struct_fields__ if getattr(asked, name) is UNSET] == ["window"]
    assert config_of(Case(mask="window", window=9)).window == 9


def test_an_unsaid_config_is_the_plain_case() -> None:
    assert case_from(AttentionConfig()) == Case()
    assert case_from(AttentionConfig(), seed=3) == Case(seed=3)


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ({"head_dim": 96}, {"head_dim_v": 96}),
        ({"head_dim_v": 96}, {"head_dim": 96}),
        ({"head_dim": 96, "head_dim_v": 128}, {"head_dim": 96, "head_dim_v": 128}),
        ({"heads": 8}, {"heads_kv": 8}),
        ({"heads_kv": 8}, {"heads": 8}),
        ({"heads": 8, "heads_kv": 2}, {"heads": 8, "heads_kv": 2}),
        ({"seqlen_q": 7}, {"seqlen_kv": 7}),
        ({"seqlen_kv": 7}, {"seqlen_q": 7}),
        ({"seqlen_q": 1, "seqlen_kv": 9}, {"seqlen_q": 1, "seqlen_kv": 9}),
        ({"pass_": "forward"}, {"needs_grad": "none"}),
        ({"pass_": "backward"}, {"needs_grad": "all"}),
        ({"masked_rows": "false"}, {"mask": "bool"}),
        ({"masked_rows": "-inf"}, {"mask": "float"}),
        ({"masked_rows": "finfo-min"}, {"mask": "float"}),
        ({"masked_rows": "-inf", "mask": "float-broadcast"}, {"mask": "float-broadcast"}),
        ({"masked_rows": "none"}, {"mask": "none"}),
        ({"mask": "window"}, {"window": 64}),
        ({"mask": "window", "window": 5}, {"window": 5}),
        ({"scale": None}, {"scale": None}),
    ],
)
def test_dependent_fields_follow_what_is_said(said: dict[str, Any], expected: dict[str, Any]) -> None:
    case = case_from(AttentionConfig(**said))
    assert case == structs.replace(Case(), **{**said, **expected})


@pytest.mark.parametrize("said", [{"heads": 3, "heads_kv": 2}, {"heads": 2, "heads_kv": 4}])
def test_heads_that_do_not_divide_are_refused(said: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=rf"heads={said['heads']}.*heads_kv={said['heads_kv']}"):
        case_from(AttentionConfig(**said))


@pytest.mark.parametrize(
    "said",
    [
        {"pass_": "forward", "needs_grad": "all"},
        {"pass_": "backward", "needs_grad": "none"},
        {"needs_grad": "mask", "mask": "bool"},
        {"mask": "none", "masked_rows": "false"},
        {"mask": "bool", "masked_rows": "-inf"},
        {"mask": "float", "masked_rows": "false"},
        {"masked_rows": "false", "seqlen_kv": 0},
        {"layout": "varlen", "mask": "bool"},
        {"mask": "none", "window": 5},
    ],
    ids=str,
)
def test_a_config_that_contradicts_itself_is_refused(said: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        case_from(AttentionConfig(**said))


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"dtype": "float8"}, "dtype"),
        ({"colour": 1}, "colour"),
        ({"pass_": "forward"}, "pass_"),
        ({"pass": "sideways"}, "pass"),
        ({"head_dim": 0}, "head_dim"),
        ({"head_dim": 64.5}, "head_dim"),
        ({"head_dim": "64"}, "head_dim"),
        ({"head_dim_v": -8}, "head_dim_v"),
        ({"heads": 0}, "heads"),
        ({"heads_kv": (1 << 31) + 1}, "heads_kv"),
        ({"batch": 0}, "batch"),
        ({"seqlen_q": -1}, "seqlen_q"),
        ({"seqlen_kv": "long"}, "seqlen_kv"),
        ({"mask": "causal"}, "mask"),
        ({"window": 0}, "window"),
        ({"masked_rows": "all"}, "masked_rows"),
        ({"dropout": 1.0}, "dropout"),
        ({"dropout": float("nan")}, "dropout"),
        ({"dropout": "on"}, "dropout"),
        ({"scale": 0}, "scale"),
        ({"scale": float("nan")}, "scale"),
        ({"scale": float("inf")}, "scale"),
        ({"softcap": -0.5}, "softcap"),
        ({"softcap": float("inf")}, "softcap"),
        ({"alibi": 1}, "alibi"),
        ({"layout": "bshd"}, "layout"),
        ({"needs_grad": True}, "needs_grad"),
        ({"deterministic": "on"}, "deterministic"),
    ],
    ids=str,
)
def test_a_bad_field_is_named(fields: dict[str, object], named: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_config({"head_dim": 64, **fields}, "jobs.yaml: entry 4")
    assert "jobs.yaml: entry 4" in caught.value.what
    assert named in caught.value.why
    assert caught.value.exit_code == 2


def test_parsing_keeps_what_is_unsaid_unset() -> None:
    asked = parse_config({"pass": "forward", "scale": 1, "window": 3}, "here")
    assert asked == AttentionConfig(pass_="forward", scale=1.0, window=3)
    assert asked.head_dim is UNSET
    assert parse_config({}, "here") == AttentionConfig()
