"""Move a case along one axis, repairing what the constraints tie to it."""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from typing import Final

from attnprobe.axes import AXES, AXIS, At, Level, allowed, levels_of
from attnprobe.config import Case
from attnprobe.probe.concrete import with_levels

LENGTHS: Final = frozenset({"seqlen_q", "seqlen_kv", "seqlen_order"})

HAZARDS: Final = tuple(axis.name for axis in AXES if axis.hazard)

# The order in which axes are tried: what is costly to keep first, what names a failure best last.
ORDER: Final = (
    "seqlen_q",
    "seqlen_kv",
    "seqlen_order",
    # Nobody can promise these, so a rule that needs none of them says more.
    *HAZARDS,
    # What only a mask can have goes before the mask, which could not go plain beside it.
    "needs_grad",
    "masked_rows",
    *(
        axis.name
        for axis in AXES
        if axis.name not in LENGTHS | {"pass", "dtype", "needs_grad", "masked_rows", *HAZARDS}
    ),
    "dtype",
    "pass",
)


def step(case: Case, axis: str, level: Level, keep: AbstractSet[str] = frozenset()) -> Case | None:
    """Return the case with `axis` at `level` and as little else changed as the constraints allow.

    None where no repair that leaves the axes of `keep` alone makes it possible.
    """
    at = levels_of(case)
    if at[axis] == level:
        return case
    for repair in _repairs(axis):
        if keep & repair.keys():
            continue
        wanted = {**at, axis: level}
        changed = {axis}
        for other, choice in repair.items():
            if wanted[other] != choice:
                wanted[other] = choice
                changed.add(other)
        if axis == "pass":
            wanted["needs_grad"] = "none" if level == "forward" else "all"
            changed.add("needs_grad")
            if level == "forward" and at["grad_out"] != "contiguous":
                wanted["grad_out"] = "contiguous"
                changed.add("grad_out")
        if allowed(wanted):
            moved = with_levels(case, wanted, frozenset(changed))
            if levels_of(moved) == wanted:
                return moved
    return None


def _repairs(axis: str) -> list[dict[str, Level]]:
    """Return what else may be changed along with an axis, the least first."""
    repairs: list[dict[str, Level]] = [{}]
    if axis in {"seqlen_q", "seqlen_kv"}:
        repairs += [{"seqlen_order": order} for order in AXIS["seqlen_order"].levels]
    if axis == "seqlen_order":
        # One length moved, the plain one first, then both.
        levels = (AXIS["seqlen_q"].plain, "odd", "long", "1")
        repairs += [{side: level} for side in ("seqlen_kv", "seqlen_q") for level in levels]
        pairs = (("x128", "x128"), ("odd", "odd"), ("x128", "odd"), ("odd", "x128"))
        repairs += [{"seqlen_q": q, "seqlen_kv": kv} for q, kv in pairs]
    return repairs


def reset(case: Case, axis: str) -> Case | None:
    """Return the case with `axis` plainer, or None where it is as plain as it can be.

    Plainer is the plain level, or where the constraints forbid that, the first level they allow.
    """
    at = levels_of(case)
    plain = AXIS[axis].plain
    if at[axis] == plain:
        return None
    moved = step(case, axis, plain)
    if moved is not None:
        return moved
    for level in AXIS[axis].levels:
        if level == at[axis]:
            return None
        moved = step(case, axis, level)
        if moved is not None:
            return moved
    return None


def forced(at: At, axis: str) -> bool:
    """Whether the other levels leave `axis` no plain level, so that naming it says nothing."""
    return not allowed({**at, axis: AXIS[axis].plain})


def differing(one: At, other: At) -> list[str]:
    """Return the axes on which two choices differ, without those that follow from others."""
    axes = [axis for axis in ORDER if one[axis] != other[axis]]
    if "pass" in axes:
        axes = [axis for axis in axes if axis not in {"needs_grad", "grad_out"}]
    if "seqlen_order" in axes and {"seqlen_q", "seqlen_kv"} & set(axes):
        axes.remove("seqlen_order")
    return axes
