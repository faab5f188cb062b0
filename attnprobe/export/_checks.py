"""The last part of a script: run the case, hold the result against what was promised, say FAILS or passes."""

# ruff: noqa: E501  # a line of a template has a margin; what is written is shorter

from __future__ import annotations

from string import Template
from typing import Final

from attnprobe.export._template import fill

BEGIN: Final = """
reexec        |TUNABLES = "glibc.malloc.tcache_count=0"
reexec        |if os.environ.get("GLIBC_TUNABLES") != TUNABLES:
reexec        |    # Otherwise glibc hands small blocks out again as they are.
reexec        |    again = [sys.executable, *sys.orig_argv[1:]]
reexec        |    os.execve(sys.executable, again, os.environ | {"GLIBC_TUNABLES": TUNABLES})
reexec        |
child         |LIMIT = $limit  # seconds that one call may take
child         |
fills nofill  |torch.utils.deterministic.fill_uninitialized_memory = False  # torch's own fill would hide this
"""

END: Final = '''
              |def end(failing):
              |    """Say how it went, and exit."""
              |    print(f"FAILS: {failing}" if failing else "passes: not reproduced here")
              |    sys.exit(1 if failing else 0)
'''

REFUSED: Final = """
try:
    $body
except Exception as error:
    # A clear refusal is no failure.
    print(f"refused: {type(error).__name__}: {error}")
    end("")
"""

WHERE: Final = '''
def where(bad):
    """Say where elements are, leaving out the axes along which they are everywhere."""
    parts = []
    for axis, name in zip(range(bad.dim()), $axes, strict=False):
        hit = bad.transpose(0, axis).flatten(1).any(1).nonzero().flatten().tolist()
        if len(hit) < bad.shape[axis]:
            some = ", ".join(map(str, hit[:6])) + (", ..." if len(hit) > 6 else "")
            parts.append(f"{name} {some} ({len(hit)} of {bad.shape[axis]})")
    return f"{int(bad.sum())} of {bad.numel()} elements" + "".join(f"; {part}" for part in parts)
'''

_COMPARE: Final = '''
              |def compare(got, right, tolerance$exempt):
              |    """Return a report on each result, and the names of those beyond their tolerance."""
              |    lines, failing = [], []
              |    for name, wanted in right.items():
              |        value, allowed = got[name], tolerance[name]
              |        error = (value - wanted).abs()
!exempt       |        bad = ~(error <= allowed)  # NaN is within no tolerance
exempt        |        bad = ~(error <= allowed) & ~exempt[name]  # NaN is within no tolerance
              |        if not bad.any():
              |            lines.append(f"{name}: right, within its tolerance")
              |            continue
              |        failing.append(name)
              |        infinite = int((bad & ~value.isfinite()).sum())
              |        note = f"; {infinite} not finite" if infinite else ""
              |        lines.append(f"{name}: wrong, {where(bad)}{note}")
              |        worst = (error / allowed).nan_to_num(torch.inf).masked_fill(~bad, -1.0).argmax()
              |        expected_, got_, error_, allowed_ = (t.flatten()[worst] for t in (wanted, value, error, allowed))
              |        lines.append(f"    worst: expected {expected_:.6g}, got {got_:.6g}")
              |        lines.append(f"    error {error_:.2g}, tolerance {allowed_:.2g}")
              |        factor = (value * wanted)[bad].sum() / (wanted[bad] ** 2).sum()
              |        rest = ((value - factor * wanted)[bad] ** 2).sum()
              |        if rest <= 1e-4 * (value[bad] ** 2).sum() and abs(factor - 1) > 0.01:
              |            lines.append(f"    all of them are {factor:.3g} times what is expected")
              |    return lines, failing
'''

_WEIGHTS: Final = '''
              |@torch.no_grad()
              |def read_weights($called):
              |    """Return the weight of each key: where v is one-hot in its columns, out shows it."""
              |    weights = torch.zeros(B, H, $s_q, $s_kv, dtype=torch.float64)
              |    for start in range(0, $s_kv, $d_v):
              |        columns = torch.arange(min($d_v, $s_kv - start))
              |        v = torch.zeros_like(v)
              |        v[:, :, start + columns, columns] = 1
seed          |        torch.manual_seed($seed)
              |        weights[..., start + columns] = attention($called)[..., columns]$cpu.double()
              |    return weights
'''

_DEAD: Final = '''
              |def rows_made_of(out):
              |    """Say what became of rows that see no key; there is no right answer for them.
              |
              |    Zeros, NaN, the average over all keys and the softmax of the bare scores are accepted, and
              |    the gradients must follow from that choice.
              |    """
              |    every, none = torch.ones_like(dead), torch.zeros_like(dead)
              |    nan = dead & out.isnan().all(-1, keepdim=True)
              |    left = dead & ~nan & ~(out == 0).all(-1, keepdim=True)
              |    fits = {}
              |    for name, other in (("uniform", "softmax"), ("softmax", "uniform")):
              |        right, tolerance = expected({name: every, other: none})
              |        fits[name] = left & ((out - right["out"]).abs() <= tolerance["out"]).all(-1, keepdim=True)
              |    # A row that fits both is of the kind that more rows fit.
              |    one, other = sorted(fits, key=lambda name: -int(fits[name].sum()))
              |    return {one: fits[one], other: fits[other] & ~fits[one]}, nan
'''

_VALUES: Final = """
dropout       |# The dropout mask that the backend drew goes into the reference.
dropout       |keep = (read_weights($zero_q) > 0).double() / (1 - $rate)
!varlen       |got = {name: value.double()$cpu for name, value in got.items()}
varlen        |by = {"out": $by_q, "dq": $by_q, "dk": $by_kv, "dv": $by_kv}
varlen        |got = {name: padded(value.double()$cpu, by[name]) for name, value in got.items()}
!dead !own    |report, failing = compare(got, *expected())
!dead own     |report, failing = compare(got, *expected(read_weights($called)))
dead !own     |made_of, nan = rows_made_of(got["out"])
dead own      |weights = read_weights($called)
dead !own     |# Where they are NaN, so may be what they touch.
dead !own     |exempt = {"out": nan, "dq": nan, "dmask": nan}
dead !own kv  |exempt["dk"] = exempt["dv"] = nan.any(2, keepdim=True).unflatten(1, ($h_kv, -1)).any(2)
dead !own     |exact, tolerance = expected()
dead          |outcomes = []
dead backward |# A mask that was added passes the gradient on to the scores, one that replaced them does not.
dead backward !own|for to_scores in (True, False):
dead backward !own|    extra, slack = expected(made_of, to_scores=to_scores)
dead backward !own|    right = {name: value + extra[name] for name, value in exact.items()}
dead backward !own|    allowed = {name: value + slack[name] for name, value in tolerance.items()}
dead backward !own|    outcomes.append(compare(got, right, allowed, exempt))
dead backward own|for to_scores in (True, False):
dead backward own|    outcomes.append(compare(got, *expected(weights, to_scores=to_scores)))
dead !backward|extra, slack = expected(made_of)
dead !backward|right = {name: value + extra[name] for name, value in exact.items()}
dead !backward|allowed = {name: value + slack[name] for name, value in tolerance.items()}
dead !backward|outcomes.append(compare(got, right, allowed, exempt))
dead          |report, failing = next((one for one in outcomes if not one[1]), outcomes[0])
              |print(*report, sep="\\n")
              |end(f"{', '.join(failing)} wrong" if failing else "")
"""

RATE: Final = """
              |kept = read_weights($zero_q) > 0
hidden        |kept = kept[(~hidden).expand_as(kept)]
              |dropped = 1 - float(kept.double().mean())
              |chance = 6 * ($rate * (1 - $rate) / kept.numel()) ** 0.5 + 12 / kept.numel() + 1 / 256
              |print(f"dropout: {dropped:.4f} of what is visible was dropped, not $rate; chance makes {chance:.4f}")
              |end("the dropout rate is another" if abs(dropped - $rate) > chance else "")
"""

ALIKE: Final = """
              |kept = read_weights($zero_q) > 0
              |masks = kept.unbind($axis)
!hidden       |alike = [torch.equal(masks[0], other) for other in masks[1:]]
hidden        |# Where a score is hidden from one of two, it says nothing of either.
hidden        |unseen = hidden.expand_as(kept).unbind($axis)
hidden        |pairs = zip(masks[1:], unseen[1:], strict=True)
hidden        |alike = [bool(((masks[0] == other) | unseen[0] | no).all()) for other, no in pairs]
              |print(f"dropout: {sum(alike)} of {len(alike)} other $alike have the mask of the first")
              |end("one dropout mask for several $alike" if any(alike) else "")
"""

CONTRACT: Final = """
failing = []
for name, like in {"out": ($out), $likes}.items():
    value = got.get(name)
    is_there = "nothing" if value is None else f"{tuple(value.shape)} {value.dtype}"
    wanted = f"{tuple(getattr(like, 'shape', like))} {$dtype}"
    print(f"{name}: {is_there}; wanted: {wanted}")
    if is_there != wanted:
        failing.append(name)
end(f"{', '.join(failing)} not as promised" if failing else "")
"""

CHANGED: Final = """
changed = [name for name, tensor in given.items() if not torch.equal(tensor, before[name])]
for name in changed:
    print(f"{name}: changed by the call, {where(given[name] != before[name])}")
end(f"{', '.join(changed)} changed by the call" if changed else "")
"""

MEMORY: Final = '''
def filled(byte):
    """Make the call while glibc hands out memory that holds `byte` (mallopt, M_PERTURB)."""
    mallopt(-6, (byte ^ 0xFF) or 256)  # glibc wants the complement
    try:
        return run($given)
    finally:
        mallopt(-6, 0)
'''

UNWRITTEN: Final = """
failing = []
for name, nan in runs[0].items():
    finite, nan_again, finite_again = (run[name] for run in runs[1:])
    depends = bits(nan) != bits(finite)
    chance = (bits(nan) != bits(nan_again)) | (bits(finite) != bits(finite_again))
    if chance.any():
        # It does not repeat anyway; only what lies far beyond its own scatter tells.
        scatter = max(float((a - b).abs().max()) for a, b in ((nan, nan_again), (finite, finite_again)))
        depends &= ~chance & ~((nan - finite).abs() <= 100 * scatter)
    if depends.any():
        failing.append(name)
        first = depends.flatten().nonzero()[0]
        print(f"{name}: depends on what memory held before, {where(depends)}")
        print(f"    the first: {nan.flatten()[first].item():.6g} where memory held 0xFF bytes (NaN),")
        print(f"    {finite.flatten()[first].item():.6g} where it held 0x42 bytes")
    else:
        print(f"{name}: the same whatever memory held")
end(f"{', '.join(failing)} never written" if failing else "")
"""

REPEAT: Final = """
              |failing = []
              |for name, first in runs[0].items():
              |    differs = torch.stack([bits(run[name]) != bits(first) for run in runs[1:]])
              |    if differs.any():
              |        failing.append(name)
              |        print(f"{name}: {int(differs.flatten(1).any(1).sum())} of {len(runs) - 1} repeats differ")
              |        print(f"    {where(differs.any(0))}")
              |    else:
              |        print(f"{name}: the same in all {len(runs)} runs")
              |end(f"{', '.join(failing)} not deterministic" if failing else "")
"""

BUSY: Final = '''
def keep_busy():
    """Keep the machine busy, so that the threads of the kernel meet in another order."""
    square = torch.ones(128, 128)
    while not over.is_set():
        torch.mm(square, square)


def repeated():
    """Return the results of several calls, some of them beside other work."""
    runs = [run($given) for _ in range($times)]
    others = [threading.Thread(target=keep_busy, daemon=True) for _ in range(2)]
    for other in others:
        other.start()
    runs += [run($given) for _ in range($times)]
    over.set()
    return runs


over = threading.Event()
'''

CHILD: Final = '''
              |def child():
              |    """Make the call as it is, then on memory that holds NaN, then on memory that does not."""
              |    given = inputs()
earlier       |    with contextlib.suppress(Exception):
earlier       |        $earlier
              |    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
              |    for byte in (None, 0xFF, 0x42) if mallopt else (None,):
              |        print("call" if byte is None else f"call, memory filled with 0x{byte:02X}", flush=True)
              |        if byte is not None:
              |            mallopt(-6, (byte ^ 0xFF) or 256)  # M_PERTURB; glibc wants the complement
              |        signal.alarm(LIMIT)  # ends this process, wherever it is
              |        try:
              |            run(*given)
              |        except Exception as error:
              |            # A clear refusal is no failure.
              |            print(f"refused: {type(error).__name__}: {error}")
              |        signal.alarm(0)
              |        if byte is not None:
              |            mallopt(-6, 0)
              |    print("returned", flush=True)
              |    os._exit(0)
'''

PARENT: Final = """
if os.environ.get("REPRO_CHILD"):
    child()
print(f"torch {torch.__version__}")
environment = os.environ | {$environment}
environment["REPRO_CHILD"] = "1"
again = [sys.executable, *sys.orig_argv[1:]]
done = subprocess.run(again, env=environment, stdout=subprocess.PIPE, text=True)
said = done.stdout.splitlines()
print(*said, sep="\\n")
if said[-1:] == ["returned"]:
    end("")
if done.returncode == -signal.SIGALRM:
    end(f"no answer within {LIMIT} s")
if done.returncode < 0:
    end(f"the process died of {signal.Signals(-done.returncode).name}")
end(f"the process exited with code {done.returncode}")
"""


def parent(**environment: str) -> list[str]:
    """Return the lines that start the child, in that environment, and say how it ended."""
    said = ", ".join(f'"{name}": "{value}"' for name, value in environment.items())
    return Template(PARENT).substitute(environment=said).strip("\n").splitlines()


def values(flags: set[str], **words: object) -> tuple[list[str], list[str]]:
    """Return the functions that compare values, and the lines that call them."""
    functions: list[str] = []
    exempt = {"exempt"} if "dead" in flags and "own" not in flags else set()
    blocks = [fill(_COMPARE, flags | exempt, exempt=", exempt" if exempt else "")]
    blocks += [weights(flags, **words)] if flags & {"dropout", "own"} else []
    blocks += [fill(_DEAD, flags)] if "dead" in flags and "own" not in flags else []
    for block in blocks:
        functions += ["", *block, ""]
    return functions, fill(_VALUES, flags, **words)


def weights(flags: set[str], **words: object) -> list[str]:
    """Return the function that reads the weights of the keys from a backend's forward."""
    return fill(_WEIGHTS, flags, **words)
