"""The lines of a script that make the inputs of a case, bit for bit as `probe.inputs.make` does."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from attnprobe.export._hazards import GRAD_OUT, regimes
from attnprobe.export._template import fill
from attnprobe.probe.inputs import MASKED_SHARE, sequence_lengths

if TYPE_CHECKING:
    from collections.abc import Iterable

    from attnprobe.config import Case

BOOL: Final = frozenset({"bool", "bool-broadcast"})
FLOAT: Final = frozenset({"float", "float-broadcast"})

_MASK: Final = """
               |    # The mask: every row keeps a key,
               |    shape = $shape
               |    hidden = torch.rand(shape, generator=numbers) < $share
               |    spared = torch.randint($keys, shape[:3], generator=numbers)
               |    hidden.scatter_(3, spared[..., None], value=False)
rows           |    # but these rows, which it hides whole.
rows           |    whole = torch.rand(shape[:3], generator=numbers) < $share
rows           |    whole[..., 0] = True
rows           |    whole[..., -1] = $last
rows           |    hidden |= whole[..., None]
bool           |    mask = ~hidden
float          |    lowest = $lowest
float          |    bias = torch.randn(shape, generator=numbers)$cast
float          |    mask = bias.masked_fill(hidden, lowest)
broadcast      |    mask = mask.expand(-1, $heads, -1, -1)  # one mask for all heads, stride 0
"""
_NO_KEYS: Final = """
bool           |    mask = torch.ones($shape, dtype=torch.bool)
float          |    mask = torch.ones($shape)$cast
broadcast      |    mask = mask.expand(-1, $heads, -1, -1)
"""
_LAYOUTS: Final = """
transposed     |    # Laid out as (B, S, H, D), seen as (B, H, S, D).
transposed     |    q, k, v = (tensor.transpose(1, 2).contiguous().transpose(1, 2) for tensor in (q, k, v))
inner-stride   |    # Neighbours in the head dim lie two elements apart.
inner-stride   |    q, k, v = (tensor.repeat_interleave(2, dim=3)[..., ::2] for tensor in (q, k, v))
expanded       |    # k and v are the same for all $same, with stride 0.
expanded       |    k, v = (tensor[$first].clone().expand_as(tensor) for tensor in (k, v))
packed together|    q, k, v = in_one_buffer(q, k, v)
packed !together|    q, _ = in_one_buffer(q, torch.zeros_like(q))
packed !together|    k, v = in_one_buffer(k, v)
"""
_PACKED: Final = '''
def in_one_buffer(*tensors):
    """Return the same values as slices of one (B, S, columns) buffer."""
    rows = [tensor.transpose(1, 2).flatten(2) for tensor in tensors]
    slices = torch.cat(rows, dim=2).split([row.shape[2] for row in rows], dim=2)
    return [s.unflatten(2, t.shape[1::2]).transpose(1, 2) for s, t in zip(slices, tensors, strict=True)]
'''


class Names:
    """How a script calls the numbers of a case: two that are equal share a name."""

    def __init__(self, case: Case) -> None:
        """Choose the names."""
        self.heads_kv = "H" if case.heads == case.heads_kv else "H_KV"
        same = case.seqlen_q == case.seqlen_kv
        self.seqlen_q, self.seqlen_kv = ("S", "S") if same else ("S_Q", "S_KV")
        self.dim_v = "D" if case.head_dim == case.head_dim_v else "D_V"
        self._case = case

    def lines(self) -> list[str]:
        """Return the assignment of all of them."""
        case = self._case
        every = {"B": case.batch, "H": case.heads, self.heads_kv: case.heads_kv}
        every |= {self.seqlen_q: case.seqlen_q, self.seqlen_kv: case.seqlen_kv}
        every |= {"D": case.head_dim, self.dim_v: case.head_dim_v}
        lines = [f"{', '.join(every)} = {', '.join(map(str, every.values()))}"]
        if case.layout == "varlen":
            per_q, per_kv = sequence_lengths(case.batch, case.seqlen_q, case.seqlen_kv)
            if case.seqlen_q == case.seqlen_kv:
                lines.append(f"LENGTHS = {list(per_q)}  # of the sequences, which lie end to end: (T, H, D)")
            else:
                lines.append(
                    f"LENGTHS_Q = {list(per_q)}  # of the sequences, which lie end to end: (T, H, D)"
                )
                lines.append(f"LENGTHS_KV = {list(per_kv)}")
        return lines

    @property
    def lengths(self) -> tuple[str, str]:
        """Return how the lengths of the sequences are called."""
        same = self._case.seqlen_q == self._case.seqlen_kv
        return ("LENGTHS", "LENGTHS") if same else ("LENGTHS_Q", "LENGTHS_KV")

    def shapes(self) -> dict[str, str]:
        """Return the shapes of q, k, v and grad_out."""
        if self._case.layout == "varlen":
            q, kv = (f"sum({name})" for name in self.lengths)
            return {
                "q": f"({q}, H, D)",
                "k": f"({kv}, {self.heads_kv}, D)",
                "v": f"({kv}, {self.heads_kv}, {self.dim_v})",
                "grad_out": f"({q}, H, {self.dim_v})",
            }
        return {
            "q": f"(B, H, {self.seqlen_q}, D)",
            "k": f"(B, {self.heads_kv}, {self.seqlen_kv}, D)",
            "v": f"(B, {self.heads_kv}, {self.seqlen_kv}, {self.dim_v})",
            "grad_out": f"(B, H, {self.seqlen_q}, {self.dim_v})",
        }


def inputs_of(case: Case) -> list[str]:
    """Return the names of the inputs of a case, in the order in which `inputs()` returns them."""
    mask = ["mask"] if case.mask in BOOL | FLOAT else []
    return ["q", "k", "v", *mask, *(["grad_out"] if case.pass_ == "backward" else [])]


def helpers(cases: Iterable[Case]) -> list[str]:
    """Return the functions that `inputs` of these cases calls."""
    sources = []
    for case in cases:
        sources += [regime.source for regime in regimes(case) if regime is not None]
        sources += [_PACKED] if case.layout == "packed" else []
    return [line for source in dict.fromkeys(sources) for line in ["", *source.splitlines(), ""]]


def function(case: Case, names: Names, *, name: str, device: str, said: str) -> list[str]:
    """Return the function that makes the inputs of a case."""
    dtype = f"torch.{case.dtype}"
    cast = "" if case.dtype == "float32" else f".to({dtype})"
    drawn = ["q", "k", "v"]
    if case.pass_ == "backward" or case.mask in BOOL | FLOAT or _draws(case):
        drawn.append("grad_out")
    lines = ["", f"def {name}():", f'    """{said}"""']
    lines.append(f"    numbers = torch.Generator().manual_seed(0x{int(case.id, 16) ^ case.seed:X})")
    lines += [f"    {n} = torch.randn({names.shapes()[n]}, generator=numbers)" for n in drawn]
    if "grad_out" in drawn and case.pass_ == "forward" and not _draws(case):
        lines[-1] = f"    torch.randn({names.shapes()['grad_out']}, generator=numbers)  # not used, but drawn"
    lines += _regimes(case, names)
    kept = [one for one in drawn if one != "grad_out" or case.pass_ == "backward"]
    if cast:
        every = ", ".join(kept)
        lines.append(f"    {every} = (tensor{cast} for tensor in ({every}))")
    lines += _mask(case, names, cast, dtype)
    if device != "cpu":
        every = ", ".join(inputs_of(case))
        lines.append(f'    {every} = (tensor.to("{device}") for tensor in ({every}))')
    lines += _layout(case)
    laid_out = GRAD_OUT[case.grad_out].format(tokens=0 if case.layout == "varlen" else 2)
    if laid_out and case.pass_ == "backward" and case.seqlen_q:
        lines.append(f"    grad_out = {laid_out}")
    return [*lines, f"    return {', '.join(inputs_of(case))}", ""]


def _draws(case: Case) -> bool:
    return any(regime is not None and "numbers" in regime.takes for regime in regimes(case))


def _regimes(case: Case, names: Names) -> list[str]:
    """Return the calls that turn Gaussian numbers into the data regime."""
    by_q, by_kv = names.lengths
    lines = []
    for entry, regime in enumerate(regimes(case)):
        if regime is None:
            continue
        taken = list(regime.takes)
        if case.data == "batch-differs":
            part = {name: f"{name}[{entry}]" for name in ("q", "k", "v", "grad_out")}
            if case.layout == "varlen":
                split = {"q": by_q, "k": by_kv, "v": by_kv, "grad_out": by_q}
                part = {name: f"{name}.split({lengths})[{entry}]" for name, lengths in split.items()}
            taken = [part.get(name, name) for name in taken]
        taken += [repr(figure) for figure in regime.figures(case)]
        lines.append(f"    {regime.name}({', '.join(taken)})")
    return lines


def _mask(case: Case, names: Names, cast: str, dtype: str) -> list[str]:
    if case.mask not in BOOL | FLOAT:
        return []
    flags = {"bool" if case.mask in BOOL else "float"}
    flags |= {"broadcast"} if case.mask.endswith("-broadcast") else set()
    flags |= {"rows"} if case.masked_rows != "none" else set()
    lowest = f"torch.finfo({dtype}).min" if case.masked_rows == "finfo-min" else 'float("-inf")'
    heads = "1" if "broadcast" in flags else "H"
    return fill(
        _MASK if case.seqlen_kv else _NO_KEYS,
        flags,
        shape=f"(B, {heads}, {names.seqlen_q}, {names.seqlen_kv})",
        share=MASKED_SHARE,
        keys=names.seqlen_kv,
        last=case.seqlen_q == 1,
        lowest=lowest,
        cast=cast,
        heads="H",
    )


def _layout(case: Case) -> list[str]:
    flags = {case.layout} | ({"together"} if case.seqlen_q == case.seqlen_kv else set())
    over_heads = case.heads_kv > 1
    return fill(
        _LAYOUTS,
        flags,
        same="heads" if over_heads else "batch entries",
        first=":, :1" if over_heads else ":1",
    )
