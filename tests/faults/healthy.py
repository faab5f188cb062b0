"""Attention that nothing is wrong with, however differently it goes about it."""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Any, Final

import torch

from .base import Call, Kernel, attend
from .model import Attention, Healthy
from .repeat import AnyOrder

if TYPE_CHECKING:
    from torch import Tensor


def eager(  # noqa: PLR0913, PLR0917  # the call shape of scaled_dot_product_attention
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,  # noqa: FBT001, FBT002
    scale: float | None = None,
    enable_gqa: bool = False,  # noqa: FBT001, FBT002
) -> Tensor:
    """Return attention as in the textbook, in float32 or, of float64, in float64."""
    work = torch.float64 if q.dtype is torch.float64 else torch.float32
    if enable_gqa:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    scores = q.to(work) @ k.to(work).mT * scale
    if is_causal:
        scores = scores.masked_fill(~torch.ones(scores.shape[-2:], dtype=torch.bool).tril(), -math.inf)
    if attn_mask is not None and attn_mask.dtype is torch.bool:
        scores = scores.masked_fill(~attn_mask, -math.inf)
    elif attn_mask is not None:
        scores = scores + attn_mask.to(work)
    dead = (scores == -math.inf).all(-1, keepdim=True)
    p = torch.softmax(scores.masked_fill(dead, 0.0), -1).masked_fill(dead, 0.0)
    return (torch.dropout(p, dropout_p, train=True) @ v.to(work)).to(q.dtype)


class Rounded(Kernel):
    """Rounds probabilities and their gradients to the type of the inputs before it multiplies them."""

    def read(self, call: Call) -> tuple[Tensor, Tensor, Tensor]:
        """Note the type."""
        self._dtype = call.q.dtype
        return super().read(call)

    def _rounded(self, value: Tensor) -> Tensor:
        return value.to(self._dtype).to(value.dtype)

    def add_out(self, acc: Tensor, shrink: Tensor, p: Tensor, v: Tensor) -> Tensor:
        """Return the output with one more tile."""
        return super().add_out(acc, shrink, self._rounded(p), v)

    def drop_again(self, call: Call, p: Tensor, keep: Tensor | None, rows: slice, keys: slice) -> Tensor:
        """Return the probabilities that dv is computed from."""
        return self._rounded(super().drop_again(call, p, keep, rows, keys))

    def score_grad(self, call: Call, p: Tensor, dp: Tensor, term: Tensor) -> Tensor:
        """Return the gradient of the scores."""
        return self._rounded(super().score_grad(call, p, dp, term))


class DeadRowsNan(Kernel):
    """Divides zero by zero where every key is hidden."""

    def divide(self, acc: Tensor, summed: Tensor) -> Tensor:
        """Return the output."""
        return acc / summed


class DeadRowsUniform(Kernel):
    """Hides keys by the lowest number there is: a row that sees none averages all."""

    def masked(self, call: Call, scores: Tensor, rows: slice, keys: slice) -> Tensor:
        """Return masked scores."""
        return super().masked(call, scores, rows, keys).clamp_(min=torch.finfo(call.work).min)


class SmallTiles(Kernel):
    """Tiles of 32 rows and 16 keys: other sums, other roundings."""

    rows_tile = 32
    keys_tile = 16


def picky(q: Tensor, k: Tensor, v: Tensor, *given: Any, **options: Any) -> Tensor:
    """Refuse in clear words what it has no kernel for."""
    if q.shape[-1] % 16 or q.shape[-1] > 128:
        raise RuntimeError("no kernel: the head dim must be a multiple of 16, at most 128")
    if q.shape[-1] != v.shape[-1]:
        raise RuntimeError("no kernel: head dims of q and v must be equal")
    if any(x.stride(-1) != 1 for x in (q, k, v)):
        raise RuntimeError("no kernel: the last dimension must be contiguous")
    return attend(Kernel(), q, k, v, *given, **options)


def _any_order() -> Attention:
    kernel = AnyOrder()

    def attention(*given: Any, **options: Any) -> Tensor:
        if torch.are_deterministic_algorithms_enabled():
            raise RuntimeError("this attention has no deterministic implementation")
        return attend(kernel, *given, **options)

    return attention


def _of(kernel: Kernel) -> Attention:
    return functools.partial(attend, kernel)


HEALTHY: Final = (
    Healthy("healthy_eager", "the textbook, in float32", lambda: eager),
    Healthy("healthy_tiled", "the base of all faults", lambda: _of(Kernel())),
    Healthy("healthy_small_tiles", "the same in small tiles", lambda: _of(SmallTiles())),
    Healthy("healthy_rounded", "probabilities rounded to the input type", lambda: _of(Rounded())),
    Healthy("healthy_picky", "refuses what it has no kernel for", lambda: picky),
    Healthy("healthy_any_order", "last bits differ; refuses where determinism is asked for", _any_order),
    Healthy("healthy_dead_rows_nan", "NaN in rows masked whole", lambda: _of(DeadRowsNan())),
    Healthy("healthy_dead_rows_uniform", "the average in rows masked whole", lambda: _of(DeadRowsUniform())),
)
"""`healthy_tiled` returns zeros in rows masked whole."""
