"""The tensors of a case: layouts, masks, lengths, and the same bits every time."""

from __future__ import annotations

from typing import Final, get_args

import pytest
import torch
from msgspec import structs
from torch import Tensor

from attnprobe import config
from attnprobe.config import Case, Layout, Mask, NeedsGrad
from attnprobe.probe.inputs import (
    MASKED_SHARE,
    Tensors,
    alibi_slopes,
    make,
    positions_visible,
    sequence_lengths,
    visible,
)

CPU: Final = torch.device("cpu")
GROUPED: Final = Case(
    batch=2,
    heads=6,
    heads_kv=2,
    seqlen_q=10,
    seqlen_kv=13,
    head_dim=16,
    head_dim_v=24,
)
EQUAL: Final = structs.replace(GROUPED, seqlen_kv=10)


def given(case: Case) -> Tensors:
    return make(case, CPU)


def all_of(tensors: Tensors) -> dict[str, Tensor]:
    names = ("q", "k", "v", "mask", "grad_out")
    return {name: value for name in names if (value := getattr(tensors, name)) is not None}


DENSE: Final = [layout for layout in get_args(config.Layout) if layout != "varlen"]


@pytest.mark.parametrize("layout", DENSE)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_shapes_and_dtypes(layout: Layout, dtype: config.Dtype) -> None:
    tensors = given(structs.replace(GROUPED, layout=layout, dtype=dtype, mask="float"))
    assert tensors.q.shape == (2, 6, 10, 16)
    assert tensors.k.shape == (2, 2, 13, 16)
    assert tensors.v.shape == (2, 2, 13, 24)
    assert tensors.grad_out.shape == (2, 6, 10, 24)
    assert tensors.lengths_q is tensors.lengths_kv is None
    assert {value.dtype for value in all_of(tensors).values()} == {getattr(torch, dtype)}
    assert all(bool(value.isfinite().all()) for name, value in all_of(tensors).items() if name != "mask")


def test_contiguous_is_in_order() -> None:
    tensors = given(GROUPED)
    assert all(value.is_contiguous() for value in all_of(tensors).values())


def test_transposed_lies_as_batch_sequence_head() -> None:
    tensors = given(structs.replace(GROUPED, layout="transposed"))
    for value in (tensors.q, tensors.k, tensors.v):
        assert not value.is_contiguous()
        assert value.transpose(1, 2).is_contiguous()


def test_inner_stride_is_two() -> None:
    tensors = given(structs.replace(GROUPED, layout="inner-stride"))
    for value in (tensors.q, tensors.k, tensors.v):
        assert value.stride(-1) == 2
        assert value.stride(-2) == 2 * value.shape[-1]


def test_packed_slices_one_buffer() -> None:
    tensors = given(structs.replace(EQUAL, layout="packed"))
    columns = 6 * 16 + 2 * 16 + 2 * 24
    first = tensors.q.untyped_storage().data_ptr()
    offsets = []
    for value in (tensors.q, tensors.k, tensors.v):
        assert value.untyped_storage().data_ptr() == first
        assert value.stride() == (10 * columns, value.shape[-1], columns, 1)
        offsets.append(value.storage_offset())
    assert offsets == [0, 6 * 16, 6 * 16 + 2 * 16]


def test_packed_of_two_lengths_packs_key_and_value_and_gives_the_query_a_neighbour() -> None:
    tensors = given(structs.replace(GROUPED, layout="packed"))
    assert tensors.k.untyped_storage().data_ptr() == tensors.v.untyped_storage().data_ptr()
    assert tensors.q.untyped_storage().data_ptr() != tensors.k.untyped_storage().data_ptr()
    assert tensors.k.stride(2) == tensors.v.stride(2) == 2 * 16 + 2 * 24
    assert tensors.q.stride(2) == 2 * 6 * 16
    assert not any(value.is_contiguous() for value in (tensors.q, tensors.k, tensors.v))


@pytest.mark.parametrize(("heads_kv", "axis"), [(2, 1), (1, 0)])
def test_expanded_has_stride_zero(heads_kv: int, axis: int) -> None:
    tensors = given(structs.replace(GROUPED, heads_kv=heads_kv, layout="expanded"))
    for value in (tensors.k, tensors.v):
        assert value.stride(axis) == 0
        assert torch.equal(value.select(axis, 0), value.select(axis, 1))
    assert tensors.q.is_contiguous()


@pytest.mark.parametrize("layout", DENSE)
def test_a_layout_does_not_change_the_distribution(layout: Layout) -> None:
    case = Case(seqlen_q=64, seqlen_kv=64, layout=layout, head_dim=32, head_dim_v=32, batch=4)
    for value in (given(case).q, given(case).k, given(case).v):
        assert abs(float(value.mean())) < 0.1
        assert 0.9 < float(value.std()) < 1.1


@pytest.mark.parametrize("layout", get_args(config.Layout))
def test_the_same_case_gives_the_same_bits_and_another_seed_others(layout: Layout) -> None:
    case = structs.replace(GROUPED, layout=layout, mask="none" if layout == "varlen" else "float", seed=5)
    one, again, other = given(case), given(case), given(structs.replace(case, seed=6))
    torch.manual_seed(99)
    late = given(case)
    for name, value in all_of(one).items():
        assert torch.equal(value, getattr(again, name))
        assert torch.equal(value, getattr(late, name))
        assert value.stride() == getattr(again, name).stride()
        assert not torch.equal(value, getattr(other, name))


def test_making_inputs_leaves_the_global_generator_alone() -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    given(GROUPED)
    assert torch.equal(before, torch.get_rng_state())


def hidden(tensors: Tensors) -> Tensor:
    """Return which scores a mask hides, by what a mask of that dtype means."""
    mask = tensors.mask
    assert mask is not None
    return ~mask if mask.dtype is torch.bool else mask <= torch.finfo(mask.dtype).min


MASKS: Final[list[Mask]] = ["bool", "float", "bool-broadcast", "float-broadcast"]


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("lengths", [(10, 13), (1, 1), (7, 1), (1, 40)])
def test_without_masked_rows_every_query_keeps_a_key(mask: Mask, seed: int, lengths: tuple[int, int]) -> None:
    q, kv = lengths
    tensors = given(structs.replace(GROUPED, mask=mask, seed=seed, seqlen_q=q, seqlen_kv=kv))
    gone = hidden(tensors)
    assert gone.shape == (2, 6, q, kv)
    assert not bool(gone.all(-1).any())


@pytest.mark.parametrize("mask", MASKS)
def test_about_the_stated_share_of_scores_is_hidden(mask: Mask) -> None:
    gone = hidden(given(structs.replace(GROUPED, mask=mask, seqlen_q=200, seqlen_kv=200)))
    assert abs(float(gone.float().mean()) - MASKED_SHARE) < 0.02


@pytest.mark.parametrize(
    ("mask", "rows"),
    [
        ("bool", "false"),
        ("bool-broadcast", "false"),
        ("float", "-inf"),
        ("float-broadcast", "-inf"),
        ("float", "finfo-min"),
        ("float-broadcast", "finfo-min"),
    ],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_masked_rows_are_whole_in_every_head_but_not_all(
    mask: Mask, rows: config.MaskedRows, dtype: config.Dtype
) -> None:
    case = structs.replace(GROUPED, mask=mask, masked_rows=rows, dtype=dtype)
    for seed in range(5):
        tensors = given(structs.replace(case, seed=seed))
        whole = hidden(tensors).all(-1)
        assert bool(whole.any(-1).all())
        assert not bool(whole.all(-1).any())
        assert tensors.mask is not None
        if rows != "false":
            lowest = float("-inf") if rows == "-inf" else torch.finfo(tensors.mask.dtype).min
            assert bool((tensors.mask[whole] == lowest).all())
            assert bool((tensors.mask[hidden(tensors)] == lowest).all())


@pytest.mark.parametrize(("mask", "rows"), [("bool", "false"), ("float", "-inf"), ("float", "finfo-min")])
def test_a_single_query_is_masked_whole_where_asked(mask: Mask, rows: config.MaskedRows) -> None:
    tensors = given(structs.replace(GROUPED, mask=mask, masked_rows=rows, seqlen_q=1))
    assert bool(hidden(tensors).all())


@pytest.mark.parametrize("mask", MASKS)
def test_broadcast_masks_have_stride_zero_over_heads(mask: Mask) -> None:
    tensors = given(structs.replace(GROUPED, mask=mask))
    assert tensors.mask is not None
    assert (tensors.mask.stride(1) == 0) == mask.endswith("-broadcast")
    same = torch.equal(tensors.mask[:, 0], tensors.mask[:, 1])
    assert same == mask.endswith("-broadcast")
    assert not torch.equal(tensors.mask[0], tensors.mask[1])


@pytest.mark.parametrize("mask", ["none", "causal-top-left", "causal-bottom-right", "window"])
def test_positional_masks_are_no_tensor(mask: Mask) -> None:
    assert given(structs.replace(GROUPED, mask=mask, window=3)).mask is None


@pytest.mark.parametrize("lengths", [(1, 1), (1, 9), (9, 1), (7, 7), (5, 12), (12, 5), (0, 3), (3, 0)])
@pytest.mark.parametrize("window", [1, 4, 100])
def test_positions_that_each_query_sees(lengths: tuple[int, int], window: int) -> None:
    rows, columns = lengths
    for mask in ("causal-top-left", "causal-bottom-right", "window"):
        seen = positions_visible(mask, window, rows, columns, CPU)
        assert seen is not None
        assert seen.shape == lengths
        for query in range(rows):
            # Counted from the end: the last query sees the last key.
            last = columns - 1 - (rows - 1 - query)
            expected = {
                "causal-top-left": range(query + 1),
                "causal-bottom-right": range(last + 1),
                "window": range(last - window, last + 1),
            }[mask]
            assert seen[query].tolist() == [key in expected for key in range(columns)]


def test_what_is_not_positional_hides_nothing_by_position() -> None:
    for mask in ("none", *MASKS):
        assert visible(structs.replace(GROUPED, mask=mask), CPU) is None
    seen = visible(structs.replace(GROUPED, mask="causal-top-left"), CPU)
    assert seen is not None
    assert torch.equal(seen, torch.ones(10, 13, dtype=torch.bool).tril())


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ((1, 10, 13), ((10,), (13,))),
        ((3, 10, 13), ((10, 5, 1), (13, 8, 3))),
        ((2, 0, 4), ((0, 0), (4, 1))),
        ((2, 1, 0), ((1, 1), (0, 0))),
    ],
)
def test_sequence_lengths(
    asked: tuple[int, int, int], expected: tuple[tuple[int, ...], tuple[int, ...]]
) -> None:
    assert sequence_lengths(*asked) == expected


def test_varlen_packs_sequences_end_to_end() -> None:
    tensors = given(structs.replace(GROUPED, layout="varlen", batch=3))
    assert tensors.lengths_q == (10, 5, 1)
    assert tensors.lengths_kv == (13, 8, 3)
    assert tensors.q.shape == (16, 6, 16)
    assert tensors.k.shape == (24, 2, 16)
    assert tensors.v.shape == (24, 2, 24)
    assert tensors.grad_out.shape == (16, 6, 24)
    assert tensors.mask is None


@pytest.mark.parametrize(
    ("needs", "expected"),
    [
        ("none", []),
        ("all", ["dq", "dk", "dv"]),
        ("q", ["dq"]),
        ("kv", ["dk", "dv"]),
        ("mask", ["dmask"]),
    ],
)
def test_wanting_names_the_gradients(needs: NeedsGrad, expected: list[str]) -> None:
    tensors = given(structs.replace(GROUPED, mask="float"))
    wanted = tensors.wanting(needs)
    assert list(wanted) == expected
    for name, value in wanted.items():
        assert value is getattr(tensors, name[1:])


def test_alibi_slopes_of_powers_of_two_are_those_of_the_paper() -> None:
    assert alibi_slopes(8).tolist() == [2.0**-i for i in range(1, 9)]
    assert alibi_slopes(16).tolist()[1::2] == [2.0**-i for i in range(1, 9)]
    slopes = alibi_slopes(6).tolist()
    assert sorted(slopes, reverse=True) == slopes
    assert len(set(slopes)) == 6
