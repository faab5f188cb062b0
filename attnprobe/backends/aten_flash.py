"""`aten-flash`: ATen's flash attention operators called directly, without the public call's checks.

On the CPU these are `_scaled_dot_product_flash_attention_for_cpu` and its backward. They hand back the
log-sum-exp, and take inputs that the public call would have copied or kept from them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from attnprobe.backends._sdpa import signature_refuses, torch_materials
from attnprobe.backends.interface import Outputs, Refusal

if TYPE_CHECKING:
    from collections.abc import Sequence

    from attnprobe.config import Case
    from attnprobe.device.interface import Device
    from attnprobe.matrix.schema import Material
    from attnprobe.probe.inputs import Tensors

_FORWARD = "_scaled_dot_product_flash_attention_for_cpu"


class AtenFlash:
    """The operator pair."""

    name = "aten-flash"

    def materials(self) -> Sequence[Material]:
        """Return the torch build."""
        return torch_materials()

    def missing(self, device: Device) -> str | None:
        """Return why the operators are not there."""
        if device.record.kind != "cpu":
            return "the CPU operators need a CPU"
        if not hasattr(torch.ops.aten, _FORWARD):
            return f"torch {torch.__version__} has no aten::{_FORWARD}"
        return None

    def declares(self, case: Case, device: Device) -> Refusal | None:  # noqa: ARG002
        """Return what the operators' signature cannot say."""
        refusal = signature_refuses(case)
        if refusal is not None:
            return Refusal(refusal.reason.replace("scaled_dot_product_attention", f"aten::{_FORWARD}"))
        for asked, what in (
            (case.layout == "varlen", "sequences packed end to end"),
            (case.mask == "causal-bottom-right", "bottom-right causal alignment"),
            (case.needs_grad == "mask", "the gradient of a mask"),
        ):
            if asked:
                return Refusal(f"aten::{_FORWARD} has no argument for {what}")
        return None

    def kernel_key(self, case: Case) -> str | None:  # noqa: ARG002
        """Return None: nothing is compiled per case."""
        return None

    def run(self, case: Case, tensors: Tensors) -> Outputs:
        """Run the forward operator and, for gradients, the backward operator on its results."""
        causal = case.mask == "causal-top-left"
        options: dict[str, Any] = {"attn_mask": tensors.mask, "scale": case.scale}
        q, k, v = tensors.q, tensors.k, tensors.v
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(  # noqa: SLF001
            q, k, v, case.dropout, causal, **options
        )
        outputs = Outputs(out=out, lse=lse)
        if case.pass_ == "backward":
            grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(  # noqa: SLF001
                tensors.grad_out, q, k, v, out, lse, case.dropout, causal, **options
            )
            wanted = tensors.wanting(case.needs_grad)
            named = zip(("dq", "dk", "dv"), grads, strict=True)
            outputs.update({name: grad for name, grad in named if name in wanted})
        return outputs


backend = AtenFlash()
