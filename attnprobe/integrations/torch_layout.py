"""How q, k and v lie in memory, told from shapes (B, H, S, D) and strides as `probe.inputs` lays them out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from attnprobe.config import Layout

DENSE: Final[tuple[Layout, ...]] = ("contiguous", "transposed", "packed", "expanded")
"""Layouts whose head dim has stride 1."""
LAYOUTS: Final[tuple[Layout, ...]] = (*DENSE, "inner-stride")
"""In the order in which they are tried: many a tensor lies in several, such as one with a single head."""

Numbers = tuple[int, ...]


def layouts_of(shapes: Sequence[Numbers], strides: Sequence[Numbers]) -> list[list[Layout]]:
    """Return the layouts that each of q, k and v lies in, in order."""
    laid = {layout: strides_of(layout, shapes) for layout in LAYOUTS}
    return [
        [layout for layout in LAYOUTS if any(_same(shape, stride, other) for other in laid[layout][place])]
        for place, (shape, stride) in enumerate(zip(shapes, strides, strict=True))
    ]


def strides_of(layout: Layout, shapes: Sequence[Numbers]) -> list[list[Numbers]]:
    """Return the strides that q, k and v may have each in a layout.

    Whether slices come from one buffer does not matter to a kernel, so it does not matter here.
    """
    if layout == "contiguous":
        return [[(h * s * d, s * d, d, 1)] for _, h, s, d in shapes]
    if layout == "inner-stride":
        return [[(h * s * 2 * d, s * 2 * d, 2 * d, 2)] for _, h, s, d in shapes]
    if layout == "expanded":
        over_heads_or_batch: list[list[Numbers]] = [
            [(s * d, 0, d, 1), (0, s * d, d, 1)] for _, _, s, d in shapes[1:]
        ]
        return [*strides_of("contiguous", shapes[:1]), *over_heads_or_batch]
    rows = widths = [h * d for _, h, _, d in shapes]
    if layout == "packed" and shapes[0][2] == shapes[1][2]:
        rows = [sum(widths)] * 3
    elif layout == "packed":
        # Of two lengths, two buffers: q beside a neighbour, k beside v.
        rows = [2 * widths[0], *[widths[1] + widths[2]] * 2]
    return [[(s * row, d, row, 1)] for row, (_, _, s, d) in zip(rows, shapes, strict=True)]


def _same(shape: Numbers, stride: Numbers, other: Numbers) -> bool:
    """Whether two strides lead to the same places in a tensor of this shape."""
    if 0 in shape:
        return True
    return all(n == 1 or mine == its for n, mine, its in zip(shape, stride, other, strict=True))
