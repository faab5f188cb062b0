"""`attnprobe advisories`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from attnprobe.cli._config import matrix_option
from attnprobe.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from attnprobe.matrix.schema import DeviceRecord
    from attnprobe.select.advisories import Advisory


@click.command("advisories")
@matrix_option
@click.option("--all", "every", is_flag=True, help="List all, whether they apply or not.")
@click.option("--format", type=click.Choice(["text", "json"]), default="text", show_default=True)
@click.option(
    "--fail-on",
    type=click.Choice(["never", "any"]),
    default="never",
    show_default=True,
    help="Exit 1 if one applies.",
)
def command(*, file: Path | None, assume_device: bool, every: bool, format: str, fail_on: str) -> int:
    """List public reports of failing kernels that apply to this machine; nothing is run.

    An advisory applies where its library is installed in an affected version and a device meets its
    condition. With -m FILE --assume-device: on the device and builds of the matrix.
    """
    from attnprobe.select.advisories import read

    known = read()
    devices, version = _stack(file, assume_device=assume_device)
    applying = [one for one in known if _applies(one, devices, version)]
    shown = known if every else applying
    if format == "json":
        import msgspec

        content = msgspec.json.encode(
            [{**msgspec.to_builtins(one), "applies": one in applying} for one in shown], order="deterministic"
        )
        click.echo(msgspec.json.format(content, indent=2).decode())
    else:
        for one in shown:
            _print(one, version(one.library), applies=one in applying)
        click.echo(f"{len(applying)} of {len(known)} advisories apply to {_names(devices)}", err=True)
    return 1 if applying and fail_on == "any" else 0


def _stack(
    file: Path | None, *, assume_device: bool
) -> tuple[Sequence[DeviceRecord], Callable[[str], str | None]]:
    """Return the devices and the versions to ask about."""
    if assume_device:
        from attnprobe.matrix.store import newest_matrix, read_matrix

        matrix = read_matrix(file or newest_matrix())
        versions = {m.name: m.version for b in matrix.backends for m in b.materials}
        return matrix.devices, versions.get
    if file is not None:
        raise UsageError("-m FILE asks about the machine of a matrix", fix="add --assume-device")
    from attnprobe.select.match import here

    live = here()

    def version(library: str) -> str | None:
        found = live.material(library)
        return None if found is None else found.version

    return live.devices, version


def _applies(one: Advisory, devices: Sequence[DeviceRecord], version: Callable[[str], str | None]) -> bool:
    found = version(one.library)
    return found is not None and any(map(one.device.holds, devices)) and one.concerns(found)


def _print(one: Advisory, version: str | None, *, applies: bool) -> None:
    from attnprobe.select.explain import condition_words

    click.echo(f"{one.id}  {'applies' if applies else 'does not apply'}")
    click.echo(f"  {one.title}")
    here = f", here {version}" if version else ", not installed"
    fixed = f", fixed in {one.fixed_in}" if one.fixed_in else ""
    click.echo(f"  {', '.join(one.backends)}: {one.library} {one.affected}{fixed}{here}")
    facts: list[Any] = [f"SM {' or '.join(one.device.sm)}"] if one.device.sm else []
    facts += [f"under {one.device.smem_below} B of shared memory a block"] if one.device.smem_below else []
    happens = " ".join([one.verdict.value, ", ".join(one.outputs)]).rstrip()
    click.echo(f"  {', '.join(facts)}; {condition_words(one.when)}: {happens}")
    click.echo(f"  {one.link}  checked {one.checked}")
    if one.note:
        click.echo(f"  {one.note}")


def _names(devices: Sequence[DeviceRecord]) -> str:
    return " and ".join(device.name for device in devices) or "no device"
