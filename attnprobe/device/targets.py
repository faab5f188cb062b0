"""Which code with features of one architecture or family a GPU runs: the suffixes a and f of SM versions.

By the CUDA Programming Guide, section on compute capabilities: code for a target with `a` (from 9.0 on) runs
on exactly that version; code for one with `f` (from 10.0 on) on the same major version with the same or a
higher minor one. Both come beside the plain targets, which they do not replace.
"""

from __future__ import annotations

from typing import Final

_FIRST_A: Final = (9, 0)
_FIRST_F: Final = (10, 0)
_FAMILIES: Final = {10: (0, 3), 11: (0,), 12: (0, 1)}
"""Major version: the minor versions for which compilers know a target with f, as of CUDA 13."""


def special_targets(sm: str) -> tuple[str, ...]:
    """Return the targets with a suffix whose code runs on an SM version: "12.1" gives 12.1a, 12.0f, 12.1f.

    Of a major version that is newer than this table, only the families 0 and the GPU's own.
    """
    major, minor = map(int, sm.split("."))
    found = [f"{sm}a"] if (major, minor) >= _FIRST_A else []
    if (major, minor) >= _FIRST_F:
        known = {*_FAMILIES.get(major, (0,)), minor}
        found += [f"{major}.{one}f" for one in sorted(known) if one <= minor]
    return tuple(found)
