"""What Transformer Engine asks its selector, as a question to a matrix; and what its answer holds.

Transformer Engine's `AttentionParams` grew from 28 fields in 2.8 to 39 in 2.20; a field that a release does
not have yet has the value here that it then always had. Nothing here imports Transformer Engine or torch.
"""

from __future__ import annotations

import math
from typing import Any, Final, get_args

from msgspec import UNSET, Struct, UnsetType, structs

from attnprobe.config import AttentionConfig, Dtype, Layout, Mask

FLASH: Final = "flash-attn-"
"""Followed by the major version: 2, 3 or 4."""
FLASH_2: Final = FLASH + "2"
FLASH_4: Final = FLASH + "4"
FUSED: Final = "transformer-engine-fused"
"""FusedAttention: cuDNN, through Transformer Engine."""
UNFUSED: Final = "transformer-engine-unfused"
"""UnfusedDotProductAttention: matrix products and a softmax."""
BACKENDS: Final = (FLASH_2, FLASH + "3", FLASH_4, FUSED, UNFUSED)

RETURNED: Final = (
    "use_flash_attention",
    "flash_attention_backend",
    "use_fused_attention",
    "fused_attention_backend",
    "use_unfused_attention",
    "available_backends",
)
"""What `get_attention_backend` returns, in this order, from 2.8 to 2.20. `available_backends` says of
flash, fused and unfused, in this order, whether it could run, chosen or not."""

_LIKE_THE_FIELD: Final[dict[str, Any]] = {
    "qkv_dtype": None,
    "qkv_layout": "",
    "batch_size": None,
    "num_heads": None,
    "num_gqa_groups": None,
    "max_seqlen_q": None,
    "max_seqlen_kv": None,
    "head_dim_qk": None,
    "head_dim_v": None,
    "attn_mask_type": "",
    "window_size": None,
    "core_attention_bias_type": "no_bias",
    "pad_between_seqs": False,
    "attention_dropout": 0.0,
    "context_parallel": False,
    "deterministic": False,
    "is_training": True,
    "softmax_type": "vanilla",
    "softmax_scale": None,
    "softcap": 0.0,
    "return_max_logit": False,
    "num_splits": 1,
    "has_score_mod": False,
}
"""The fields that matter and are plain values, with what holds where a release does not have one."""


class Question(Struct, frozen=True):
    """A configuration to ask for, and in words what of the call no axis can say.

    Where `unjudged` names something, the fields that it may change are left unsaid in `config`.
    """

    config: AttentionConfig
    unjudged: tuple[str, ...] = ()


def plain(params: Any) -> dict[str, Any]:
    """Return an `AttentionParams` as plain values. `torch.compile` traces through here."""
    known = {}
    for name, default in _LIKE_THE_FIELD.items():
        known[name] = getattr(params, name, default)
    for name in ("max_seqlen_q", "max_seqlen_kv"):
        # A tensor is no plain value, and reading it would make the host wait for the device.
        known[name] = known[name] if isinstance(known[name], int) else None
    if known["window_size"] is not None:
        known["window_size"] = tuple(known["window_size"])
    known["kv_cache"] = params.inference_params is not None
    known["fp8_attention"] = bool(params.fp8 and params.fp8_meta["recipe"].fp8_dpa)
    return known


def question(known: dict[str, Any], backend: str, *, forward_only: bool = False) -> Question:
    """Return what to ask a matrix of one backend for a call that `plain` described."""
    unjudged = _unjudged(known, backend)
    training = known["is_training"]
    elsewhere = known["context_parallel"]  # sequences, heads and masks are then divided among ranks
    lengths: tuple[int | UnsetType, int | UnsetType] = (UNSET, UNSET)
    if not (elsewhere or known["kv_cache"] or None in _lengths(known)):
        lengths = _lengths(known)
    mask, window = (UNSET, UNSET) if elsewhere or known["kv_cache"] else _mask(known, backend)
    scale = known["softmax_scale"]
    config = AttentionConfig(
        pass_="backward" if training and not forward_only else "forward",
        dtype=UNSET if known["fp8_attention"] else _dtype(known),
        head_dim=known["head_dim_qk"],
        head_dim_v=known["head_dim_v"],
        heads=UNSET if elsewhere else known["num_heads"],
        heads_kv=UNSET if elsewhere else known["num_gqa_groups"],
        batch=known["batch_size"],
        seqlen_q=lengths[0],
        seqlen_kv=lengths[1],
        mask=mask,
        window=window,
        # Transformer Engine hands the kernels no dropout outside training, whatever the module says.
        dropout=float(known["attention_dropout"]) if training else 0.0,
        scale=None if scale is None or _is_default(scale, known["head_dim_qk"]) else scale,
        softcap=float(known["softcap"]),
        alibi=known["core_attention_bias_type"] == "alibi",
        layout=UNSET if elsewhere or known["kv_cache"] else _layout(known, backend),
        deterministic=bool(known["deterministic"]),
    )
    return Question(as_run(config, backend), unjudged)


def as_run(config: AttentionConfig, backend: str) -> AttentionConfig:
    """Return a configuration as Transformer Engine hands it to the kernels of a backend.

    FlashAttention 2 gets q, k and v padded to the larger head dim; the scale stays that of q and k. Where
    query and key are equally long, a causal mask has one alignment, by the name of what the flash kernels do.
    """
    dim, dim_v = config.head_dim, config.head_dim_v
    if backend == FLASH_2 and isinstance(dim, int) and isinstance(dim_v, int) and dim != dim_v:
        scale = config.scale if isinstance(config.scale, float) else float(dim) ** -0.5
        wide = max(dim, dim_v)
        kept = None if _is_default(scale, wide) else scale
        config = structs.replace(config, head_dim=wide, head_dim_v=wide, scale=kept)
    aligned = config.seqlen_q is not UNSET and config.seqlen_q == config.seqlen_kv
    if aligned and config.mask == "causal-top-left":
        config = structs.replace(config, mask="causal-bottom-right")
    return config


def offered(returned: Any) -> tuple[str, ...]:
    """Return the backends that an answer allows, the chosen one first. `torch.compile` traces this."""
    flash, version, fused, _, unfused, available = returned
    if not (flash or fused or unfused):
        return ()
    names = []
    if available[0]:
        names.append(FLASH + str(version.major))
    if available[1]:
        names.append(FUSED)
    if available[2]:
        names.append(UNFUSED)
    first = names[0] if flash else (FUSED if fused else UNFUSED)
    return (first, *[name for name in names if name != first])


def answer(name: str, returned: Any) -> Any:
    """Return an answer with another of the backends that it allows chosen. `torch.compile` traces this."""
    flash = name not in {FUSED, UNFUSED}
    return (flash, returned[1], name == FUSED, returned[3], name == UNFUSED, returned[5])


def _lengths(known: dict[str, Any]) -> tuple[int, int]:
    return known["max_seqlen_q"], known["max_seqlen_kv"]


def _is_default(scale: float, head_dim: int) -> bool:
    return math.isclose(scale, float(head_dim) ** -0.5, rel_tol=1e-6)


def _dtype(known: dict[str, Any]) -> Dtype | UnsetType:
    name = str(known["qkv_dtype"]).rpartition(".")[2]
    return next((one for one in get_args(Dtype) if one == name), UNSET)


def _unjudged(known: dict[str, Any], backend: str) -> tuple[str, ...]:
    """Return what of a call no axis can say, in words."""
    bias = known["core_attention_bias_type"]
    biased = bias not in {"no_bias", "alibi"}
    padded = "padding" in known["attn_mask_type"] and not _varlen(known, backend)
    unlike = _mask(known, backend)[0] is UNSET and not (biased or padded)
    said = (
        (known["context_parallel"], "context parallelism"),
        (known["fp8_attention"], "FP8 attention"),
        (_dtype(known) is UNSET, f"element type {known['qkv_dtype']}"),
        (known["kv_cache"], "a key-value cache"),
        (None in _lengths(known), "a sequence length that is a tensor"),
        (biased, f"bias {bias}"),
        (padded, "a padding mask"),
        (unlike, f"mask {known['attn_mask_type']} with window {known['window_size']}"),
        (known["pad_between_seqs"], "padding between sequences"),
        (known["softmax_type"] != "vanilla", f"softmax {known['softmax_type']}"),
        (known["return_max_logit"], "returning the largest logit"),
        (known["num_splits"] != 1, f"num_splits {known['num_splits']}"),
        (known["has_score_mod"], "score_mod"),
    )
    return tuple(words for holds, words in said if holds)


def _varlen(known: dict[str, Any], backend: str) -> bool:
    """Whether the kernels get sequences end to end: for flash-attn also what has a padding mask."""
    packed = "t" in known["qkv_layout"].replace("paged_kv_", "")
    return packed or ("padding" in known["attn_mask_type"] and backend.startswith(FLASH))


def _layout(known: dict[str, Any], backend: str) -> Layout:
    if _varlen(known, backend):
        return "varlen"
    layout = known["qkv_layout"]
    # Transformer Engine copies (S, B, H, D) before it calls flash-attn.
    copied = layout.startswith("sb") and backend.startswith(FLASH)
    return "packed" if ("3" in layout or "2" in layout) and not copied else "transposed"


def _mask(known: dict[str, Any], backend: str) -> tuple[Mask | UnsetType, int | UnsetType]:
    """Return level and window of the mask; both unset where no level says it."""
    kind = known["attn_mask_type"].replace("padding", "").strip("_") or "no_mask"
    left, right = known["window_size"] or (-1, -1)
    if (
        kind == "arbitrary"
        or known["core_attention_bias_type"] not in {"no_bias", "alibi"}
        or ("padding" in known["attn_mask_type"] and not _varlen(known, backend))
    ):
        return UNSET, UNSET
    if left >= 0:
        # The axis has windows that end at the query and are aligned at the bottom right, as those of
        # the flash kernels are. Elsewhere the alignment is that of a window only where lengths are equal.
        aligned = backend.startswith(FLASH) or "bottom" in kind or len(set(_lengths(known))) == 1
        fits = left > 0 and (right == 0 or "causal" in kind) and aligned
        return ("window", left) if fits else (UNSET, UNSET)
    if kind == "no_mask":
        return "none", UNSET
    # Transformer Engine lets flash-attn have a causal mask only where both alignments are the same.
    bottom_right = "bottom" in kind or backend.startswith(FLASH)
    return ("causal-bottom-right" if bottom_right else "causal-top-left"), UNSET
