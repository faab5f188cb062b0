"""Which kernels torch can run for a call, and which it would take itself."""

from __future__ import annotations

import warnings
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from attnprobe.errors import UsageError
from attnprobe.integrations.torch_call import NOT_JUDGED, Call, Seen

_FORCED: Final = {
    "torch-cudnn": "CUDNN_ATTENTION",
    "torch-efficient": "EFFICIENT_ATTENTION",
    "torch-flash": "FLASH_ATTENTION",
    "torch-math": "MATH",
}
MEMBERS: Final[dict[str, SDPBackend]] = {
    name: SDPBackend.__members__[member]
    for name, member in _FORCED.items()
    if member in SDPBackend.__members__
}
"""The backends that this torch has, in the order of the registry."""


def switches() -> tuple[Any, ...]:
    """Return which kernels are switched on and in what order torch tries them."""
    order = getattr(torch._C, "_get_sdp_priority_order", None)  # noqa: SLF001  # guarded; nothing public says it
    on: Any = torch.backends.cuda
    return (
        on.cudnn_sdp_enabled(),
        on.mem_efficient_sdp_enabled(),
        on.flash_sdp_enabled(),
        on.math_sdp_enabled(),
        None if order is None else tuple(order()),
    )


def runnable(call: Call) -> tuple[str, ...]:
    """Return the backends that torch can run for a call, the one it would take itself first.

    None where torch would refuse the call. Where this torch does not say, all that are switched on.

    Raises:
        UsageError: torch would take a kernel that is no backend of a matrix.
    """
    enabled = [name for name, on in zip(_FORCED, switches(), strict=False) if on and name in MEMBERS]
    if not hasattr(torch, "_fused_sdp_choice"):
        return tuple(enabled)
    tensors = _alike(call)
    with warnings.catch_warnings(), torch.set_grad_enabled(call.backward):
        warnings.simplefilter("ignore")  # the reasons against each kernel that is tried
        own = _choice(call, tensors)
        if own is None:
            return ()
        first = next((name for name, member in MEMBERS.items() if member == own), None)
        if first is None:
            raise UsageError(NOT_JUDGED, why=f"torch takes its kernel {own.name}, no backend of a scan")
        others = []
        for name in enabled:
            with sdpa_kernel(MEMBERS[name]):
                if name != first and _choice(call, tensors) == MEMBERS[name]:
                    others.append(name)
    return (first, *others)


def _choice(call: Call, tensors: tuple[Tensor, Tensor, Tensor, Tensor | None]) -> SDPBackend | None:
    """Return the kernel that torch takes under the switches as they are; None: it refuses the call."""
    query, key, value, mask = tensors
    lengths = (query.shape[2], key.shape[2])
    causal = call.causal or call.bias == "upper-left" or (bool(call.bias) and lengths[0] == lengths[1])
    if call.bias and not causal:
        # As torch's own mask object does: these take it as it is, the others as a mask.
        params = torch.backends.cuda.SDPAParams(query, key, value, None, call.dropout, False, call.gqa)
        if torch.backends.cuda.can_use_flash_attention(params):
            return SDPBackend.FLASH_ATTENTION
        if torch.backends.cuda.can_use_efficient_attention(params):
            return SDPBackend.EFFICIENT_ATTENTION
        mask = torch.empty(lengths, dtype=torch.bool, device=call.device)
    try:
        number = torch._fused_sdp_choice(  # noqa: SLF001  # its absence is handled; nothing public says it
            query, key, value, mask, call.dropout, causal, scale=call.scale, enable_gqa=call.gqa
        )
    except RuntimeError:
        return None
    return SDPBackend(number)


def _alike(call: Call) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return tensors with the strides and flags of a call, and nothing in them."""
    wanted = call.wanted or frozenset("qkv" if call.backward else "")

    def empty(name: str, seen: Seen) -> Tensor:
        made = torch.empty_strided(seen.shape, seen.stride, dtype=seen.dtype, device=call.device)
        return made.requires_grad_() if name in wanted else made

    query, key, value = call.qkv
    mask = None if call.mask is None else empty("mask", call.mask)
    return empty("q", query), empty("k", key), empty("v", value), mask
