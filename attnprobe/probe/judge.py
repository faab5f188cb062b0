"""From the runs of one backend on one case to a verdict. Pure: tensors in, `Judgement` out.

The runs differ in what memory held before and in what lies around the tensors (see `memory`). Checks, in
order of what a later one would misread without an earlier one:

1. contract: every output there, with the right shape, dtype and device, inputs unchanged;
2. bounds: nothing read or written outside a tensor;
3. memory: bits that differ between fills, though a fill repeats them, were never written, or were
   computed from memory that was not (a NaN that is the right answer hides neither);
4. values: finite where the reference is, and within its tolerance;
5. where that tolerance is coarse, gradients against the backend's own forward.

A row whose keys are all hidden has no right answer. What the backend made of it is recorded as a trait,
and the gradients must follow from that choice.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from msgspec import to_builtins

from attnprobe.probe.memory import agree, compare, same_bits
from attnprobe.probe.own_forward import gradients
from attnprobe.probe.reference import dense, is_weak
from attnprobe.probe.region import describe, size
from attnprobe.verdict import Verdict

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor

    from attnprobe.backends.interface import Outputs
    from attnprobe.config import Case
    from attnprobe.probe.inputs import Tensors
    from attnprobe.probe.memory import Breach, Memory, Run
    from attnprobe.probe.reference import Reference

Exempt = dict[str, "Tensor"]


@dataclass
class Judgement:
    """A verdict, the outputs it concerns, what was seen, and the semantic choices met on the way."""

    verdict: Verdict
    outputs: tuple[str, ...] = ()
    detail: dict[str, Any] = field(default_factory=dict)
    traits: dict[str, str] = field(default_factory=dict)


def judge(
    case: Case,
    tensors: Tensors,
    runs: Sequence[Run],
    expected: Reference | None,
    own: Callable[[], Tensor | None] = lambda: None,
) -> Judgement:
    """Return the verdict on the runs of a `trial.Trial`.

    Without `expected` values are not judged (the reference could not be had), and the best verdict is
    `inconclusive`. `own` returns the weights of the backend's own forward, asked for where the reference
    is too coarse to tell a wrong gradient; None where they cannot be had.
    """
    memory = None
    found = _by_contract(case, tensors, runs)
    if found is None:
        memory = compare(runs)
        found = _by_memory(case, runs, memory) or _by_dropout(expected)
    if found is None:
        assert expected is not None
        found = _values(case, tensors, runs[0].outputs, expected, own)
    if memory is not None and memory.unsteady and not memory.unwritten:
        found.detail["repeat"] = memory.unsteady
    return found


def _by_contract(case: Case, tensors: Tensors, runs: Sequence[Run]) -> Judgement | None:
    broken = next((faults for run in runs if (faults := _contract(case, tensors, run.outputs))), {})
    return Judgement(Verdict.WRONG, tuple(broken), {"contract": broken}) if broken else None


def _by_memory(case: Case, runs: Sequence[Run], memory: Memory) -> Judgement | None:
    """Return the verdict on accesses outside, memory nobody wrote, and runs that do not repeat."""
    bounds = _bounds(runs, memory)
    if bounds:
        return Judgement(Verdict.OUT_OF_BOUNDS, tuple(memory.outside), bounds)
    if memory.unwritten:
        return Judgement(Verdict.UNWRITTEN, tuple(memory.unwritten), {"memory": memory.unwritten})
    if memory.unsteady and case.deterministic:
        load = "beside other threads that keep the machine busy"
        detail = {"only": load} if agree(runs[0].outputs, runs[1].outputs) else {}
        return Judgement(Verdict.NONDETERMINISTIC, tuple(memory.unsteady), detail)
    if memory.unsteady and case.dropout:
        return Judgement(Verdict.INCONCLUSIVE, (), {"values": "its dropout mask does not repeat"})
    return None


def _by_dropout(expected: Reference | None) -> Judgement | None:
    """Return the verdict where there is no reference, or where the mask of dropout itself is amiss."""
    if expected is None:
        return Judgement(Verdict.INCONCLUSIVE, (), {"values": "no reference"})
    if expected.dropout is None:
        return None
    return Judgement(Verdict.WRONG, ("out",), {"dropout": dict(expected.dropout)})


def _bounds(runs: Sequence[Run], memory: Memory) -> dict[str, Any]:
    """Return what is known of accesses outside the tensors: where, and which results they reached."""
    seen: dict[tuple[str, str], Breach] = {}
    for breach in (breach for run in runs for breach in run.breaches):
        key = (breach.where, breach.access)
        if key not in seen or abs(breach.offset) < abs(seen[key].offset):
            seen[key] = breach
    bounds: dict[str, Any] = {}
    if seen:
        bounds["bounds"] = [to_builtins(seen[key]) for key in sorted(seen)]
    if memory.outside:
        bounds["memory"] = memory.outside
    return bounds


def input_bits(tensors: Tensors) -> list[Tensor]:
    """Return copies of all inputs, to compare after a run."""
    given = (tensors.q, tensors.k, tensors.v, tensors.mask, tensors.grad_out)
    return [tensor.detach().clone() for tensor in given if tensor is not None]


def inputs_changed(tensors: Tensors, before: Sequence[Tensor]) -> list[str]:
    """Return the names of the inputs whose bits are not those of `before`."""
    names = ("q", "k", "v", "mask", "grad_out")
    given = [(n, t) for n in names if (t := getattr(tensors, n)) is not None]
    return [n for (n, t), b in zip(given, before, strict=True) if not same_bits(t.detach(), b)]


def expected_outputs(case: Case, tensors: Tensors) -> dict[str, Tensor]:
    """Return which outputs a run must give, each with a tensor of its shape, dtype and device."""
    grads = tensors.wanting(case.needs_grad) if case.pass_ == "backward" else {}
    return {"out": tensors.grad_out, **grads}


def _contract(case: Case, tensors: Tensors, run: Outputs) -> dict[str, str]:
    """Return what is amiss with each output: absent, or of another shape, dtype or device."""
    broken = {}
    for name, like in expected_outputs(case, tensors).items():
        got = run.get(name)
        if got is None:
            broken[name] = "not returned"
        elif got.shape != like.shape:
            broken[name] = f"shape {tuple(got.shape)}, not {tuple(like.shape)}"
        elif got.dtype is not like.dtype:
            broken[name] = f"dtype {got.dtype}, not {like.dtype}"
        elif got.device != like.device:
            broken[name] = f"on {got.device}, not {like.device}"
    return broken


def _values(
    case: Case, tensors: Tensors, run: Outputs, expected: Reference, own: Callable[[], Tensor | None]
) -> Judgement:
    """Return the verdict on one run's values against the reference, and against its own forward."""
    names, traits = list(expected_outputs(case, tensors)), {}
    if case.seqlen_kv == 0 and "dq" in names:
        # Without a key there is nothing to differentiate: whatever comes is a choice.
        traits = {"gradient of q without keys": "nan" if bool(run["dq"].isnan().any()) else "zeros"}
        names.remove("dq")
    found = _named_values(names, case, tensors, run, expected, own)
    found.traits.update(traits)
    return found


def _named_values(  # noqa: PLR0913, PLR0917  # one comparison
    names: list[str],
    case: Case,
    tensors: Tensors,
    run: Outputs,
    expected: Reference,
    own: Callable[[], Tensor | None],
) -> Judgement:
    if tensors.lengths_q is None and _all_within(names, run, expected):
        dead = None if expected.dead is None else expected.dead.expand(*run["out"].shape[:3], 1)
        if dead is None:
            found = _by_own_forward(names, run, expected, own, weak=expected.is_weak(names))
            return found or Judgement(Verdict.OK)
        if not bool((run["out"] * dead).any()):
            found = _by_own_forward(names, run, expected, own, weak=expected.is_weak(names))
            return _with_trait(case, found or Judgement(Verdict.OK), {"zeros": dead}, dead)
    got = {name: _dense(name, run[name], tensors).double() for name in names}
    if expected.dead is None:
        return _against(got, expected.expected, expected.tolerance, {})
    first = None
    weak = False
    for made_of in _classify(got["out"], expected):
        exempt = _exempt(made_of, got)
        weighs = bool(made_of.keys() & {"uniform", "softmax"})
        # A mask that was added passes the gradient on to the scores, one that replaced them does not.
        for to_scores in (True, False) if weighs else (True,):
            wanted, tolerance = expected.expected, expected.tolerance
            if weighs:
                extra, slack = expected.of_dead_rows(made_of, to_scores=to_scores)
                wanted = {name: wanted[name] + extra[name] for name in names}
                tolerance = {name: tolerance[name] + slack[name] for name in names}
            judged = _against(got, wanted, tolerance, exempt)
            first = first or (judged, made_of)
            if not judged.verdict.fails:
                break
        if not judged.verdict.fails:
            weak = not exempt and is_weak(wanted, tolerance, names)
            break
    else:
        assert first is not None
        judged, made_of = first
    found = _by_own_forward(names, run, expected, own, weak=weak) or judged
    return _with_trait(case, found, made_of, expected.dead.expand(*got["out"].shape[:3], 1))


def _by_own_forward(
    names: Sequence[str],
    run: Outputs,
    expected: Reference,
    own: Callable[[], Tensor | None],
    *,
    weak: bool,
) -> Judgement | None:
    """Return a failing verdict on gradients that do not follow from the backend's own forward, else None."""
    p = own() if weak else None
    if p is None or bool(p.isnan().any()):
        return None
    got = {name: run[name].double() for name in names if name != "out"}
    found = None
    for dead_to_scores in (True, False) if expected.dead is not None else (True,):
        wanted, tolerance = gradients(p, expected, dead_to_scores=dead_to_scores)
        judged = _against(got, wanted, tolerance, {})
        if not judged.verdict.fails:
            return None
        found = found or judged
    if found is not None:
        found.detail["against"] = "the weights of its own forward"
    return found


def _all_within(names: Sequence[str], run: Outputs, expected: Reference) -> bool:
    """Whether every element is within its tolerance, all outputs at once: most cases end here."""
    wanted, tolerance = expected.joined(tuple(names))
    joined = torch.cat([run[name].reshape(-1) for name in names]).double()
    beyond = joined.sub_(wanted).abs_().sub_(tolerance)
    return not beyond.numel() or bool(beyond.max() <= 0)  # the largest of a NaN is NaN


def _with_trait(case: Case, found: Judgement, made_of: dict[str, Tensor], dead: Tensor) -> Judgement:
    """Return a judgement with what was made of dead rows; no trait where out itself is wrong."""
    if "out" not in found.outputs and not case.dropout:
        found.traits[f"whole-masked rows, {_cause(case)}"] = _spelled(made_of, dead)
    return found


def _dense(name: str, tensor: Tensor, tensors: Tensors) -> Tensor:
    lengths = tensors.lengths_q if name in {"out", "dq"} else tensors.lengths_kv
    return dense(tensor, lengths)


def _cause(case: Case) -> str:
    if case.masked_rows != "none":
        return f"masked_rows={case.masked_rows}"
    return "seqlen_kv=0" if case.seqlen_kv == 0 else f"mask={case.mask}"


def _spelled(made_of: dict[str, Tensor], dead: Tensor) -> str:
    counts = {name: int((rows & dead).sum()) for name, rows in made_of.items()}
    seen = [name for name in ("zeros", "uniform", "softmax", "nan") if counts.get(name)]
    return " and ".join(seen) if seen else "none of zeros, NaN, uniform, softmax"


def _classify(out: Tensor, expected: Reference) -> list[dict[str, Tensor]]:
    """Return, for each thing a dead row may be made into, the rows that were, (B, H, S_q, 1) bool.

    Where values are alike a row may be within tolerance of the average and of the softmax both. Then there
    are two answers: such rows are of the kind that more rows fit, or of the other.
    """
    assert expected.dead is not None
    left = expected.dead.expand(*out.shape[:3], 1).clone()
    made_of: dict[str, Tensor] = {}
    for name, fits in (("nan", out.isnan()), ("zeros", out == 0)):
        rows = fits.all(-1, keepdim=True) & left
        if bool(rows.any()):
            made_of[name] = rows
            left.logical_and_(~rows)
    fitting = {}
    if bool(left.any()):
        for name in ("uniform", "softmax"):
            wanted, tolerance = expected.dead_out(name)
            rows = ((out - wanted).abs() <= tolerance).all(-1, keepdim=True) & left
            if bool(rows.any()):
                fitting[name] = rows
    order = sorted(fitting, key=lambda name: -int(fitting[name].sum()))
    if len(order) < 2 or not bool((fitting[order[0]] & fitting[order[1]]).any()):  # noqa: PLR2004  # of two
        return [made_of | fitting]
    answers = []
    for one, other in (order, order[::-1]):
        rest = fitting[other] & ~fitting[one]
        answers.append(made_of | {one: fitting[one]} | ({other: rest} if bool(rest.any()) else {}))
    return answers


def _against(
    got: dict[str, Tensor],
    wanted: Mapping[str, Tensor],
    tolerance: Mapping[str, Tensor],
    exempt: Exempt,
) -> Judgement:
    """Return the verdict on dense float64 results, leaving out the elements that `exempt` names."""
    nonfinite: dict[str, Any] = {}
    wrong: dict[str, Any] = {}
    for name, value in got.items():
        error = (value - wanted[name]).abs_()
        beyond = ~(error <= tolerance[name])
        if name in exempt:
            beyond &= ~exempt[name]
        if not bool(beyond.any()):
            continue
        infinite = beyond & ~value.isfinite()
        if bool(infinite.any()):
            nonfinite[name] = describe(infinite)
        else:
            wrong[name] = {
                **describe(beyond),
                **size(value, wanted[name], error, tolerance[name], beyond),
            }
    if nonfinite:
        detail: dict[str, Any] = {"nonfinite": nonfinite}
        if wrong:
            detail["wrong"] = wrong
        return Judgement(Verdict.NONFINITE, tuple(nonfinite) + tuple(wrong), detail)
    if wrong:
        return Judgement(Verdict.WRONG, tuple(wrong), {"wrong": wrong})
    return Judgement(Verdict.OK)


def _exempt(made_of: Mapping[str, Tensor], got: Mapping[str, Tensor]) -> Exempt:
    """Return what cannot be judged because rows without a right answer came out as NaN.

    Their own out and dq, and every gradient of the keys and masks that they attend to.
    """
    rows = made_of.get("nan")
    if rows is None:
        return {}
    exempt = {"out": rows, "dq": rows}
    batch, heads = rows.shape[:2]
    for name in ("dk", "dv"):
        if name in got:
            heads_kv = got[name].shape[1]
            touched = rows.any(2, keepdim=True).reshape(batch, heads_kv, heads // heads_kv, 1)
            exempt[name] = touched.any(2, keepdim=True)
    if "dmask" in got:
        exempt["dmask"] = rows.any(1, keepdim=True) if got["dmask"].shape[1] == 1 else rows
    return exempt
