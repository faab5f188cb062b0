"""A clean attention, tiled and with an online softmax, that every fault here is one wrong line of.

Forward, per tile of rows: scores of a tile of keys, the running row maximum, the exponentials, the running
sum and the accumulated output, both shrunk where the maximum rose. Backward, per tile of keys: probabilities
recomputed from maximum and sum, dv = p^T do, ds = p (dp - row term), dk = ds^T q, dq += ds k. Maximum and
sum are kept apart: joined into one log-sum-exp they lose the sum where a whole row is near finfo.min.

Inside, tensors are (B, H_kv, G, S, D): the G query heads that share a key-value head, together. Everything a
call returns is allocated unwritten, by `Kernel.empty`, and written tile by tile, by `Kernel.write`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.function import once_differentiable

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

Slice = slice


@dataclass
class Call:
    """The arguments of one call, and what follows from them."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None
    dropout: float
    causal: bool
    scale: float

    def __post_init__(self) -> None:
        """Note the sizes."""
        self.batch, self.heads, self.seqlen_q, self.head_dim = self.q.shape
        self.heads_kv, self.seqlen_kv, self.head_dim_v = self.k.shape[1], self.k.shape[2], self.v.shape[3]
        self.groups = self.heads // self.heads_kv
        self.work = torch.float64 if self.q.dtype is torch.float64 else torch.float32

    def grouped(self, tensor: Tensor) -> Tensor:
        """Return a (B, H, ...) or (B, H_kv, ...) tensor as (B, H_kv, G or 1, ...), without a copy."""
        groups = tensor.shape[1] // self.heads_kv
        return tensor.view(self.batch, self.heads_kv, groups, *tensor.shape[2:])


@dataclass
class Saved:
    """What the forward leaves for the backward. `top` and `total`: row maximum and sum."""

    out: Tensor
    top: Tensor
    total: Tensor
    keep: Tensor | None


Grads = dict[str, "Tensor"]


def tiles(length: int, size: int) -> Iterator[Slice]:
    """Yield the slices of at most `size` that cover a length."""
    for start in range(0, length, size):
        yield slice(start, min(start + size, length))


class Kernel:
    """The steps of the two passes, each a method, so that a fault can get one of them wrong."""

    rows_tile = 256
    keys_tile = 128

    def forward(self, call: Call) -> Saved:
        """Return the output and what the backward needs."""
        q, k, v = self.read(call)
        out = self.empty("out", (call.batch, call.heads, call.seqlen_q, call.head_dim_v), call.q.dtype)
        shape = (call.batch, call.heads_kv, call.groups, call.seqlen_q, 1)
        top, total = self.empty("top", shape, call.work), self.empty("total", shape, call.work)
        keep = self.draw(call) if call.dropout else None
        for rows in tiles(call.seqlen_q, self.rows_tile):
            highest, summed, acc = self.begin(call, (*shape[:3], rows.stop - rows.start))
            for keys in tiles(call.seqlen_kv, self.keys_tile):
                scores = self.scores(call, q[..., rows, :], k[..., keys, :], rows, keys)
                higher = self.higher(highest, scores)
                p, shrink = self.exponential(scores, higher), self.exponential(highest, higher)
                summed = self.add_sum(summed, shrink, p)
                acc = self.add_out(acc, shrink, self.drop(call, p, keep, rows, keys), v[..., keys, :])
                highest = higher
            self.write("top", top, rows, highest)
            self.write("total", total, rows, summed)
            self.write("out", call.grouped(out), rows, self.divide(acc, summed))
        return Saved(out, top, total, keep)

    def backward(self, call: Call, saved: Saved, grad_out: Tensor, needs: set[str]) -> Grads:
        """Return the gradients that are needed, by the name of the input."""
        q, k, v = self.read(call)
        g = self.read_grad(call, grad_out)
        term = self.row_term(call, saved, g)
        dq = self.zeros("dq-sum", q.shape, call.work)
        dk, dv = (
            self.empty(f"{name}-heads", (*q.shape[:3], *x.shape[3:]), call.work)
            for name, x in (("dk", k), ("dv", v))
        )
        everywhere = (*q.shape[:4], call.seqlen_kv)
        dmask = self.empty("dmask-all", everywhere, call.work) if "mask" in needs else None
        for keys in tiles(call.seqlen_kv, self.keys_tile):
            dk_tile, dv_tile = dk.new_zeros(dk[..., keys, :].shape), dv.new_zeros(dv[..., keys, :].shape)
            for rows in tiles(call.seqlen_q, self.rows_tile):
                p = self.probabilities(call, saved, (q, k), rows, keys)
                if "v" in needs:
                    dv_tile += self.drop_again(call, p, saved.keep, rows, keys).mT @ g[..., rows, :]
                dp = self.drop_grad(call, g[..., rows, :] @ v[..., keys, :].mT, saved.keep, rows, keys)
                ds = self.score_grad(call, p, dp, term[..., rows, :])
                if dmask is not None:
                    self.write("dmask-all", dmask[..., keys], rows, ds)
                if "q" in needs:
                    dq[..., rows, :] += self.to_queries(call, ds, k[..., keys, :])
                if "k" in needs:
                    dk_tile += self.to_keys(call, ds, q[..., rows, :])
            self.write("dk-heads", dk, keys, dk_tile)
            self.write("dv-heads", dv, keys, dv_tile)
        sums = {"q": dq, "k": self.sum_heads(dk), "v": self.sum_heads(dv)}
        grads = self.in_input_type(call, {name: sums[name] for name in sorted(needs - {"mask"})})
        if dmask is not None and call.mask is not None:
            whole = dmask.view(call.batch, call.heads, call.seqlen_q, call.seqlen_kv)
            grads["mask"] = self.like("dmask", call.mask)
            self.write("dmask", grads["mask"], slice(None), whole.sum_to_size(call.mask.shape))
        return grads

    def in_input_type(self, call: Call, sums: Grads) -> Grads:
        """Return gradients of q, k and v in the shape and type of each."""
        grads = {}
        for name, value in sums.items():
            grads[name] = self.like(f"d{name}", getattr(call, name))
            self.write(f"d{name}", call.grouped(grads[name]), slice(None), value)
        return grads

    def notice(self, call: Call) -> None:
        """Be told of a call that the healthy kernel takes; for what remembers earlier calls."""

    # Memory.

    def empty(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:  # noqa: ARG002
        """Return memory that nobody has written; `name` is for faults and tests."""
        return torch.empty(shape, dtype=dtype)

    def zeros(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:  # noqa: ARG002
        """Return memory to accumulate into."""
        return torch.zeros(shape, dtype=dtype)

    def like(self, name: str, tensor: Tensor) -> Tensor:
        """Return unwritten memory for the gradient of an input."""
        return self.empty(name, tensor.shape, tensor.dtype)

    def write(self, name: str, target: Tensor, rows: Slice, value: Tensor) -> None:  # noqa: ARG002
        """Write a tile of results."""
        target[..., rows, :] = value

    # Reading the inputs.

    def read(self, call: Call) -> tuple[Tensor, Tensor, Tensor]:
        """Return q, k and v in the precision that is computed in."""
        return (
            call.grouped(call.q).to(call.work),
            call.grouped(call.k).to(call.work),
            call.grouped(call.v).to(call.work),
        )

    def read_grad(self, call: Call, grad_out: Tensor) -> Tensor:
        """Return the gradient of the output in the precision that is computed in."""
        return call.grouped(grad_out).to(call.work)

    def read_mask(self, call: Call, rows: Slice, keys: Slice) -> Tensor:
        """Return a tile of the mask."""
        assert call.mask is not None
        whole = call.mask.expand(call.batch, call.heads, call.seqlen_q, call.seqlen_kv)
        return call.grouped(whole)[..., rows, keys]

    # Forward.

    def begin(self, call: Call, shape: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor]:
        """Return maximum, sum and output of rows that have seen no key."""
        highest = torch.full((*shape, 1), -math.inf, dtype=call.work)
        return highest, torch.zeros_like(highest), torch.zeros((*shape, call.head_dim_v), dtype=call.work)

    def scores(self, call: Call, q: Tensor, k: Tensor, rows: Slice, keys: Slice) -> Tensor:
        """Return the scores of a tile, minus infinity where a key is hidden."""
        return self.masked(call, self.products(call, q, k).mul_(self.factor(call)), rows, keys)

    def products(self, call: Call, q: Tensor, k: Tensor) -> Tensor:  # noqa: ARG002
        """Return q k^T."""
        return q @ k.mT

    def factor(self, call: Call) -> float:
        """Return the factor on the products."""
        return call.scale

    def masked(self, call: Call, scores: Tensor, rows: Slice, keys: Slice) -> Tensor:
        """Return scores with masks applied."""
        if call.mask is not None:
            mask = self.read_mask(call, rows, keys)
            scores = scores.masked_fill_(~mask, -math.inf) if mask.dtype is torch.bool else scores.add_(mask)
        if call.causal:
            scores = scores.masked_fill_(self.later(call, rows, keys), -math.inf)
        return scores

    def later(self, call: Call, rows: Slice, keys: Slice) -> Tensor:  # noqa: ARG002
        """Return which keys come after which rows, aligned at the top left."""
        return torch.arange(keys.start, keys.stop) > torch.arange(rows.start, rows.stop)[:, None]

    def higher(self, highest: Tensor, scores: Tensor) -> Tensor:
        """Return the maximum of each row with one more tile."""
        return torch.maximum(highest, scores.amax(-1, keepdim=True))

    def exponential(self, scores: Tensor, top: Tensor) -> Tensor:
        """Return exp(scores - top), 0 where both are minus infinity."""
        return (scores - top.clamp(min=torch.finfo(top.dtype).min)).exp_()

    def add_sum(self, summed: Tensor, shrink: Tensor, p: Tensor) -> Tensor:
        """Return the sum of each row with one more tile."""
        return summed * shrink + p.sum(-1, keepdim=True)

    def add_out(self, acc: Tensor, shrink: Tensor, p: Tensor, v: Tensor) -> Tensor:
        """Return the output of each row, not yet divided, with one more tile."""
        return (p @ v).add_(acc * shrink)

    def divide(self, acc: Tensor, summed: Tensor) -> Tensor:
        """Return the output of each row, zeros where every key was hidden."""
        return acc / summed.masked_fill(summed == 0, 1.0)

    # Dropout.

    def rate(self, call: Call) -> float:
        """Return how often a probability is dropped."""
        return call.dropout

    def draw(self, call: Call) -> Tensor:
        """Return which probabilities are kept, drawn from torch's generator."""
        shape = (call.batch, call.heads, call.seqlen_q, call.seqlen_kv)
        return call.grouped(torch.rand(shape) >= self.rate(call))

    def drop(self, call: Call, p: Tensor, keep: Tensor | None, rows: Slice, keys: Slice) -> Tensor:
        """Return probabilities, or their gradient, after dropout."""
        return p if keep is None else p * keep[..., rows, keys] / (1 - call.dropout)

    def drop_again(self, call: Call, p: Tensor, keep: Tensor | None, rows: Slice, keys: Slice) -> Tensor:
        """Return probabilities after the dropout of the forward, in the backward."""
        return self.drop(call, p, keep, rows, keys)

    def drop_grad(self, call: Call, dp: Tensor, keep: Tensor | None, rows: Slice, keys: Slice) -> Tensor:
        """Return the gradient of the probabilities before dropout."""
        return self.drop(call, dp, keep, rows, keys)

    # Backward.

    def row_term(self, call: Call, saved: Saved, g: Tensor) -> Tensor:
        """Return sum_j p dp of each row, which is do . o."""
        return (g * call.grouped(saved.out).to(call.work)).sum(-1, keepdim=True)

    def probabilities(
        self, call: Call, saved: Saved, both: tuple[Tensor, Tensor], rows: Slice, keys: Slice
    ) -> Tensor:
        """Return the probabilities of a tile once more."""
        q, k = both
        scores = self.scores(call, q[..., rows, :], k[..., keys, :], rows, keys)
        return self.divide(self.exponential(scores, saved.top[..., rows, :]), saved.total[..., rows, :])

    def score_grad(self, call: Call, p: Tensor, dp: Tensor, term: Tensor) -> Tensor:  # noqa: ARG002
        """Return the gradient of the scores."""
        return (dp - term).mul_(p)

    def to_queries(self, call: Call, ds: Tensor, k: Tensor) -> Tensor:
        """Return what a tile adds to dq."""
        return ds @ k * call.scale

    def to_keys(self, call: Call, ds: Tensor, q: Tensor) -> Tensor:
        """Return what a tile adds to dk of each head."""
        return ds.mT @ q * call.scale

    def sum_heads(self, heads: Tensor) -> Tensor:
        """Return the gradient of a key-value head: the sum over the query heads that share it."""
        return heads.sum(2, keepdim=True)


class _Attention(torch.autograd.Function):
    """One call of a kernel, for autograd."""

    @staticmethod
    def forward(ctx: Any, kernel: Kernel, call: Call, *_: Tensor | None) -> Tensor:
        """Run the forward and keep what the backward needs; q, k, v, mask are there for autograd."""
        saved = kernel.forward(call)
        ctx.kernel, ctx.call = kernel, call
        ctx.has_keep = saved.keep is not None
        tensors = (saved.out, saved.top, saved.total, *((saved.keep,) if saved.keep is not None else ()))
        ctx.save_for_backward(*tensors)
        return saved.out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        """Run the backward for the inputs that need it."""
        out, top, total, *keep = ctx.saved_tensors
        names = ("q", "k", "v", "mask")
        needs = {n for n, needed in zip(names, ctx.needs_input_grad[2:], strict=True) if needed}
        saved = Saved(out, top, total, keep[0] if keep else None)
        grads = ctx.kernel.backward(ctx.call, saved, grad_out, needs)
        return (None, None, *(grads.get(name) for name in names))


def attend(  # noqa: PLR0913, PLR0917  # the call shape of scaled_dot_product_attention
    kernel: Kernel,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,  # noqa: FBT001, FBT002
    scale: float | None = None,
    enable_gqa: bool = False,  # noqa: FBT001, FBT002
    *,
    instead: Kernel | None = None,
) -> Tensor:
    """Run a kernel, or `instead` of it another, on the arguments of scaled_dot_product_attention."""
    if q.shape[1] != k.shape[1] and not enable_gqa:
        raise ValueError(f"{q.shape[1]} query heads and {k.shape[1]} key heads need enable_gqa")
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    mask = None if attn_mask is None else attn_mask.detach()
    call = Call(q.detach(), k.detach(), v.detach(), mask, dropout_p, is_causal, scale)
    if instead is not None:
        kernel.notice(call)
        kernel = instead
    out: Tensor = _Attention.apply(kernel, call, q, k, v, attn_mask)  # type: ignore[no-untyped-call]
    return out
