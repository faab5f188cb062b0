"""The options that spell a configuration: one per field of `AttentionConfig`, under its name."""

from __future__ import annotations

import functools
import types
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, Literal

import click
import msgspec
from msgspec import UNSET, UnsetType

from attnprobe.config import AttentionConfig, parse_config

_HELP: Final = {
    "pass_": "What the job runs; backward includes forward.",
    "head_dim": "Of q and k.",
    "heads": "Query heads.",
    "window": "Earlier keys that a query sees, with --mask window.",
    "dropout": "Probability; 0 is off.",
    "scale": "Factor on the scores, or `default`.",
    "softcap": "0 is off.",
}
_SWITCH: Final = {"on": True, "off": False}


def config_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add an option per field, and hand the command one `config`."""

    @functools.wraps(command)
    def with_config(**options: Any) -> Any:
        said = {}
        for field in _FIELDS:
            value = options.pop(field.name)
            if value is not None:
                said[field.encode_name] = _value(field.name, value)
        return command(config=parse_config(said, "the configuration"), **options)

    wrapped: Callable[..., Any] = with_config
    for field in reversed(_FIELDS):
        name = "--" + field.encode_name.replace("_", "-")
        option = click.option(name, field.name, type=_type(field.type), help=_HELP.get(field.name))
        wrapped = option(wrapped)
    return wrapped


def matrix_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add `-m FILE` and `--assume-device`."""
    command = click.option(
        "--assume-device", is_flag=True, help="Answer as if on the device and with the builds of the matrix."
    )(command)
    return click.option(
        "-m",
        "--matrix",
        "file",
        type=click.Path(path_type=Path),
        metavar="FILE",
        help="[default: ATTNPROBE_MATRIX, else the matrix of this device]",
    )(command)


_FIELDS: Final = msgspec.structs.fields(AttentionConfig)


def _type(hint: Any) -> click.ParamType[Any] | None:
    """Return what an option takes; ranges are checked where the configuration is made."""
    for kind in _alternatives(hint):
        origin = typing.get_origin(kind)
        if origin is Literal:
            return click.Choice(typing.get_args(kind))
        if kind is bool:
            return click.Choice(list(_SWITCH))
    kinds = [_bare(kind) for kind in _alternatives(hint)]
    if type(None) in kinds:
        return click.STRING
    return click.INT if int in kinds else click.FLOAT


def _alternatives(hint: Any) -> list[Any]:
    union = typing.get_origin(hint) in {typing.Union, types.UnionType}
    return [kind for kind in (typing.get_args(hint) if union else (hint,)) if kind is not UnsetType]


def _bare(kind: Any) -> Any:
    return typing.get_args(kind)[0] if typing.get_origin(kind) is typing.Annotated else kind


def _value(name: str, value: Any) -> Any:
    if name in {"alibi", "deterministic"}:
        return _SWITCH[value]
    if name == "scale":
        if value == "default":
            return None
        try:
            return float(value)
        except ValueError:
            raise click.BadParameter(
                f"{value!r} is neither a number nor `default`", param_hint="--scale"
            ) from None
    return value


def said(config: AttentionConfig) -> str:
    """Return what a configuration says, in one line."""
    fields = [(field.encode_name, getattr(config, field.name)) for field in _FIELDS]
    return ", ".join(f"{name} {value}" for name, value in fields if value is not UNSET) or "nothing"
