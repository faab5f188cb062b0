"""A device that can be probed."""

from __future__ import annotations

from msgspec import Struct

from attnprobe.matrix.schema import DeviceRecord


class Device(Struct, frozen=True):
    """A live device: what the matrix records of it, and how torch addresses it."""

    record: DeviceRecord
    torch_name: str

    @property
    def slug(self) -> str:
        """Return a file name for the device class."""
        words = self.record.name.lower().replace("(r)", "").replace("(tm)", "").split()
        return "-".join("".join(c for c in word if c.isalnum()) for word in words if word != "@")
