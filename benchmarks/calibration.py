"""How near healthy backends come to the tolerance: the worst error over tolerance per dtype and output.

    python benchmarks/calibration.py [--level quick] [--seeds 3] [--backend NAME ...]

Runs the cases of a level in this process on backends known to be right, and prints for each dtype, output
and length the largest ratio of error to tolerance: against the reference, and, where its tolerance is
coarse, against the weights of the backend's own forward. 1 would be an accusation.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from typing import Any

import torch
from msgspec import structs

from attnprobe.backends.registry import choose
from attnprobe.config import Case
from attnprobe.device.cpu import cpu_device
from attnprobe.probe.dropout import reference_with_its_mask
from attnprobe.probe.inputs import make
from attnprobe.probe.judge import expected_outputs
from attnprobe.probe.own_forward import gradients, weights
from attnprobe.probe.plan import plan
from attnprobe.probe.reference import Reference, dense, reference
from attnprobe.probe.trial import as_in_a_job

CPU = torch.device("cpu")
HEALTHY = ("torch-math", "torch-flash", "torch-default")
Worst = dict[tuple[str, str, str, str], tuple[float, str]]


def main() -> int:
    """Run and print."""
    parser = argparse.ArgumentParser(description="worst error over tolerance of healthy backends")
    parser.add_argument("--level", default="quick")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--backend", action="append")
    asked = parser.parse_args()
    backends, _ = choose(tuple(asked.backend or HEALTHY), cpu_device())
    worst: Worst = {}
    count = 0
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    for seed in range(asked.seeds):
        for case in plan(asked.level, seed).cases:
            # Rows masked whole have no right answer; torch's flash is known to be wrong in their gradients.
            if case.masked_rows == "none" and 0 not in {case.seqlen_q, case.seqlen_kv}:
                count += one(structs.replace(case, earlier="nothing"), backends, worst)
    print(f"{count} results of {', '.join(backends)}; level {asked.level}, {asked.seeds} seeds")
    print(f"{'against':10} {'dtype':9} {'output':6} {'longest':>8}  worst ratio")
    for key in sorted(worst):
        against, dtype, name, length = key
        ratio, where = worst[key]
        print(f"{against:10} {dtype:9} {name:6} {length:>8}  {ratio:.2f}  {where}")
    return 0


def one(case: Case, backends: dict[str, Any], worst: Worst) -> int:
    """Note the ratios of one case; return how many backends ran it."""
    tensors = make(case, CPU)
    ran, known = 0, None
    for name, backend in backends.items():
        if backend.declares(case, cpu_device()) is not None:
            continue
        try:
            with as_in_a_job(case, CPU, torch.get_num_threads()):
                run = backend.run(case, tensors)
        except Exception:  # noqa: BLE001, S112  # a refusal, in whatever form
            continue
        if case.dropout:
            expected = reference_with_its_mask(case, tensors, backend)
        else:
            expected = known = known or reference(case, tensors)
        if expected is None or expected.dead is not None:
            continue
        ran += 1
        names = list(expected_outputs(case, tensors))
        got = {
            n: dense(run[n], tensors.lengths_q if n in {"out", "dq"} else tensors.lengths_kv) for n in names
        }
        note(worst, "reference", case, name, got, expected.expected, expected.tolerance)
        if expected.is_weak(names) and not case.dropout:
            by_own_forward(worst, case, name, tensors, backend, got, expected)
    return ran


def by_own_forward(  # noqa: PLR0913, PLR0917  # what one comparison needs
    worst: Worst,
    case: Case,
    name: str,
    tensors: Any,
    backend: Any,
    got: dict[str, torch.Tensor],
    expected: Reference,
) -> None:
    """Note the ratios against the weights of the backend's own forward."""
    p = weights(case, tensors, backend)
    if p is not None:
        wanted, tolerance = gradients(p, expected, dead_to_scores=True)
        grads = {n: value for n, value in got.items() if n != "out"}
        note(worst, "own", case, name, grads, wanted, tolerance)


def note(  # noqa: PLR0913, PLR0917  # what one comparison needs
    worst: Worst,
    against: str,
    case: Case,
    name: str,
    got: dict[str, torch.Tensor],
    wanted: dict[str, torch.Tensor],
    tolerance: dict[str, torch.Tensor],
) -> None:
    """Keep the worst ratio of each output, with the case it is from."""
    longest = max(case.seqlen_q, case.seqlen_kv)
    length = next(
        text for limit, text in ((64, "to 64"), (256, "to 256"), (1 << 31, "more")) if longest <= limit
    )
    for output, value in got.items():
        if not value.numel():
            continue
        ratio = float(((value.double() - wanted[output]).abs() / tolerance[output]).max())
        key = (against, case.dtype, output, length)
        if not ratio <= worst.get(key, (0.0, ""))[0]:
            worst[key] = (
                ratio,
                f"{name} {case.id} data={case.data} grad_out={case.grad_out} D={case.head_dim}",
            )


if __name__ == "__main__":
    sys.exit(main())
