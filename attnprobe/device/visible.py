"""What is wrong with a CUDA_VISIBLE_DEVICES, which the driver does not say.

By the CUDA Programming Guide, section on environment variables: a list of indices or of UUIDs, which may be
cut short; the first invalid entry hides itself and all behind it. The driver applies it without a word.
"""

from __future__ import annotations

from collections.abc import Sequence


def fault_in(value: str, uuids: Sequence[Sequence[str]]) -> str:
    """Return why the first invalid entry of a value is that, or an empty string.

    `uuids` holds for each GPU its own UUID and those of its MIG instances.
    """
    return next(filter(None, (_fault(entry.strip(), uuids) for entry in value.split(","))), "")


def _fault(entry: str, uuids: Sequence[Sequence[str]]) -> str:
    if not entry:
        return "an entry is empty"
    if entry.lstrip("-").isdigit():
        return "" if 0 <= int(entry) < len(uuids) else f"{entry} is no index of a GPU here"
    matching = sum(one.lower().startswith(entry.lower()) for own in uuids for one in own)
    if matching == 1:
        return ""
    return f"{entry} begins the UUIDs of several GPUs" if matching else f"{entry} is the UUID of no GPU here"
