"""From what is known of the candidates to the one that may run."""

from __future__ import annotations

from collections.abc import Sequence

from attnprobe.errors import UsageError
from attnprobe.select.explain import Candidate, Mode

MODES: tuple[Mode, ...] = ("gate", "veto", "observe")
STRENGTHS = (1, 2, 3)


def check(mode: str, strength: int | None) -> None:
    """Raise UsageError for a mode or a strength that does not exist."""
    if mode not in MODES:
        raise UsageError(f"mode {mode!r} is not known", fix=f"one of {', '.join(MODES)}")
    if strength is not None and strength not in STRENGTHS:
        raise UsageError(
            f"strength {strength!r} is not known",
            why="it is how many axis values must have been seen to work together",
            fix="1, 2 or 3; leave it out to accept only what is proven",
        )


def choose(
    candidates: Sequence[Candidate], mode: Mode, strength: int | None, *, named: bool
) -> tuple[str | None, dict[str, str | None] | None]:
    """Return the backend, and for `observe` what the other modes would have done.

    Candidates come in order of preference. `named`: the caller listed them, so it can run each of them;
    otherwise what was absent from the scanned machine is not offered.
    """
    here = [one for one in candidates if named or not one.absent]
    gate = next((one.backend for one in here if passes_gate(one, strength)), None)
    if mode == "gate":
        return gate, None
    veto = next((one.backend for one in here if one.status != "denied"), None)
    if mode == "veto":
        return veto, None
    return next((one.backend for one in here), None), {"veto": veto, "gate": gate}


def passes_gate(one: Candidate, strength: int | None) -> bool:
    """Whether a gate lets a candidate through."""
    if one.status == "proven":
        return True
    if strength is None or one.status != "unrefuted":
        return False
    return one.strength is not None and one.strength >= strength
