"""What every integration does with a decision: let it through, take another, raise, or only write it down."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from attnprobe.errors import NoBackendError
from attnprobe.select.policy import check

if TYPE_CHECKING:
    from attnprobe.config import AttentionConfig
    from attnprobe.select.explain import Decision, Mode
    from attnprobe.select.selector import Selector


class Guard:
    """A selector and how much of what it says is done.

    In mode "veto" the backend that the host would run goes ahead unless it is denied, in "gate" only if it
    is proven (or unrefuted at `strength`); else the next of those the host can run takes its place, and
    where none is left `decide` raises. "observe" changes nothing; what veto and gate would have done is
    appended to the file `log`, one line of JSON for each place and configuration, once.

    Safe to use from several threads. Nothing here imports a host.
    """

    def __init__(
        self,
        selector: Selector,
        mode: Mode = "veto",
        *,
        strength: int | None = None,
        log: str | os.PathLike[str] | None = None,
    ) -> None:
        """Raise UsageError for a mode or a strength that does not exist."""
        check(mode, strength)
        self.selector = selector
        self.mode = mode
        self.strength = strength
        self.log = log
        self._lock = threading.Lock()
        self._written: set[tuple[str, AttentionConfig, tuple[str, ...]]] = set()

    def decide(self, config: AttentionConfig, backends: Sequence[str], where: str = "") -> Decision:
        """Return the decision; its `backend` is to run.

        `backends`: what the host can run for this call, the one that it would run itself first. `where`
        names the layer, for the log.

        Raises:
            NoBackendError: veto or gate leaves none of them.
            UsageError: the configuration contradicts itself.
        """
        decision = self.selector.select(config, self.mode, self.strength, tuple(backends))
        if self.mode == "observe":
            self._observe(decision, where)
        elif decision.backend is None:
            place = f" at {where}" if where else ""
            raise NoBackendError(f"no attention backend may run this call{place}", decision)
        return decision

    def _observe(self, decision: Decision, where: str) -> None:
        """Append what the other modes would have done, the first time that it is asked."""
        if self.log is None:
            return
        key = (where, decision.config, tuple(one.backend for one in decision.candidates))
        with self._lock:
            if key in self._written:
                return
            self._written.add(key)
            would = decision.would or {}
            line = {
                "where": where,
                "config": decision.config,
                "host": decision.backend,
                "veto": would.get("veto"),
                "gate": would.get("gate"),
                "changes": sorted(mode for mode, chosen in would.items() if chosen != decision.backend),
                "candidates": decision.candidates,
                "matrix": decision.digest,
            }
            # One write of one line: the ranks of a job may share the file.
            with Path(self.log).open("ab", buffering=0) as file:
                file.write(msgspec.json.encode(line) + b"\n")
