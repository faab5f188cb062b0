"""Kind 9: strides that are assumed instead of read."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Final

import torch

from .base import Call, Kernel, Saved
from .model import MASK, MORE_BATCH, Fault, level
from .seen import Condition

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


def restrided(tensor: Tensor, strides: Sequence[int]) -> Tensor:
    """Return a tensor read by other strides; what leads out of its memory goes on at its start."""
    if not tensor.numel():
        return tensor
    have = int(tensor.untyped_storage().nbytes() // tensor.element_size() - tensor.storage_offset())
    index = torch.zeros((), dtype=torch.int64)
    for size, stride in zip(tensor.shape, strides, strict=True):
        index = index[..., None] + torch.arange(size) * stride
    return tensor.as_strided((have,), (1,))[index % have]


def dense(shape: Sequence[int]) -> tuple[int, int, int, int]:
    """Return the strides of a contiguous tensor."""
    _, heads, length, dim = shape
    return (heads * length * dim, length * dim, dim, 1)


class InnerStrideIgnored(Kernel):
    """Takes the head dim to be contiguous."""

    def read(self, call: Call) -> tuple[Tensor, Tensor, Tensor]:
        """Return the inputs."""
        _, k, v = super().read(call)
        return call.grouped(restrided(call.q, (*call.q.stride()[:3], 1))).to(call.work), k, v


class HeadStrideIgnored(Kernel):
    """Takes k to be contiguous."""

    def read(self, call: Call) -> tuple[Tensor, Tensor, Tensor]:
        """Return the inputs."""
        q, _, v = super().read(call)
        return q, call.grouped(restrided(call.k, dense(call.k.shape))).to(call.work), v


class GradientStrideOfInput(Kernel):
    """Gives dk and dv the strides of k and v: where one is 0, the last one written stands for all."""

    def backward(self, call: Call, saved: Saved, grad_out: Tensor, needs: set[str]) -> dict[str, Tensor]:
        """Return the gradients."""
        grads = super().backward(call, saved, grad_out, needs)
        for name, like in (("k", call.k), ("v", call.v)):
            for axis in (0, 1):
                if name in grads and like.stride(axis) == 0:
                    grads[name] = grads[name].narrow(axis, -1, 1).expand(like.shape).clone()
        return grads


class ExpandedTakenForGrouped(Kernel):
    """Takes k and v of stride 0 over heads for one shared head, and sums their gradient over heads."""

    def backward(self, call: Call, saved: Saved, grad_out: Tensor, needs: set[str]) -> dict[str, Tensor]:
        """Return the gradients."""
        grads = super().backward(call, saved, grad_out, needs)
        for name, like in (("k", call.k), ("v", call.v)):
            for axis in (0, 1):
                if name in grads and like.stride(axis) == 0:
                    grads[name] = grads[name].sum(axis, keepdim=True).expand(like.shape).clone()
        return grads


class MaskOfFirstEntry(Kernel):
    """Takes the mask to be one for the whole batch."""

    def read_mask(self, call: Call, rows: slice, keys: slice) -> Tensor:
        """Return a tile of the mask."""
        mask = super().read_mask(call, rows, keys)
        return mask[:1].expand_as(mask)


class GradOutTakenForDense(Kernel):
    """Takes grad_out to be contiguous."""

    def read_grad(self, call: Call, grad_out: Tensor) -> Tensor:
        """Return the gradient."""
        return super().read_grad(call, restrided(grad_out, dense(grad_out.shape)))


class RowsStoredOnce(Kernel):
    """Walks over the rows of grad_out that are stored, of an expanded one the first."""

    def read_grad(self, call: Call, grad_out: Tensor) -> Tensor:
        """Return the gradient."""
        g = super().read_grad(call, grad_out).clone()
        if grad_out.stride(2) == 0:
            g[..., 1:, :] = 0
        return g


class RowTermOfStoredColumns(Kernel):
    """Sums the row term over the columns of grad_out that are stored, of a single number the first."""

    def read_grad(self, call: Call, grad_out: Tensor) -> Tensor:
        """Return the gradient."""
        self._stored = 1 if grad_out.stride(-1) == 0 else grad_out.shape[-1]
        return super().read_grad(call, grad_out)

    def row_term(self, call: Call, saved: Saved, g: Tensor) -> Tensor:
        """Return the row term."""
        left = g.clone()
        left[..., self._stored :] = 0
        return super().row_term(call, saved, left)


_fault = functools.partial(Fault, kind=9, expected=("wrong",))
_EXPANDED = level("layout", "layout expanded", "layout", "expanded")
_APART = Condition("layout", "layout strided", lambda s: s.layout == "strided")
FAULTS: Final = (
    _fault(
        "inner_stride",
        about="the inner stride of q ignored",
        kernel=InnerStrideIgnored,
        inherent=(level("layout", "layout inner-stride", "layout", "inner-stride"),),
    ),
    _fault(
        "head_stride",
        about="the head stride of k ignored",
        kernel=HeadStrideIgnored,
        inherent=(_APART, Condition("heads", "several kv heads", lambda s: s.heads_kv > 1)),
    ),
    _fault(
        "gradient_strides",
        about="dk and dv with stride 0 where k and v have it",
        kernel=GradientStrideOfInput,
        inherent=(_EXPANDED,),
        grads="kv",
    ),
    _fault(
        "expanded_as_grouped",
        about="dk and dv summed over heads where k and v have stride 0",
        kernel=ExpandedTakenForGrouped,
        inherent=(_EXPANDED,),
        grads="kv",
    ),
    _fault(
        "mask_of_first_entry",
        about="the mask of batch entry 0 for all",
        kernel=MaskOfFirstEntry,
        inherent=(MASK, MORE_BATCH),
    ),
    _fault(
        "grad_out_dense",
        about="grad_out taken to be contiguous",
        kernel=GradOutTakenForDense,
        shows={"grad_out": ("transposed",)},
        grads="qkvm",
    ),
    _fault(
        "grad_out_rows",
        about="grad_out of stride 0 over rows counted once",
        kernel=RowsStoredOnce,
        shows={"grad_out": ("expanded", "scalar")},
        grads="qkvm",
    ),
    _fault(
        "grad_out_scalar",
        about="the row term over the first column of a grad_out that is one number",
        kernel=RowTermOfStoredColumns,
        shows={"grad_out": ("scalar",)},
        grads="qkm",
    ),
)
