"""Kind 1: results, or what they are summed from, that nobody writes."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Final

import torch

from .base import Call, Kernel, Saved
from .model import HIDDEN_ROWS, Fault, grouped, lengths, level

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


class NoGradients(Kernel):
    """Returns from the backward without having launched it."""

    def write(self, name: str, target: Tensor, rows: slice, value: Tensor) -> None:
        """Write, but no gradient."""
        if name not in {"dq", "dk", "dv"}:
            super().write(name, target, rows, value)


class FullTilesOfColumns(Kernel):
    """Copies dq and dk by tiles of 32 columns and forgets the rest."""

    def write(self, name: str, target: Tensor, rows: slice, value: Tensor) -> None:
        """Write the full tiles of columns."""
        full = value.shape[-1] // 32 * 32 if name in {"dq", "dk"} else value.shape[-1]
        super().write(name, target[..., :full], rows, value[..., :full])


class FullTilesOfRows(Kernel):
    """Stores the output by tiles of 64 rows and forgets the rest."""

    def write(self, name: str, target: Tensor, rows: slice, value: Tensor) -> None:
        """Write the full tiles of rows."""
        if name == "out":
            full = value.shape[-2] // 64 * 64
            rows, value = slice(rows.start, rows.start + full), value[..., :full, :]
        super().write(name, target, rows, value)


class HalfOfDv(Kernel):
    """Takes the head dim of q for that of v where it halves the work of a tile."""

    def write(self, name: str, target: Tensor, rows: slice, value: Tensor) -> None:
        """Write the first half of the columns of dv."""
        half = value.shape[-1] // 2 if name == "dv" else value.shape[-1]
        super().write(name, target[..., :half], rows, value[..., :half])


class LastHeadOfGroup(Kernel):
    """Leaves one part of its own buffer for each head unwritten, and sums all parts."""

    def write(self, name: str, target: Tensor, rows: slice, value: Tensor) -> None:
        """Write all heads of a group but the last."""
        if name in {"dk-heads", "dv-heads"}:
            target, value = target[:, :, :-1], value[:, :, :-1]
        super().write(name, target, rows, value)


class NotZeroed(Kernel):
    """Accumulates dq into memory that nobody zeroed."""

    def zeros(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return memory as it is."""
        return self.empty(name, shape, dtype)


class NotZeroedButCleaned(Kernel):
    """Accumulates into memory that nobody zeroed, and strikes NaN out of it first."""

    def zeros(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return memory as it is, without NaN."""
        return self.empty(name, shape, dtype).nan_to_num_(0.0, 0.0, 0.0)


class MaximumFromMemory(Kernel):
    """Starts the row maximum from memory that nobody wrote; an ordinary number there does little harm."""

    def begin(self, call: Call, shape: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor]:
        """Return a maximum as memory holds it."""
        _, summed, acc = super().begin(call, shape)
        return self.empty("highest", (*shape, 1), call.work), summed, acc


class DeadRowsSkipped(Kernel):
    """Leaves early where every key of a row is hidden, before the output is written."""

    def write(self, name: str, target: Tensor, rows: slice, value: Tensor) -> None:
        """Write the rows that see a key."""
        if name == "out":
            value = torch.where(self._seen, value, target[..., rows, :])
        super().write(name, target, rows, value)

    def divide(self, acc: Tensor, summed: Tensor) -> Tensor:
        """Note which rows see a key."""
        self._seen = summed > 0
        return super().divide(acc, summed)


class LastRowOfMask(Kernel):
    """Writes the gradient of the mask for all rows but the last."""

    def write(self, name: str, target: Tensor, rows: slice, value: Tensor) -> None:
        """Write all rows but the last."""
        if name == "dmask":
            target, value = target[..., :-1, :], value[..., :-1, :]
        super().write(name, target, rows, value)


class RowTermOfFullTiles(Kernel):
    """Computes the row term of the backward for full tiles of 32 rows and reads it for all."""

    def row_term(self, call: Call, saved: Saved, g: Tensor) -> Tensor:
        """Return the row term, its tail as memory holds it."""
        right = super().row_term(call, saved, g)
        term = self.empty("term", right.shape, call.work)
        full = right.shape[-2] // 32 * 32
        term[..., :full, :] = right[..., :full, :]
        return term


_fault = functools.partial(Fault, kind=1, expected=("unwritten",))
FAULTS: Final = (
    _fault("no_gradients", about="dq, dk, dv never written", kernel=NoGradients, grads="qkv"),
    _fault(
        "columns_tail",
        about="dq and dk unwritten past the last full tile of 32 columns",
        kernel=FullTilesOfColumns,
        inherent=(lengths("head_dim", "D % 32 != 0", lambda n: n % 32 != 0),),
        grads="qk",
    ),
    _fault(
        "rows_tail",
        about="out unwritten past the last full tile of 64 rows",
        kernel=FullTilesOfRows,
        inherent=(lengths("seqlen_q", "S_q % 64 != 0", lambda n: n % 64 != 0),),
    ),
    _fault(
        "half_of_dv",
        about="the second half of dv unwritten where head dims differ",
        kernel=HalfOfDv,
        inherent=(level("head_dim_v", "D_v != D", "dims_differ", True),),
        grads="v",
    ),
    _fault(
        "head_buffer",
        about="one head of the buffer that dk and dv are summed from unwritten",
        kernel=LastHeadOfGroup,
        inherent=(grouped(),),
        grads="kv",
    ),
    _fault("not_zeroed", about="dq accumulated into unwritten memory", kernel=NotZeroed, grads="q"),
    _fault(
        "not_zeroed_cleaned",
        about="dq accumulated into unwritten memory that was cleaned of NaN",
        kernel=NotZeroedButCleaned,
        grads="q",
    ),
    _fault(
        "maximum_from_memory", about="row maximum started from unwritten memory", kernel=MaximumFromMemory
    ),
    _fault(
        "dead_rows_skipped",
        about="out unwritten in rows masked whole",
        kernel=DeadRowsSkipped,
        inherent=(HIDDEN_ROWS,),
    ),
    _fault(
        "mask_gradient_row",
        about="the last row of the gradient of the mask unwritten",
        kernel=LastRowOfMask,
        inherent=(level("needs_grad", "the mask alone needs a gradient", "needs", "mask"),),
        grads="m",
    ),
    _fault(
        "row_term_tail",
        about="the row term of the last rows read from unwritten memory",
        kernel=RowTermOfFullTiles,
        inherent=(lengths("seqlen_q", "S_q % 32 != 0", lambda n: n % 32 != 0),),
        grads="qkm",
    ),
)
