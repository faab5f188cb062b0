"""Templates with a margin: a line is written where every flag before its `|` holds.

    low       |    scores = r(scores)
    dead !low |    made_of = None

`!flag` holds where the flag does not; an empty margin always holds. `$name` is replaced by a value.
"""

from __future__ import annotations

import re
from string import Template
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Collection

WIDTH: Final = 110
"""Columns of a script."""


def fill(template: str, flags: Collection[str], **values: object) -> list[str]:
    """Return the lines of a template that the flags let through."""
    lines = []
    for line in template.strip("\n").splitlines():
        margin, bar, code = line.partition("|")
        assert bar, line
        if all((flag.removeprefix("!") in flags) is not flag.startswith("!") for flag in margin.split()):
            lines.append(Template(code).substitute(values).rstrip())
    return lines


def wrapped(line: str) -> list[str]:
    """Return a line as a formatter breaks it where it is too long and ends with a call."""
    if len(line) <= WIDTH or not line.endswith(")"):
        return [line]
    depth, start = 0, len(line)
    while depth or start == len(line):
        start -= 1
        depth += {")": 1, "(": -1}.get(line[start], 0)
    indent = " " * (len(line) - len(line.lstrip()))
    inner = line[start + 1 : -1]
    if len(indent) + 4 + len(inner) <= WIDTH:
        return [line[: start + 1], f"{indent}    {inner}", f"{indent})"]
    arguments = re.split(r", (?![^()]*\))", inner)
    return [line[: start + 1], *(f"{indent}    {argument}," for argument in arguments), f"{indent})"]


def unrounded(line: str) -> str:
    """Return a line without its `r(...)`, the roundings that a float32 script has no use for."""
    while (found := re.search(r"(?<![\w.])r\(", line)) is not None:
        start, depth = found.end(), 1
        end = start
        while depth:
            depth += {"(": 1, ")": -1}.get(line[end], 0)
            end += 1
        inner, before, after = line[start : end - 1], line[: found.start()], line[end:]
        alone = before.endswith(("= ", "(", ": ")) and (not after or after[0] in "),.}")
        simple = alone and not (after.startswith(".") and " " in inner)
        line = f"{before}{inner}{after}" if simple else f"{before}({inner}){after}"
    return line
