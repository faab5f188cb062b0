"""Words of others, made fit to be shown."""

from __future__ import annotations


def printable(text: str) -> str:
    """Return text without what would steer a terminal or break an encoding.

    A matrix may come from anywhere, and so may what a library says.
    """
    return "".join(character if character.isprintable() else "?" for character in text)
