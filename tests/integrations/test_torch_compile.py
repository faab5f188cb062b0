"""Under torch.compile: the kernel in the graph is the one that was decided, in memory and on disk."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import backward
from torch.nn.functional import scaled_dot_product_attention

from attnprobe.config import AttentionConfig, Case, config_of
from attnprobe.integrations.guard import Guard
from attnprobe.integrations.torch import attention, backends
from attnprobe.matrix.schema import Matrix
from attnprobe.matrix.store import encode
from attnprobe.select.selector import Selector

ALL = {"pass": ("forward", "backward")}
DENIED = {"torch-flash": ALL}
STATED = config_of(Case(heads=2, heads_kv=2, seqlen_q=16, seqlen_kv=16, head_dim=8, head_dim_v=8))
Make = Callable[..., Selector]
Kernels = Callable[[Callable[[], Any]], str]


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a function in one graph; how a graph is lowered does not matter to what is in it."""
    made: Callable[..., Tensor] = torch.compile(function, fullgraph=True, backend="aot_eager")
    return made


def leaf(length: int = 16) -> Tensor:
    return torch.randn(1, 2, length, 8, requires_grad=True)


def guarded(x: Tensor, guard: Guard, where: str = "", **options: Any) -> Tensor:
    y = x * 2
    return attention(y, y, y, guard=guard, where=where, **options).sum()


def graphs() -> int:
    count: int = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    return count


def test_another_guard_is_another_graph(selector_of: Make, kernels: Kernels) -> None:
    allowing, denying = Guard(selector_of()), Guard(selector_of(DENIED))
    function, x = compiled(guarded), leaf()
    before = graphs()
    for guard, kernel in ((allowing, "flash"), (denying, "math"), (allowing, "flash"), (denying, "math")):
        assert kernels(lambda: backward(function(x, guard))) == kernel  # noqa: B023  # called at once
    assert graphs() - before == 2
    allowing.selector = denying.selector  # a guard that changed its mind
    assert kernels(lambda: backward(function(x, allowing))) == "math"
    allowing.mode = "observe"
    assert kernels(lambda: backward(function(x, allowing))) == "flash"


def test_a_length_of_its_own_is_decided_on_its_own(selector_of: Make, kernels: Kernels) -> None:
    """Where torch would make one graph for all lengths, what is denied for some is not run for them."""
    guard = Guard(selector_of({"torch-flash": {"seqlen_q": ("x32",)}}))
    function = compiled(guarded)
    for length in (16, 20, 24, 32, 96, 28):
        kernel = "math" if length % 32 == 0 else "flash"
        assert kernels(lambda: backward(function(leaf(length), guard))) == kernel, length  # noqa: B023  # called at once


def test_options_that_change_are_decided_on_their_own(selector_of: Make, kernels: Kernels) -> None:
    denied = {"scale": ("custom",)}
    guard = Guard(selector_of({"torch-flash": denied}))
    function, x = compiled(guarded), leaf()
    for scale, kernel in ((None, "flash"), (0.5, "math"), (0.25, "math"), (8**-0.5, "flash")):
        assert kernels(lambda: backward(function(x, guard, scale=scale))) == kernel, scale  # noqa: B023  # called at once
    for grown, kernel in ((x, "flash"), (x.detach(), "flash")):
        assert kernels(lambda: function(grown, guard)) == kernel  # noqa: B023  # called at once
    forward = Guard(selector_of({"torch-flash": {"pass": ("forward",)}}))
    assert kernels(lambda: backward(function(x, forward))) == "flash"
    assert kernels(lambda: function(x.detach(), forward)) == "math"


def test_layers_share_a_graph_unless_their_names_are_written(selector_of: Make, tmp_path: Path) -> None:
    for guard, expected in (
        (Guard(selector_of(DENIED)), 1),
        (Guard(selector_of(DENIED), "observe", log=tmp_path / "log"), 3),
    ):
        torch._dynamo.reset()
        before = graphs()
        function = compiled(guarded)
        for layer in range(3):
            function(leaf(), guard, where=f"layer {layer}")
        assert graphs() - before == expected
    written = [json.loads(line)["where"] for line in (tmp_path / "log").read_text().splitlines()]
    assert written == ["layer 0", "layer 1", "layer 2"]


def test_what_nothing_may_run_is_refused_while_compiling(selector_of: Make) -> None:
    guard = Guard(selector_of(), "gate")
    with pytest.raises(Exception, match="no attention backend may run this call"):
        compiled(guarded)(leaf(), guard)


def test_what_is_compiled_in_a_block_stays_in_it(selector_of: Make, kernels: Kernels) -> None:
    def plain(x: Tensor) -> Tensor:
        y = x * 2
        return scaled_dot_product_attention(y, y, y).sum()

    function, x = compiled(plain), leaf()
    allowing, denying = Guard(selector_of({"torch-math": ALL})), Guard(selector_of(DENIED))
    for _ in range(2):
        assert kernels(lambda: backward(function(x))) == "flash"
        for guard, kernel in ((denying, "math"), (allowing, "flash")):
            with backends(guard, STATED):
                assert kernels(lambda: backward(function(x))) == kernel


SCRIPT = '''
"""Run one function behind a guard and one in a block; say which kernels ran and which caches were warm."""
import json, sys
import msgspec, torch
from torch._dynamo.utils import counters
from torch.profiler import ProfilerActivity, profile
import attnprobe
from attnprobe.integrations.guard import Guard
from attnprobe.integrations.torch import attention, backends

guard = Guard(attnprobe.load(sys.argv[1], assume_device=True))
config = msgspec.json.decode(sys.argv[2], type=attnprobe.AttentionConfig)

@torch.compile(fullgraph=True)
def guarded(x):
    y = x * 2
    return attention(y, y, y, guard=guard).sum()

@torch.compile(fullgraph=True)
def plain(x):
    y = x * 3
    return torch.nn.functional.scaled_dot_product_attention(y, y, y).sum()

def kernels(function):
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        function(torch.randn(1, 2, 16, 8, requires_grad=True)).backward()
    return sorted({e.key for e in seen.key_averages() if e.key.startswith("aten::_scaled")})

def in_block(x):
    with backends(guard, config):
        return plain(x)

said = {"guarded": kernels(guarded), "block": kernels(in_block)}
said["hits"] = {**counters["inductor"], **counters["aot_autograd"]}
print("said:" + json.dumps(said))
'''


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_warm_cache_of_another_process_and_matrix(matrix_of: Callable[..., Matrix], tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    files = {"allowing": matrix_of(), "denying": matrix_of(DENIED)}
    for name, matrix in files.items():
        (tmp_path / f"{name}.json").write_bytes(encode(matrix))
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache"),
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
    }

    def said(matrix: str) -> dict[str, Any]:
        done = subprocess.run(
            [sys.executable, "script.py", f"{matrix}.json", _json(STATED)],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        (line,) = (line for line in done.stdout.splitlines() if line.startswith("said:"))
        found: dict[str, Any] = json.loads(line.removeprefix("said:"))
        return found

    flash = "aten::_scaled_dot_product_flash_attention_for_cpu"
    fused = [flash, f"{flash}_backward"]
    first = said("allowing")
    assert first["guarded"] == first["block"] == fused
    assert not first["hits"].get("autograd_cache_hit")
    second = said("denying")
    assert second["guarded"] == second["block"] == ["aten::_scaled_dot_product_attention_math"]
    third = said("allowing")
    assert third["guarded"] == third["block"] == fused
    # The cache was warm: the graphs of the first process were served, to the same decision.
    assert third["hits"]["fxgraph_cache_hit"]
    assert third["hits"]["autograd_cache_hit"]


def _json(config: AttentionConfig) -> str:
    import msgspec

    return msgspec.json.encode(config).decode()
