"""The guard in Transformer Engine's real selector, on devices that are not here."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from attnprobe.config import Case
from attnprobe.errors import NoBackendError, UsageError
from attnprobe.integrations.transformer_engine import forward_only, install
from attnprobe.matrix.store import encode
from attnprobe.verdict import Evidence
from tests.integrations.te_matrices import FUSED, SOLE, UNFUSED, fixture, guard, rule
from tests.integrations.te_sources import ROOT, Process, in_te

if TYPE_CHECKING:
    from tests.integrations.te_sources import TE


@pytest.fixture(scope="module")
def te_process() -> Iterator[Process]:
    process = Process()
    yield process
    process.close()


ROWS = [
    ({}, "12.0", UNFUSED),
    ({"head_dim_qk": 224, "head_dim_v": 224}, "12.0", UNFUSED),
    ({"head_dim_qk": 192}, "12.0", UNFUSED),
    ({"head_dim_v": 192}, "12.0", UNFUSED),
    ({"qkv_layout": "thd_thd_thd", "attn_mask_type": "padding_causal"}, "12.0", UNFUSED),
    ({"qkv_layout": "sbh3d", "num_gqa_groups": 4}, "12.0", UNFUSED),
    ({"attention_dropout": 0.0}, "12.0", "flash-attn-2"),
    ({"is_training": False}, "12.0", "flash-attn-2"),
    ({"head_dim_qk": 192, "head_dim_v": 192}, "12.0", "flash-attn-2"),
    ({}, "10.0", "flash-attn-2"),
]


@pytest.mark.parametrize(("changed", "sm", "chosen"), ROWS)
@in_te
def test_what_flash_attn_2_may_run(te: TE, changed: dict[str, Any], sm: str, chosen: str) -> None:
    te.device(*map(int, sm.split(".")))
    assert te.choice(**changed) == "flash-attn-2"
    installed = install(guard(fixture(sm)))
    assert te.choice(**changed) == chosen
    assert bool(te.logged) == (chosen == UNFUSED)
    installed.uninstall()
    assert te.choice(**changed) == "flash-attn-2"


@in_te
def test_forward_only_keeps_a_backend_whose_backward_is_broken(te: TE) -> None:
    install(guard(fixture()))
    with forward_only():
        assert te.choice() == "flash-attn-2"
    assert te.choice() == UNFUSED


@in_te
def test_the_layer_itself_alternates_and_its_memory_with_it(te: TE) -> None:
    """Transformer Engine remembers one choice by its parameters; no promise outlives its block."""
    import torch

    run = te.layer()
    assert run() == "flash-attn-2"
    installed = install(guard(fixture()))
    assert run() == UNFUSED
    assert run(training=False) == "flash-attn-2"
    assert run() == UNFUSED
    with torch.no_grad():  # as the first pass under activation checkpointing
        assert run() == UNFUSED
    with forward_only():
        assert run() == "flash-attn-2"
        assert run() == "flash-attn-2"
    assert run() == UNFUSED
    installed.uninstall()
    assert run() == "flash-attn-2"


@in_te
def test_the_layer_still_remembers(te: TE) -> None:
    run = te.layer(192)
    install(guard(fixture()))
    assert run() == "flash-attn-2"
    te.utils.get_attention_backend = None
    assert run() == "flash-attn-2"  # it is not asked again


@in_te
def test_a_promise_of_one_thread_is_not_remembered_for_another(te: TE) -> None:
    import threading

    run = te.layer()
    install(guard(fixture()))
    seen = []
    with forward_only():
        assert run() == "flash-attn-2"
        other = threading.Thread(target=lambda: seen.append(run()))
        other.start()
        other.join()
    assert seen == [UNFUSED]


@in_te
def test_mixed_policies_are_remembered_apart(te: TE) -> None:
    import torch

    policy = {
        "sequence_ids": torch.arange(2),
        "mask_type": "padding_causal",
        "window_size": (-1, 0),
        "bottom_right_diagonal": False,
    }
    params = vars(te.params(qkv_layout="thd_thd_thd"))
    known = {k: v for k, v in params.items() if k not in {"batch_size", "attn_mask_type", *policy}}
    del known["pad_between_seqs"]

    def chosen() -> bool:
        return bool(te.attention._get_thd_policy_attention_backend(policy, known, False)[0])

    assert chosen()
    install(guard(fixture()))
    assert not chosen()
    with forward_only():
        assert chosen()
    assert not chosen()


@pytest.mark.parametrize(
    ("denied", "chosen"),
    [
        ("", "flash-attn-3"),
        ("3", "flash-attn-4"),
        ("34", "flash-attn-2"),
        ("4", "flash-attn-3"),
        ("234", UNFUSED),
    ],
)
@in_te
def test_it_moves_between_the_versions_as_transformer_engine_would(te: TE, denied: str, chosen: str) -> None:
    te.device(9, 0)
    te.flash(3, "3.0.0b1")
    te.flash(4, "4.0.0b11", lambda *_: None)
    versions = te.utils.FlashAttentionUtils
    before, environment = dict(vars(versions)), dict(os.environ)
    plain = {"attention_dropout": 0.0, "head_dim_qk": 128, "head_dim_v": 128}
    assert te.choice(**plain) == "flash-attn-3"
    install(guard(fixture("9.0", {f"flash-attn-{major}": (rule("r", SOLE),) for major in denied})))
    returned = te.utils.get_attention_backend(te.params(**plain))
    assert te.choice(**plain) == chosen
    if chosen != UNFUSED:
        assert returned[1].major == int(chosen[-1])
    # Nothing of the process was changed on the way, and nobody was advised to install what is there.
    assert not te.advised
    assert dict(vars(versions)) == before
    assert dict(os.environ) == environment


@pytest.mark.parametrize(("sm", "before", "after"), [("8.6", "flash-attn-2", FUSED), ("12.0", FUSED, FUSED)])
@in_te
def test_fused_attention_is_next(te: TE, sm: str, before: str, after: str) -> None:
    te.library.fused = True
    te.device(*map(int, sm.split(".")))
    plain = {"head_dim_qk": 192, "head_dim_v": 192}
    assert te.choice(**plain) == before
    wide = rule("r", {"pass": ("backward",), "dropout": ("on",), "head_dim": (192,)})
    install(guard(fixture(sm, {"flash-attn-2": (wide,)})))
    returned = te.utils.get_attention_backend(te.params(**plain))
    assert te.choice(**plain) == after
    assert returned[3] == te.library.NVTE_Fused_Attn_Backend.NVTE_F16_arbitrary_seqlen


@in_te
def test_a_fused_attention_that_is_denied_gives_way(te: TE) -> None:
    """Matrices do not know it yet; one that does is heard."""
    te.library.fused = True
    plain = {"head_dim_qk": 128, "head_dim_v": 128}
    assert te.choice(**plain) == FUSED
    install(guard(fixture(rules={FUSED: (rule("r", SOLE),)})))
    assert te.choice(**plain) == "flash-attn-2"
    assert te.choice(**plain, attention_dropout=0.0, is_training=False) == FUSED


@in_te
def test_where_nothing_is_left_the_call_ends_with_the_reason(te: TE) -> None:
    os.environ["NVTE_UNFUSED_ATTN"] = "0"
    assert te.choice() == "flash-attn-2"
    install(guard(fixture()))
    with pytest.raises(NoBackendError) as caught:
        te.choice()
    assert "flash-attn-2" in str(caught.value)
    assert "dq, dk, dv never written" in str(caught.value)
    (one,) = caught.value.decision.candidates
    assert (one.backend, one.status, one.evidence) == ("flash-attn-2", "denied", Evidence.TRACED)


@in_te
def test_what_transformer_engine_refuses_stays_refused(te: TE) -> None:
    te.device(12, 1)
    os.environ["NVTE_UNFUSED_ATTN"] = "0"
    install(guard(fixture("12.1")))
    assert te.choice() == ""


@in_te
def test_a_public_report_alone_counts_too(te: TE) -> None:
    os.environ["NVTE_UNFUSED_ATTN"] = "0"
    install(guard(fixture(rules={"flash-attn-2": ()})))
    with pytest.raises(NoBackendError) as caught:
        te.choice()
    (one,) = caught.value.decision.candidates
    assert (one.rule, one.evidence) == ("flash-attention-3053", Evidence.REPORTED)


@in_te
def test_threads_do_not_disturb_each_other(te: TE) -> None:
    from concurrent.futures import ThreadPoolExecutor

    te.device(9, 0)
    te.flash(3, "3.0.0b1")
    te.flash(4, "4.0.0b11", lambda *_: None)
    install(guard(fixture("9.0", {f"flash-attn-{major}": (rule("r", SOLE),) for major in "34"})))
    plain = {"attention_dropout": 0.0, "head_dim_qk": 128, "head_dim_v": 128}
    asked = [True, False] * 100
    with ThreadPoolExecutor(4) as pool:
        chosen = list(pool.map(lambda training: te.choice(**plain, is_training=training), asked))
    assert chosen == ["flash-attn-2", "flash-attn-3"] * 100


@in_te
def test_it_warns_once_and_says_why(te: TE) -> None:
    install(guard(fixture()))
    for length in (128, 256, 384, 512, 1024):
        te.choice(max_seqlen_q=length, max_seqlen_kv=length)
    assert len(te.logged) == 2  # lengths below 512, and above
    assert f"chose flash-attn-2, {UNFUSED} runs instead" in te.logged[0]
    assert "dropout" in te.logged[0]
    assert "dq, dk, dv never written" in te.logged[0]


RIGHT = Case(
    dtype="bfloat16",
    head_dim=128,
    head_dim_v=128,
    heads=16,
    heads_kv=16,
    mask="causal-bottom-right",
    layout="transposed",
)


@in_te
def test_a_gate_lets_only_what_is_proven_run(te: TE) -> None:
    plain = {"head_dim_qk": 128, "head_dim_v": 128, "attention_dropout": 0.0}
    install(guard(fixture(right={"flash-attn-2": (RIGHT,)}), "gate"))
    assert te.choice(**plain) == "flash-attn-2"
    assert not te.logged
    assert te.choice(**{**plain, "head_dim_v": 64}) == "flash-attn-2"  # padded to what is proven
    for change in ({"max_seqlen_q": 256, "max_seqlen_kv": 256}, {"num_gqa_groups": 4}, {"head_dim_qk": 64}):
        with pytest.raises(NoBackendError, match="unknown"):
            te.choice(**{**plain, **change})
    for unsaid in ("context_parallel", "return_max_logit"):
        with pytest.raises(NoBackendError, match="not judged"):
            te.choice(**plain, **{unsaid: True})


@in_te
def test_observing_changes_nothing_and_writes_it_down(te: TE) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as place:
        log = Path(place, "log")
        install(guard(fixture(), "observe", log=log))
        for dropout in (0.1, 0.0, 0.1):
            assert te.choice(attention_dropout=dropout) == "flash-attn-2"
        lines = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    assert [(line["where"], line["host"], line["veto"]) for line in lines] == [
        ("transformer-engine", "flash-attn-2", UNFUSED),
        ("transformer-engine", "flash-attn-2", "flash-attn-2"),
    ]


@in_te
def test_context_parallelism_is_judged_only_where_no_length_or_mask_matters(te: TE) -> None:
    te.library.fused = True
    te.device(8, 9)
    narrow = {"head_dim_qk": 128, "head_dim_v": 128, "context_parallel": True}
    masked = rule("r2", {"mask": ("causal-bottom-right",), "pass": ("backward",)})
    wide = rule("r1", {"pass": ("backward",), "dropout": ("on",), "head_dim": (128,)})
    matrix = fixture("8.9", {"flash-attn-2": (masked, wide)})
    assert te.choice(**narrow) == "flash-attn-2"
    install(guard(matrix))
    assert te.choice(**narrow) == FUSED
    te.logged.clear()
    for _ in range(2):
        assert te.choice(**narrow, attention_dropout=0.0) == "flash-attn-2"
    assert te.logged == ["context parallelism: not judged; flash-attn-2 is let through"]
    del narrow["context_parallel"]
    assert te.choice(**narrow, attention_dropout=0.0) == FUSED


@in_te
def test_a_public_report_counts_under_context_parallelism_too(te: TE) -> None:
    assert te.choice(context_parallel=True) == "flash-attn-2"
    install(guard(fixture(rules={"flash-attn-2": ()})))
    assert te.choice(context_parallel=True, attention_dropout=0.0) == "flash-attn-2"
    with pytest.raises(NoBackendError, match="flash-attention-3053"):
        te.choice(context_parallel=True)


@in_te
def test_a_question_that_cannot_be_put_does_not_end_a_job(te: TE) -> None:
    plain = {"batch_size": 0}
    installed = install(guard(fixture()))
    assert te.choice(**plain) == "flash-attn-2"
    assert "not judged" in te.logged[0]
    installed.uninstall()
    install(guard(fixture(), "gate"))
    with pytest.raises(UsageError):
        te.choice(**plain)


# -- FlashAttention 4 --------------------------------------------------------------------------------------


def validate(head_dim: int, head_dim_v: int, major: int, alignment: int) -> None:
    """Refuse what flash-attn 4.0.0b11 refuses on SM 10.x, by the table in its interface."""
    assert head_dim % alignment == 0, "alignment"
    if major in {10, 11}:
        small = head_dim <= 128 and head_dim_v <= 128
        assert small or (head_dim, head_dim_v) in {(192, 128), (64, 512), (256, 256)}, "head dims"


PLAIN_4 = {"attention_dropout": 0.0, "head_dim_qk": 128, "head_dim_v": 128}
WIDE_4 = {"attention_dropout": 0.0, "attn_mask_type": "no_mask", "window_size": (-1, -1)}
CROSS = {**WIDE_4, "max_seqlen_q": 128, "max_seqlen_kv": 256}
SKEWED = {**PLAIN_4, "head_dim_v": 96}


@pytest.mark.parametrize(
    ("changed", "reported"),
    [
        (PLAIN_4, ""),
        (WIDE_4, ""),
        (CROSS, "transformer-engine-fa4-256-cross"),
        (SKEWED, "flash-attention-2552"),
        ({**SKEWED, "is_training": False}, ""),
    ],
)
@in_te
def test_flash_attn_4_goes_by_public_reports(te: TE, changed: dict[str, Any], reported: str) -> None:
    """Without the guards that Transformer Engine 2.20 has: they are tied to a validator that is not there."""
    te.device(10, 0)
    te.flash(4, "4.0.0b11")
    assert te.choice(**changed) == "flash-attn-4"
    os.environ["NVTE_UNFUSED_ATTN"] = os.environ["NVTE_FLASH_ATTN_V2"] = "0"
    installed = install(guard(fixture("10.0")))
    te.logged.clear()
    if reported:
        with pytest.raises(NoBackendError) as caught:
            te.choice(**changed)
        (one,) = caught.value.decision.candidates
        assert (one.rule, one.evidence) == (reported, Evidence.REPORTED)
        installed.uninstall()
        te.flash(4, "4.0.0b11", validate)
        assert te.choice(**changed) == ""  # as Transformer Engine's own guards say
    else:
        assert te.choice(**changed) == "flash-attn-4"


def interface(**names: Any) -> None:
    """Let `flash_attn.cute.interface` be a module with these names."""
    import types

    for name in ("flash_attn", "flash_attn.cute", "flash_attn.cute.interface"):
        sys.modules[name] = types.ModuleType(name)
    vars(sys.modules["flash_attn.cute.interface"]).update(names)


@in_te
def test_flash_attn_4_goes_by_its_own_check_of_head_dims(te: TE) -> None:
    te.device(10, 0)
    te.flash(4, "4.0.0b11")
    interface(_validate_head_dims=validate)
    refused = {**PLAIN_4, "head_dim_qk": 192, "head_dim_v": 192}
    assert te.choice(**refused) == "flash-attn-4"
    install(guard(fixture("10.0")))
    assert te.choice(**PLAIN_4) == "flash-attn-4"
    assert not te.logged
    assert te.choice(**refused) == "flash-attn-2"
    assert "_validate_head_dims of flash-attn 4 refuses: head dims" in te.logged[0]
    os.environ["NVTE_UNFUSED_ATTN"] = os.environ["NVTE_FLASH_ATTN_V2"] = "0"
    with pytest.raises(NoBackendError) as caught:
        te.choice(**refused)
    (one,) = caught.value.decision.candidates
    assert (one.backend, one.evidence) == ("flash-attn-4", Evidence.DECLARED)


def breaks(*_: int) -> None:
    raise RuntimeError("no driver")


@pytest.mark.parametrize(
    ("build", "said"),
    [
        ({}, "flash-attn-4: no _validate_head_dims, so its head dims are not checked"),
        ({"_validate_head_dims": 0}, "flash-attn-4: _validate_head_dims ended with TypeError"),
        (None, "flash-attn-4: no _validate_head_dims, so its head dims are not checked"),
    ],
)
@in_te
def test_a_flash_attn_4_that_cannot_be_asked_is_reported(
    te: TE, build: dict[str, Any] | None, said: str
) -> None:
    te.device(10, 0)
    te.flash(4, "4.0.0b11")
    if build is not None:
        interface(**build)
    install(guard(fixture("10.0")))
    for _ in range(2):
        assert te.choice(**PLAIN_4) == "flash-attn-4"
    (only,) = te.logged
    assert only.startswith(said)


@in_te
def test_a_flash_attn_4_that_transformer_engine_cannot_load_is_reported(te: TE) -> None:
    """A build without the symbol: Transformer Engine's own import gives up on it."""
    import importlib
    import tempfile

    with tempfile.TemporaryDirectory() as place:
        for name, version in (("flash_attn_4", "4.0.0b3"), ("nvidia_cutlass_dsl", "4.6.2")):
            info = Path(place) / f"{name}-{version}.dist-info"
            info.mkdir()
            (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        sys.path.append(place)
        interface(flash_attn_func=None, flash_attn_varlen_func=None)
        with pytest.warns(RuntimeWarning, match="cannot be loaded"):
            importlib.reload(te.kernels)
        assert te.choice(**PLAIN_4) == "flash-attn-2"
        install(guard(fixture("10.0")))
        assert te.choice(**PLAIN_4) == "flash-attn-2"
    assert te.logged == ["flash-attn-4: 4.0.0b3 is installed, Transformer Engine could not load it"]


# -- torch.compile -----------------------------------------------------------------------------------------


def compiled(te: TE) -> Any:
    """Return a compiled function of a tensor that says which backend was chosen for its shape."""
    import torch

    # With it Transformer Engine itself breaks the graph where a number is symbolic.
    os.environ["NVTE_FUSED_ATTN"] = "0"
    torch._dynamo.config.recompile_limit = 64  # one compilation a question is what is tested

    def call(x: Any, dropout: float, training: bool) -> tuple[Any, str]:  # noqa: FBT001  # as a module has it
        params = te.utils.AttentionParams(
            qkv_dtype=x.dtype,
            qkv_layout="bshd_bshd_bshd",
            batch_size=x.shape[0],
            max_seqlen_q=x.shape[1],
            max_seqlen_kv=x.shape[1],
            head_dim_qk=x.shape[3],
            head_dim_v=x.shape[3],
            attention_dropout=dropout,
            is_training=training,
            core_attention_bias_shape=None,
        )
        returned = te.utils.get_attention_backend(params)
        if returned[0]:
            return x + 1, f"flash-attn-{returned[1].major}"
        return (x + 2, "transformer-engine-unfused") if returned[4] else (x + 3, "transformer-engine-fused")

    run = torch.compile(call, backend="eager", fullgraph=True)

    def chosen(head_dim: int = 256, dropout: float = 0.1, batch: int = 1, *, training: bool = True) -> str:
        name: str = run(torch.zeros(batch, 128, 2, head_dim, dtype=torch.bfloat16), dropout, training)[1]
        return name

    return chosen


@in_te
def test_compiled_code_is_decided_as_it_is_traced(te: TE) -> None:
    chosen = compiled(te)
    assert chosen() == "flash-attn-2"
    installed = install(guard(fixture()))
    assert chosen() == UNFUSED
    assert chosen(dropout=0.0) == "flash-attn-2"
    assert chosen(192) == "flash-attn-2"
    assert chosen(training=False) == "flash-attn-2"
    for batch in (2, 3, 5):  # from the second on torch.compile would have a symbol
        assert chosen(batch=batch) == UNFUSED
    with forward_only():
        assert chosen() == UNFUSED
        assert chosen(224) == UNFUSED
    assert chosen(224) == UNFUSED
    installed.uninstall()
    assert chosen() == "flash-attn-2"


@in_te
def test_compiled_code_moves_between_the_versions(te: TE) -> None:
    te.device(9, 0)
    te.flash(3, "3.0.0b1")
    te.flash(4, "4.0.0b11", lambda *_: None)
    chosen = compiled(te)
    assert chosen(128, 0.0) == "flash-attn-3"
    install(guard(fixture("9.0", {"flash-attn-3": (rule("r", SOLE),)})))
    assert chosen(128, 0.0) == "flash-attn-4"
    assert chosen(128, 0.0, training=False) == "flash-attn-3"


@in_te
def test_compiled_code_ends_where_nothing_is_left(te: TE) -> None:
    import torch

    os.environ["NVTE_UNFUSED_ATTN"] = "0"
    install(guard(fixture()))

    def call(x: Any) -> Any:
        returned = te.utils.get_attention_backend(te.params(batch_size=x.shape[0]))
        return x + 1 if returned[0] else x + 2

    with pytest.raises(NoBackendError, match="dq, dk, dv never written"):
        torch.compile(call, backend="eager")(torch.zeros(2))


# -- What is refused ---------------------------------------------------------------------------------------


@in_te
def test_one_guard_at_a_time(te: TE) -> None:
    original = te.utils.get_attention_backend
    first = guard(fixture())
    installed = install(first)
    assert install(first) is installed
    with pytest.raises(UsageError, match="another guard"):
        install(guard(fixture()))
    installed.uninstall()
    installed.uninstall()
    assert te.utils.get_attention_backend is original
    again = install(guard(fixture()))
    assert again is not installed
    ours = te.utils.get_attention_backend
    te.utils.get_attention_backend = functools.partial(ours)
    with pytest.raises(UsageError, match="bound again"):
        again.uninstall()
    te.utils.get_attention_backend = ours
    again.uninstall()
    assert te.utils.get_attention_backend is original


OTHERS = {
    "a longer tuple": """
def get_attention_backend(attention_params=None):
    use_flash_attention = flash_attention_backend = use_fused_attention = None
    fused_attention_backend = use_unfused_attention = reasons = None
    available_backends = [use_flash_attention, use_fused_attention, use_unfused_attention]
    return (use_flash_attention, flash_attention_backend, use_fused_attention, fused_attention_backend,
            use_unfused_attention, available_backends, reasons)
""",
    "an object": "def get_attention_backend(attention_params=None):\n    return choose(attention_params)\n",
    "another order": """
def get_attention_backend(attention_params=None):
    use_flash_attention = flash_attention_backend = use_fused_attention = None
    fused_attention_backend = use_unfused_attention = None
    available_backends = [use_fused_attention, use_flash_attention, use_unfused_attention]
    return (use_flash_attention, flash_attention_backend, use_fused_attention, fused_attention_backend,
            use_unfused_attention, available_backends)
""",
}


@pytest.mark.parametrize("other", OTHERS)
@in_te
def test_a_selector_of_another_shape_is_refused(te: TE, other: str) -> None:
    import linecache

    text = OTHERS[other]
    linecache.cache["other.py"] = (len(text), None, text.splitlines(keepends=True), "other.py")
    exec(compile(text, "other.py", "exec"), vars(te.utils))  # noqa: S102  # a release that does not exist
    bound = te.utils.get_attention_backend
    with pytest.raises(UsageError, match=r"does not (return|list)"):
        install(guard(fixture()))
    assert te.utils.get_attention_backend is bound


@in_te
def test_a_selector_that_was_replaced_is_refused(te: TE) -> None:
    """As NVTE_PLUGIN does."""
    original = te.utils.get_attention_backend
    te.utils.get_attention_backend = functools.partial(original)
    with pytest.raises(UsageError, match="it was replaced by"):
        install(guard(fixture()))


@pytest.mark.parametrize("how", ["torch", "transformer-engine", "kept"])
@in_te
def test_it_is_refused_after_a_graph_was_captured(te: TE, how: str) -> None:
    import torch

    kept = None
    torch.cuda.is_initialized = lambda: True
    torch.cuda.is_current_stream_capturing = lambda: how == "torch"
    if how == "transformer-engine":
        sys.modules[te.attention.is_graph_capturing.__module__].set_capture_start()
    elif how == "kept":
        kept = object.__new__(torch.cuda.CUDAGraph)
    with pytest.raises(UsageError, match="CUDA graph"):
        install(guard(fixture()))
    assert te.choice() == "flash-attn-2"
    del kept


@in_te
def test_it_can_be_installed_before_one_is(te: TE) -> None:
    installed = install(guard(fixture()))
    capture = sys.modules[te.attention.is_graph_capturing.__module__]
    capture.set_capture_start()
    assert te.choice(cuda_graph=True) == UNFUSED
    capture.set_capture_end()
    installed.uninstall()


@in_te
def test_megatron_finds_the_environment_as_it_wants_it(te: TE) -> None:
    """Its `auto` asserts that these are unset or 1, and sets them."""
    install(guard(fixture()))
    assert te.choice() == UNFUSED
    for name in ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN"):
        assert os.environ.get(name, "1") == "1"
        os.environ[name] = "1"
    assert te.choice() == UNFUSED


@in_te
def test_the_snippets_of_the_page_run(te: TE) -> None:
    import re
    import tempfile

    page = (ROOT / "docs/transformer-engine.md").read_text(encoding="utf-8")
    snippets = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    run, ran = te.layer(), []
    with tempfile.TemporaryDirectory() as place:
        file = Path(place, "m.json")
        file.write_bytes(encode(fixture()))
        names = {"FILE": file, "model": lambda _: ran.append(run()), "tokens": None}
        for number, snippet in enumerate(snippets):
            exec(compile(snippet, f"transformer-engine.md, {number + 1}", "exec"), names)  # noqa: S102  # our own page
    assert ran == [UNFUSED, "flash-attn-2"]


def run_python(script: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)


def test_importing_it_imports_no_host() -> None:
    done = run_python(
        "import sys, attnprobe.integrations.transformer_engine\n"
        "assert not {'torch', 'transformer_engine'} & set(sys.modules)"
    )
    assert done.returncode == 0, done.stderr


def test_a_transformer_engine_without_its_library_is_refused() -> None:
    done = run_python(
        "from attnprobe.errors import UsageError\n"
        "from attnprobe.integrations.transformer_engine import forward_only, install\n"
        "with forward_only():\n"
        "    pass\n"
        "try:\n"
        "    install(None)\n"
        "except UsageError as error:\n"
        "    print(error)"
    )
    assert done.stdout.startswith("Transformer Engine cannot be imported: "), done.stderr
