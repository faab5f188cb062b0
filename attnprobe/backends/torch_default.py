"""`torch-default`: the public call of torch as people make it; torch chooses the kernel."""

from __future__ import annotations

from attnprobe.backends._sdpa import Sdpa

backend = Sdpa("torch-default", None)
