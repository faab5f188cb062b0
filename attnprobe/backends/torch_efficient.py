"""`torch-efficient`: the public call of torch with the efficient backend forced."""

from __future__ import annotations

from attnprobe.backends._sdpa import Sdpa

backend = Sdpa("torch-efficient", "EFFICIENT_ATTENTION")
