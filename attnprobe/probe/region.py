"""Say in few words which elements of a result are amiss, and by how much."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from torch import Tensor

_AXES: Final = {4: ("batch", "head", "row", "column"), 3: ("row", "head", "column")}


def describe(beyond: Tensor) -> dict[str, Any]:
    """Return how many elements of a bool tensor are true, out of how many, and the box they lie in.

    An axis on which all indices are hit is left out; "where" is empty if that leaves none.
    """
    count = int(beyond.sum())
    where = []
    names = _AXES.get(beyond.dim(), tuple(f"axis {i}" for i in range(beyond.dim())))
    for axis, name in enumerate(names):
        others = [other for other in range(beyond.dim()) if other != axis]
        hit = (beyond.any(dim=others) if others else beyond).nonzero().flatten().tolist()
        if len(hit) < beyond.shape[axis]:
            where.append(f"{name} {_ranges(hit)} of {beyond.shape[axis]}")
    return {"elements": count, "of": beyond.numel(), "where": ", ".join(where)}


def _ranges(indices: list[int]) -> str:
    """Return sorted indices as "0..3, 7", at most three runs."""
    runs: list[list[int]] = []
    for index in indices:
        if runs and index == runs[-1][1] + 1:
            runs[-1][1] = index
        else:
            runs.append([index, index])
    shown = [str(a) if a == b else f"{a}..{b}" for a, b in runs[:3]]
    if len(runs) > len(shown):
        shown.append(f"and {len(runs) - len(shown)} more runs")
    return ", ".join(shown)


def size(got: Tensor, wanted: Tensor, error: Tensor, tolerance: Tensor, beyond: Tensor) -> dict[str, Any]:
    """Return the largest error against its tolerance, and the factor that explains it, if one does."""
    ratio = (error / tolerance).masked_fill(~beyond, 0)
    worst = int(ratio.argmax())
    result: dict[str, Any] = {
        "error": two_digits(float(error.flatten()[worst])),
        "tolerance": two_digits(float(tolerance.flatten()[worst])),
        "expected": two_digits(float(wanted.flatten()[worst])),
    }
    found = factor(got[beyond], wanted[beyond])
    if found is not None:
        result["factor"] = found
    return result


def factor(got: Tensor, wanted: Tensor) -> float | None:
    """Return f where got = f x wanted explains the difference to a hundredth, else None."""
    norm = float((wanted * wanted).sum())
    if not norm:
        return None
    found = float((got * wanted).sum()) / norm
    rest = float(((got - found * wanted) ** 2).sum())
    explained = rest <= 1e-4 * float((got * got).sum())
    return two_digits(found, 3) if explained else None


def two_digits(value: float, digits: int = 2) -> float:
    """Return a number rounded to significant digits, so that documents do not differ in noise."""
    return float(f"{value:.{digits}g}")
