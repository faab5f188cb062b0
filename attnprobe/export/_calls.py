"""How a script calls a backend: `run(...)`, which returns the results by name.

A backend whose object has `snippet(case) -> Snippet | None` says it itself (one of another package, say);
the backends of this package and callables are in `_KNOWN` and `_callable`.
"""

from __future__ import annotations

import functools
import keyword
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from msgspec import Struct

from attnprobe.errors import UsageError
from attnprobe.export._inputs import BOOL, FLOAT, Names, inputs_of
from attnprobe.export._template import fill

if TYPE_CHECKING:
    from attnprobe.config import Case
    from attnprobe.matrix.schema import Backend

_POSITIONAL: Final = frozenset({"causal-top-left", "causal-bottom-right", "window"})


SLOPES: Final = "torch.tensor([2.0 ** (-8.0 * (head + 1) / H) for head in range(H)])"


class Snippet(Struct, frozen=True, kw_only=True):
    """A call. `what` names it in the headline, `needs` says what must be installed.

    `setup` are lines before the functions of the script. `forward` are the lines of the body of
    `attention(q, k, v)`, or `attention(q, k, v, mask)` where the case has one; it returns out, and
    autograd differentiates it. Where a library is called below autograd, `whole` are the lines of the body
    of `run` instead: they leave `results`, by name, and `lse`.
    """

    what: str
    needs: str = "torch"
    imports: tuple[str, ...] = ()
    setup: tuple[str, ...] = ()
    forward: tuple[str, ...] = ()
    whole: tuple[str, ...] = ()
    draws: bool = False
    """Whether it may draw random numbers even where the case has no dropout."""


def snippet(case: Case, backend: Backend) -> Snippet:
    """Return how a backend is called for a case.

    Raises:
        UsageError: this backend's call is not known here.
    """
    from attnprobe.backends.registry import known

    if ":" in backend.name:
        return _callable(case, backend)
    own = getattr(known()[0].get(backend.name), "snippet", None)
    found = own(case) if own is not None else None
    if found is None and backend.name in _KNOWN:
        found = _KNOWN[backend.name](case)
    if found is None:
        raise UsageError(
            f"no script for {backend.name}",
            why="its call is not known here",
            fix="a backend says it by a method `snippet(case)`; see attnprobe/export/_calls.py",
        )
    chosen: Snippet = found
    return chosen


def grads(case: Case) -> tuple[str, ...]:
    """Return the inputs that need a gradient."""
    if case.pass_ == "forward":
        return ()
    names: dict[str, tuple[str, ...]] = {
        "all": ("q", "k", "v"),
        "q": ("q",),
        "kv": ("k", "v"),
        "mask": ("mask",),
    }
    return names.get(case.needs_grad, ())


_RUN: Final = """
              |def run($given):
              |    \"\"\"Make the call$too.\"\"\"
seed          |    torch.manual_seed($seed)
deterministic |    torch.set_deterministic_debug_mode("error")
backward      |    $leaves = $detached
forward       |    with torch.no_grad():
forward       |        out = attention($called)
backward      |    out = attention($called)
backward      |    $found = torch.autograd.grad(out, $wanted, grad_out)
deterministic |    torch.set_deterministic_debug_mode("default")
forward       |    return {"out": out}
backward      |    return {"out": out.detach(), $named}
"""


def functions(case: Case, call: Snippet, *, lse: bool) -> list[str]:
    """Return `attention` and `run` of a script; `lse`: return that as well where there is one."""
    given = inputs_of(case)
    if call.whole:
        lines = ["", f"def run({', '.join(given)}):", '    """Call the operators."""']
        mode = "    torch.set_deterministic_debug_mode"
        lines += [f'{mode}("error")'] if case.deterministic else []
        lines += [f"    {line}" for line in call.whole]
        lines += [f'{mode}("default")'] if case.deterministic else []
        lines += ['    results["lse"] = lse'] if lse else []
        return [*lines, "    return results", ""]
    called = ", ".join(name for name in given if name != "grad_out")
    lines = ["", f"def attention({called}):", '    """Make the call in question."""']
    lines += [""] if call.forward[0].startswith("def ") else []
    lines += [f"    {line}".rstrip() for line in call.forward]
    wanted = grads(case)
    every = ", ".join(wanted)
    one = len(wanted) == 1
    flags = {"backward" if wanted else "forward"}
    flags |= {"seed"} if case.dropout or call.draws else set()
    flags |= {"deterministic"} if case.deterministic else set()
    leaves = f"(tensor.detach().requires_grad_() for tensor in ({every}))"
    body = fill(
        _RUN,
        flags,
        given=", ".join(given),
        too=" and differentiate it" if wanted else "",
        seed=case.seed,
        leaves=every,
        detached=f"{every}.detach().requires_grad_()" if one else leaves,
        called=called,
        found=f"(d{every},)" if one else ", ".join(f"d{name}" for name in wanted),
        wanted=f"({every},)" if one else f"({every})",
        named=", ".join(f'"d{name}": d{name}' for name in wanted),
    )
    return [*lines, "", "", *body, ""]


def _options(case: Case, *, bottom_right: str) -> str:
    """Return the keywords that say the case to scaled_dot_product_attention."""
    options = []
    if case.mask in BOOL | FLOAT:
        options.append("attn_mask=mask")
    if case.mask == "causal-top-left":
        options.append("is_causal=True")
    if case.mask == "causal-bottom-right":
        options.append(f"attn_mask={bottom_right}")
    if case.dropout:
        options.append(f"dropout_p={case.dropout}")
    if case.scale is not None:
        options.append(f"scale={case.scale}")
    if case.heads != case.heads_kv:
        options.append("enable_gqa=True")
    return "".join(f", {option}" for option in options)


_JAGGED: Final = '''
def jagged(packed, lengths):
    """Return (T, H, D) as a nested (B, H, S, D) tensor, one sequence an entry."""
    offsets = torch.tensor([0, *lengths], device=packed.device).cumsum(0)
    return torch.nested.nested_tensor_from_jagged(packed, offsets).transpose(1, 2)
'''


def _sdpa(forced: str | None, case: Case) -> Snippet:
    names = Names(case)
    imports = ["from torch.nn.functional import scaled_dot_product_attention"]
    setup: tuple[str, ...] = ()
    lower_right = f"causal_lower_right({names.seqlen_q}, {names.seqlen_kv})"
    if case.mask == "causal-bottom-right":
        imports.append("from torch.nn.attention.bias import causal_lower_right")
    options = _options(case, bottom_right=lower_right)
    inner = [f"return scaled_dot_product_attention(q, k, v{options})"]
    if case.layout == "varlen":
        by_q, by_kv = names.lengths
        setup = tuple(_JAGGED.splitlines())
        nested = f"jagged(q, {by_q}), jagged(k, {by_kv}), jagged(v, {by_kv})"
        inner = [
            f"out = scaled_dot_product_attention({nested}{options})",
            "return out.transpose(1, 2).values()",
        ]
    if forced is not None:
        imports.append("from torch.nn.attention import SDPBackend, sdpa_kernel")
        inner = [f"with sdpa_kernel([SDPBackend.{forced}]):", *(f"    {line}" for line in inner)]
    what = "torch.nn.functional.scaled_dot_product_attention"
    what += f" (SDPBackend.{forced})" if forced else ""
    return Snippet(what=what, imports=tuple(imports), setup=setup, forward=tuple(inner))


def _aten_flash(case: Case) -> Snippet:
    name = "_scaled_dot_product_flash_attention_for_cpu"
    causal = case.mask == "causal-top-left"
    keywords = ["attn_mask=mask"] if case.mask in BOOL | FLOAT else []
    keywords += [f"scale={case.scale}"] if case.scale is not None else []
    options = "".join(f", {keyword}" for keyword in keywords)
    whole = [
        f"forward = torch.ops.aten.{name}",
        f"out, lse = forward(q, k, v, {case.dropout}, {causal}{options})",
        'results = {"out": out}',
    ]
    if case.pass_ == "backward":
        whole.append(f"backward = torch.ops.aten.{name}_backward")
        into = [f'results["d{n}"]' if n in grads(case) else "_" for n in ("q", "k", "v")]
        whole.append(f"grads = backward(grad_out, q, k, v, out, lse, {case.dropout}, {causal}{options})")
        whole.append(f"{', '.join(into)} = grads")
    return Snippet(what=f"torch.ops.aten.{name}", whole=tuple(whole))


_FLEX: Final = """
changes       |def change(score, b, h, i, j):
softcap       |    score = $softcap * torch.tanh(score / $softcap)
alibi         |    score = score - slopes[h] * (i$bias_shift - j).abs()
bias          |    score = score + mask[b, h, i, j]
changes       |    return score
changes       |
hides         |def seen(b, h, i, j):
hides bool    |    return mask[b, h, i, j]
hides !bool !window|    return j <= i$shift
hides window  |    return (j <= i$shift) & (j >= i$shift - $window)
hides         |
hides         |blocks = create_block_mask(seen, $over, $s_q, $s_kv, device=q.device)
              |return flex(q, k, v$options)
"""


def _flex(case: Case) -> Snippet:
    names = Names(case)
    flags = {name for name in ("softcap", "alibi") if getattr(case, name)}
    flags |= {"bias"} if case.mask in FLOAT else set()
    flags |= {"changes"} if flags else set()
    flags |= {"hides"} if case.mask in BOOL | _POSITIONAL else set()
    flags |= {"bool"} if case.mask in BOOL else {case.mask}
    options = ["score_mod=change"] if "changes" in flags else []
    options += ["block_mask=blocks"] if "hides" in flags else []
    options += [f"scale={case.scale}"] if case.scale is not None else []
    options += ["enable_gqa=True"] if case.heads != case.heads_kv else []
    body = fill(
        _FLEX,
        flags,
        softcap=case.softcap,
        shift=_added(0 if case.mask == "causal-top-left" else case.seqlen_kv - case.seqlen_q),
        bias_shift=_added(case.seqlen_kv - case.seqlen_q),
        window=case.window,
        over="B, H" if "bool" in flags else "None, None",
        s_q=names.seqlen_q,
        s_kv=names.seqlen_kv,
        options="".join(f", {option}" for option in options),
    )
    if "alibi" in flags:
        body = [f"slopes = {SLOPES}", "", *body]
    blocks = "create_block_mask, " if "hides" in flags else ""
    return Snippet(
        what="torch.compile(flex_attention)",
        imports=(f"from torch.nn.attention.flex_attention import {blocks}flex_attention",),
        setup=("", "flex = torch.compile(flex_attention, dynamic=False)"),
        forward=tuple(body),
    )


def _added(number: int) -> str:
    return f" {'+' if number > 0 else '-'} {abs(number)}" if number else ""


_LOAD: Final = '''
def load():
    """Return the callable: from the file that is named, or from {file} beside this script."""
    path = Path(sys.argv[1]) if sys.argv[1:] else Path(__file__).with_name("{file}")
    if not path.exists():
        print(f"{{path}} is not here: python {{sys.argv[0]}} path/to/{file}", file=sys.stderr)
        sys.exit(2)
    if hashlib.sha256(path.read_bytes()).hexdigest()[:16] != "{digest}":
        print(f"note: {{path}} is not what was scanned, its content differs")
    spec = importlib.util.spec_from_file_location("{module}", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["{module}"] = module
    spec.loader.exec_module(module)
    return module.{name}


user_attention = load()
'''


def _callable(case: Case, backend: Backend) -> Snippet:
    """Return the call of a user's callable, from a file or from a module that is installed."""
    names = Names(case)
    place, _, name = backend.name.rpartition(":")
    file = next((m for m in backend.materials if m.name == "file"), None)
    # A matrix may come from anywhere, and what is written here is run.
    dotted = [*name.split("."), *(place.split(".") if file is None else [])]
    safe = file is None or (re.fullmatch(r"[\w.-]+\.py", file.version) and re.fullmatch(r"\w*", file.digest))
    if not safe or not all(part.isidentifier() and not keyword.iskeyword(part) for part in dotted):
        raise UsageError(f"{backend.name!r} is no name of a callable")
    shift = case.seqlen_kv - case.seqlen_q
    ones = f"torch.ones({names.seqlen_q}, {names.seqlen_kv}, dtype=torch.bool, device=q.device)"
    options = _options(case, bottom_right=f"{ones}.tril({shift})")
    imports: tuple[str, ...]
    setup: tuple[str, ...]
    if file is None:
        imports, setup = (f"import {place}",), ("", f"user_attention = {backend.name.replace(':', '.')}")
    else:
        module = re.sub(r"\W", "_", file.version.removesuffix(".py"))
        source = _LOAD.format(file=file.version, digest=file.digest, module=module, name=name)
        imports = ("import hashlib", "import importlib.util", "from pathlib import Path")
        setup = tuple(source.rstrip().splitlines())
    return Snippet(
        what=f"{file.version if file else place}: {name}",
        needs=f"torch and {file.version if file else place.partition('.')[0]}",
        imports=imports,
        setup=setup,
        forward=(f"return user_attention(q, k, v{options})",),
        draws=True,
    )


_KNOWN: Final[dict[str, Callable[[Case], Snippet]]] = {
    "torch-default": functools.partial(_sdpa, None),
    "torch-math": functools.partial(_sdpa, "MATH"),
    "torch-flash": functools.partial(_sdpa, "FLASH_ATTENTION"),
    "torch-efficient": functools.partial(_sdpa, "EFFICIENT_ATTENTION"),
    "torch-cudnn": functools.partial(_sdpa, "CUDNN_ATTENTION"),
    "aten-flash": _aten_flash,
    "flex-attention": _flex,
}
