"""Each kind of data is what its spelling in `axes` says, and the same in every process."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from typing import Final, get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs
from torch import Tensor

from attnprobe.axes import AXIS, CONSTRAINTS, HEAD_DIMS
from attnprobe.config import Case, Data, Dtype, GradOut, Layout, case_from, config_of
from attnprobe.probe.data import FAR_BELOW, LARGE, OUTLIER, OUTLIER_OF_V, SPREAD
from attnprobe.probe.inputs import DTYPES, Tensors, make
from attnprobe.probe.reference import dense

CPU: Final = torch.device("cpu")
BASE: Final = Case(batch=3, heads=4, heads_kv=2, seqlen_q=33, seqlen_kv=40, head_dim=64, head_dim_v=48)
LIMIT: Final = -89.0
"""Below it exp underflows to 0 in float32, up to denormal numbers."""
DENSE: Final[tuple[Layout, ...]] = ("contiguous", "transposed", "packed", "expanded", "inner-stride")


def scores(case: Case, tensors: Tensors) -> Tensor:
    """Return what q k^T says in float64, (B, H, S_q, S_kv)."""
    q = dense(tensors.q, tensors.lengths_q).double()
    k = dense(tensors.k, tensors.lengths_kv).double().repeat_interleave(case.heads // case.heads_kv, 1)
    return q @ k.mT * case.softmax_scale


def log_sum_exp(case: Case) -> Tensor:
    """Return the log-sum-exp of every row that is there, over the keys that are there."""
    tensors = make(case, CPU)
    found = scores(case, tensors)
    if tensors.lengths_q is None or tensors.lengths_kv is None:
        return found.logsumexp(-1).flatten()
    pairs = zip(found, tensors.lengths_q, tensors.lengths_kv, strict=True)
    return torch.cat([one[:, :q, :kv].logsumexp(-1).flatten() for one, q, kv in pairs])


def hashed(tensors: Tensors) -> str:
    given = (tensors.q, tensors.k, tensors.v, tensors.mask, tensors.grad_out)
    digest = hashlib.sha256()
    for tensor in given:
        if tensor is not None and tensor.numel():
            digest.update(repr(tensor.stride()).encode())
            digest.update(tensor.flatten().clone().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def test_every_kind_has_a_spelling() -> None:
    assert AXIS["data"].levels == get_args(Data)
    assert set(AXIS["data"].spelling) == set(get_args(Data))
    assert set(AXIS["grad_out"].spelling) == set(get_args(GradOut))


# gaussian: independent, mean 0, variance 1.


@pytest.mark.parametrize("dtype", get_args(Dtype))
def test_gaussian_has_mean_0_and_variance_1(dtype: Dtype) -> None:
    tensors = make(structs.replace(BASE, dtype=dtype, seqlen_q=96, seqlen_kv=96), CPU)
    for name in ("q", "k", "v", "grad_out"):
        value = getattr(tensors, name).double()
        assert abs(float(value.mean())) < 0.03
        assert abs(float(value.std()) - 1) < 0.03
        assert abs(float((value[:, :, 1:] * value[:, :, :-1]).mean())) < 0.03
        assert abs(float((value[..., 1:] * value[..., :-1]).mean())) < 0.03


# far-below: every score far below zero, so that no row's LSE reaches -89.


@pytest.mark.parametrize("dtype", get_args(Dtype))
@pytest.mark.parametrize("layout", ["contiguous", "varlen"])
def test_no_row_far_below_reaches_89_below_zero_at_any_head_dim(dtype: Dtype, layout: Layout) -> None:
    for head_dim in HEAD_DIMS:
        case = structs.replace(BASE, data="far-below", dtype=dtype, layout=layout, head_dim=head_dim)
        found = log_sum_exp(case)
        assert float(found.max()) < LIMIT, head_dim
        assert float(found.min()) > -FAR_BELOW - 10, head_dim


@pytest.mark.parametrize("dtype", get_args(Dtype))
@pytest.mark.parametrize(
    "change",
    [
        {"seqlen_kv": 800, "heads": 2, "heads_kv": 1, "batch": 1},
        {"seqlen_kv": 1},
        {"seqlen_q": 1},
        {"scale": 0.0375},
        {"scale": 1.0},
        {"heads_kv": 1},
        {"layout": "expanded"},
        {"layout": "packed"},
        {"layout": "inner-stride"},
        {"head_dim": 8, "scale": 0.2},
    ],
    ids=str,
)
def test_no_row_far_below_reaches_89_below_zero(change: dict[str, object], dtype: Dtype) -> None:
    case = structs.replace(BASE, data="far-below", dtype=dtype, **change)
    assert float(log_sum_exp(case).max()) < LIMIT


@settings(max_examples=50)
@given(
    seed=st.integers(0, 1 << 31),
    head_dim=st.sampled_from(HEAD_DIMS[:20]),
    dtype=st.sampled_from(get_args(Dtype)),
    lengths=st.tuples(st.integers(1, 70), st.integers(1, 70)),
    layout=st.sampled_from(["contiguous", "varlen"]),
)
def test_no_row_far_below_reaches_89_below_zero_for_any_seed(
    seed: int, head_dim: int, dtype: Dtype, lengths: tuple[int, int], layout: Layout
) -> None:
    case = structs.replace(
        BASE,
        data="far-below",
        seed=seed,
        head_dim=head_dim,
        dtype=dtype,
        layout=layout,
        seqlen_q=lengths[0],
        seqlen_kv=lengths[1],
    )
    assert float(log_sum_exp(case).max()) < LIMIT


def test_far_below_rows_still_differ() -> None:
    """A kernel that gets nothing else wrong would pass on uniform rows."""
    p = scores(BASE, make(structs.replace(BASE, data="far-below"), CPU)).softmax(-1)
    assert float(p.amax(-1).mean()) > 4 / BASE.seqlen_kv


def test_far_below_leaves_v_and_the_gradient_of_out_gaussian() -> None:
    tensors = make(structs.replace(BASE, data="far-below"), CPU)
    for value in (tensors.v, tensors.grad_out):
        assert abs(float(value.mean())) < 0.03
        assert abs(float(value.std()) - 1) < 0.03


# large-logits: scores of standard deviation 40: exp of them overflows, softmax is one-hot.


@pytest.mark.parametrize("dtype", get_args(Dtype))
@pytest.mark.parametrize("head_dim", [8, 64, 72, 128, 256, 512])
@pytest.mark.parametrize("scale", [None, 0.05])
def test_large_logits_have_a_standard_deviation_of_40(
    dtype: Dtype, head_dim: int, scale: float | None
) -> None:
    case = structs.replace(
        BASE, data="large-logits", dtype=dtype, head_dim=head_dim, scale=scale, seqlen_q=128, seqlen_kv=128
    )
    tensors = make(case, CPU)
    found = scores(case, tensors)
    assert float(found.std()) == pytest.approx(LARGE, rel=0.15)
    assert bool(found.float().exp().isinf().any())
    assert float(found.softmax(-1).amax(-1).median()) > 0.9
    for value in (tensors.v, tensors.grad_out):
        assert float(value.double().std()) == pytest.approx(1, abs=0.05)


# outliers: tokens alike, channel scales over orders of magnitude.


@pytest.mark.parametrize("dtype", get_args(Dtype))
@pytest.mark.parametrize("layout", ["contiguous", "varlen", "transposed"])
@pytest.mark.parametrize("head_dim", [8, 64, 200])
def test_outliers_have_channels_of_all_sizes_and_tokens_alike(
    dtype: Dtype, layout: Layout, head_dim: int
) -> None:
    case = structs.replace(BASE, data="outliers", dtype=dtype, layout=layout, head_dim=head_dim)
    tensors = make(case, CPU)
    largest = []
    for name in ("q", "k", "v", "grad_out"):
        value = getattr(tensors, name).double()
        channels = value.flatten(0, -2)
        spread = channels.std(0)
        # What is drawn anew for each token is a quarter of a Gaussian, times the scale of its channel.
        exponents = (spread / 0.25).log2()
        assert float((exponents - exponents.round()).abs().max()) < 0.4, name
        outlier = OUTLIER_OF_V if name == "v" else OUTLIER
        assert set(exponents.round().int().tolist()) <= {*SPREAD, outlier}
        assert int((exponents.round() == outlier).sum()) == 1
        assert float(spread.max() / spread.min()) >= (16 if head_dim == 8 else 100), name
        largest.append(int(spread.argmax()))
        # All tokens share three quarters of another one.
        centred = channels / spread
        assert float(centred.mean(0).abs().mean()) > 1.0, name
        alike = torch.nn.functional.cosine_similarity(centred[0], centred[1:], dim=-1)
        assert float(alike.median()) > 0.5 or head_dim == 8
    assert largest[0] == largest[1]


# batch-differs: batch entries of different scale and offset.


@pytest.mark.parametrize("dtype", get_args(Dtype))
@pytest.mark.parametrize("layout", [*DENSE, "varlen"])
@pytest.mark.parametrize("batch", [2, 3, 5])
def test_batch_entries_differ(dtype: Dtype, layout: Layout, batch: int) -> None:
    case = structs.replace(BASE, data="batch-differs", dtype=dtype, layout=layout, batch=batch)
    tensors = make(case, CPU)
    every = scores(case, tensors)
    seen = []
    for entry in range(batch):
        q, kv = case.seqlen_q, case.seqlen_kv
        if tensors.lengths_q is not None and tensors.lengths_kv is not None:
            q, kv = tensors.lengths_q[entry], tensors.lengths_kv[entry]
        one = every[entry, :, :q, :kv]
        seen.append((float(one.mean()), float(one.std())))
    wanted = [(0.0, 1.0), (-FAR_BELOW, 1.0), (0.0, LARGE)]
    for entry, (mean, std) in enumerate(seen):
        if entry % 4 < 3:
            assert mean == pytest.approx(wanted[entry % 4][0], abs=0.1 * wanted[entry % 4][1] + 0.6)
            assert std == pytest.approx(wanted[entry % 4][1], rel=0.3)


def test_a_batch_that_differs_has_more_than_one_entry() -> None:
    rule = next(c for c in CONSTRAINTS if c.axes == ("data", "batch"))
    assert not rule.allows("batch-differs", "one")
    assert rule.allows("batch-differs", "more")
    assert all(rule.allows(data, "one") for data in get_args(Data) if data != "batch-differs")


# Anything goes with anything.


@pytest.mark.parametrize("data", get_args(Data))
@pytest.mark.parametrize("dtype", get_args(Dtype))
@pytest.mark.parametrize("lengths", [(0, 5), (5, 0), (1, 1), (7, 3)])
@pytest.mark.parametrize("layout", [*DENSE, "varlen"])
def test_every_value_is_finite_in_its_type(
    data: Data, dtype: Dtype, lengths: tuple[int, int], layout: Layout
) -> None:
    case = structs.replace(
        BASE, data=data, dtype=dtype, seqlen_q=lengths[0], seqlen_kv=lengths[1], layout=layout, head_dim=8
    )
    tensors = make(case, CPU)
    for name in ("q", "k", "v", "grad_out"):
        value = getattr(tensors, name)
        assert value.dtype is DTYPES[dtype]
        assert bool(value.isfinite().all())
    assert hashed(tensors) == hashed(make(case, CPU))


def test_no_two_kinds_and_no_two_seeds_are_the_same() -> None:
    cases = [structs.replace(BASE, data=data, seed=seed) for data in get_args(Data) for seed in (0, 1)]
    assert len({hashed(make(case, CPU)) for case in cases}) == len(cases)


def test_data_and_gradient_layout_are_hazards_no_question_asks_for() -> None:
    case = structs.replace(BASE, data="outliers", grad_out="scalar", earlier="other-data")
    assert AXIS["data"].hazard
    assert AXIS["grad_out"].hazard
    again = case_from(config_of(case))
    assert (again.data, again.grad_out, again.earlier) == ("gaussian", "contiguous", "nothing")


# How the gradient of out lies.


@pytest.mark.parametrize("data", get_args(Data))
def test_the_gradient_of_out_is_laid_out_as_asked(data: Data) -> None:
    case = structs.replace(BASE, data=data)
    shape = (3, 4, 33, 48)
    found = {one: make(structs.replace(case, grad_out=one), CPU).grad_out for one in get_args(GradOut)}
    assert {tuple(value.shape) for value in found.values()} == {shape}
    assert found["contiguous"].stride() == (4 * 33 * 48, 33 * 48, 48, 1)
    assert found["transposed"].stride() == (4 * 33 * 48, 48, 4 * 48, 1)
    assert found["expanded"].stride()[1:] == (0, 0, 1)
    assert found["scalar"].stride() == (0, 0, 0, 0)


def test_the_gradient_of_packed_sequences_is_laid_out_as_asked() -> None:
    case = structs.replace(BASE, layout="varlen")
    found = {one: make(structs.replace(case, grad_out=one), CPU).grad_out for one in get_args(GradOut)}
    tokens = 33 + 28 + 23
    assert {tuple(value.shape) for value in found.values()} == {(tokens, 4, 48)}
    assert found["contiguous"].stride() == (4 * 48, 48, 1)
    assert found["transposed"].stride() == (48, tokens * 48, 1)
    assert found["expanded"].stride() == (0, 0, 1)
    assert found["scalar"].stride() == (0, 0, 0)


@pytest.mark.parametrize("lengths", [(0, 5), (1, 1), (5, 0)])
@pytest.mark.parametrize("layout", ["contiguous", "varlen"])
@pytest.mark.parametrize("grad_out", get_args(GradOut))
def test_a_gradient_of_any_length_can_be_laid_out(
    lengths: tuple[int, int], layout: Layout, grad_out: GradOut
) -> None:
    case = structs.replace(BASE, seqlen_q=lengths[0], seqlen_kv=lengths[1], layout=layout, grad_out=grad_out)
    plain = make(structs.replace(case, grad_out="contiguous"), CPU).grad_out
    assert make(case, CPU).grad_out.shape == plain.shape


@pytest.mark.parametrize("grad_out", ["expanded", "scalar"])
def test_stride_zero_keeps_no_more_memory_than_it_shows(grad_out: GradOut) -> None:
    found = make(structs.replace(BASE, grad_out=grad_out), CPU).grad_out
    assert found.untyped_storage().nbytes() == 4 * {"expanded": 3 * 48, "scalar": 1}[grad_out]


# The same everywhere.

_PRINT: Final = """
import sys
sys.path.insert(0, {place!r})
from test_data import every_hash
print(every_hash())
"""


def every_hash() -> str:
    """Return one hash of many cases."""
    cases = [
        structs.replace(BASE, data=data, dtype=dtype, layout=layout, mask="none" if varlen else "float")
        for data in get_args(Data)
        for dtype in get_args(Dtype)
        for layout in ("contiguous", "packed", "varlen")
        for varlen in [layout == "varlen"]
    ]
    return hashlib.sha256("".join(hashed(make(case, CPU)) for case in cases).encode()).hexdigest()


def test_another_process_makes_the_same_bits() -> None:
    place = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120
    environment = {**os.environ, "OMP_NUM_THREADS": "2", "PYTHONHASHSEED": "1"}
    done = subprocess.run(
        [sys.executable, "-c", _PRINT.format(place=place)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.stdout.strip() == every_hash(), done.stderr
