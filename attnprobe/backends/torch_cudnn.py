"""`torch-cudnn`: the public call of torch with the cudnn backend forced."""

from __future__ import annotations

from attnprobe.backends._sdpa import Sdpa

backend = Sdpa("torch-cudnn", "CUDNN_ATTENTION")
