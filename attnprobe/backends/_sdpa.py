"""`torch.nn.functional.scaled_dot_product_attention`, with one backend forced or as people call it."""

from __future__ import annotations

import contextlib
import warnings
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode

from attnprobe.backends.calling import Call, attend
from attnprobe.backends.interface import Outputs, Refusal
from attnprobe.materials.installed import installed

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from attnprobe.config import Case
    from attnprobe.device.interface import Device
    from attnprobe.matrix.schema import Material
    from attnprobe.probe.inputs import Tensors


class Sdpa:
    """The public call under one name; `forced` names a member of `torch.nn.attention.SDPBackend`."""

    def __init__(self, name: str, forced: str | None) -> None:
        """Name the backend; None lets torch choose."""
        self.name = name
        self._forced = forced

    def materials(self) -> Sequence[Material]:
        """Return the torch build."""
        return torch_materials()

    def missing(self, device: Device) -> str | None:  # noqa: ARG002  # one answer for every device
        """Return why the call cannot be made: this torch has no such backend."""
        if self._forced is not None and self._member() is None:
            return f"torch {torch.__version__} has no SDPBackend.{self._forced}"
        return None

    def declares(self, case: Case, device: Device) -> Refusal | None:  # noqa: ARG002
        """Return what the call's signature cannot say."""
        return signature_refuses(case)

    def kernel_key(self, case: Case) -> str | None:  # noqa: ARG002
        """Return None: nothing is compiled per case."""
        return None

    def run(self, case: Case, tensors: Tensors) -> Outputs:
        """Run the call and, where gradients are asked for, its backward."""
        with self._chosen():
            outputs = attend(scaled_dot_product_attention, case, tensors)
        if case.pass_ == "backward" and outputs.kernel is None:
            outputs.kernel = "math"
        return outputs

    def kernel(self, case: Case, tensors: Tensors) -> str:
        """Return which operator the forward really runs: "math" where it is torch's composite.

        For what leaves no trace in an autograd graph; one more forward.
        """
        recorder = Recorder()
        call = Call(case, tensors)
        with self._chosen(), torch.no_grad(), recorder:
            call.forward(scaled_dot_product_attention)
        return recorder.kernel()

    def _member(self) -> Any:
        from torch.nn.attention import SDPBackend

        return SDPBackend.__members__.get(self._forced or "")

    @contextlib.contextmanager
    def _chosen(self) -> Iterator[None]:
        """Force the backend, and let a refusal carry the reasons that torch gives as warnings."""
        if self._forced is None:
            yield
            return
        from torch.nn.attention import sdpa_kernel

        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                with sdpa_kernel([self._member()]):
                    yield
            except RuntimeError as error:
                because = _because(caught)
                if because:
                    raise RuntimeError(because) from error
                raise


def _because(caught: list[warnings.WarningMessage]) -> str:
    """Return the reasons that torch's kernel choice gave as warnings before it gave up."""
    said = []
    for one in caught:
        text, _, source = str(one.message).partition(" (Triggered internally")
        if "sdp_utils" in source and not text.strip().endswith("because:"):
            said.append(text.strip())
    return " ".join(dict.fromkeys(said))


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves it untyped
    """Notes which attention operators are dispatched."""

    def __init__(self) -> None:
        """Start with none."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: list[str] = []

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Note an operator by name and run it."""
        name = str(func).removeprefix("aten.").removesuffix(".default")
        if "attention" in name:
            self.seen.append(name)
        return func(*args, **(kwargs or {}))

    def kernel(self) -> str:
        """Return the fused operator that ran, or "math"."""
        return self.seen[0] if self.seen else "math"


def torch_materials() -> tuple[Material, ...]:
    """Return the installed torch as a material."""
    found = installed("torch")
    return () if found is None else (found,)


def signature_refuses(case: Case) -> Refusal | None:
    """Return what scaled_dot_product_attention has no argument for."""
    for asked, what in (
        (case.softcap, "softcap"),
        (case.alibi, "ALiBi (a float mask can hold the bias)"),
        (case.mask == "window", "a window (a bool mask can say it)"),
    ):
        if asked:
            return Refusal(f"scaled_dot_product_attention has no argument for {what}")
    return None
