"""`torch-flash`: the public call of torch with the flash backend forced."""

from __future__ import annotations

from attnprobe.backends._sdpa import Sdpa

backend = Sdpa("torch-flash", "FLASH_ATTENTION")
