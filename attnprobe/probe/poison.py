"""Fill memory that nobody has written yet, so that an unwritten result shows.

On the CPU with glibc, `mallopt(M_PERTURB, 255 ^ byte)` makes malloc hand out memory filled with `byte`,
whoever allocates: Python, ATen, a library's own C++. 0xFF is NaN in every float type, 0x42 an ordinary
number. Small blocks are recycled without a fill unless the process
was started with `ENVIRONMENT`. Without glibc nothing is poisoned, and `Poison.covers` says so.

Not covered: memory that a library keeps and hands out again by itself, writes and reads outside a tensor.
"""

from __future__ import annotations

import ctypes
import platform
from typing import Final

NAN_FILL: Final = 0xFF
FINITE_FILL: Final = 0x42
"""The bytes that memory holds before the two runs of a case."""

_KEPT: Final = 1 << 30
ENVIRONMENT: Final = {
    "GLIBC_TUNABLES": "glibc.malloc.tcache_count=0"
    # Large blocks are kept and filled again, instead of mapped anew and faulted in page by page.
    f":glibc.malloc.mmap_threshold={_KEPT}:glibc.malloc.trim_threshold={_KEPT}"
}
_M_PERTURB: Final = -6


class Poison:
    """The process-wide fill. `covers` says in a few words what is filled."""

    covers: str

    def __init__(self) -> None:
        """Find out what can be had in this process."""
        self._mallopt = None
        self.covers = "nothing: no glibc here"
        if platform.libc_ver()[0] == "glibc":
            self._mallopt = ctypes.CDLL(None).mallopt
            self.covers = "all memory from malloc (glibc M_PERTURB)"

    def fill(self, byte: int) -> None:
        """Let memory allocated from now on hold `byte`."""
        if self._mallopt is not None:
            # glibc stores the complement; 256 is the value whose complement's low byte is 0xFF.
            self._mallopt(_M_PERTURB, (byte ^ 0xFF) or 256)

    def stop(self) -> None:
        """Let memory be handed out as it is."""
        if self._mallopt is not None:
            self._mallopt(_M_PERTURB, 0)
