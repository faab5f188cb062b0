"""Kind 6: reads and writes outside the tensors that a call was given or allocated, and in its inputs.

Each is of one element, or of the few that a vector load brings along. None does harm by chance: malloc leaves
eight bytes free behind a block whose size is a multiple of 16, as all of these are. So they show only to what
guards the memory around.
"""

from __future__ import annotations

import ctypes
import functools
from typing import TYPE_CHECKING, Final

import torch

from .base import Call, Grads, Kernel, Saved
from .model import Fault, level

if TYPE_CHECKING:
    from torch import Tensor


def end(tensor: Tensor) -> int:
    """Return the address behind the last element of a tensor, as it lies in memory."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr() + (last + 1) * tensor.element_size()


def peek(address: int, dtype: torch.dtype, count: int = 1) -> Tensor:
    """Return elements that lie at an address."""
    size = count * dtype.itemsize
    return torch.frombuffer(bytearray(ctypes.string_at(address, size)), dtype=dtype)


def poke(address: int, value: Tensor) -> None:
    """Write elements to an address."""
    ctypes.memmove(address, value.data_ptr(), value.numel() * value.element_size())


class ReadTimesZero(Kernel):
    """Reads one key past the end and multiplies it by a probability of zero."""

    def read(self, call: Call) -> tuple[Tensor, Tensor, Tensor]:
        """Return the inputs; v with the padding's share."""
        q, k, v = super().read(call)
        if v.numel():
            v = v + 0.0 * peek(end(call.v), call.v.dtype).to(call.work)
        return q, k, v


class ReadBefore(Kernel):
    """Loads the element before q with the first vector, and does not use it."""

    def read(self, call: Call) -> tuple[Tensor, Tensor, Tensor]:
        """Return the inputs."""
        if call.q.numel():
            peek(call.q.data_ptr() - call.q.element_size(), call.q.dtype)
        return super().read(call)


class ReadVectorTail(Kernel):
    """Loads k by vectors of eight and lets the last one reach past the end."""

    def read(self, call: Call) -> tuple[Tensor, Tensor, Tensor]:
        """Return the inputs."""
        if call.k.numel():
            peek(end(call.k) - call.k.element_size(), call.k.dtype, 8)
        return super().read(call)


class ReadGradOutTail(Kernel):
    """Loads the rows of grad_out one too far, and does not use the last."""

    def read_grad(self, call: Call, grad_out: Tensor) -> Tensor:
        """Return the gradient."""
        if grad_out.numel():
            peek(end(grad_out), grad_out.dtype, 4)
        return super().read_grad(call, grad_out)


class SumOfNextRow(Kernel):
    """Reads the row sum one row too far: for the last row, past the end of the buffer."""

    def probabilities(
        self, call: Call, saved: Saved, both: tuple[Tensor, Tensor], rows: slice, keys: slice
    ) -> Tensor:
        """Return the probabilities."""
        total = saved.total.clone()
        total[-1, -1, -1, -1] = peek(end(saved.total), total.dtype)
        return super().probabilities(call, Saved(saved.out, saved.top, total, saved.keep), both, rows, keys)


class WritePastOut(Kernel):
    """Stores one element past the end of the output."""

    def forward(self, call: Call) -> Saved:
        """Run, then store."""
        saved = super().forward(call)
        if saved.out.numel():
            poke(end(saved.out), torch.ones(1, dtype=saved.out.dtype))
        return saved


class WritePastDk(Kernel):
    """Stores one element past the end of dk."""

    def backward(self, call: Call, saved: Saved, grad_out: Tensor, needs: set[str]) -> Grads:
        """Run, then store."""
        grads = super().backward(call, saved, grad_out, needs)
        if "k" in grads and grads["k"].numel():
            poke(end(grads["k"]), torch.ones(1, dtype=grads["k"].dtype))
        return grads


class WriteRestored(Kernel):
    """Stores one element past the end of the output, and puts back what was there."""

    def forward(self, call: Call) -> Saved:
        """Run, store, restore."""
        saved = super().forward(call)
        if saved.out.numel():
            before = peek(end(saved.out), saved.out.dtype)
            poke(end(saved.out), torch.ones(1, dtype=saved.out.dtype))
            poke(end(saved.out), before)
        return saved


class WritePastInput(Kernel):
    """Pads v in place: a zero behind its last element."""

    def read(self, call: Call) -> tuple[Tensor, Tensor, Tensor]:
        """Pad and return the inputs."""
        if call.v.numel():
            poke(end(call.v), torch.zeros(1, dtype=call.v.dtype))
        return super().read(call)


class ScalesGradOut(Kernel):
    """Scales grad_out in place, and back."""

    def read_grad(self, call: Call, grad_out: Tensor) -> Tensor:
        """Return the gradient; its own memory keeps what rounding made of it."""
        right = super().read_grad(call, grad_out).clone()
        if 0 not in grad_out.stride():
            grad_out.mul_(0.7).div_(0.7)
        return right


_fault = functools.partial(Fault, kind=6, expected=("out_of_bounds",))
FAULTS: Final = (
    _fault("read_times_zero", about="reads past v, times zero", kernel=ReadTimesZero),
    _fault("read_before", about="reads before q, value not used", kernel=ReadBefore),
    _fault("read_vector_tail", about="reads past k, values not used", kernel=ReadVectorTail),
    _fault(
        "read_grad_out_tail",
        about="reads past grad_out, values not used",
        kernel=ReadGradOutTail,
        grads="qkvm",
    ),
    Fault(
        "sum_of_next_row",
        6,
        "the row sum of the last row read past the end of a buffer of its own",
        SumOfNextRow,
        ("out_of_bounds", "unwritten", "wrong", "nonfinite"),
        grads="qkvm",
    ),
    _fault("write_past_out", about="writes past out", kernel=WritePastOut),
    _fault("write_past_dk", about="writes past dk", kernel=WritePastDk, grads="k"),
    _fault("write_restored", about="writes past out and restores it", kernel=WriteRestored),
    _fault(
        "write_past_input",
        about="writes past v",
        kernel=WritePastInput,
        inherent=(level("layout", "layout contiguous", "layout", "contiguous"),),
    ),
    Fault(
        "scales_grad_out",
        6,
        "scales grad_out in place and back, not to the bit",
        ScalesGradOut,
        ("wrong",),
        grads="qkvm",
    ),
)
