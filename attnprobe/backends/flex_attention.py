"""`flex-attention`: torch's compiled attention with the mask and score changes given as functions.

Compiled once per shape and feature, which takes seconds; a scan counts its kernels, not its cases. On the
CPU the library refuses to differentiate it.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch

from attnprobe.backends._sdpa import torch_materials
from attnprobe.backends.calling import Call, backward_of
from attnprobe.backends.interface import Outputs, Refusal
from attnprobe.config import canonical
from attnprobe.probe.inputs import alibi_slopes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from attnprobe.config import Case
    from attnprobe.device.interface import Device
    from attnprobe.matrix.schema import Material
    from attnprobe.probe.inputs import Tensors


class FlexAttention:
    """torch.compile(flex_attention), static shapes."""

    name = "flex-attention"

    def materials(self) -> Sequence[Material]:
        """Return the torch build."""
        return torch_materials()

    def missing(self, device: Device) -> str | None:  # noqa: ARG002  # one answer for every device
        """Return why flex_attention cannot be imported."""
        try:
            from torch.nn.attention import flex_attention  # noqa: F401
        except Exception as error:  # noqa: BLE001  # whatever a broken install raises is the reason
            return f"{type(error).__name__}: {error}"
        return None

    def declares(self, case: Case, device: Device) -> Refusal | None:  # noqa: ARG002
        """Return what the call has no argument for."""
        for asked, what in (
            (case.dropout, "dropout"),
            (case.layout == "varlen", "sequences packed end to end"),
        ):
            if asked:
                return Refusal(f"flex_attention has no argument for {what}")
        return None

    def kernel_key(self, case: Case) -> str | None:
        """Return everything that shapes the generated code; None where the library refuses first."""
        if case.needs_grad in {"all", "q", "kv"} or case.dropout or case.layout == "varlen":
            return None
        return canonical(case).decode()

    def run(self, case: Case, tensors: Tensors) -> Outputs:
        """Run the compiled call; its backward only where the library has one."""
        from torch.nn.attention.flex_attention import flex_attention

        call = Call(case, tensors, plain_mask=True)
        if call.leaves.keys() & {"dq", "dk", "dv"} and call.q.device.type == "cpu":
            # The library refuses this; asked uncompiled, it says so at once.
            flex_attention(call.q, call.k, call.v)
        attention = functools.partial(
            _compiled(),
            score_mod=_score_mod(case, call.mask),
            block_mask=_block_mask(case, call.mask, tensors.q.device),
            scale=case.scale,
            enable_gqa=case.heads != case.heads_kv,
        )
        if not call.leaves:
            with torch.no_grad():
                return Outputs(out=attention(call.q, call.k, call.v))
        out = attention(call.q, call.k, call.v)
        return Outputs(out=out.detach(), **backward_of(out, call.leaves, tensors.grad_out))


@functools.lru_cache(maxsize=1)
def _compiled() -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False)


def _score_mod(case: Case, mask: Tensor | None) -> Any:
    """Return the change of scores in the order of the reference: softcap, then ALiBi and mask."""
    bias = mask if mask is not None and mask.is_floating_point() else None
    if not (case.softcap or case.alibi or bias is not None):
        return None
    slopes = alibi_slopes(case.heads) if case.alibi else None
    shift = case.seqlen_kv - case.seqlen_q

    def change(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        if case.softcap:
            score = case.softcap * torch.tanh(score / case.softcap)
        if slopes is not None:
            score = score - slopes[h] * (i + shift - j).abs()
        if bias is not None:
            score = score + bias[b, h, i, j]
        return score

    return change


def _block_mask(case: Case, mask: Tensor | None, device: torch.device) -> Any:
    """Return the block mask of positional and bool masks, or None."""
    from torch.nn.attention.flex_attention import create_block_mask

    hides = mask if mask is not None and mask.dtype is torch.bool else None
    if hides is None and case.mask not in {"causal-top-left", "causal-bottom-right", "window"}:
        return None
    shift = 0 if case.mask == "causal-top-left" else case.seqlen_kv - case.seqlen_q

    def seen(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        if hides is not None:
            return hides[b, h, i, j]
        visible = j <= i + shift
        if case.mask == "window":
            visible = visible & (j >= i + shift - case.window)
        return visible

    return create_block_mask(
        seen,
        case.batch if hides is not None else None,
        case.heads if hides is not None else None,
        case.seqlen_q,
        case.seqlen_kv,
        device=device,
    )


backend = FlexAttention()
