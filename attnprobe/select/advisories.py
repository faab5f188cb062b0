"""Public reports as data: which builds on which devices a report speaks of, and what it denies.

One JSON file each in matrices/advisories/. An advisory denies until this very configuration passed here,
on an affected build and under the hazard that would show the defect.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Final, Literal

import msgspec
from msgspec import UNSET, Meta, Struct

from attnprobe.axes import AXIS, Level
from attnprobe.config import Case
from attnprobe.errors import UsageError
from attnprobe.matrix.schema import DeviceRecord
from attnprobe.select.asked import Asked
from attnprobe.verdict import Verdict

Text = Annotated[str, Meta(min_length=1)]
Date = Annotated[str, Meta(pattern=r"^\d{4}-\d{2}-\d{2}$")]
Link = Annotated[str, Meta(pattern=r"^https://\S+$")]


class DeviceCondition(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Which devices: SM versions as "12.0", or opt-in shared memory per block below so many bytes."""

    kind: Literal["cuda", "cpu"] = "cuda"
    sm: tuple[str, ...] = ()
    smem_below: int = 0

    def holds(self, device: DeviceRecord) -> bool:
        """Whether a device is meant."""
        if device.kind != self.kind:
            return False
        if self.sm and device.sm not in self.sm:
            return False
        # A device that does not say how much it has is not known to have enough.
        return not self.smem_below or device.smem_per_block_optin < self.smem_below


class Advisory(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One report.

    `backends` by their names here; `library` the distribution whose versions count; `affected` a PEP 440
    range, `fixed_in` the first version known to be right. `when` as in a rule. What an axis does not tell:
    `head_dims_v` are exact head dims of v, `residues` says of a field that it is [m, r]: r modulo m.
    `hazard`: what a case must have been run under to show the defect. `note`: what the report leaves open.
    """

    id: Text
    title: Text
    link: Link
    backends: Annotated[tuple[str, ...], Meta(min_length=1)]
    library: Text
    affected: Text
    device: DeviceCondition
    when: Annotated[dict[str, tuple[Level, ...]], Meta(min_length=1)]
    verdict: Verdict
    checked: Date
    outputs: tuple[str, ...] = ()
    fixed_in: str = ""
    note: str = ""
    head_dims_v: tuple[int, ...] = ()
    residues: dict[str, tuple[int, int]] = {}
    hazard: dict[str, str] = {}
    evidence: Literal["reported"] = "reported"

    def concerns(self, version: str | None) -> bool:
        """Whether a version of the library is affected; one that cannot be told is."""
        from packaging.specifiers import SpecifierSet
        from packaging.version import InvalidVersion, Version

        if version is None:
            return True
        try:
            known = Version(version)
        except InvalidVersion:
            return True
        if self.fixed_in and Version(known.public) >= Version(self.fixed_in):
            return False
        return SpecifierSet(self.affected, prereleases=True).contains(known)

    def covers(self, asked: Asked) -> bool:
        """Whether a configuration may be one that the report speaks of."""
        for axis, levels in self.when.items():
            possible = asked.levels.get(axis)
            if possible is not None and not any(level in levels for level in possible):
                return False
        for field, (modulus, remainder) in self.residues.items():
            value = getattr(asked.config, field)
            if value is not UNSET and value % modulus != remainder:
                return False
        return not self.head_dims_v or asked.dim_v is None or asked.dim_v in self.head_dims_v

    def shown_by(self, case: Case) -> bool:
        """Whether a case ran under the hazard that would show the defect."""
        return all(getattr(case, name, None) == value for name, value in self.hazard.items())


def directory() -> Path:
    """Return where the advisories are."""
    from attnprobe.select.loading import published

    return published() / "advisories"


def read(place: Path | None = None) -> tuple[Advisory, ...]:
    """Return all advisories, sorted by id.

    Raises:
        UsageError: a file that is no advisory.
    """
    files = sorted((place or directory()).glob("*.json"))
    return tuple(sorted((_read(file) for file in files), key=lambda one: one.id))


_DECODER: Final = msgspec.json.Decoder(Advisory)


def _read(file: Path) -> Advisory:
    try:
        return _DECODER.decode(file.read_bytes())
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise UsageError(f"{file} is no advisory", why=str(error)) from None


def faults(one: Advisory) -> Iterator[str]:
    """Yield what keeps an advisory from being usable: ranges, axes and levels that do not exist."""
    yield from _range_faults(one)
    if not (one.device.sm or one.device.smem_below):
        yield "device: no condition"
    if not (one.verdict.fails or one.verdict is Verdict.REFUSED):
        yield f"verdict: {one.verdict.value} denies nothing"
    for axis, levels in one.when.items():
        if axis not in AXIS:
            yield f"when.{axis}: no such axis"
        elif not levels or not set(levels) <= set(AXIS[axis].levels):
            yield f"when.{axis}: {levels} are no levels of it"
    for field, (modulus, remainder) in one.residues.items():
        if field not in {"seqlen_q", "seqlen_kv"} or not 0 <= remainder < modulus:
            yield f"residues.{field}: no length, or no remainder"
    yield from _hazard_faults(one)


def _hazard_faults(one: Advisory) -> Iterator[str]:
    for name, level in one.hazard.items():
        axis = AXIS.get(name)
        if axis is None or not axis.hazard:
            yield f"hazard.{name}: no hazard; what a query states belongs in when"
        elif level not in axis.levels:
            yield f"hazard.{name}: {level} is no level of it"


def _range_faults(one: Advisory) -> Iterator[str]:
    from packaging.specifiers import InvalidSpecifier, SpecifierSet
    from packaging.version import InvalidVersion, Version

    try:
        if not str(SpecifierSet(one.affected)):
            yield "affected: no bound"
    except InvalidSpecifier as error:
        yield f"affected: {error}"
    try:
        if one.fixed_in:
            Version(one.fixed_in)
    except InvalidVersion as error:
        yield f"fixed_in: {error}"


def applying(
    every: Iterable[Advisory], devices: Iterable[DeviceRecord], version: str | None, backend: str
) -> tuple[Advisory, ...]:
    """Return the advisories about a backend that hold for these devices and this version."""
    known = tuple(devices)
    return tuple(
        one
        for one in every
        if backend in one.backends and any(map(one.device.holds, known)) and one.concerns(version)
    )
