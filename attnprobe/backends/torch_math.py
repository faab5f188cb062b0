"""`torch-math`: the public call of torch with the math backend forced."""

from __future__ import annotations

from attnprobe.backends._sdpa import Sdpa

backend = Sdpa("torch-math", "MATH")
