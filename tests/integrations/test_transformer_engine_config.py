"""How a call of Transformer Engine is asked for. Its own classes are not needed for that."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from msgspec import UNSET

from attnprobe.config import AttentionConfig
from attnprobe.integrations.transformer_engine_config import FUSED, UNFUSED, as_run, plain, question

RECIPE = SimpleNamespace(fp8_dpa=True)
PARAMS: dict[str, Any] = {
    "qkv_dtype": "torch.bfloat16",
    "qkv_layout": "bshd_bshd_bshd",
    "batch_size": 2,
    "num_heads": 32,
    "num_gqa_groups": 8,
    "max_seqlen_q": 512,
    "max_seqlen_kv": 512,
    "head_dim_qk": 128,
    "head_dim_v": 128,
    "attn_mask_type": "causal",
    "window_size": (-1, 0),
    "core_attention_bias_type": "no_bias",
    "pad_between_seqs": False,
    "attention_dropout": 0.1,
    "context_parallel": False,
    "deterministic": True,
    "is_training": True,
    "fp8": False,
    "fp8_meta": {},
    "inference_params": None,
    "softmax_type": "vanilla",
}
"""As the AttentionParams of 2.8: every field of it that matters."""
ASKED: dict[str, Any] = {
    "pass_": "backward",
    "dtype": "bfloat16",
    "head_dim": 128,
    "head_dim_v": 128,
    "heads": 32,
    "heads_kv": 8,
    "batch": 2,
    "seqlen_q": 512,
    "seqlen_kv": 512,
    "mask": "causal-bottom-right",
    "dropout": 0.1,
    "scale": None,
    "softcap": 0.0,
    "alibi": False,
    "layout": "transposed",
    "deterministic": True,
}


def ask(backend: str = "flash-attn-2", *, forward_only: bool = False, **changed: Any) -> Any:
    return question(plain(SimpleNamespace(**PARAMS | changed)), backend, forward_only=forward_only)


@pytest.mark.parametrize(
    ("changed", "asked"),
    [
        ({}, {}),
        ({"is_training": False}, {"pass_": "forward", "dropout": 0.0}),
        ({"qkv_dtype": "torch.float16"}, {"dtype": "float16"}),
        ({"attn_mask_type": "no_mask", "window_size": None}, {"mask": "none"}),
        ({"attn_mask_type": "no_mask", "window_size": (64, 0)}, {"mask": "window", "window": 64}),
        ({"window_size": (64, 0)}, {"mask": "window", "window": 64}),
        ({"attn_mask_type": "causal_bottom_right", "max_seqlen_q": 1}, {"seqlen_q": 1}),
        ({"attn_mask_type": "padding_causal"}, {"layout": "varlen"}),
        ({"attn_mask_type": "padding", "qkv_layout": "t3hd"}, {"layout": "varlen", "mask": "none"}),
        ({"qkv_layout": "bs3hd"}, {"layout": "packed"}),
        ({"qkv_layout": "bshd_bsh2d"}, {"layout": "packed"}),
        ({"qkv_layout": "sb3hd"}, {"layout": "transposed"}),
        ({"core_attention_bias_type": "alibi"}, {"alibi": True}),
        ({"softcap": 50.0}, {"softcap": 50.0}),
        ({"softmax_scale": 128**-0.5}, {"scale": None}),
        ({"softmax_scale": 1.0}, {"scale": 1.0}),
        ({"head_dim_v": 64}, {"scale": None}),
        ({"head_dim_qk": 64}, {"scale": 64**-0.5}),
    ],
)
def test_what_axes_can_say_is_asked(changed: dict[str, Any], asked: dict[str, Any]) -> None:
    found = ask(**changed)
    assert found.config == AttentionConfig(**ASKED | asked)
    assert not found.unjudged


def test_a_promise_changes_the_pass_and_not_the_dropout() -> None:
    assert ask(forward_only=True).config == AttentionConfig(**ASKED | {"pass_": "forward"})


@pytest.mark.parametrize(
    ("changed", "unsaid", "words"),
    [
        (
            {"context_parallel": True},
            {"heads", "heads_kv", "seqlen_q", "seqlen_kv", "mask", "layout"},
            "context parallelism",
        ),
        ({"fp8": True, "fp8_meta": {"recipe": RECIPE}}, {"dtype"}, "FP8 attention"),
        ({"qkv_dtype": "torch.float64"}, {"dtype"}, "element type torch.float64"),
        (
            {"inference_params": object()},
            {"seqlen_q", "seqlen_kv", "mask", "layout"},
            "a key-value cache",
        ),
        ({"max_seqlen_kv": object()}, {"seqlen_q", "seqlen_kv"}, "a sequence length that is a tensor"),
        ({"attn_mask_type": "arbitrary"}, {"mask"}, "mask arbitrary with window (-1, 0)"),
        ({"core_attention_bias_type": "post_scale_bias"}, {"mask"}, "bias post_scale_bias"),
        (
            {"attn_mask_type": "no_mask", "window_size": [8, 8]},
            {"mask"},
            "mask no_mask with window (8, 8)",
        ),
        ({"pad_between_seqs": True}, set(), "padding between sequences"),
        ({"softmax_type": "learnable"}, set(), "softmax learnable"),
        ({"return_max_logit": True}, set(), "returning the largest logit"),
        ({"num_splits": 2}, set(), "num_splits 2"),
        ({"has_score_mod": True}, set(), "score_mod"),
    ],
)
def test_what_they_cannot_say_is_named_and_unsaid(
    changed: dict[str, Any], unsaid: set[str], words: str
) -> None:
    found = ask(**changed)
    assert found.unjudged == (words,)
    assert found.config == AttentionConfig(**ASKED | dict.fromkeys(unsaid, UNSET))


def test_only_flash_attn_gets_padded_and_packed_tensors() -> None:
    wide: dict[str, Any] = {"head_dim_qk": 192, "head_dim_v": 256}
    assert (ask(**wide).config.head_dim, ask(**wide).config.head_dim_v) == (256, 256)
    for backend in ("flash-attn-3", "flash-attn-4", FUSED, UNFUSED):
        found = ask(backend, **wide).config
        assert (found.head_dim, found.head_dim_v) == (192, 256)
    assert ask(FUSED, attn_mask_type="padding_causal").unjudged[0] == "a padding mask"
    assert ask(FUSED, qkv_layout="sb3hd").config.layout == "packed"
    assert ask(FUSED, window_size=(8, 0), max_seqlen_q=1).config.mask is UNSET


def test_a_causal_mask_has_the_alignment_of_transformer_engine() -> None:
    assert ask(UNFUSED, max_seqlen_q=1).config.mask == "causal-top-left"
    assert ask(UNFUSED, max_seqlen_q=1, attn_mask_type="causal_bottom_right").config.mask == (
        "causal-bottom-right"
    )
    assert ask(UNFUSED).config.mask == "causal-bottom-right"  # it is the same, and the name of the others


def test_fp8_layers_whose_attention_is_not() -> None:
    assert not ask(fp8=True, fp8_meta={"recipe": SimpleNamespace(fp8_dpa=False)}).unjudged


def test_a_question_with_open_head_dims_stays_as_it_is() -> None:
    config = AttentionConfig(head_dim_v=256)
    assert as_run(config, "flash-attn-2") == config
