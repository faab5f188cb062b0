"""What a backend is: a name, the builds it rests on, and a way to run one case."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from msgspec import Struct

from attnprobe.matrix.schema import Material

if TYPE_CHECKING:
    from torch import Tensor

    from attnprobe.config import Case
    from attnprobe.device.interface import Device
    from attnprobe.probe.inputs import Tensors


class Refusal(Struct, frozen=True):
    """The library's own words for "not this configuration"."""

    reason: str


class Outputs(dict[str, "Tensor"]):
    """What one run returned: out, and lse, dq, dk, dv, dmask where there are some.

    `kernel` names the operator that ran, where the backend can tell.
    """

    kernel: str | None = None


class Backend(Protocol):
    """One implementation reached through one entry."""

    name: str

    def materials(self) -> Sequence[Material]:
        """Return the installed things that verdicts about this backend rest on."""

    def missing(self, device: Device) -> str | None:
        """Return why this backend cannot be here at all (not installed, no such device), or None."""

    def declares(self, case: Case, device: Device) -> Refusal | None:
        """Return the refusal of the library's own check, without running anything; None: it accepts."""

    def kernel_key(self, case: Case) -> str | None:
        """Return what a separate compilation depends on; None where this case compiles nothing."""

    def run(self, case: Case, tensors: Tensors) -> Outputs:
        """Run the case, forward and, where it asks for gradients, backward.

        Any exception is a refusal in the library's own words, a MemoryError or torch.OutOfMemoryError
        a lack of memory.
        """
