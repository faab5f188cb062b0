"""The configurations of a job, from a YAML, JSON or TOML file.

The file holds a list of configurations, or a mapping with such a list under `configs` (TOML:
`[[configs]]`). A configuration maps field names of `AttentionConfig` to values.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from attnprobe.config import AttentionConfig, parse_config
from attnprobe.errors import UsageError


def read_configs(path: Path) -> list[AttentionConfig]:
    """Return the configurations in a file.

    Raises:
        UsageError: no such file, a suffix that is none of the three, bad syntax, or a field that no
            configuration has; the message names the entry.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UsageError(f"{path} cannot be read", why=error.strerror or str(error)) from None
    document = _parse(path, content)
    entries = document.get("configs") if isinstance(document, dict) else document
    if not isinstance(entries, list) or not entries:
        raise UsageError(
            f"{path} holds no configurations",
            why="it must be a list, or hold one under `configs`",
            fix="docs/scan.md has an example",
        )
    configs = []
    for number, entry in enumerate(entries, start=1):
        if not isinstance(entry, dict):
            raise UsageError(f"{path}: entry {number} is no mapping of fields to values")
        configs.append(parse_config(entry, f"{path}: entry {number}"))
    return configs


def _parse(path: Path, content: bytes) -> Any:
    suffix = path.suffix.lower()
    try:
        if suffix == ".json":
            return msgspec.json.decode(content)
        if suffix == ".toml":
            return _toml(content)
        if suffix in {".yaml", ".yml"}:
            return _yaml(content)
    except UsageError:
        raise
    except Exception as error:  # noqa: BLE001  # three parsers, each with errors of its own
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UsageError(f"{path} cannot be parsed as {suffix[1:]}", why=first) from None
    raise UsageError(f"{path}: unknown kind of file", why="known are .yaml, .yml, .json and .toml")


def _toml(content: bytes) -> Any:
    try:
        import tomllib
    except ImportError:  # Python 3.10
        import tomli as tomllib
    return tomllib.loads(content.decode())


def _yaml(content: bytes) -> Any:
    import yaml

    return yaml.safe_load(content)
