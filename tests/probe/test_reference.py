"""The reference against autograd on attention written plainly, and what its tolerance lets through."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import pytest
import torch
from msgspec import structs
from torch import Tensor

from attnprobe.config import Case, Dtype, Layout, Mask, MaskedRows
from attnprobe.probe.inputs import DTYPES, Tensors, alibi_slopes, make
from attnprobe.probe.reference import Reference, dense, reference

CPU: Final = torch.device("cpu")
NAMES: Final = ("out", "dq", "dk", "dv")
BASE: Final = Case(
    batch=2, heads=4, heads_kv=2, seqlen_q=11, seqlen_kv=14, head_dim=16, head_dim_v=24, seed=3
)
Found = dict[str, Tensor]
Weigh = Callable[[Tensor, Tensor], Tensor]


def hidden_by(case: Case, tensors: Tensors) -> Tensor:
    """Return which scores do not count, (B, H, S_q, S_kv), by loops over positions."""
    rows = tensors.lengths_q or (case.seqlen_q,) * case.batch
    columns = tensors.lengths_kv or (case.seqlen_kv,) * case.batch
    late = case.mask in {"causal-top-left", "causal-bottom-right", "window"}
    entries = []
    for height, width in zip(rows, columns, strict=True):
        shift = 0 if case.mask == "causal-top-left" else width - height
        seen = torch.zeros((case.seqlen_q, case.seqlen_kv), dtype=torch.bool)
        for query in range(height):
            first = max(query + shift - case.window, 0) if case.mask == "window" else 0
            last = min(query + shift, width - 1) if late else width - 1
            if last >= first:
                seen[query, first : last + 1] = True
        entries.append(seen)
    gone = ~torch.stack(entries)[:, None].expand(-1, case.heads, -1, -1)
    if tensors.mask is not None:
        mask = tensors.mask
        gone = gone | ~mask if mask.dtype is torch.bool else gone | (mask <= torch.finfo(mask.dtype).min)
    return gone


def softmax_of_visible(scores: Tensor, gone: Tensor) -> Tensor:
    """Return probabilities with rows that see nothing at zero."""
    dead = gone.all(-1, keepdim=True)
    return torch.softmax(scores.masked_fill(gone & ~dead, float("-inf")), -1).masked_fill(dead, 0.0)


def plainly(
    case: Case,
    tensors: Tensors,
    keep: Tensor | None = None,
    *,
    dtype: torch.dtype = torch.float64,
    weigh: Weigh = softmax_of_visible,
) -> Found:
    """Return out and all gradients of attention as a textbook has it, through autograd."""

    def leaf(tensor: Tensor, lengths: tuple[int, ...] | None) -> Tensor:
        return dense(tensor, lengths).detach().to(dtype).clone().requires_grad_()

    q, k, v = (
        leaf(tensors.q, tensors.lengths_q),
        leaf(tensors.k, tensors.lengths_kv),
        leaf(tensors.v, tensors.lengths_kv),
    )
    groups = case.heads // case.heads_kv
    scores = q @ k.repeat_interleave(groups, dim=1).transpose(-1, -2) * case.softmax_scale
    if case.softcap:
        scores = case.softcap * torch.tanh(scores / case.softcap)
    if case.alibi:
        query = torch.arange(case.seqlen_q)[:, None] + case.seqlen_kv - case.seqlen_q
        distance = (query - torch.arange(case.seqlen_kv)).abs()
        scores = scores - (alibi_slopes(case.heads)[:, None, None] * distance).to(dtype)
    leaves = {"dq": q, "dk": k, "dv": v}
    gone = hidden_by(case, tensors)
    if tensors.mask is not None and tensors.mask.dtype is not torch.bool:
        mask = tensors.mask[:, :1] if tensors.mask.stride(1) == 0 else tensors.mask
        lowest = mask <= torch.finfo(mask.dtype).min
        bias = mask.to(dtype).masked_fill(lowest, 0.0).clone().requires_grad_()
        leaves["dmask"] = bias
        scores = scores + bias
    p = weigh(scores, gone)
    if keep is not None:
        p = p * keep.to(dtype)
    out = p @ v.repeat_interleave(groups, dim=1)
    grads = torch.autograd.grad(
        out, list(leaves.values()), dense(tensors.grad_out, tensors.lengths_q).to(dtype)
    )
    return {"out": out.detach(), **dict(zip(leaves, grads, strict=True))}


def close(got: Tensor, wanted: Tensor) -> bool:
    return got.shape == wanted.shape and torch.allclose(got, wanted, rtol=1e-9, atol=1e-11)


CASES: Final[dict[str, Case]] = {
    "plain": structs.replace(BASE, heads=2),
    "grouped": BASE,
    "one kv head": structs.replace(BASE, heads=3, heads_kv=1),
    "causal top left": structs.replace(BASE, mask="causal-top-left"),
    "causal bottom right": structs.replace(BASE, mask="causal-bottom-right"),
    "more queries than keys": structs.replace(BASE, mask="causal-bottom-right", seqlen_q=14, seqlen_kv=11),
    "window": structs.replace(BASE, mask="window", window=3),
    "bool": structs.replace(BASE, mask="bool"),
    "bool broadcast, dead rows": structs.replace(BASE, mask="bool-broadcast", masked_rows="false"),
    "float": structs.replace(BASE, mask="float"),
    "float, dead rows": structs.replace(BASE, mask="float", masked_rows="-inf"),
    "float broadcast, finfo": structs.replace(BASE, mask="float-broadcast", masked_rows="finfo-min"),
    "float16 mask, finfo": structs.replace(BASE, mask="float", masked_rows="finfo-min", dtype="float16"),
    "softcap": structs.replace(BASE, softcap=0.7),
    "alibi": structs.replace(BASE, alibi=True),
    "alibi and float": structs.replace(BASE, alibi=True, mask="float", softcap=2.0),
    "scale": structs.replace(BASE, scale=0.6),
    "one key": structs.replace(BASE, seqlen_kv=1),
    "one query": structs.replace(BASE, seqlen_q=1, mask="causal-bottom-right"),
    "varlen": structs.replace(BASE, layout="varlen"),
    "varlen causal": structs.replace(BASE, layout="varlen", mask="causal-bottom-right", batch=3),
    "varlen top left": structs.replace(BASE, layout="varlen", mask="causal-top-left", batch=3),
    "varlen window": structs.replace(BASE, layout="varlen", mask="window", window=4, batch=3),
    "expanded": structs.replace(BASE, layout="expanded"),
    "inner stride": structs.replace(BASE, layout="inner-stride"),
    "bfloat16": structs.replace(BASE, dtype="bfloat16", mask="float", masked_rows="-inf"),
}


@pytest.mark.parametrize("name", CASES)
def test_the_reference_is_what_autograd_says(name: str) -> None:
    case = CASES[name]
    tensors = make(case, CPU)
    found = reference(case, tensors)
    wanted = plainly(case, tensors)
    for output in NAMES:
        assert found.expected[output].dtype is torch.float64
        assert close(found.expected[output], wanted[output]), output


@pytest.mark.parametrize("mask", ["float", "float-broadcast"])
@pytest.mark.parametrize("rows", ["none", "-inf", "finfo-min"])
@pytest.mark.parametrize("softcap", [0.0, 0.7])
def test_the_gradient_of_a_mask_has_its_shape_and_is_what_autograd_says(
    mask: Mask, rows: MaskedRows, softcap: float
) -> None:
    case = structs.replace(BASE, mask=mask, masked_rows=rows, softcap=softcap, needs_grad="mask")
    tensors = make(case, CPU)
    assert tensors.mask is not None
    found = reference(case, tensors).expected["dmask"]
    assert found.shape == tensors.mask.shape
    wanted = plainly(case, tensors)["dmask"]
    if mask == "float":
        assert close(found, wanted)
    else:
        # The mask as given holds one entry per head; summed over heads it is the broadcast one's.
        assert close(found.sum(1, keepdim=True), wanted)


def test_other_cases_have_no_gradient_of_the_mask() -> None:
    case = structs.replace(BASE, mask="float")
    assert set(reference(case, make(case, CPU)).expected) == set(NAMES)


@pytest.mark.parametrize("name", ["grouped", "float, dead rows", "softcap", "causal top left"])
def test_dropout_follows_the_kept_mask(name: str) -> None:
    case = structs.replace(CASES[name], dropout=0.25)
    tensors = make(case, CPU)
    shape = (case.batch, case.heads, case.seqlen_q, case.seqlen_kv)
    kept = torch.rand(shape, generator=torch.Generator().manual_seed(1)) > case.dropout
    keep = kept.double() / (1 - case.dropout)
    found, wanted = reference(case, tensors, keep), plainly(case, tensors, keep)
    assert all(close(found.expected[output], wanted[output]) for output in NAMES)
    assert not close(found.expected["out"], plainly(case, tensors)["out"])


@pytest.mark.parametrize("lengths", [(0, 5), (5, 0), (0, 0)])
def test_no_query_or_no_key_gives_zeros_and_empty_tensors(lengths: tuple[int, int]) -> None:
    q, kv = lengths
    case = structs.replace(BASE, seqlen_q=q, seqlen_kv=kv)
    found = reference(case, make(case, CPU))
    assert found.expected["out"].shape == (2, 4, q, 24)
    assert found.expected["dk"].shape == (2, 2, kv, 16)
    for output in NAMES:
        assert not bool(found.expected[output].any())
        assert bool((found.tolerance[output] >= 0).all())


@pytest.mark.parametrize("name", CASES)
def test_dead_rows_are_those_that_see_no_key(name: str) -> None:
    case = CASES[name]
    tensors = make(case, CPU)
    found = reference(case, tensors)
    wanted = hidden_by(case, tensors).all(-1, keepdim=True)
    for entry, length in enumerate(tensors.lengths_q or ()):
        wanted[entry, :, length:] = False
    if found.dead is None:
        assert not bool(wanted.any())
    else:
        assert bool(found.dead.any())
        assert torch.equal(found.dead.expand_as(wanted), wanted)


def test_the_cases_here_have_dead_rows_of_every_cause() -> None:
    with_dead = {name for name, case in CASES.items() if reference(case, make(case, CPU)).dead is not None}
    assert with_dead >= {
        "bool broadcast, dead rows",
        "float, dead rows",
        "float broadcast, finfo",
        "more queries than keys",
        "bfloat16",
    }
    assert not with_dead & {"plain", "bool", "float", "varlen", "one key"}


def through(p_of_dead: Callable[[Tensor], Tensor], *, cut: bool) -> Weigh:
    """Return weights whose dead rows are what `p_of_dead` makes of the scores there."""

    def weigh(scores: Tensor, gone: Tensor) -> Tensor:
        dead = gone.all(-1, keepdim=True)
        rows = p_of_dead(scores.detach() if cut else scores)
        return torch.where(dead, rows, softmax_of_visible(scores, gone))

    return weigh


def uniform(scores: Tensor) -> Tensor:
    """Return one over the keys, with the slope that softmax has where all scores are equal."""
    return torch.softmax(scores - scores.detach(), -1)


def softmax(scores: Tensor) -> Tensor:
    return torch.softmax(scores, -1)


@pytest.mark.parametrize("name", ["float, dead rows", "bool broadcast, dead rows", "more queries than keys"])
@pytest.mark.parametrize("made", [uniform, softmax])
@pytest.mark.parametrize("cut", [False, True], ids=["to scores", "cut"])
@pytest.mark.parametrize("softcap", [0.0, 0.7])
def test_what_dead_rows_add(
    name: str, made: Callable[[Tensor], Tensor], softcap: float, *, cut: bool
) -> None:
    case = structs.replace(CASES[name], softcap=softcap)
    tensors = make(case, CPU)
    found = reference(case, tensors)
    assert found.dead is not None
    rows = found.dead.expand(case.batch, case.heads, case.seqlen_q, 1)
    extra, slack = found.of_dead_rows({made.__name__: rows}, to_scores=not cut)
    wanted = plainly(case, tensors, weigh=through(made, cut=cut))
    for output in NAMES:
        assert close(found.expected[output] + extra[output], wanted[output]), output
        assert bool((slack[output] >= 0).all())
    assert bool(extra["out"][rows.squeeze(-1)].any())
    assert not bool(extra["out"][~rows.squeeze(-1)].any())
    of_row, _ = found.dead_out(made.__name__)
    assert close(of_row[rows.squeeze(-1)], wanted["out"][rows.squeeze(-1)])


@pytest.mark.parametrize("cut", [False, True], ids=["to scores", "cut"])
def test_what_dead_rows_add_to_the_gradient_of_a_mask(*, cut: bool) -> None:
    case = structs.replace(BASE, mask="float", masked_rows="finfo-min", needs_grad="mask")
    tensors = make(case, CPU)
    found = reference(case, tensors)
    assert found.dead is not None
    extra, _ = found.of_dead_rows({"softmax": found.dead}, to_scores=not cut)
    wanted = plainly(case, tensors, weigh=through(softmax, cut=cut))
    assert close(found.expected["dmask"] + extra["dmask"], wanted["dmask"])
    assert bool(extra["dmask"].any()) != cut


def test_some_dead_rows_may_be_made_into_one_thing_and_some_into_another() -> None:
    case = CASES["float, dead rows"]
    tensors = make(case, CPU)
    found = reference(case, tensors)
    assert found.dead is not None
    dead = found.dead.expand(case.batch, case.heads, case.seqlen_q, 1)
    first = dead.clone()
    first[1] = False
    both, _ = found.of_dead_rows({"uniform": first, "softmax": dead & ~first}, to_scores=True)
    one, _ = found.of_dead_rows({"uniform": first}, to_scores=True)
    other, _ = found.of_dead_rows({"softmax": dead & ~first}, to_scores=True)
    assert all(close(both[output], one[output] + other[output]) for output in NAMES)
    again, _ = found.of_dead_rows({"uniform": first}, to_scores=True)
    assert all(torch.equal(one[output], again[output]) for output in NAMES)
    assert not any(close(one[output], other[output]) for output in NAMES)


SIZED: Final[dict[str, Case]] = {
    "plain": Case(seqlen_q=96, seqlen_kv=96),
    "long rows": Case(seqlen_q=8, seqlen_kv=700),
    "wide": Case(head_dim=256, head_dim_v=256, seqlen_q=48, seqlen_kv=64),
    "narrow": Case(head_dim=8, head_dim_v=8, seqlen_q=65, seqlen_kv=33),
    "one key": Case(seqlen_q=33, seqlen_kv=1),
    "grouped causal": Case(heads=6, heads_kv=2, seqlen_q=50, seqlen_kv=70, mask="causal-bottom-right"),
    "float mask": Case(seqlen_q=64, seqlen_kv=80, mask="float"),
    "softcap": Case(seqlen_q=64, seqlen_kv=80, softcap=5.0),
    "alibi": Case(seqlen_q=64, seqlen_kv=80, alibi=True, heads=4, heads_kv=4),
    "scale": Case(seqlen_q=64, seqlen_kv=80, scale=0.25),
    "varlen": Case(seqlen_q=64, seqlen_kv=80, layout="varlen", batch=3),
}


def beyond(found: Reference, got: Found) -> dict[str, int]:
    """Return how many elements of each output are further off than the tolerance."""
    return {
        output: int(
            (~((got[output].double() - found.expected[output]).abs() <= found.tolerance[output])).sum()
        )
        for output in NAMES
    }


DTYPE_NAMES: Final[list[Dtype]] = ["float32", "bfloat16", "float16"]


@pytest.mark.parametrize("name", SIZED)
@pytest.mark.parametrize("dtype", DTYPE_NAMES)
def test_the_tolerance_accepts_eager_attention(name: str, dtype: Dtype) -> None:
    for seed in range(2):
        case = structs.replace(SIZED[name], dtype=dtype, seed=seed)
        tensors = make(case, CPU)
        eager = plainly(case, tensors, dtype=DTYPES[dtype])
        assert beyond(reference(case, tensors), eager) == dict.fromkeys(NAMES, 0)


@pytest.mark.parametrize("name", SIZED)
@pytest.mark.parametrize("dtype", DTYPE_NAMES)
def test_the_tolerance_accepts_exact_results_rounded_once(name: str, dtype: Dtype) -> None:
    case = structs.replace(SIZED[name], dtype=dtype)
    tensors = make(case, CPU)
    exact = {output: value.to(DTYPES[dtype]) for output, value in plainly(case, tensors).items()}
    assert beyond(reference(case, tensors), exact) == dict.fromkeys(NAMES, 0)


@pytest.mark.parametrize("name", SIZED)
@pytest.mark.parametrize("dtype", DTYPE_NAMES)
@pytest.mark.parametrize("sign", [-1, 1])
def test_the_tolerance_rejects_an_error_of_a_few_percent(name: str, dtype: Dtype, sign: int) -> None:
    # Eager attention in bfloat16 is itself off by one or two per cent of the largest value, and gradients
    # are compared with the backend's own forward as well where that is the coarser of the two.
    factor = 1 + sign * (0.09 if dtype == "bfloat16" else 0.02)
    case = structs.replace(SIZED[name], dtype=dtype)
    tensors = make(case, CPU)
    found = reference(case, tensors)
    for output, value in plainly(case, tensors).items():
        if output in NAMES and float(value.abs().max()) > 1e-9:
            off = {**found.expected, output: (value * factor).to(DTYPES[dtype])}
            assert beyond(found, off)[output] > 0, output


@pytest.mark.parametrize("name", ["plain", "wide", "narrow", "grouped causal", "float mask", "scale"])
@pytest.mark.parametrize("dtype", DTYPE_NAMES)
def test_the_tolerance_rejects_a_key_that_was_left_out(name: str, dtype: Dtype) -> None:
    case = structs.replace(SIZED[name], dtype=dtype)
    tensors = make(case, CPU)

    def without_last(scores: Tensor, gone: Tensor) -> Tensor:
        gone = gone.clone()
        gone[..., -1] = True
        return softmax_of_visible(scores, gone)

    got = plainly(case, tensors, weigh=without_last)
    assert all(beyond(reference(case, tensors), got).values())


def test_the_tolerance_rejects_wrong_gradients_of_one_head_alone() -> None:
    case = structs.replace(SIZED["plain"], dtype="bfloat16", heads=4, heads_kv=4)
    tensors = make(case, CPU)
    found = reference(case, tensors)
    got = {output: value.clone() for output, value in found.expected.items()}
    got["dk"][:, 2] = 0
    counts = beyond(found, got)
    assert counts["dk"] > 0
    assert counts["dq"] == counts["dv"] == counts["out"] == 0


@pytest.mark.parametrize("layout", ["transposed", "packed", "inner-stride"])
def test_strides_do_not_change_the_reference(layout: Layout) -> None:
    case = structs.replace(BASE, layout=layout)
    tensors = make(case, CPU)
    dense_copy = Tensors(
        tensors.q.contiguous(), tensors.k.contiguous(), tensors.v.contiguous(), None, tensors.grad_out
    )
    one, other = reference(case, tensors), reference(case, dense_copy)
    assert all(close(one.expected[output], other.expected[output]) for output in NAMES)


def test_dense_unpacks_sequences_and_pads_with_zeros() -> None:
    packed = torch.arange(2 * 6.0).reshape(6, 1, 2)
    found = dense(packed, (2, 0, 4))
    assert found.shape == (3, 1, 4, 2)
    assert torch.equal(found[0, 0, :2], packed[:2, 0])
    assert torch.equal(found[2, 0], packed[2:, 0])
    assert not bool(found[0, 0, 2:].any())
    assert not bool(found[1].any())
    assert dense(packed, None) is packed
