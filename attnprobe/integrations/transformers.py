"""transformers: an attention implementation by name, which is transformers' own for torch behind a guard.

    register(Guard(attnprobe.load(), "veto"))
    model.set_attn_implementation("attnprobe")

What a model hands over (grouped heads, masks, `is_causal`) is dealt with by transformers' own function for
"sdpa"; only the call of torch inside it is asked for, so that both agree in every version of transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from attnprobe.errors import UsageError
from attnprobe.integrations.torch import attention

if TYPE_CHECKING:
    from attnprobe.integrations.guard import Guard

NAME: Final = "attnprobe"


def register(guard: Guard, name: str = NAME, *, look_at_mask: bool = False) -> str:
    """Register `name` as an attention implementation and return it; again with another guard replaces it.

    A layer is named by its `layer_idx` in the log and in errors. A module in training mode is taken to need
    gradients, also where checkpointing runs its forward pass without them. `look_at_mask`: see
    `torch.config_of_call`; it waits for the device once a layer and step.

    Raises:
        UsageError: transformers is not here, or is one without an interface for attention and masks.
    """
    try:
        from transformers import AttentionInterface
        from transformers.integrations.sdpa_attention import sdpa_attention_forward
        from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
    except ImportError as error:
        raise UsageError(
            "there is no attention to register", why=str(error), fix="pip install 'transformers>=4.53'"
        ) from None

    def forward(module: torch.nn.Module, *arguments: Any, **options: Any) -> Any:
        with _Guarded(guard, module, look_at_mask=look_at_mask):
            return sdpa_attention_forward(module, *arguments, **options)

    AttentionInterface.register(name, forward)
    AttentionMaskInterface.register(name, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
    return name


class _Guarded(TorchFunctionMode):
    """Hands every call of scaled_dot_product_attention in a block to the guard."""

    def __init__(self, guard: Guard, module: torch.nn.Module, *, look_at_mask: bool) -> None:
        super().__init__()
        self._guard = guard
        self._look_at_mask = look_at_mask
        self._training = True if module.training else None
        # In a graph only the log needs the name; reading it would make a graph for every layer.
        named = guard.mode == "observe" or not torch.compiler.is_compiling()
        self._where = f"layer {getattr(module, 'layer_idx', '?')}" if named else ""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        options = dict(kwargs or {})
        if func is not scaled_dot_product_attention:
            return func(*args, **options)
        return attention(
            *args,
            **options,
            guard=self._guard,
            where=self._where,
            training=self._training,
            look_at_mask=self._look_at_mask,
        )
