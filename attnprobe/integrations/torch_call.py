"""What a call of `scaled_dot_product_attention` is, told from shapes, strides and flags alone.

`facts` are plain values that can be a key, and that torch.compile takes for constants; `Call` gives them
names, as the kernel gets them (autocast has cast them); `config_of` says them in the words of a matrix.
"""

from __future__ import annotations

import math
from typing import Any, Final, NamedTuple

import torch
from msgspec import UNSET, UnsetType, structs
from torch import Tensor
from torch.nn.attention.bias import CausalBias, CausalVariant

from attnprobe.config import AttentionConfig, Case, Dtype, Layout, Mask, MaskedRows, NeedsGrad
from attnprobe.errors import UsageError
from attnprobe.integrations.torch_layout import DENSE, layouts_of, strides_of
from attnprobe.select.asked import asked

Facts = tuple[Any, ...]

NOT_JUDGED: Final = "this call is not judged"
_NESTED: Final = "its sequences are nested tensors"

DTYPES: Final[dict[torch.dtype, Dtype]] = {
    torch.float32: "float32",
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
}
HIDDEN: Final = -1e3
"""A row of a float mask with nothing above this may lose its scores to rounding: no level says so."""

_NEEDS: Final[dict[frozenset[str], NeedsGrad]] = {
    frozenset("qkv"): "all",
    frozenset("q"): "q",
    frozenset("kv"): "kv",
    frozenset({"mask"}): "mask",
}
_RANK: Final = 4


class Seen(NamedTuple):
    """One tensor without its values."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool


class Call(NamedTuple):
    """One call. `bias`: the variant of torch's own mask object, "" without one. `grad`: gradients are on.

    `training`: what the caller said of it, None where the flags are to be believed.
    """

    qkv: tuple[Seen, Seen, Seen]
    mask: Seen | None
    bias: str
    device: str
    dropout: float
    causal: bool
    scale: float | None
    gqa: bool
    grad: bool
    training: bool | None
    deterministic: bool
    masked_rows: MaskedRows | None

    @property
    def wanted(self) -> frozenset[str]:
        """Return which of q, k, v and mask get a gradient."""
        if self.training is False or (self.training is None and not self.grad):
            return frozenset()
        wanted = {name for name, seen in zip("qkv", self.qkv, strict=True) if seen.requires_grad}
        return frozenset(wanted | {"mask"} if self.mask is not None and self.mask.requires_grad else wanted)

    @property
    def backward(self) -> bool:
        """Whether gradients flow through it."""
        return bool(self.wanted) if self.training is None else self.training


def facts(  # noqa: PLR0913, PLR0917  # the signature of torch's call
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,  # noqa: FBT001  # torch's name and place
    scale: float | None,
    enable_gqa: bool,  # noqa: FBT001  # torch's name and place
    training: bool | None,  # noqa: FBT001  # one of three
    masked_rows: MaskedRows | None,
) -> Facts:
    """Return a call as nested tuples of plain values; the same function runs when torch.compile traces.

    Nested tensors have no plain values: their call is ().
    """
    if query.is_nested or key.is_nested or value.is_nested:
        return ()
    device = query.device.type
    autocast = None
    if device in {"cpu", "cuda"} and torch.is_autocast_enabled(device):
        autocast = torch.get_autocast_dtype(device)
    bias, mask = "", None
    if isinstance(attn_mask, CausalBias):
        bias = "upper-left" if attn_mask.variant == CausalVariant.UPPER_LEFT else "lower-right"
    elif attn_mask is not None:
        mask = _seen(attn_mask)
    return (
        (_seen(query), _seen(key), _seen(value)),
        mask,
        (bias, str(query.device), _constant(dropout_p), is_causal, _constant(scale), enable_gqa),
        (torch.is_grad_enabled(), training, torch.are_deterministic_algorithms_enabled(), masked_rows),
        autocast,
    )


def _seen(tensor: Tensor) -> Facts:
    if torch.compiler.is_compiling():
        shape = tuple([_constant(n) for n in tensor.shape])
        stride = tuple([_constant(n) for n in tensor.stride()])
        return (shape, stride, tensor.dtype, tensor.requires_grad)
    return (tensor.shape, tensor.stride(), tensor.dtype, tensor.requires_grad)


def _constant(number: Any) -> Any:
    """Return the number; where torch.compile has made a symbol of it, the value, which the graph then needs.

    A member of a set is a value: the tracer has to know it to find it again.
    """
    return next(iter({number})) if torch.compiler.is_compiling() else number


def call_of(found: Facts) -> Call:
    """Return facts by name; tensors that autocast will cast as they are after that.

    Raises:
        UsageError: it is of nested tensors, whose lengths cannot be told without waiting for the device.
    """
    if not found:
        raise UsageError(NOT_JUDGED, why=_NESTED)
    (query, key, value), mask, options, state, autocast = found
    qkv = (_cast(Seen(*query), autocast), _cast(Seen(*key), autocast), _cast(Seen(*value), autocast))
    return Call(qkv, None if mask is None else _cast(Seen(*mask), autocast), *options, *state)


def _cast(seen: Seen, dtype: torch.dtype | None) -> Seen:
    """Return a tensor as autocast hands it on: in another type, and dense where it was not."""
    if dtype is None or not seen.dtype.is_floating_point or seen.dtype in {dtype, torch.float64}:
        return seen
    there = torch.empty_strided(seen.shape, seen.stride, dtype=seen.dtype, device="meta").to(dtype)
    return Seen(seen.shape, there.stride(), dtype, seen.requires_grad)


def config_of(call: Call) -> AttentionConfig:
    """Return the configuration that a call is; unsaid what cannot be told or has no level.

    Raises:
        UsageError: no configuration says this call; `why` is the reason.
    """
    reason = _unsayable(call)
    if reason:
        raise UsageError(NOT_JUDGED, why=reason)
    query, _, value = call.qkv
    batch, heads, seqlen_q, head_dim = query.shape
    _, heads_kv, seqlen_kv, head_dim_v = value.shape
    # No scan runs a float mask of another type than q: unsaid, so that what any type is denied counts.
    mixed = call.mask is not None and call.mask.dtype not in {torch.bool, query.dtype}
    masked_rows: MaskedRows | UnsetType = call.masked_rows or UNSET
    config = AttentionConfig(
        pass_="backward" if call.backward else "forward",
        dtype=UNSET if mixed else DTYPES[query.dtype],
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        heads=heads,
        heads_kv=heads_kv,
        batch=batch,
        seqlen_q=seqlen_q,
        seqlen_kv=seqlen_kv,
        mask=_mask(call),
        masked_rows="none" if call.mask is None else masked_rows,
        dropout=call.dropout,
        scale=None if _is_default(call.scale, head_dim) else call.scale,
        softcap=0.0,
        alibi=False,
        layout=_layout(call),
        needs_grad=_NEEDS.get(call.wanted, UNSET) if call.backward else "none",
        deterministic=call.deterministic,
    )
    asked(config)
    return config


def _unsayable(call: Call) -> str:  # noqa: PLR0911  # one line a reason
    """Return why no configuration says a call, or "" where one does."""
    shapes = [seen.shape for seen in call.qkv]
    dtype = call.qkv[0].dtype
    if {len(shape) for shape in shapes} != {_RANK}:
        return "q, k and v are not of shape (batch, heads, length, head dim)"
    query, key, value = shapes
    if any(seen.dtype != dtype for seen in call.qkv):
        return "q, k and v are of different types"
    if dtype not in DTYPES:
        return f"{str(dtype).removeprefix('torch.')} is no dtype of the axes"
    if not query[0] == key[0] == value[0]:
        return "it broadcasts over the batch"
    if not call.gqa and not query[1] == key[1] == value[1]:
        return "it broadcasts over the heads"
    if key[1:3] != value[1:3] or query[3] != key[3]:
        return "the shapes of q, k and v do not belong together"
    if call.causal and (call.mask is not None or call.bias):
        return "it has a mask and is_causal"
    return ""


def _is_default(scale: float | None, head_dim: int) -> bool:
    return scale is None or (head_dim > 0 and math.isclose(scale, head_dim**-0.5, rel_tol=1e-6))


def _mask(call: Call) -> Mask:
    if call.bias:
        return "causal-top-left" if call.bias == "upper-left" else "causal-bottom-right"
    if call.mask is None:
        return "causal-top-left" if call.causal else "none"
    shape, stride = call.mask.shape, call.mask.stride
    # A size that is not there, a size of 1 and a stride of 0 are one mask for all heads; how a mask
    # broadcasts over batch entries or queries is on no axis.
    one = len(shape) < _RANK - 1 or shape[-3] == 1 or stride[-3] == 0
    broadcast = one and call.qkv[0].shape[1] > 1
    if call.mask.dtype == torch.bool:
        return "bool-broadcast" if broadcast else "bool"
    return "float-broadcast" if broadcast else "float"


def _layout(call: Call) -> Layout | UnsetType:
    """Return the first layout that q, k and v all lie in; unsaid where there is none."""
    first, *others = _layouts(call)
    return next((layout for layout in first if all(layout in fits for fits in others)), UNSET)


def _layouts(call: Call) -> list[list[Layout]]:
    return layouts_of([seen.shape for seen in call.qkv], [seen.stride for seen in call.qkv])


def asking(config: AttentionConfig, call: Call) -> list[AttentionConfig]:
    """Return the configurations to ask for a call: what it mixes one by one, as no level says a mixture.

    Tensors that lie differently are asked for each of their layouts, one that lies in none for all that
    have a head dim of stride 1; gradients of a mask beside others are asked for on their own.
    """
    layouts = [config.layout]
    if config.layout is UNSET:
        found: list[Layout] = []
        for seen, fits in zip(call.qkv, _layouts(call), strict=True):
            found += fits[:1] or (DENSE if seen.stride[-1] == 1 else ("inner-stride",))
        layouts = list(dict.fromkeys(found))
    needs = [config.needs_grad]
    if config.needs_grad is UNSET and "mask" in call.wanted:
        needs.append("mask")
    return [structs.replace(config, layout=layout, needs_grad=need) for layout in layouts for need in needs]


def rows_masked(mask: Tensor | None) -> MaskedRows | None:
    """Return which of its rows a mask hides wholly, by looking: this waits for the device.

    None where no level says it: rows hidden in different ways, or nearly.
    """
    if mask is None or isinstance(mask, CausalBias) or not mask.numel():
        return "none"
    if mask.dtype == torch.bool:
        return "none" if bool(mask.any(-1).all()) else "false"
    top = mask.detach().amax(-1)
    # A NaN is in no comparison, so it leads to None.
    hidden = ~(top > HIDDEN)
    if not bool(hidden.any()):
        return "none"
    if bool((top[hidden] == float("-inf")).all()):
        return "-inf"
    lowest = torch.finfo(mask.dtype).min
    return "finfo-min" if bool((mask.detach()[hidden] == lowest).all()) else None


def call_of_case(case: Case, device: str) -> Call:
    """Return the call that a case is, for the strides and flags that torch chooses a kernel by.

    Raises:
        UsageError: packed sequences, which are no (B, H, S, D) tensors.
    """
    if case.layout == "varlen":
        raise UsageError(NOT_JUDGED, why=_NESTED)
    q = (case.batch, case.heads, case.seqlen_q, case.head_dim)
    k = (case.batch, case.heads_kv, case.seqlen_kv, case.head_dim)
    v = (case.batch, case.heads_kv, case.seqlen_kv, case.head_dim_v)
    dtype = next(torch_type for torch_type, name in DTYPES.items() if name == case.dtype)
    grads = {"none": "", "all": "qkv", "q": "q", "kv": "kv", "mask": ""}[case.needs_grad]
    # Of the two ways to expand, over heads where there are several.
    strides = [ways[0 if case.heads_kv > 1 else -1] for ways in strides_of(case.layout, [q, k, v])]

    def seen(name: str, shape: tuple[int, ...], stride: tuple[int, ...]) -> Seen:
        return Seen(shape, stride, dtype, name in grads)

    mask = None
    if case.mask.startswith(("bool", "float")):
        n, m = case.seqlen_q, case.seqlen_kv
        stride = (n * m, 0, m, 1) if case.mask.endswith("-broadcast") else (case.heads * n * m, n * m, m, 1)
        of = torch.bool if case.mask.startswith("bool") else dtype
        mask = Seen((case.batch, case.heads, n, m), stride, of, case.needs_grad == "mask")
    return Call(
        qkv=(seen("q", q, strides[0]), seen("k", k, strides[1]), seen("v", v, strides[2])),
        mask=mask,
        bias="lower-right" if case.mask == "causal-bottom-right" else "",
        device=device,
        dropout=case.dropout,
        causal=case.mask == "causal-top-left",
        scale=case.scale,
        gqa=case.heads != case.heads_kv,
        grad=case.pass_ == "backward",
        training=None,
        deterministic=case.deterministic,
        masked_rows=case.masked_rows,
    )
