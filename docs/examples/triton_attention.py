"""Flash attention in Triton, forward and backward, with the call of scaled_dot_product_attention.

Small rather than fast. It can be scanned without a GPU, in Triton's interpreter; docs/triton.md shows how.
`attention_broken` is the same kernel with one term missing from the gradient of k.
"""
# Kernels are Triton's language, not quite Python:
# mypy: ignore-errors
# ruff: noqa: ANN001, ANN002, ANN003, ANN201, ANN205, FBT002, N803, PLR0913, PLR0917

from __future__ import annotations

import os

import torch
import triton
import triton.language as tl

BLOCK = 64
"""Queries, or keys, that a program looks at in one step."""
HEAD_DIMS = (16, 32, 64, 128)
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


@triton.jit
def load(head, rows, length, DIM: tl.constexpr):
    """Load rows of one head, (rows, DIM) in order; zero past the end."""
    columns = tl.arange(0, DIM)
    return tl.load(head + rows[:, None] * DIM + columns[None, :], mask=rows[:, None] < length, other=0.0)


@triton.jit
def store(head, rows, length, value, DIM: tl.constexpr):
    """Store rows of one head, but none past the end."""
    columns = tl.arange(0, DIM)
    where = head + rows[:, None] * DIM + columns[None, :]
    tl.store(where, value.to(head.dtype.element_ty), mask=rows[:, None] < length)


@triton.jit
def scores(q, k, queries, keys, s_kv, scale, CAUSAL: tl.constexpr):
    """Return (queries, keys) scores; minus infinity where a query does not see a key."""
    found = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    seen = (queries[:, None] >= 0) & (keys[None, :] < s_kv)
    if CAUSAL:
        seen = seen & (keys[None, :] <= queries[:, None])
    return tl.where(seen, found, float("-inf"))


@triton.jit
def forward(
    q, k, v, out, lse, s_q, s_kv, scale, GROUP, CAUSAL: tl.constexpr, DIM: tl.constexpr, N: tl.constexpr
):
    """Compute one block of queries of one head: out, and the log-sum-exp of each row of scores."""
    head = tl.program_id(1).to(tl.int64)
    queries = tl.program_id(0) * N + tl.arange(0, N)
    q_block = load(q + head * s_q * DIM, queries, s_q, DIM)
    k += head // GROUP * s_kv * DIM
    v += head // GROUP * s_kv * DIM
    largest = tl.full([N], float("-inf"), tl.float32)
    total = tl.zeros([N], tl.float32)
    weighted = tl.zeros([N, DIM], tl.float32)
    for start in range(0, s_kv, N):
        keys = start + tl.arange(0, N)
        s = scores(q_block, load(k, keys, s_kv, DIM), queries, keys, s_kv, scale, CAUSAL)
        # Each row sees key 0, so `largest` is finite from the first block on.
        higher = tl.maximum(largest, tl.max(s, 1))
        p = tl.exp(s - higher[:, None])
        shrink = tl.exp(largest - higher)
        total = total * shrink + tl.sum(p, 1)
        v_block = load(v, keys, s_kv, DIM)
        product = tl.dot(p.to(v_block.dtype), v_block, input_precision="ieee")
        weighted = weighted * shrink[:, None] + product
        largest = higher
    store(out + head * s_q * DIM, queries, s_q, weighted / total[:, None], DIM)
    tl.store(lse + head * s_q + queries, largest + tl.log(total), mask=queries < s_q)


@triton.jit
def backward_q(
    q, k, v, grad, dq, lse, delta, s_q, s_kv, scale, GROUP,
    CAUSAL: tl.constexpr, DIM: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Compute dq of one block of queries of one head."""
    head = tl.program_id(1).to(tl.int64)
    queries = tl.program_id(0) * N + tl.arange(0, N)
    q_block = load(q + head * s_q * DIM, queries, s_q, DIM)
    grad_block = load(grad + head * s_q * DIM, queries, s_q, DIM)
    row_lse = tl.load(lse + head * s_q + queries, mask=queries < s_q, other=0.0)
    row_delta = tl.load(delta + head * s_q + queries, mask=queries < s_q, other=0.0)
    k += head // GROUP * s_kv * DIM
    v += head // GROUP * s_kv * DIM
    found = tl.zeros([N, DIM], tl.float32)
    for start in range(0, s_kv, N):
        keys = start + tl.arange(0, N)
        k_block = load(k, keys, s_kv, DIM)
        s = scores(q_block, k_block, queries, keys, s_kv, scale, CAUSAL)
        p = tl.exp(s - row_lse[:, None])
        dp = tl.dot(grad_block, tl.trans(load(v, keys, s_kv, DIM)), input_precision="ieee")
        ds = p * (dp - row_delta[:, None])
        found += tl.dot(ds.to(k_block.dtype), k_block, input_precision="ieee")
    store(dq + head * s_q * DIM, queries, s_q, found * scale, DIM)


@triton.jit
def backward_kv(
    q, k, v, grad, dk, dv, lse, delta, s_q, s_kv, scale, GROUP,
    CAUSAL: tl.constexpr, DIM: tl.constexpr, N: tl.constexpr, BROKEN: tl.constexpr,
):  # fmt: skip
    """Compute dk and dv of one block of keys of one key-value head, over all query heads that share it."""
    kv_head = tl.program_id(1).to(tl.int64)
    keys = tl.program_id(0) * N + tl.arange(0, N)
    k_block = load(k + kv_head * s_kv * DIM, keys, s_kv, DIM)
    v_block = load(v + kv_head * s_kv * DIM, keys, s_kv, DIM)
    dk_block = tl.zeros([N, DIM], tl.float32)
    dv_block = tl.zeros([N, DIM], tl.float32)
    for head in range(kv_head * GROUP, (kv_head + 1) * GROUP):
        for start in range(0, s_q, N):
            queries = start + tl.arange(0, N)
            q_block = load(q + head * s_q * DIM, queries, s_q, DIM)
            grad_block = load(grad + head * s_q * DIM, queries, s_q, DIM)
            # Infinite past the end, so that those rows weigh nothing.
            row_lse = tl.load(lse + head * s_q + queries, mask=queries < s_q, other=float("inf"))
            row_delta = tl.load(delta + head * s_q + queries, mask=queries < s_q, other=0.0)
            s = scores(q_block, k_block, queries, keys, s_kv, scale, CAUSAL)
            p = tl.exp(s - row_lse[:, None])
            dv_block += tl.dot(tl.trans(p).to(grad_block.dtype), grad_block, input_precision="ieee")
            dp = tl.dot(grad_block, tl.trans(v_block), input_precision="ieee")
            ds = p * dp if BROKEN else p * (dp - row_delta[:, None])
            dk_block += tl.dot(tl.trans(ds).to(q_block.dtype), q_block, input_precision="ieee")
    store(dk + kv_head * s_kv * DIM, keys, s_kv, dk_block * scale, DIM)
    store(dv + kv_head * s_kv * DIM, keys, s_kv, dv_block, DIM)


class Attention(torch.autograd.Function):
    """The kernels as one differentiable operation on (B, H, S, D) tensors."""

    @staticmethod
    def forward(ctx, q, k, v, is_causal, scale, broken):
        """Return out; keep what the backward needs."""
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        batch, heads, s_q, dim = q.shape
        out = torch.empty_like(q)
        lse = torch.empty((batch, heads, s_q), dtype=torch.float32, device=q.device)
        ctx.settings = (heads // k.shape[1], is_causal, dim, BLOCK)
        ctx.scale, ctx.broken = scale, broken
        grid = (triton.cdiv(s_q, BLOCK), batch * heads)
        forward[grid](q, k, v, out, lse, s_q, k.shape[2], scale, *ctx.settings)
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx, grad):
        """Return the gradients of q, k and v."""
        q, k, v, out, lse = ctx.saved_tensors
        grad = grad.contiguous()
        delta = (grad.float() * out.float()).sum(-1)
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        sizes = (lse, delta, q.shape[2], k.shape[2], ctx.scale, *ctx.settings)
        of_queries = (triton.cdiv(q.shape[2], BLOCK), q.shape[0] * q.shape[1])
        of_keys = (triton.cdiv(k.shape[2], BLOCK), k.shape[0] * k.shape[1])
        backward_q[of_queries](q, k, v, grad, dq, *sizes)
        backward_kv[of_keys](q, k, v, grad, dk, dv, *sizes, ctx.broken)
        return dq, dk, dv, None, None, None


def attention(
    q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False, *, broken=False
):
    """Return attention of q over k and v; raises NotImplementedError for what the kernels do not do."""
    heads, s_q, dim = q.shape[1:]
    heads_kv, s_kv = k.shape[1:3]
    for refused, what in (
        (attn_mask is not None, "attn_mask"),
        (dropout_p > 0, "dropout"),
        (q.dtype not in {torch.float32, torch.float16} and not q.is_cuda, f"{q.dtype} off a GPU"),
        (dim not in HEAD_DIMS or v.shape[-1] != dim, f"head dims {dim} and {v.shape[-1]}"),
        (heads != heads_kv and (not enable_gqa or heads % heads_kv), f"{heads} heads over {heads_kv}"),
        (not s_q or not s_kv, "empty sequences"),
        (not q.is_cuda and not INTERPRETED, "a CPU without TRITON_INTERPRET=1 in the environment"),
    ):
        if refused:
            raise NotImplementedError(f"this kernel does not do {what}")
    return Attention.apply(q, k, v, is_causal, dim**-0.5 if scale is None else scale, broken)


def attention_broken(*arguments, **options):
    """Do the same with a backward that forgets a term."""
    return attention(*arguments, **options, broken=True)
