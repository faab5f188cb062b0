"""Write the generated files of docs/, or with `--check` fail where one of them is out of date.

python docs/generate.py [--check]
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import msgspec

from attnprobe.axes import AXES, CONSTRAINTS
from attnprobe.config import AttentionConfig
from attnprobe.matrix.schema import SCHEMA, Matrix

HERE = Path(__file__).parent


def axes_page() -> str:
    """Return docs/axes.md: every axis with its levels, and what cannot meet."""
    lines = [
        "# Axes",
        "",
        "Generated from `attnprobe/axes.py` by `python docs/generate.py`; do not edit.",
        "",
        "A case falls on exactly one level of every axis. Rules in a matrix (`when`) and cases (`at`) use",
        "these names and spellings. *Special* levels are those that whole libraries refuse or are known to",
        "fail on; the plan keeps them apart. The plain level is what a failure is narrowed down toward.",
        "",
        "| axis | levels | plain | what it says |",
        "|---|---|---|---|",
    ]
    for axis in AXES:
        levels = ", ".join(f"`{level}`" for level in axis.levels)
        if axis.name == "head_dim":
            levels = "`8` to `256` in steps of 8, `512`"
        lines.append(f"| `{axis.name}` | {levels} | `{axis.plain}` | {axis.about} |")
    lines += ["", "## Spellings", "", "| axis | level | means |", "|---|---|---|"]
    for axis in AXES:
        lines += [f"| `{axis.name}` | `{level}` | {said} |" for level, said in axis.spelling.items()]
    lines += ["", "## Special levels", ""]
    for axis in AXES:
        if axis.special:
            levels = ", ".join(f"`{level}`" for level in axis.levels if level in axis.special)
            lines.append(f"- `{axis.name}`: {levels}")
    lines += ["", "## What cannot meet", ""]
    for constraint in CONSTRAINTS:
        axes = ", ".join(f"`{name}`" for name in constraint.axes)
        lines.append(f"- {axes}: {constraint.reason}.")
    lines += [
        "",
        "## Fields of a configuration",
        "",
        "`AttentionConfig`, and an entry of a `--config` file:",
        "",
    ]
    for field in msgspec.structs.fields(AttentionConfig):
        lines.append(f"- `{field.encode_name}`")
    return "\n".join(lines) + "\n"


def schema_file() -> str:
    """Return docs/matrix.schema.json: the JSON Schema of a matrix, from its structs."""
    schema = msgspec.json.schema(Matrix)
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": SCHEMA, **schema}
    return json.dumps(schema, indent=1, sort_keys=True) + "\n"


def main(arguments: list[str]) -> int:
    """Write or check every generated file."""
    stale = 0
    for name, content in (("axes.md", axes_page()), ("matrix.schema.json", schema_file())):
        path = HERE / name
        if "--check" not in arguments:
            path.write_text(content, encoding="utf-8")
        elif not path.exists() or path.read_text(encoding="utf-8") != content:
            print(f"docs/{name} is out of date: run python docs/generate.py")
            stale += 1
    return 1 if stale else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
