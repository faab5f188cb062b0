"""`attnprobe doctor`."""

from __future__ import annotations

import platform
import shutil
from typing import Any

import click

from attnprobe.errors import AttnprobeError


@click.command("doctor")
@click.option(
    "--format",
    type=click.Choice(["text", "json"]),
    default="text",
    show_default=True,
)
def command(format: str) -> int:
    """Say what a scan would run on and what is missing.

    Exits 3 where nothing can be probed.
    """
    found = examine()
    if format == "json":
        import msgspec

        content = msgspec.json.encode(found, order="deterministic")
        click.echo(msgspec.json.format(content, indent=2).decode())
    else:
        for line in _lines(found):
            click.echo(line)
    return 0 if found["can_scan"] else 3


def examine() -> dict[str, Any]:
    """Return what is here, as plain values."""
    import msgspec

    import attnprobe
    from attnprobe.cli.device import look
    from attnprobe.device.cpu import cpu_device
    from attnprobe.device.gpus import storable
    from attnprobe.matrix.store import data_directory
    from attnprobe.run.supervisor import Supervisor

    device = cpu_device()
    gpus = look()
    found: dict[str, Any] = {
        "attnprobe": attnprobe.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "devices": [msgspec.to_builtins(device.record)],
        "gpus": msgspec.to_builtins(storable(gpus)),
        "backends": [],
        "missing": [],
        "poison": "",
        "guard": "",
        "compiler": shutil.which("c++") is not None or shutil.which("g++") is not None,
        "matrices": sorted(path.name for path in data_directory().glob("*.json")),
        "can_scan": False,
    }
    if not found["compiler"]:
        found["missing"].append("a C++ compiler: flex-attention cannot compile its kernels")
    try:
        with Supervisor(device.torch_name, (), 60.0) as supervisor:
            for one in supervisor.controlled():
                entry = {"name": one.name, "status": "absent" if one.reason else "present"}
                if one.reason:
                    entry["reason"] = one.reason
                entry["materials"] = msgspec.to_builtins(one.materials)
                found["backends"].append(entry)
            assert supervisor.described is not None
            found["poison"] = supervisor.described.poison
            found["guard"] = supervisor.described.guard
    except AttnprobeError as error:
        found["missing"].append(f"{error.what}: {error.why}" + (f" ({error.fix})" if error.fix else ""))
    found["can_scan"] = any(entry["status"] == "present" for entry in found["backends"])
    return found


def _lines(found: dict[str, Any]) -> list[str]:
    lines = [
        f"attnprobe {found['attnprobe']}, Python {found['python']}, {found['system']}",
        *(f"device: {d['name']} ({d['kind']}, {d.get('cores', 0)} cores)" for d in found["devices"]),
        *_gpu_lines(found["gpus"]),
    ]
    for one in found["backends"]:
        versions = ", ".join(f"{m['name']} {m['version']}" for m in one["materials"])
        said = f"not here: {one['reason']}" if "reason" in one else versions
        lines.append(f"  {one['name']:16} {said}")
    if found["poison"]:
        lines.append(f"poisoned before each run: {found['poison']}")
        lines.append(f"accesses outside tensors show for: {found['guard']}")
    lines.append(f"own matrices: {', '.join(found['matrices']) or 'none yet'}")
    lines += [f"missing: {what}" for what in found["missing"]]
    lines.append("ready: attnprobe scan" if found["can_scan"] else "cannot scan yet")
    return lines


def _gpu_lines(gpus: dict[str, Any]) -> list[str]:
    """Return a line for each GPU that CUDA shows, the notes, and a line if none can be probed."""
    lines = []
    for gpu in gpus.get("gpus", ()):
        if "ordinal" in gpu:
            optin = gpu.get("smem_per_block_optin", "unknown")
            lines.append(f"GPU {gpu['ordinal']}: {gpu['name']} (SM {gpu['sm']}, {optin} B a block)")
    lines += [f"GPU note: {note}" for note in gpus.get("notes", ())]
    if trouble := gpus.get("trouble"):
        parts = [trouble["what"], trouble.get("why", "")]
        lines.append(f"GPU: not usable: {': '.join(part for part in parts if part)}")
    return lines
