from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import UNSET, structs

from attnprobe.axes import AXES, AXIS, allowed, levels_of
from attnprobe.config import AttentionConfig, Case, config_of
from attnprobe.errors import UsageError
from attnprobe.probe.concrete import concretise
from attnprobe.select.asked import ALL, Asked, asked, completions, extent_of


def full(**changed: object) -> AttentionConfig:
    return structs.replace(config_of(Case()), **changed)


def test_nothing_said_is_every_value_but_the_documented_defaults() -> None:
    query = asked(AttentionConfig())
    fixed = {"scale": "default", "softcap": "off", "alibi": "off", "deterministic": "off"}
    for axis, levels in query.levels.items():
        if axis in fixed:
            assert levels == (fixed[axis],)
        elif axis == "mask":
            assert levels == tuple(level for level in ALL["mask"] if level != "window")
        elif axis == "needs_grad":
            assert levels == ("none", "all")
        else:
            assert levels == ALL[axis]
    assert query.extent is None
    assert set(query.assumed) == {*fixed, "window", "needs_grad"}


@pytest.mark.parametrize(
    ("said", "axis", "levels"),
    [
        ({"pass_": "forward"}, "needs_grad", ("none",)),
        ({"pass_": "backward"}, "needs_grad", ("all",)),
        ({"mask": "none"}, "masked_rows", ("none",)),
        ({"mask": "bool"}, "masked_rows", ("none", "false")),
        ({"layout": "varlen"}, "mask", ("none", "causal-top-left", "causal-bottom-right")),
        ({"masked_rows": "false"}, "mask", ("bool", "bool-broadcast")),
        ({"seqlen_q": 1, "seqlen_kv": 9}, "seqlen_order", ("q-shorter",)),
        ({"seqlen_q": 0, "seqlen_kv": 0}, "masked_rows", ("none",)),
        ({"heads": 1}, "heads", ("equal",)),
        ({"heads": 8, "heads_kv": 1}, "heads", ("one-kv",)),
        ({"head_dim": 192, "head_dim_v": 128}, "head_dim_v", ("smaller",)),
        ({"mask": "window"}, "mask", ("window",)),
    ],
)
def test_what_is_said_narrows_what_is_not(
    said: dict[str, object], axis: str, levels: tuple[object, ...]
) -> None:
    assert asked(AttentionConfig(**said)).levels[axis] == levels  # type: ignore[arg-type]


@given(st.data())
def test_a_case_falls_on_possible_levels_whatever_is_left_unsaid(data: st.DataObject) -> None:
    at = {axis.name: data.draw(st.sampled_from(axis.levels), axis.name) for axis in AXES}
    if at["pass"] == "forward":
        at["needs_grad"], at["grad_out"] = "none", "contiguous"
    if not allowed(at):
        return
    case = concretise(at)
    config = config_of(case)
    silent = ["scale", "softcap", "alibi", "deterministic", "needs_grad", "window"]
    names = [n for n in AttentionConfig.__struct_fields__ if n not in silent and case.mask != "window"]
    gone = data.draw(st.lists(st.sampled_from(names), unique=True)) if names else []
    query = asked(structs.replace(config, **dict.fromkeys(gone, UNSET)))
    promised = {axis: level for axis, level in levels_of(case).items() if not AXIS[axis].hazard}
    for axis, level in promised.items():
        assert level in query.levels[axis], axis
    if not gone:
        assert completions(query.levels, 1) == [promised]
        assert query.extent == extent_of(case)


def test_sizes_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(UsageError, match="heads=5"):
        asked(full(heads=5, heads_kv=2))


@pytest.mark.parametrize(
    "wrong", [{"dtype": "float7"}, {"head_dim": 0}, {"dropout": 1.5}, {"heads": object()}]
)
def test_a_value_out_of_range_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(UsageError, match="no attention configuration"):
        asked(full(**wrong))


def test_a_contradiction_of_levels_is_a_question_without_an_answer() -> None:
    query: Asked = asked(full(masked_rows="-inf", mask="none"))
    assert query.levels["masked_rows"] == ("-inf",)
    assert completions(query.levels, 64) == []


def test_an_extent_counts_what_lies_between_the_elements() -> None:
    plain = extent_of(Case())
    assert (plain.batch_heads, plain.elements, plain.scores, plain.reach) == (2, 16384, 32768, 16384)
    assert extent_of(Case(layout="inner-stride")).reach == 2 * plain.reach
    assert extent_of(Case(layout="packed")).reach == 3 * plain.reach
    assert plain.within(extent_of(Case(seqlen_q=256)))
    assert not extent_of(Case(layout="packed")).within(plain)
    assert "beyond" in extent_of(Case(batch=2)).exceeding(plain)
