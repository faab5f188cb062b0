"""Memory that nobody has written shows the fill: asked in a process started as a worker is."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from typing import Any, Final

import pytest
import torch

from attnprobe.probe.poison import ENVIRONMENT, FINITE_FILL, NAN_FILL, Poison

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the fill is glibc's")

SIZES: Final = (1, 8, 64, 100, 1_000, 4_096, 100_000, 5_000_000)
FILLS: Final = (NAN_FILL, FINITE_FILL, NAN_FILL)

SCRIPT: Final = """
import json, sys
import torch
from attnprobe.probe.poison import Poison

sizes, fills = json.loads(sys.argv[1])
torch.utils.deterministic.fill_uninitialized_memory = False
poison = Poison()
found = []
for fill in fills:
    for size in sizes:
        # Blocks of this size that were used and freed come back first.
        for byte in (0, 7):
            used = [torch.full((size,), byte, dtype=torch.uint8) for _ in range(4)]
            del used
        poison.fill(fill)
        tensors = [torch.empty(size, dtype=torch.uint8) for _ in range(6)]
        tensors.append(torch.empty_like(tensors[0]))
        tensors.append(tensors[0].new_empty(size))
        poison.stop()
        found += [[fill, size, int((t != fill).sum())] for t in tensors]
poison.fill(fills[0])
zeros = [bool(torch.zeros(size, dtype=torch.uint8).any()) for size in sizes]
poison.stop()
print(json.dumps({"covers": poison.covers, "found": found, "zeros": zeros}))
"""


def answer(environment: dict[str, str]) -> Any:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, json.dumps([SIZES, FILLS])],
        env={**os.environ, **environment, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return json.loads(done.stdout)


def test_empty_tensors_of_every_size_hold_the_fill() -> None:
    said = answer(ENVIRONMENT)
    assert len(said["found"]) == len(SIZES) * len(FILLS) * 8
    assert [one for one in said["found"] if one[2]] == []
    assert said["zeros"] == [False] * len(SIZES)
    assert "malloc" in said["covers"]


def test_the_environment_is_needed_for_small_blocks() -> None:
    missed = [one for one in answer({"GLIBC_TUNABLES": ""})["found"] if one[2]]
    assert missed
    assert all(size <= 4_096 for _, size, _ in missed)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_one_fill_is_nan_and_the_other_an_ordinary_number(dtype: torch.dtype) -> None:
    def value(byte: int) -> float:
        return float(torch.full((16,), byte, dtype=torch.uint8).view(dtype)[0])

    assert value(NAN_FILL) != value(NAN_FILL)
    assert 1 < value(FINITE_FILL) < 1e12


def test_large_blocks_are_filled_here_too_and_left_alone_after() -> None:
    poison = Poison()
    size = 3_000_000
    poison.fill(FINITE_FILL)
    try:
        filled = torch.empty(size, dtype=torch.uint8)
    finally:
        poison.stop()
    assert bool((filled == FINITE_FILL).all())
    del filled
    assert not bool((torch.empty(64 << 20, dtype=torch.uint8)[: 1 << 20] == FINITE_FILL).all())
