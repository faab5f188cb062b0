"""How a script makes what no job can promise: the data, the layout of grad_out, the call before.

One table a field of `Case`; a new level is one entry. The scan's own code is in `probe.data`,
`probe.inputs` and `probe.trial`; a test holds the bits of both together.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from msgspec import Struct

from attnprobe.probe import data

if TYPE_CHECKING:
    from attnprobe.config import Case


class Regime(Struct, frozen=True):
    """A data regime: a function of the script, the inputs that it takes, and figures that come after them.

    It draws from the generator where it takes `numbers`.
    """

    name: str
    takes: tuple[str, ...]
    source: str
    figures: Callable[[Case], tuple[float, ...]] = lambda _: ()


_FAR_BELOW: Final = f'''
def far_below(q, k, shift):
    """Move q and k apart along one direction, so that every score lies {data.FAR_BELOW:g} below zero."""
    for tensor, sign in ((q, -1.0), (k, 1.0)):
        tensor.sub_(tensor.mean(-1, keepdim=True)).add_(sign * shift)
'''
_LARGE_LOGITS: Final = f'''
def large_logits(q, k, factor):
    """Scale q and k so that the scores have a standard deviation of {data.LARGE:g}."""
    for tensor in (q, k):
        tensor.mul_(factor)
'''
_OUTLIERS: Final = f'''
def outliers(q, k, v, grad_out, numbers):
    """Make tokens alike, and channels differ by powers of two; the largest is the same in q and k."""
    exponents = torch.tensor({data.SPREAD}, dtype=torch.float32)
    largest = int(torch.randint(1 << 16, (), generator=numbers))
    tops = {{q: {data.OUTLIER}, k: {data.OUTLIER}, v: {data.OUTLIER_OF_V}, grad_out: {data.OUTLIER}}}
    for tensor, top in tops.items():
        width = tensor.shape[-1]
        common = torch.randn(width, generator=numbers)
        drawn = exponents[torch.randint({len(data.SPREAD)}, (width,), generator=numbers)]
        drawn[largest % width] = top
        tensor.mul_({1 - data.ALIKE}).add_(common, alpha={data.ALIKE}).mul_(torch.exp2(drawn))
'''


def _shift(case: Case) -> tuple[float, ...]:
    return ((data.FAR_BELOW / (case.softmax_scale * case.head_dim)) ** 0.5,)


def _factor(case: Case) -> tuple[float, ...]:
    return ((data.LARGE / (case.softmax_scale * case.head_dim**0.5)) ** 0.5,)


DATA: Final = {
    "gaussian": None,
    "far-below": Regime("far_below", ("q", "k"), _FAR_BELOW, _shift),
    "large-logits": Regime("large_logits", ("q", "k"), _LARGE_LOGITS, _factor),
    "outliers": Regime("outliers", ("q", "k", "v", "grad_out", "numbers"), _OUTLIERS),
}
CYCLE: Final = ("gaussian", "far-below", "large-logits", "outliers")
"""What `batch-differs` makes of entry 0, 1, 2, ... of the batch."""

GRAD_OUT: Final = {
    "contiguous": "",
    "transposed": "grad_out.transpose({tokens}, 1).contiguous().transpose({tokens}, 1)",
    "expanded": "grad_out.narrow({tokens}, 0, 1).narrow(1, 0, 1).clone().expand_as(grad_out)",
    "scalar": "grad_out.flatten()[:1].reshape([1] * grad_out.dim()).clone().expand_as(grad_out)",
}
"""grad_out laid out, given the number of its token axis; heads are axis 1. "" leaves it as it is."""

EARLIER: Final = {
    "other-data": "with other values",
    "other-strides": "with another layout",
    "other-dtype": "with another element type",
}
"""What the call before this one differs in; `probe.trial.earlier_case` makes it."""


def regimes(case: Case) -> list[Regime | None]:
    """Return the regimes of a case: one for all, or one for each entry of the batch."""
    if case.data == "batch-differs":
        return [DATA[CYCLE[entry % len(CYCLE)]] for entry in range(case.batch)]
    return [DATA[case.data]]
