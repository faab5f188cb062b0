"""The dropout mask that a backend drew, read from its own output.

With Q = 0 every visible key has the same probability, and with V one-hot in its columns `out` shows for
each key whether it was kept. The generator is set back before each run, the head dims stay, so the kernel
and its draws are those of the judged run. The mask then goes into the reference: gradients that used
another mask, and a forward that scaled by anything but 1/(1-p), come out wrong.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from msgspec import structs

from attnprobe.probe.inputs import seed_generators
from attnprobe.probe.reference import Reference, reference

if TYPE_CHECKING:
    from torch import Tensor

    from attnprobe.config import Case
    from attnprobe.probe.inputs import Tensors


def reference_with_its_mask(case: Case, tensors: Tensors, backend: Any) -> Reference | None:
    """Return the reference under the dropout mask of this backend; None where it cannot be read.

    It cannot where sequences are packed.
    """
    if tensors.lengths_q is not None:
        return None
    return reference(case, tensors, read_mask(case, tensors, backend))


def read_mask(case: Case, tensors: Tensors, backend: Any) -> Tensor:
    """Return which scores were kept, over 1-p: (B, H, S_q, S_kv) float64."""
    forward = structs.replace(case, pass_="forward", needs_grad="none")
    columns = case.head_dim_v
    q = torch.zeros_like(tensors.q)
    seen = []
    for start in range(0, case.seqlen_kv, columns):
        v = torch.zeros_like(tensors.v)
        count = min(columns, case.seqlen_kv - start)
        index = torch.arange(count, device=v.device)
        v[:, :, start + index, index] = 1
        seed_generators(case.seed, q.device)
        out = backend.run(forward, replace(tensors, q=q, v=v))["out"]
        seen.append(out[..., :count].double() > 0)
    if not seen:
        shape = (case.batch, case.heads, case.seqlen_q, 0)
        return torch.zeros(shape, dtype=torch.float64, device=q.device)
    kept = torch.cat(seen, dim=-1)
    return kept.double() / (1 - case.dropout)
