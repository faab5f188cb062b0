"""What torch says that it would run is what it runs."""

from __future__ import annotations

import pytest
import torch

from attnprobe.audit.interface import Answer, selectors
from attnprobe.audit.torch_sdpa import selector
from attnprobe.backends.torch_default import backend as torch_default
from attnprobe.config import Case
from attnprobe.probe.inputs import make
from attnprobe.probe.plan import random_cases

SMALL = Case(head_dim=16, head_dim_v=16, seqlen_q=32, seqlen_kv=32)


def test_it_is_found_and_can_be_asked() -> None:
    assert selector in selectors()
    assert selector.missing() is None


def test_without_its_private_call_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch, "_fused_sdp_choice")
    assert "does not tell" in str(selector.missing())


def test_the_plain_call_takes_flash_and_a_gradient_of_the_mask_math() -> None:
    assert selector.ask(SMALL) == Answer("torch-flash", ("torch-cudnn",))
    answer = selector.ask(Case(mask="float", needs_grad="mask"))
    assert answer is not None
    assert answer.takes == "torch-math"
    assert {"torch-flash", "aten-flash"} <= set(answer.passes_over)


@pytest.mark.parametrize(
    "case",
    [
        Case(softcap=5.0),
        Case(alibi=True),
        Case(mask="window", window=20),
        Case(layout="varlen"),
    ],
)
def test_what_cannot_be_put_to_it_is_not_asked(case: Case) -> None:
    assert selector.ask(case) is None


@pytest.mark.filterwarnings("ignore:Lower right causal bias will produce NaNs")  # of more queries than keys
def test_the_answer_is_the_kernel_that_runs() -> None:
    asked = 0
    for case in random_cases(500, 5):
        answer = selector.ask(case)
        if answer is None or case.work > 1 << 21:
            continue
        tensors = make(case, torch.device("cpu"))
        try:
            outputs = torch_default.run(case, tensors)
        except RuntimeError:
            continue
        kernel = outputs.kernel or torch_default.kernel(case, tensors)
        assert ("flash" in kernel) is (answer.takes == "torch-flash"), (case, kernel)
        asked += 1
    assert asked > 40
