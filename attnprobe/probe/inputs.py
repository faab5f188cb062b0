"""The tensors of one case: q, k, v, mask and grad_out, laid out in memory as the case says.

Every value is drawn from a generator seeded by the case alone, so the same case gives the same bits in
every process. Shapes: dense (B, H, S, D); varlen (T, H, D), all sequences end to end.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch

from attnprobe.probe.data import shaped

if TYPE_CHECKING:
    from torch import Tensor

    from attnprobe.config import Case

DTYPES: Final = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}

MASKED_SHARE: Final = 0.3
"""Share of scores that a bool or float mask hides in a row that is not masked whole."""


@dataclass(frozen=True)
class Tensors:
    """What a backend is given. `mask` broadcasts to (B, H, S_q, S_kv) and is None where the case has none.

    `lengths_q` and `lengths_kv` are the tokens of each sequence (varlen), or None.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None
    grad_out: Tensor
    lengths_q: tuple[int, ...] | None = None
    lengths_kv: tuple[int, ...] | None = None

    def wanting(self, needs_grad: str) -> dict[str, Tensor]:
        """Return the inputs that need a gradient, by the name of that gradient."""
        names = {
            "none": (),
            "all": ("q", "k", "v"),
            "q": ("q",),
            "kv": ("k", "v"),
            "mask": ("mask",),
        }
        found = {f"d{name}": getattr(self, name) for name in names[needs_grad]}
        return {name: tensor for name, tensor in found.items() if tensor is not None}


def make(case: Case, device: torch.device) -> Tensors:
    """Return the tensors of a case on a device."""
    generator = torch.Generator().manual_seed(int(case.id, 16) ^ case.seed)
    dtype = DTYPES[case.dtype]
    dims = (case.head_dim, case.head_dim, case.head_dim_v, case.head_dim_v)
    heads = (case.heads, case.heads_kv, case.heads_kv, case.heads)
    per_q = per_kv = None
    shapes: list[tuple[int, ...]]
    if case.layout == "varlen":
        per_q, per_kv = sequence_lengths(case.batch, case.seqlen_q, case.seqlen_kv)
        totals = (sum(per_q), sum(per_kv), sum(per_kv), sum(per_q))
        shapes = [(t, h, d) for t, h, d in zip(totals, heads, dims, strict=True)]
    else:
        lengths = (case.seqlen_q, case.seqlen_kv, case.seqlen_kv, case.seqlen_q)
        shapes = [(case.batch, h, s, d) for h, s, d in zip(heads, lengths, dims, strict=True)]
    drawn = [torch.randn(shape, generator=generator) for shape in shapes]
    shaped(case, drawn, _entries(drawn, per_q, per_kv), generator)
    q, k, v, grad_out = (value.to(dtype).to(device) for value in drawn)
    mask = _mask(case, generator)
    if case.layout == "expanded":
        k, v = _same_over(k), _same_over(v)
    q, k, v = _lay_out(case, [q, k, v])
    grad_out = _lay_out_grad(case, grad_out)
    return Tensors(q, k, v, None if mask is None else mask.to(device), grad_out, per_q, per_kv)


def _entries(
    values: list[Tensor], per_q: tuple[int, ...] | None, per_kv: tuple[int, ...] | None
) -> tuple[list[Tensor], ...]:
    """Return q, k, v and grad_out by batch entry or sequence, as views."""
    if per_q is None or per_kv is None:
        return tuple([value[entry] for value in values] for entry in range(len(values[0])))
    parts = [torch.split(v, list(per_q if i in {0, 3} else per_kv)) for i, v in enumerate(values)]
    return tuple(list(entry) for entry in zip(*parts, strict=True))


def seed_generators(seed: int, device: torch.device) -> None:
    """Set the random state that a kernel on the device draws dropout from.

    `torch.manual_seed` does this for every kind of device there is, and takes a millisecond over it.
    """
    if device.type == "cpu":
        torch.default_generator.manual_seed(seed)
    else:
        torch.manual_seed(seed)


def sequence_lengths(batch: int, seqlen_q: int, seqlen_kv: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the query and key lengths of each sequence; the first has the full length."""
    per_q = tuple(max(seqlen_q - 5 * entry, min(seqlen_q, 1)) for entry in range(batch))
    per_kv = tuple(max(seqlen_kv - 5 * entry, min(seqlen_kv, 1)) for entry in range(batch))
    return per_q, per_kv


def visible(case: Case, device: torch.device) -> Tensor | None:
    """Return which keys each query may see by position, (S_q, S_kv) bool; None: all of them."""
    return positions_visible(case.mask, case.window, case.seqlen_q, case.seqlen_kv, device)


def positions_visible(
    mask: str, window: int, seqlen_q: int, seqlen_kv: int, device: torch.device
) -> Tensor | None:
    """Return the (S_q, S_kv) bool matrix of a positional mask; None where the mask is not positional.

    A window is aligned at the bottom right, as causal attention with a key cache is: the last query
    sees the last key and `window` keys before it.
    """
    if mask not in {"causal-top-left", "causal-bottom-right", "window"}:
        return None
    query = torch.arange(seqlen_q, device=device)[:, None]
    key = torch.arange(seqlen_kv, device=device)[None, :]
    shift = 0 if mask == "causal-top-left" else seqlen_kv - seqlen_q
    seen = key <= query + shift
    if mask == "window":
        seen &= key >= query + shift - window
    return seen


def alibi_slopes(heads: int) -> Tensor:
    """Return one slope per head: 2^(-8 i / heads), as in the ALiBi paper for powers of two."""
    return torch.tensor([2.0 ** (-8.0 * (i + 1) / heads) for i in range(heads)])


def _mask(case: Case, generator: torch.Generator) -> Tensor | None:
    """Return the bool or float mask of a case, (B, H, S_q, S_kv), heads of stride 0 if broadcast."""
    if case.mask not in {"bool", "float", "bool-broadcast", "float-broadcast"}:
        return None
    broadcast = case.mask.endswith("-broadcast")
    shape = (case.batch, 1 if broadcast else case.heads, case.seqlen_q, case.seqlen_kv)
    hidden = torch.rand(shape, generator=generator) < MASKED_SHARE
    if case.seqlen_kv:
        spared = torch.randint(case.seqlen_kv, shape[:3], generator=generator)
        hidden.scatter_(3, spared[..., None], value=False)
    if case.masked_rows != "none":
        whole = torch.rand(shape[:3], generator=generator) < MASKED_SHARE
        whole[..., 0] = True
        whole[..., -1] = case.seqlen_q == 1
        hidden |= whole[..., None]
    if case.mask.startswith("bool"):
        mask = ~hidden
    else:
        dtype = DTYPES[case.dtype]
        bias = torch.randn(shape, generator=generator).to(dtype)
        lowest = torch.finfo(dtype).min if case.masked_rows == "finfo-min" else float("-inf")
        mask = bias.masked_fill(hidden, lowest)
    return mask.expand(-1, case.heads, -1, -1) if broadcast else mask


def _same_over(value: Tensor) -> Tensor:
    """Return values that are equal over heads, or over the batch where there is one head."""
    source = value[:, :1] if value.shape[1] > 1 else value[:1]
    return source.clone().expand_as(value)  # its own memory, so that what lies behind it is not its own


def _lay_out_grad(case: Case, grad_out: Tensor) -> Tensor:
    """Return the gradient of out as the case lays it out; stride 0 leaves one row or one number of it."""
    tokens, heads = (0, 1) if case.layout == "varlen" else (2, 1)
    if case.grad_out == "transposed":
        return grad_out.transpose(tokens, heads).contiguous().transpose(tokens, heads)
    if case.grad_out == "contiguous" or not grad_out.numel():
        return grad_out
    one = grad_out.narrow(tokens, 0, 1).narrow(heads, 0, 1)
    if case.grad_out == "scalar":
        one = grad_out.flatten()[:1].reshape([1] * grad_out.dim())
    return one.clone().expand_as(grad_out)  # its own memory, as a gradient of a sum or a mean has


def _lay_out(case: Case, values: list[Tensor]) -> list[Tensor]:
    """Return the tensors with the same values in the memory layout that the case asks for."""
    if case.layout in {"contiguous", "expanded", "varlen"}:
        # An expanded tensor keeps its stride 0 through Tensor.to; the others are dense already.
        return [v if case.layout == "expanded" and i else v.contiguous() for i, v in enumerate(values)]
    if case.layout == "transposed":
        return [value.transpose(1, 2).contiguous().transpose(1, 2) for value in values]
    if case.layout == "inner-stride":
        wide = [value.repeat_interleave(2, dim=3) for value in values]
        return [value[..., ::2] for value in wide]
    if case.seqlen_q == case.seqlen_kv:
        return _packed(values)
    return [*_packed(values[:1]), *_packed(values[1:])]


def _packed(values: list[Tensor]) -> list[Tensor]:
    """Return the tensors as slices of one (B, S, columns) buffer; a lone tensor gets a neighbour."""
    rows = [value.transpose(1, 2).flatten(2) for value in values]
    columns = [row.shape[2] for row in rows]
    neighbour = [torch.zeros_like(rows[0])] if len(rows) == 1 else []
    buffer = torch.cat(rows + neighbour, dim=2)
    result, start = [], 0
    for value, width in zip(values, columns, strict=True):
        part = buffer[:, :, start : start + width]
        apart = part.reshape(*part.shape[:2], value.shape[1], value.shape[3])
        result.append(apart.transpose(1, 2))
        start += width
    return result
