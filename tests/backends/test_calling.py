from __future__ import annotations

from typing import Any

import pytest
import torch
from msgspec import structs
from torch.nn.functional import scaled_dot_product_attention

from attnprobe.backends.aten_flash import backend as aten_flash
from attnprobe.backends.calling import Call, attend
from attnprobe.backends.flex_attention import backend as flex_attention
from attnprobe.backends.torch_default import backend as torch_default
from attnprobe.backends.torch_flash import backend as torch_flash
from attnprobe.backends.torch_math import backend as torch_math
from attnprobe.config import Case
from attnprobe.device.cpu import cpu_device
from attnprobe.probe.inputs import make

CPU = torch.device("cpu")
SMALL = Case(head_dim=16, head_dim_v=16, seqlen_q=24, seqlen_kv=24)


@pytest.mark.parametrize(
    ("needs_grad", "names"),
    [("all", {"dq", "dk", "dv"}), ("q", {"dq"}), ("kv", {"dk", "dv"}), ("mask", {"dmask"})],
)
def test_exactly_the_gradients_asked_for_come_back(needs_grad: Any, names: set[str]) -> None:
    case = structs.replace(SMALL, mask="float", needs_grad=needs_grad)
    tensors = make(case, CPU)
    outputs = torch_math.run(case, tensors)
    assert outputs.keys() == {"out"} | names
    leaves = {"dq": tensors.q, "dk": tensors.k, "dv": tensors.v, "dmask": tensors.mask}
    for name in names:
        like = leaves[name]
        assert like is not None
        assert outputs[name].shape == like.shape


def test_inputs_keep_their_memory_and_strides_and_stay_free_of_gradients() -> None:
    case = structs.replace(SMALL, layout="packed")
    tensors = make(case, CPU)
    call = Call(case, tensors)
    assert call.q.data_ptr() == tensors.q.data_ptr()
    assert call.q.stride() == tensors.q.stride()
    assert call.q.requires_grad
    assert not tensors.q.requires_grad


def test_only_the_keywords_that_a_case_needs_are_passed() -> None:
    seen: list[set[str]] = []

    def spy(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> torch.Tensor:
        seen.append(set(options))
        return scaled_dot_product_attention(q, k, v, **options)

    for case in (
        SMALL,
        structs.replace(SMALL, mask="causal-top-left"),
        structs.replace(SMALL, mask="causal-bottom-right"),
        structs.replace(SMALL, scale=0.5, heads=4),
        structs.replace(SMALL, dropout=0.2),
    ):
        attend(spy, case, make(case, CPU), plain_mask=True)
    assert seen == [set(), {"is_causal"}, {"attn_mask"}, {"scale", "enable_gqa"}, {"dropout_p"}]


@pytest.mark.parametrize("pass_", ["forward", "backward"])
def test_the_kernel_that_really_ran_is_named(pass_: Any) -> None:
    case = structs.replace(SMALL, pass_=pass_, needs_grad="none" if pass_ == "forward" else "all")
    flash = "_scaled_dot_product_flash_attention_for_cpu"

    def ran(backend: Any, one: Case) -> str:
        tensors = make(one, CPU)
        outputs = backend.run(one, tensors)
        return str(outputs.kernel or backend.kernel(one, tensors)).lstrip("_")

    assert ran(torch_default, case) == flash.lstrip("_")
    assert ran(torch_flash, case) == flash.lstrip("_")
    assert ran(torch_math, case) == "math"
    # torch falls back without a word where flash cannot: the record must show it.
    assert ran(torch_default, structs.replace(case, dropout=0.2)) == "math"


def test_varlen_runs_each_sequence_by_itself() -> None:
    case = structs.replace(SMALL, layout="varlen", batch=2)
    tensors = make(case, CPU)
    assert tensors.lengths_q is not None
    outputs = torch_math.run(case, tensors)
    first = tensors.lengths_q[0]
    q, k, v = (t[:first].transpose(0, 1)[None] for t in (tensors.q, tensors.k, tensors.v))
    alone = scaled_dot_product_attention(q, k, v)
    torch.testing.assert_close(outputs["out"][:first], alone[0].transpose(0, 1))


def test_a_refusal_by_torch_carries_its_reason() -> None:
    case = structs.replace(SMALL, dropout=0.2)
    with pytest.raises(RuntimeError, match="do not support non-zero dropout"):
        torch_flash.run(case, make(case, CPU))


@pytest.mark.parametrize("asked", [{"softcap": 5.0}, {"alibi": True}, {"mask": "window", "window": 4}])
def test_what_the_call_has_no_argument_for_is_declared(asked: dict[str, Any]) -> None:
    case = structs.replace(SMALL, **asked)
    refusal = torch_default.declares(case, cpu_device())
    assert refusal is not None
    assert "no argument for" in refusal.reason
    assert torch_default.declares(SMALL, cpu_device()) is None


def test_aten_flash_returns_lse_and_gradients() -> None:
    outputs = aten_flash.run(SMALL, make(SMALL, CPU))
    assert outputs.keys() == {"out", "lse", "dq", "dk", "dv"}


def test_flex_attention_refuses_gradients_on_the_cpu_in_its_own_words() -> None:
    with pytest.raises(NotImplementedError, match="does not support backward on CPU"):
        flex_attention.run(SMALL, make(SMALL, CPU))


def test_flex_attention_counts_a_kernel_for_what_it_compiles_only() -> None:
    forward = structs.replace(SMALL, pass_="forward", needs_grad="none")
    assert flex_attention.kernel_key(SMALL) is None
    assert flex_attention.kernel_key(forward) != flex_attention.kernel_key(
        structs.replace(forward, head_dim=24)
    )
