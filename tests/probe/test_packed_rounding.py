"""Over packed sequences torch rounds q and k once more, scaled, before they meet; that is no fault of it."""

from __future__ import annotations

import pytest
import torch

from attnprobe.backends.torch_math import backend as torch_math
from attnprobe.config import Case, Dtype
from attnprobe.probe.inputs import make
from attnprobe.probe.judge import judge
from attnprobe.probe.memory import Run
from attnprobe.probe.poison import FINITE_FILL, NAN_FILL
from attnprobe.probe.reference import reference
from attnprobe.verdict import Verdict


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("seed", range(6))
def test_outliers_in_packed_sequences(dtype: Dtype, seed: int) -> None:
    case = Case(
        dtype=dtype,
        head_dim=8,
        head_dim_v=8,
        layout="varlen",
        data="outliers",
        grad_out="scalar" if seed % 2 else "transposed",
        seed=seed,
    )
    tensors = make(case, torch.device("cpu"))
    settings = ((NAN_FILL, FINITE_FILL), (FINITE_FILL, NAN_FILL))
    runs = [Run(*setting, torch_math.run(case, tensors)) for setting in settings]
    assert judge(case, tensors, runs, reference(case, tensors)).verdict is Verdict.OK
