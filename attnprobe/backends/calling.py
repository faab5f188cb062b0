"""Call any function with the shape of scaled_dot_product_attention on a case, and take its gradients."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

import torch

from attnprobe.backends.interface import Outputs
from attnprobe.probe.inputs import visible

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from attnprobe.config import Case
    from attnprobe.probe.inputs import Tensors


_DEPTH: Final = 4
"""Nodes between a result and the operator: views, casts, a crop of padding."""


class Call:
    """The arguments of one case: inputs as leaves that ask for the gradients the case wants.

    Varlen cases go in as jagged nested tensors, what torch's own call takes for them.
    """

    def __init__(self, case: Case, tensors: Tensors, *, plain_mask: bool = False) -> None:
        """Detach the inputs (sharing their memory and strides) and mark those that need gradients.

        `plain_mask`: say bottom-right causal by a bool mask, not by torch's own mask object.
        """
        self.case = case
        self.tensors = tensors
        wanted = set(tensors.wanting(case.needs_grad)) if case.pass_ == "backward" else set()
        self.q = tensors.q.detach().requires_grad_("dq" in wanted)
        self.k = tensors.k.detach().requires_grad_("dk" in wanted)
        self.v = tensors.v.detach().requires_grad_("dv" in wanted)
        self.mask = None
        if tensors.mask is not None:
            self.mask = tensors.mask.detach()
            if "dmask" in wanted:
                self.mask.requires_grad_()
        leaves = {"dq": self.q, "dk": self.k, "dv": self.v, "dmask": self.mask}
        self.leaves: dict[str, Tensor] = {
            name: leaf for name, leaf in leaves.items() if name in wanted and leaf is not None
        }
        self.options = self._options(plain_mask=plain_mask)

    def forward(self, attention: Callable[..., Tensor]) -> Tensor:
        """Return out, dense (B, H, S, D) or packed (T, H, D) as the case is."""
        options = self.options
        if self.tensors.lengths_q is None or self.tensors.lengths_kv is None:
            return attention(self.q, self.k, self.v, **options)
        q = _jagged(self.q, self.tensors.lengths_q)
        k = _jagged(self.k, self.tensors.lengths_kv)
        v = _jagged(self.v, self.tensors.lengths_kv)
        out: Any = attention(q, k, v, **options)
        packed: Tensor = out.transpose(1, 2).values()
        return packed

    def _options(self, *, plain_mask: bool) -> dict[str, Any]:
        """Return the keywords that say the case; only those that are needed."""
        case = self.case
        options: dict[str, Any] = {}
        if self.mask is not None:
            options["attn_mask"] = self.mask
        if case.mask == "causal-top-left":
            options["is_causal"] = True
        if case.mask == "causal-bottom-right" and plain_mask:
            options["attn_mask"] = visible(case, self.q.device)
        elif case.mask == "causal-bottom-right":
            from torch.nn.attention.bias import causal_lower_right

            options["attn_mask"] = causal_lower_right(case.seqlen_q, case.seqlen_kv)
        if case.dropout:
            options["dropout_p"] = case.dropout
        if case.scale is not None:
            options["scale"] = case.scale
        if case.heads != case.heads_kv:
            options["enable_gqa"] = True
        return options


def attend(
    attention: Callable[..., Tensor], case: Case, tensors: Tensors, *, plain_mask: bool = False
) -> Outputs:
    """Return out and the gradients that the case asks for, through autograd."""
    call = Call(case, tensors, plain_mask=plain_mask)
    if not call.leaves:
        with torch.no_grad():
            return Outputs(out=call.forward(attention))
    out = call.forward(attention)
    grads = backward_of(out, call.leaves, tensors.grad_out)
    outputs = Outputs(out=out.detach(), **grads)
    outputs.kernel = fused_in_graph(out)
    return outputs


def fused_in_graph(out: Tensor) -> str | None:
    """Return the fused attention operator that autograd recorded for a result, or None."""
    level = [out.grad_fn]
    for _ in range(_DEPTH):
        for node in level:
            name = type(node).__name__
            if "ScaledDotProduct" in name:
                return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name.partition("Backward")[0]).lower()
        level = [parent for node in level if node is not None for parent, _ in node.next_functions]
    return None


def backward_of(out: Tensor, leaves: dict[str, Tensor], grad_out: Tensor) -> dict[str, Tensor]:
    """Return the gradients of the leaves by name."""
    grads = torch.autograd.grad(out, list(leaves.values()), grad_out)
    return dict(zip(leaves, grads, strict=True))


def _jagged(packed: Tensor, lengths: tuple[int, ...]) -> Tensor:
    """Return (T, H, D) as a nested (B, H, S, D) tensor with one sequence an entry."""
    offsets = torch.tensor([0, *lengths], device=packed.device).cumsum(0)
    nested: Tensor = torch.nested.nested_tensor_from_jagged(packed, offsets).transpose(1, 2)
    return nested
