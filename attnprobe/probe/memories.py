"""All that decides what memory holds around a call: the fill of fresh memory, and zones around tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attnprobe.probe.guard import Guard
from attnprobe.probe.poison import Poison

if TYPE_CHECKING:
    from attnprobe.probe.inputs import Tensors
    from attnprobe.probe.memory import Breach


class Memories:
    """Poison and guard of one process. `covers` says in a few words what each can see here."""

    def __init__(self) -> None:
        """Find out what can be had in this process."""
        self._poison = Poison()
        self._guard = Guard()
        self.poison = self._poison.covers
        self.guard = self._guard.covers

    def place(self, tensors: Tensors) -> Tensors:
        """Return the tensors where an access outside them shows; what was placed before is overwritten."""
        return self._guard.place(tensors)

    def arm(self, fill: int, zone: int) -> None:
        """Let memory allocated from now on hold `fill`, and the zones around tensors `zone`."""
        self._guard.arm(fill, zone)
        self._poison.fill(fill)

    def disarm(self) -> tuple[Breach, ...]:
        """Let memory be handed out as it is; return the accesses outside tensors since `arm`."""
        self._poison.stop()
        return self._guard.disarm()
