"""From levels to numbers and back, at any seed."""

from __future__ import annotations

import itertools
import random
from typing import Final

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from attnprobe.axes import AXES, AXIS, HEAD_DIMS, WORK_CAP, At, Level, allowed, levels_of
from attnprobe.config import Case
from attnprobe.lengths import LENGTHS, length_level
from attnprobe.probe.concrete import SMALL_WORK, concretise, with_levels

PLAIN: Final = levels_of(Case())
SEED: Final = st.integers(0, 1 << 31)


def random_levels(draw: random.Random) -> dict[str, Level]:
    while True:
        at = {axis.name: draw.choice(axis.levels) for axis in AXES}
        at["needs_grad"] = "none" if at["pass"] == "forward" else at["needs_grad"]
        if allowed(at):
            return at


@st.composite
def levels(draw: st.DrawFn) -> At:
    return random_levels(random.Random(draw(SEED)))  # noqa: S311


@settings(max_examples=1000, deadline=None)
@given(levels(), SEED)
def test_the_case_falls_on_exactly_the_levels_and_under_the_cap(at: At, seed: int) -> None:
    case = concretise(at, seed)
    assert levels_of(case) == at
    assert case.work <= WORK_CAP
    assert case.seed == seed
    assert case.heads % case.heads_kv == 0


def test_every_allowed_choice_of_sizes_has_a_case_under_the_cap() -> None:
    beyond = []
    dims = (8, 64, 128, 192, 200, 256, 512)
    for q, kv, order, heads, batch, dim, dim_v in itertools.product(
        LENGTHS,
        LENGTHS,
        AXIS["seqlen_order"].levels,
        AXIS["heads"].levels,
        AXIS["batch"].levels,
        dims,
        AXIS["head_dim_v"].levels,
    ):
        at = {
            **PLAIN,
            "seqlen_q": q,
            "seqlen_kv": kv,
            "seqlen_order": order,
            "heads": heads,
            "batch": batch,
            "head_dim": dim,
            "head_dim_v": dim_v,
        }
        if allowed(at):
            case = concretise(at)
            assert levels_of(case) == at
            if case.work > WORK_CAP:
                beyond.append((case.work / WORK_CAP, case))
    assert not beyond, (len(beyond), max(beyond, key=lambda pair: pair[0]))


@settings(deadline=None)
@given(levels(), SEED)
def test_the_same_levels_and_seed_give_the_same_case(at: At, seed: int) -> None:
    shuffled = dict(sorted(at.items(), key=lambda item: hash(item[0])))
    assert concretise(at, seed) == concretise(shuffled, seed)


def test_seeds_visit_several_lengths_of_a_level() -> None:
    at = {**PLAIN, "seqlen_q": "odd", "seqlen_kv": "even", "seqlen_order": "q-shorter"}
    cases = [concretise(at, seed) for seed in range(40)]
    assert len({case.seqlen_q for case in cases}) >= 3
    assert len({case.seqlen_kv for case in cases}) >= 3
    assert len({case.id for case in cases}) == 40


def test_an_ordinary_case_is_small() -> None:
    for dim in HEAD_DIMS[:8]:
        assert concretise({**PLAIN, "head_dim": dim}).work <= SMALL_WORK


def test_a_custom_scale_is_not_the_default_and_exact_in_half_precision() -> None:
    for dim in HEAD_DIMS:
        case = concretise({**PLAIN, "head_dim": dim, "scale": "custom"})
        assert case.scale is not None
        assert case.scale * 4096 == int(case.scale * 4096)
        assert 0.5 < case.scale * dim**0.5 < 0.7


DECIDES: Final[dict[str, set[str]]] = {
    "pass": {"pass_"},
    "head_dim": {"head_dim", "head_dim_v", "scale"},
    "head_dim_v": {"head_dim_v"},
    "heads": {"heads", "heads_kv"},
    "seqlen_q": {"seqlen_q", "seqlen_kv"},
    "seqlen_kv": {"seqlen_q", "seqlen_kv"},
    "seqlen_order": {"seqlen_q", "seqlen_kv"},
    "mask": {"mask", "window"},
}


@settings(max_examples=600, deadline=None)
@given(levels(), levels(), SEED, st.data())
def test_with_levels_keeps_the_numbers_that_no_changed_axis_decides(
    at: At, other: At, seed: int, data: st.DataObject
) -> None:
    case = concretise(at, seed)
    changed = data.draw(st.sets(st.sampled_from([axis.name for axis in AXES]), min_size=1))
    if changed & {"seqlen_q", "seqlen_kv", "seqlen_order"}:
        changed |= {"seqlen_q", "seqlen_kv", "seqlen_order"}
    wanted = {**at, **{name: other[name] for name in changed}}
    if not allowed(wanted):
        return
    moved = with_levels(case, wanted, frozenset(changed))
    assert levels_of(moved) == wanted
    assert moved.work <= WORK_CAP
    may_change = set().union(*(DECIDES.get(axis, {axis}) for axis in changed))
    different = {f for f in Case.__struct_fields__ if getattr(moved, f) != getattr(case, f)}
    if "heads" in different - may_change:
        # Only to stay under the cap.
        kept = structs.replace(moved, heads=case.heads, heads_kv=case.heads_kv)
        assert kept.work > WORK_CAP
        different -= {"heads", "heads_kv"}
    if different & {"seqlen_q", "seqlen_kv"} - may_change:
        kept = structs.replace(moved, seqlen_q=case.seqlen_q, seqlen_kv=case.seqlen_kv)
        assert kept.work > WORK_CAP
        different -= {"seqlen_q", "seqlen_kv"}
    assert different <= may_change


def test_with_levels_keeps_a_length_that_stands_for_no_level() -> None:
    case = Case(seqlen_q=77, seqlen_kv=77, head_dim=72, head_dim_v=72)
    at = levels_of(case)
    longer = with_levels(
        case, {**at, "seqlen_kv": "x128", "seqlen_order": "q-shorter"}, frozenset({"seqlen_kv"})
    )
    assert longer.seqlen_q == 77
    assert length_level(longer.seqlen_kv) == "x128"
    other = with_levels(case, {**at, "mask": "window"}, frozenset({"mask"}))
    assert (other.seqlen_q, other.seqlen_kv, other.head_dim) == (77, 77, 72)
    assert other.window > 0
    assert with_levels(other, at, frozenset({"mask"})) == case
