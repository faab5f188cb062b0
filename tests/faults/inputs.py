"""Tensors for a call that was drawn, so that a test can make it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from .seen import Seen

RATE: Final = 0.2
Run = dict[str, Tensor]


@dataclass
class Inputs:
    """The arguments of a call, and the gradient of its output."""

    seen: Seen
    q: Tensor
    k: Tensor
    v: Tensor
    options: dict[str, Any]
    grad_out: Tensor

    def run(self, attention: Callable[..., Tensor], seed: int = 0) -> Run:
        """Call and differentiate; the generator is set first."""
        torch.manual_seed(seed)
        before = torch.get_deterministic_debug_mode()
        torch.set_deterministic_debug_mode("error" if self.seen.deterministic else "default")
        try:
            return self._run(attention)
        finally:
            torch.set_deterministic_debug_mode(before)

    def _run(self, attention: Callable[..., Tensor]) -> Run:
        wanted = {"all": "qkv", "q": "q", "kv": "kv", "mask": "m", "none": ""}[self.seen.needs]
        given = {name: x.detach() for name, x in (("q", self.q), ("k", self.k), ("v", self.v))}
        options = dict(self.options)
        if "attn_mask" in options:
            given["m"] = options["attn_mask"] = options["attn_mask"].detach()
        leaves = {f"d{name}": given[name].requires_grad_() for name in wanted}
        out = attention(given["q"], given["k"], given["v"], **options)
        if not leaves:
            return {"out": out.detach()}
        grads = torch.autograd.grad(out, list(leaves.values()), self.grad_out)
        return {"out": out.detach()} | dict(zip(leaves, grads, strict=True))

    def to(self, dtype: torch.dtype) -> Inputs:
        """Return the same call in another type."""
        options = dict(self.options)
        mask = options.get("attn_mask")
        if mask is not None and mask.dtype is not torch.bool:
            lowest = torch.finfo(mask.dtype).min
            options["attn_mask"] = mask.to(dtype).masked_fill(mask == lowest, torch.finfo(dtype).min)
        q, k, v, grad_out = (x.to(dtype) for x in (self.q, self.k, self.v, self.grad_out))
        return Inputs(self.seen, q, k, v, options, grad_out)


def inputs(seen: Seen, seed: int = 0, data: str = "gaussian", grad_out: str = "contiguous") -> Inputs:
    """Return tensors that show what `seen` says, with data and a gradient of the named kinds."""
    generator = torch.Generator().manual_seed(seed)
    dtype: torch.dtype = getattr(torch, seen.dtype)

    def normal(heads: int, length: int, dim: int) -> Tensor:
        return torch.randn((seen.batch, heads, length, dim), generator=generator)

    q = normal(seen.heads, seen.seqlen_q, seen.head_dim)
    k = normal(seen.heads_kv, seen.seqlen_kv, seen.head_dim)
    v = normal(seen.heads_kv, seen.seqlen_kv, seen.head_dim_v)
    scale = (0.6 if seen.scale else 1.0) / math.sqrt(seen.head_dim)
    q, k, v = _of_kind(data, q, k, v, scale)
    if seen.outliers:
        q[..., 0] *= 50
    q, k, v = _in_memory(seen, *(x.to(dtype) for x in (q, k, v)))
    gradient = normal(seen.heads, seen.seqlen_q, seen.head_dim_v).to(dtype)
    if grad_out == "transposed":
        gradient = gradient.transpose(1, 2).contiguous().transpose(1, 2)
    elif grad_out == "expanded":
        gradient = gradient[:1, :1, :1].clone().expand(gradient.shape)
    elif grad_out == "scalar":
        gradient = torch.ones((), dtype=dtype).expand(gradient.shape)
    return Inputs(seen, q, k, v, _options(seen, scale, generator, dtype), gradient)


def _options(seen: Seen, scale: float, generator: torch.Generator, dtype: torch.dtype) -> dict[str, Any]:
    options: dict[str, Any] = {"scale": scale} if seen.scale else {}
    if seen.mask == "causal":
        options["is_causal"] = True
    elif seen.mask != "none":
        options["attn_mask"] = _mask(seen, generator, dtype)
    if seen.dropout:
        options["dropout_p"] = RATE
    if seen.heads != seen.heads_kv:
        options["enable_gqa"] = True
    return options


def _of_kind(data: str, q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k and v with data of a kind; all of them of moderate size in every type."""
    dim = q.shape[-1]
    if data == "far-below":
        # A common direction in which queries and keys are opposed: every score is near -120.
        shift = math.sqrt(200 / scale / dim)
        return q + shift, k - shift, v
    if data == "large-logits":
        size = math.sqrt(100 / scale / math.sqrt(dim))
        return q * size, k * size, v
    if data == "outliers":
        q[..., : dim // 8] *= 30
        k[..., : dim // 8] *= 30
        v[..., 0] = v[..., 0].abs() * 5000
    elif data == "batch-differs":
        size = math.sqrt(150 / scale / math.sqrt(dim))
        q[1:] *= size
        k[1:] *= size
    return q, k, v


def _in_memory(seen: Seen, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    if seen.layout == "expanded":
        axis = 1 if seen.heads_kv > 1 else 0
        shape = (seen.batch, seen.heads_kv, -1, -1)
        k, v = (x.narrow(axis, 0, 1).contiguous().expand(shape) for x in (k, v))
        return q, k, v
    return _laid_out(q, seen.layout), _laid_out(k, seen.layout), _laid_out(v, seen.layout)


def _laid_out(x: Tensor, layout: str) -> Tensor:
    if layout == "strided":
        # A slice of a wider buffer: strided whatever the sizes.
        return torch.cat([x, torch.zeros_like(x)], dim=-1)[..., : x.shape[-1]]
    if layout == "inner-stride":
        return x.repeat_interleave(2, dim=3)[..., ::2]
    return x.contiguous()


def _mask(seen: Seen, generator: torch.Generator, dtype: torch.dtype) -> Tensor:
    shared = seen.mask.endswith("-broadcast")
    shape = (seen.batch, 1 if shared else seen.heads, seen.seqlen_q, seen.seqlen_kv)
    hidden = torch.rand(shape, generator=generator) < 0.3

    spared = torch.randint(max(seen.seqlen_kv, 1), shape[:3], generator=generator)
    hidden.scatter_(3, spared[..., None], value=False)
    if seen.masked != "none":
        hidden[:, :, 0] = True
    if seen.mask.startswith("bool"):
        mask = ~hidden
    else:
        lowest = torch.finfo(dtype).min if seen.masked == "finfo-min" else -math.inf
        mask = torch.randn(shape, generator=generator).to(dtype).masked_fill(hidden, lowest)
    return mask.expand(-1, seen.heads, -1, -1) if shared else mask


@contextmanager
def memory_holds(byte: int) -> Iterator[None]:
    """Let torch.empty return memory that holds a byte everywhere, whatever malloc does."""
    empty = torch.empty

    def filled(*shape: Any, **options: Any) -> Tensor:
        result = empty(*shape, **options)
        if result.numel():
            result.view(torch.uint8).fill_(byte)
        return result

    torch.empty = filled
    try:
        yield
    finally:
        torch.empty = empty
