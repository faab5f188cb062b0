from __future__ import annotations

from attnprobe.device.cpu import _describe, cpu_device

AMD = "processor\t: 0\nmodel name\t: AMD EPYC 9R14\nflags\t\t: fpu avx2 avx512f amx_bf16\n\nprocessor\t: 1\n"
ARM = "processor\t: 0\nFeatures\t: fp asimd bf16 sve\n"


def test_name_and_flags_are_read_from_cpuinfo() -> None:
    assert _describe(AMD) == ("AMD EPYC 9R14", frozenset({"fpu", "avx2", "avx512f", "amx_bf16"}))
    assert _describe(ARM) == ("", frozenset({"fp", "asimd", "bf16", "sve"}))
    assert _describe("") == ("", frozenset())


def test_this_cpu_has_a_name_cores_and_a_file_name() -> None:
    device = cpu_device()
    assert device.record.kind == "cpu"
    assert device.record.name
    assert device.record.cores >= 1
    assert device.slug
    assert set(device.slug) <= set("abcdefghijklmnopqrstuvwxyz0123456789-")
