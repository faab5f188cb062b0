"""torch's own choice for `scaled_dot_product_attention`, asked with the very tensors of a case.

`torch._fused_sdp_choice` is private: where it is absent, or takes other arguments, nothing is asked.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any, Final

from attnprobe.audit.interface import Answer

if TYPE_CHECKING:
    from attnprobe.config import Case

_ORDER: Final = ("torch-cudnn", "torch-flash", "torch-efficient", "torch-math")
_BACKENDS: Final = {
    "FLASH_ATTENTION": "torch-flash",
    "EFFICIENT_ATTENTION": "torch-efficient",
    "CUDNN_ATTENTION": "torch-cudnn",
    "MATH": "torch-math",
}
_SAME_KERNEL: Final = {"torch-flash": ("aten-flash",)}
"""Other entries to the kernel that a backend stands for: they may run it where the choice does not."""


class TorchSdpa:
    """The choice that the public call makes."""

    name = "torch scaled_dot_product_attention"

    def missing(self) -> str | None:
        """Return why it cannot be asked."""
        try:
            import torch
        except ImportError as error:
            return f"torch cannot be imported: {error}"
        return None if hasattr(torch, "_fused_sdp_choice") else f"torch {torch.__version__} does not tell"

    def ask(self, case: Case) -> Answer | None:
        """Return what torch would run; None for what goes another way (sequences packed, mask objects)."""
        import torch
        from torch.nn import attention

        from attnprobe.backends._sdpa import signature_refuses
        from attnprobe.backends.calling import Call
        from attnprobe.probe.inputs import make

        if signature_refuses(case) is not None or case.layout == "varlen":
            return None
        if case.mask == "causal-bottom-right":
            return None
        call = Call(case, make(case, torch.device("cpu")))
        with warnings.catch_warnings(), torch.set_grad_enabled(case.pass_ == "backward"):
            warnings.simplefilter("ignore")
            try:
                choice = torch._fused_sdp_choice(call.q, call.k, call.v, **call.options)  # noqa: SLF001  # guarded
            except (RuntimeError, TypeError):
                return Answer(None)
        members: Any = attention.SDPBackend.__members__
        names = {int(member): _BACKENDS.get(name) for name, member in members.items()}
        taken = names.get(int(choice))
        if taken is None:
            return Answer(None)
        before = _ORDER[: _ORDER.index(taken)]
        return Answer(taken, tuple(entry for one in before for entry in (one, *_SAME_KERNEL.get(one, ()))))


selector = TorchSdpa()
