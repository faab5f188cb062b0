"""Every fault of a matrix file, each with its path in the file."""

from __future__ import annotations

import functools
import typing
from collections.abc import Iterator
from typing import Any

import msgspec
from msgspec import Struct, structs

from attnprobe.axes import AXIS, levels_of
from attnprobe.config import canonical
from attnprobe.errors import MatrixError
from attnprobe.matrix.schema import SCHEMA, Backend, Matrix, Rule, compact, digest_of
from attnprobe.verdict import Verdict


class Fault(Struct, frozen=True):
    """What is wrong, and where: a path like `$.backends[0].rules[2].when`."""

    path: str
    what: str


def faults(content: bytes, *, strict: bool = False) -> list[Fault]:
    """Return all faults of a file's content; `strict` also counts fields that the schema lacks.

    Raises:
        MatrixError: the content is not JSON at all.
    """
    try:
        document = msgspec.json.decode(content)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        where = "is empty" if not content.strip() else "is not JSON, or was cut off"
        raise MatrixError(f"the file {where}", why=str(error)) from None
    if isinstance(document, dict) and document.get("schema") != SCHEMA:
        schema = document.get("schema")
        return [Fault("$.schema", f"{schema!r}, not {SCHEMA!r}")]
    found = list(_typed(document, Matrix, "$", strict=strict))
    if found:
        return found
    matrix = compact(msgspec.convert(document, Matrix))
    return list(_meaning(matrix))


def _typed(  # noqa: C901, PLR0912  # one branch per kind of type
    value: Any, kind: Any, path: str, *, strict: bool
) -> Iterator[Fault]:
    """Yield every place where a value is not of the type that the schema gives it."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if isinstance(kind, type) and issubclass(kind, Struct):
        if not isinstance(value, dict):
            yield Fault(path, f"Expected `object`, got `{_name(value)}`")
            return
        fields = structs.fields(kind)
        for one in fields:
            if one.encode_name in value:
                at = f"{path}.{one.encode_name}"
                yield from _typed(value[one.encode_name], one.type, at, strict=strict)
            elif one.required:
                yield Fault(path, f"Object missing required field `{one.encode_name}`")
        if strict:
            for name in sorted(value.keys() - {one.encode_name for one in fields}):
                yield Fault(f"{path}.{name}", "unknown field")
    elif origin is dict:
        if not isinstance(value, dict):
            yield Fault(path, f"Expected `object`, got `{_name(value)}`")
            return
        for name, item in value.items():
            yield from _typed(item, arguments[1], f"{path}.{name}", strict=strict)
    elif (inner := _optional_struct(arguments)) is not None:
        if value is not None:
            yield from _typed(value, inner, path, strict=strict)
    elif origin is tuple and arguments[1:] == (Ellipsis,):
        if not isinstance(value, list):
            yield Fault(path, f"Expected `array`, got `{_name(value)}`")
            return
        for index, item in enumerate(value):
            yield from _typed(item, arguments[0], f"{path}[{index}]", strict=strict)
    else:
        try:
            msgspec.convert(value, kind)
        except msgspec.ValidationError as error:
            what, _, inner = str(error).partition(" - at `$")
            yield Fault(path + inner.rstrip("`"), what)


def _optional_struct(arguments: tuple[Any, ...]) -> Any:
    """Return the struct of `Struct | None`, or None where the type is another."""
    rest = [one for one in arguments if one is not type(None)]
    optional = len(rest) == 1 and len(arguments) > 1
    return rest[0] if optional and isinstance(rest[0], type) and issubclass(rest[0], Struct) else None


def _name(value: Any) -> str:
    names = {dict: "object", list: "array", str: "str", bool: "bool", type(None): "null"}
    return names.get(type(value), type(value).__name__)


def _meaning(matrix: Matrix) -> Iterator[Fault]:
    """Yield what the types cannot say."""
    if digest_of(matrix) != matrix.digest:
        yield Fault("$.digest", "does not match the content: the file was changed after it was written")
    known = {}
    for index, record in enumerate(matrix.cases):
        if record.id != record.case.id:
            yield Fault(f"$.cases[{index}].id", f"{record.id}, but the case hashes to {record.case.id}")
        if record.id in known:
            yield Fault(f"$.cases[{index}].id", f"{record.id} stands twice")
        known[record.id] = record.case
    for index, backend in enumerate(matrix.backends):
        path = f"$.backends[{index}]"
        at = {case_id: levels_of(case) for case_id, case in known.items()}
        yield from _backend(backend, path, at, len(matrix.runs))
    names = [backend.name for backend in matrix.backends]
    for name in sorted({name for name in names if names.count(name) > 1}):
        yield Fault("$.backends", f"{name} stands twice")


def _backend(backend: Backend, path: str, at: dict[str, dict[str, Any]], runs: int) -> Iterator[Fault]:
    """Yield what is wrong between a backend's cases and its rules."""
    if backend.status == "absent" and backend.cases:
        yield Fault(f"{path}.cases", "an absent backend has cases")
    seen: set[str] = set()
    known: set[bytes] = set()
    resting = functools.cache(lambda number: _rests_on(backend.rules[number], backend, at))
    for index, result in enumerate(backend.cases):
        here = f"{path}.cases[{index}]"
        if result.id not in at:
            yield Fault(f"{here}.id", f"{result.id} is not in $.cases")
            continue
        # Several runs may have seen a case; what they saw need not be the same.
        content = canonical(result)
        if content in known:
            yield Fault(f"{here}.id", f"{result.id} stands twice")
        seen.add(result.id)
        known.add(content)
        if not 0 <= result.run < runs:
            yield Fault(f"{here}.run", f"{result.run}, but there are {runs} runs")
        over = [n for n, rule in enumerate(backend.rules) if rule.covers(result.id, at[result.id])]
        if result.verdict.fails and not any(backend.rules[n].verdict.fails for n in over):
            yield Fault(here, f"{result.verdict.value}, and no rule covers it")
        if result.verdict is Verdict.OK:
            # A rule that rests on another run, or on another result of this very case, is disputed by it.
            alone = [n for n in over if resting(n)[0] <= {result.run} and result.id not in resting(n)[1]]
            yield from [Fault(here, f"ok, and rule {backend.rules[n].id} covers it") for n in alone[:1]]
    for index, rule in enumerate(backend.rules):
        yield from _rule(rule, f"{path}.rules[{index}]", seen)


def _rests_on(rule: Rule, backend: Backend, at: dict[str, dict[str, Any]]) -> tuple[set[int], set[str]]:
    """Return the runs and the cases that show a rule."""
    runs, cases = set(), set()
    for result in backend.cases:
        denies = result.verdict.fails or result.verdict is Verdict.REFUSED
        if denies and result.id in at and rule.covers(result.id, at[result.id]):
            runs.add(result.run)
            cases.add(result.id)
    return runs, cases


def _rule(rule: Rule, path: str, seen: set[str]) -> Iterator[Fault]:
    """Yield levels that no axis has, and witnesses that did not run."""
    for axis, levels in rule.when.items():
        if axis not in AXIS:
            yield Fault(f"{path}.when.{axis}", "no such axis")
            continue
        for level in levels:
            # A job may ask for any head dim; the axis only lists those that a plan covers.
            free = axis == "head_dim" and isinstance(level, int) and level > 0
            if not free and level not in AXIS[axis].levels:
                yield Fault(f"{path}.when.{axis}", f"{level!r} is no level of it")
    if rule.witness not in seen:
        yield Fault(f"{path}.witness", f"{rule.witness or 'none'}: no such case on this backend")
    for name in ("counter_witnesses", "cases"):
        for case_id in getattr(rule, name):
            if case_id not in seen:
                yield Fault(f"{path}.{name}", f"{case_id}: no such case on this backend")
