"""What two common practices find of the faulty functions: the peers of `detection.py`, which runs this.

    python benchmarks/detection_peers.py MODULE.py NAME...

prints, as JSON, for each function whether it was caught, and where. `allclose`: forward and backward on
Gaussian data over a grid of usual shapes, compared with eager attention in float32 at the default tolerances
of `torch.testing.assert_close`. `nan`: memory filled with NaN before the call, any NaN left in dq, dk, dv.
"""

from __future__ import annotations

import functools
import importlib.util
import itertools
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, Final

import torch

from attnprobe.probe.poison import NAN_FILL, Poison

LIMIT: Final = 300.0
DEADLY_LIMIT: Final = 15.0
"""Seconds for one function over the whole grid, and for one that is expected not to come back."""
BATCH: Final = 2
HEADS: Final = 2
Results = dict[str, torch.Tensor]


def grid() -> Iterator[tuple[int, int, torch.dtype, bool]]:
    """Yield length, head dim, type and causal."""
    types = (torch.float32, torch.bfloat16, torch.float16)
    sizes = ((128, 64), (128, 128), (512, 64), (512, 128))
    for (length, dim), dtype, causal in itertools.product(sizes, types, (False, True)):
        yield length, dim, dtype, causal


def call(
    attention: Callable[..., Any], length: int, dim: int, dtype: torch.dtype, *, causal: bool
) -> Results:
    """Return out and gradients of one shape on Gaussian data."""
    generator = torch.Generator().manual_seed(0)
    shape = (BATCH, HEADS, length, dim)
    values = [torch.randn(shape, generator=generator).to(dtype) for _ in range(4)]
    q, k, v = (value.requires_grad_() for value in values[:3])
    out = attention(q, k, v, is_causal=causal)
    grads = torch.autograd.grad(out, (q, k, v), values[3])
    return {"out": out.detach()} | dict(zip(("dq", "dk", "dv"), grads, strict=True))


def eager(q: Any, k: Any, v: Any, *, is_causal: bool) -> Any:
    """Return attention in float32, whatever the inputs are."""
    scores = q.float() @ k.float().mT / q.shape[-1] ** 0.5
    if is_causal:
        scores = scores.masked_fill(~torch.ones(scores.shape[-2:], dtype=torch.bool).tril(), float("-inf"))
    return torch.softmax(scores, -1) @ v.float()


def differs(got: Results, wanted: Results) -> bool:
    """Whether any result is further off than assert_close lets it be."""
    try:
        for name, value in got.items():
            torch.testing.assert_close(value, wanted[name].to(value.dtype))
    except AssertionError:
        return True
    return False


def expected() -> dict[Any, Results]:
    """Return what eager attention in float32 gives at every point of the grid."""

    def attention(q: Any, k: Any, v: Any, *, is_causal: bool) -> Any:
        return eager(q, k, v, is_causal=is_causal).to(q.dtype)

    return {point: call(attention, *point[:3], causal=point[3]) for point in grid()}


def judged(attention: Callable[..., Any], wanted: dict[Any, Results], poison: Poison) -> dict[str, list[str]]:
    """Return at which points each practice objects."""
    found: dict[str, list[str]] = {"allclose": [], "nan": []}
    for point in grid():
        length, dim, dtype, causal = point
        poison.fill(NAN_FILL)
        try:
            got = call(attention, length, dim, dtype, causal=causal)
        except Exception:  # noqa: BLE001, S112  # a refusal catches nothing
            continue
        finally:
            poison.stop()
        where = f"S {length}, D {dim}, {str(dtype).removeprefix('torch.')}{', causal' if causal else ''}"
        if differs(got, wanted[point]):
            found["allclose"].append(where)
        if any(bool(got[name].isnan().any()) for name in ("dq", "dk", "dv")):
            found["nan"].append(where)
    return found


def alone(work: Callable[[], Any], limit: float) -> Any:
    """Return what a forked child computes, or how it ended."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.setsid()
        null = os.open(os.devnull, os.O_RDWR)
        os.dup2(null, 1)
        os.dup2(null, 2)
        answer = json.dumps(work()).encode()
        os.write(writing, answer)
        os._exit(0)
    os.close(writing)
    deadline = time.monotonic() + limit
    while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0) and time.monotonic() < deadline:
        time.sleep(0.01)
    with suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    if ended == (0, 0):
        os.waitpid(child, 0)
    os.set_blocking(reading, False)
    try:
        said = os.read(reading, 1 << 16)
    except BlockingIOError:
        said = b""  # a child of the child may hold the other end
    finally:
        os.close(reading)
    return json.loads(said) if said else None


def main(arguments: list[str]) -> int:
    """Judge each function in a process of its own and print what was found."""
    torch.set_num_threads(1)
    spec = importlib.util.spec_from_file_location("functions", arguments[0])
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    wanted, poison = expected(), Poison()
    found = {}
    for name in arguments[1:]:
        deadly = name.startswith("deadly:")
        function = getattr(module, name.removeprefix("deadly:"))
        work = functools.partial(judged, function, wanted, poison)
        answer = alone(work, DEADLY_LIMIT if deadly else LIMIT)
        # A test that dies or hangs is a failed test, of both practices.
        found[name.removeprefix("deadly:")] = answer or {"allclose": ["died"], "nan": ["died"]}
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
