"""torch's own choice for `scaled_dot_product_attention`, asked as the guard in front of torch asks it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from attnprobe.audit.interface import Answer

if TYPE_CHECKING:
    from attnprobe.config import Case

_ORDER: Final = ("torch-cudnn", "torch-flash", "torch-efficient", "torch-math")
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
        """Return what torch would run; None for what is no plain call (packed sequences, softcap, ALiBi)."""
        from attnprobe.backends._sdpa import signature_refuses
        from attnprobe.integrations.torch_call import call_of_case
        from attnprobe.integrations.torch_choice import runnable

        if signature_refuses(case) is not None or case.layout == "varlen":
            return None
        found = runnable(call_of_case(case, "cpu"))
        if not found:
            return Answer(None)
        before = _ORDER[: _ORDER.index(found[0])]
        return Answer(found[0], tuple(e for one in before for e in (one, *_SAME_KERNEL.get(one, ()))))


selector = TorchSdpa()
