"""A call of torch in the words of a matrix, and the kernel that runs it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from msgspec import UNSET, structs
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right, causal_upper_left
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode

from attnprobe.axes import levels_of
from attnprobe.backends._sdpa import Recorder
from attnprobe.backends.calling import Call
from attnprobe.config import AttentionConfig, Case
from attnprobe.errors import NoBackendError, UsageError
from attnprobe.integrations import torch_call
from attnprobe.integrations.guard import Guard
from attnprobe.integrations.torch import attention, backends, config_of_call
from attnprobe.integrations.torch_choice import MEMBERS, runnable
from attnprobe.matrix.schema import Matrix
from attnprobe.probe.inputs import Tensors, make
from attnprobe.probe.plan import random_cases
from attnprobe.select.asked import asked
from attnprobe.select.match import Match
from attnprobe.select.selector import Selector

pytestmark = [
    pytest.mark.filterwarnings("ignore:Lower right causal bias will produce NaNs"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage"),
    # What torch says where a kernel that was forced cannot run.
    pytest.mark.filterwarnings("ignore:.*kernel not used because"),
    pytest.mark.filterwarnings("ignore:.*Triggered internally at"),
]
CPU = torch.device("cpu")
ALL = {"pass": ("forward", "backward")}
FLASH, MATH = "torch-flash", "torch-math"
RAN = {"_scaled_dot_product_flash_attention_for_cpu": FLASH, "math": MATH}
Make = Callable[..., Selector]


@contextlib.contextmanager
def deterministic(case: Case) -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(case.deterministic)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def callable_cases() -> st.SearchStrategy[Case]:
    """Cases that one plain call of torch can be."""
    cases = st.integers(0, 1 << 20).map(lambda seed: random_cases(1, seed)[0])
    return cases.filter(
        lambda case: case.layout != "varlen" and case.mask != "window" and not case.softcap and not case.alibi
    )


def placed(tensors: Tensors) -> list[list[tuple[int, int]]]:
    """Return size and stride of every dimension along which there is a step."""
    every = (tensors.q, tensors.k, tensors.v, tensors.mask)
    return [
        [pair for pair in zip(one.shape, one.stride(), strict=True) if pair[0] > 1] if one.numel() else []
        for one in every
        if one is not None
    ]


def called(case: Case, **options: Any) -> tuple[Tensors, AttentionConfig]:
    tensors = make(case, CPU)
    call = Call(case, tensors)
    with deterministic(case):
        return tensors, config_of_call(call.q, call.k, call.v, **call.options, **options)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.filter_too_much])
@given(case=callable_cases())
def test_a_call_is_the_case_that_made_it(case: Case) -> None:
    tensors, config = called(case)
    levels = levels_of(case)
    found = asked(config).levels
    for axis, (level, *more) in found.items():
        if axis == "masked_rows" and tensors.mask is not None:
            assert config.masked_rows is UNSET
            assert levels[axis] in found[axis]
        elif axis in {"layout", "mask"}:
            # One head lies alike in several layouts; the level is one of which the tensors are the same.
            same = placed(make(structs.replace(case, **{axis: level}), CPU))
            assert same == placed(tensors)
        else:
            assert not more, axis
            assert level == levels[axis], axis
    numbers = ("batch", "heads", "heads_kv", "seqlen_q", "seqlen_kv", "head_dim", "head_dim_v", "dropout")
    assert [getattr(config, name) for name in numbers] == [getattr(case, name) for name in numbers]
    assert config.scale == case.scale


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.filter_too_much])
@given(case=callable_cases().filter(lambda case: case.mask.startswith(("bool", "float"))))
def test_a_mask_that_is_looked_at_has_the_rows_it_was_made_with(case: Case) -> None:
    assume(case.seqlen_q and case.seqlen_kv)
    assert called(case, look_at_mask=True)[1].masked_rows == case.masked_rows


def dense(heads: int = 4, length: int = 6, dim: int = 8, batch: int = 2) -> Tensor:
    return torch.randn(batch, heads, length, dim)


def transposed(heads: int = 4, length: int = 6) -> Tensor:
    return torch.randn(2, length, heads, 8).transpose(1, 2)


def in_one_projection() -> tuple[Tensor, ...]:
    return tuple(one.transpose(1, 2) for one in torch.randn(2, 6, 3, 4, 8).unbind(2))


def in_one_row() -> tuple[Tensor, ...]:
    query, key, value = torch.split(torch.randn(2, 6, 64), [32, 16, 16], dim=2)
    return (
        query.view(2, 6, 4, 8).transpose(1, 2),
        key.view(2, 6, 2, 8).transpose(1, 2),
        value.view(2, 6, 2, 8).transpose(1, 2),
    )


@pytest.mark.parametrize(
    ("qkv", "layout"),
    [
        ((dense(), dense(), dense()), "contiguous"),
        ((transposed(), transposed(), transposed()), "transposed"),
        (in_one_projection(), "packed"),
        (in_one_row(), "packed"),
        ((dense(), dense(1).expand(2, 4, 6, 8), dense(1).expand(2, 4, 6, 8)), "expanded"),
        ((dense(), dense(batch=1).expand(2, 4, 6, 8), dense(batch=1).expand(2, 4, 6, 8)), "expanded"),
        ((dense(dim=16)[..., ::2], dense(dim=16)[..., ::2], dense(dim=16)[..., ::2]), "inner-stride"),
        ((transposed(length=1), transposed(), transposed()), "transposed"),  # one query, as in decoding
        ((transposed(length=1), dense(), dense()), "contiguous"),
        ((transposed(), dense(), dense()), UNSET),
        ((dense(), transposed(), dense()), UNSET),
        ((dense(dim=24)[..., ::3], dense(), dense()), UNSET),
        ((dense(length=12)[:, :, ::2], dense(), dense()), UNSET),
        (tuple(one.transpose(1, 2) for one in torch.randn(2, 6, 4, 24).chunk(3, -1)), UNSET),
    ],
)
def test_how_tensors_of_real_models_lie(qkv: tuple[Tensor, ...], layout: object) -> None:
    query, key, value = qkv
    gqa = query.shape[1] != key.shape[1]
    assert config_of_call(query, key, value, enable_gqa=gqa).layout == layout


@pytest.mark.parametrize(
    ("shape", "level"),
    [
        ((2, 4, 6, 6), "float"),
        ((1, 4, 6, 6), "float"),
        ((2, 1, 6, 6), "float-broadcast"),
        ((1, 1, 6, 6), "float-broadcast"),
        ((6, 6), "float-broadcast"),
        ((2, 1, 1, 6), "float-broadcast"),
    ],
)
def test_a_mask_of_one_for_all_heads_is_broadcast(shape: tuple[int, ...], level: str) -> None:
    query = dense()
    assert config_of_call(query, query, query, torch.zeros(shape)).mask == level
    said = level.replace("float", "bool")
    assert config_of_call(query, query, query, torch.ones(shape, dtype=torch.bool)).mask == said
    expanded = torch.zeros(shape).expand(2, 4, 6, 6)
    assert config_of_call(query, query, query, expanded).mask == level
    one_head = dense(heads=1)
    small = torch.zeros(shape)[:, :1] if len(shape) == 4 else torch.zeros(shape)
    assert config_of_call(one_head, one_head, one_head, small).mask == "float"


def test_masks_that_are_no_tensor() -> None:
    query, key = dense(), dense(length=9)
    assert config_of_call(query, key, key, is_causal=True).mask == "causal-top-left"
    assert config_of_call(query, key, key, causal_upper_left(6, 9)).mask == "causal-top-left"
    lower = config_of_call(query, key, key, causal_lower_right(6, 9), look_at_mask=True)
    assert (lower.mask, lower.masked_rows) == ("causal-bottom-right", "none")


LOW = torch.finfo(torch.float32).min


@pytest.mark.parametrize(
    ("rows", "level"),
    [
        ([[0.0, -5.0], [LOW, 0.0]], "none"),
        ([[0.0, LOW], [LOW, LOW]], "finfo-min"),
        ([[0.0, LOW], [float("-inf"), float("-inf")]], "-inf"),
        ([[LOW, LOW], [float("-inf"), float("-inf")]], UNSET),
        ([[LOW, float("-inf")], [0.0, 0.0]], UNSET),
        ([[-1e9, -1e9], [0.0, 0.0]], UNSET),
        ([[float("nan"), 0.0], [0.0, 0.0]], UNSET),
        ([[True, False], [False, True]], "none"),
        ([[True, False], [False, False]], "false"),
    ],
)
def test_rows_that_are_hidden(rows: list[list[Any]], level: object) -> None:
    query, mask = dense(length=2), torch.tensor(rows)
    assert config_of_call(query, query, query, mask, look_at_mask=True).masked_rows == level
    assert config_of_call(query, query, query, mask).masked_rows is UNSET
    assert config_of_call(query, query, query, mask, masked_rows="none").masked_rows == "none"
    assert config_of_call(query, query, query, look_at_mask=True).masked_rows == "none"


@pytest.mark.parametrize(
    ("needs", "pass_", "level"),
    [
        ("", "forward", "none"),
        ("qkv", "backward", "all"),
        ("q", "backward", "q"),
        ("kv", "backward", "kv"),
        ("m", "backward", "mask"),
        ("k", "backward", UNSET),
        ("qk", "backward", UNSET),
        ("qkvm", "backward", UNSET),
    ],
)
def test_which_inputs_need_a_gradient(needs: str, pass_: str, level: object) -> None:
    query, key, value = (dense().requires_grad_(name in needs) for name in "qkv")
    mask = torch.zeros(2, 4, 6, 6).requires_grad_("m" in needs)

    def said(**options: Any) -> tuple[object, object]:
        config = config_of_call(query, key, value, mask, **options)
        return config.pass_, config.needs_grad

    assert said() == (pass_, level)
    assert said(training=False) == ("forward", "none")
    assert said(training=True) == ("backward", level if needs else UNSET)
    with torch.no_grad():
        assert said() == ("forward", "none")
        assert said(training=True)[0] == "backward"


def test_numbers_and_switches() -> None:
    query = dense()
    plain = config_of_call(query, query, query)
    assert (plain.dropout, plain.scale, plain.deterministic) == (0.0, None, False)
    assert (plain.softcap, plain.alibi) == (0.0, False)
    assert config_of_call(query, query, query, dropout_p=0.25).dropout == 0.25
    assert config_of_call(query, query, query, scale=8**-0.5).scale is None  # it is the default
    assert config_of_call(query, query, query, scale=0.5).scale == 0.5
    with deterministic(Case(deterministic=True)):
        assert config_of_call(query, query, query).deterministic is True
    half = query.to(torch.bfloat16)
    assert config_of_call(half, half, half, torch.zeros(6, 6)).dtype is UNSET  # of two types
    assert config_of_call(half, half, half, torch.zeros(6, 6, dtype=torch.bfloat16)).dtype == "bfloat16"


class Arguments(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves it untyped
    """Notes how the tensors of the CPU's flash kernel are typed and lie."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self.seen: list[tuple[torch.dtype, tuple[int, ...]]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types
        if "_scaled_dot_product_flash_attention_for_cpu" in str(func):
            self.seen = [(one.dtype, one.stride()) for one in args[:3]]
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("layout", ["contiguous", "transposed", "packed", "expanded", "inner-stride"])
def test_autocast_is_what_the_kernel_gets(layout: Any) -> None:
    """It casts to another type, and by that makes dense what was not."""
    tensors = make(Case(heads=4, heads_kv=4, batch=2, head_dim=8, head_dim_v=8, layout=layout), CPU)
    arguments = (tensors.q, tensors.k, tensors.v)
    with torch.autocast("cpu", dtype=torch.bfloat16), Arguments() as kernel:
        scaled_dot_product_attention(*arguments)
        facts = torch_call.facts(*arguments, None, 0.0, False, None, False, None, None)
        config = config_of_call(*arguments)
    call = torch_call.call_of(facts)
    assert [(seen.dtype, seen.stride) for seen in call.qkv] == kernel.seen
    assert config.dtype == "bfloat16"
    dense_then = {"packed": "transposed", "expanded": "contiguous", "inner-stride": "contiguous"}
    assert config.layout == dense_then.get(layout, layout)
    assert config_of_call(*arguments).dtype == "float32"


def nested() -> Tensor:
    parts = [torch.randn(5, 4, 8), torch.randn(3, 4, 8)]
    return torch.nested.nested_tensor(parts, layout=torch.jagged).transpose(1, 2)


NOT_JUDGED: dict[str, tuple[tuple[Tensor, Tensor, Tensor], dict[str, Any]]] = {
    "float64 is no dtype": ((dense().double(),) * 3, {}),
    "are not of shape": ((dense()[0],) * 3, {}),
    "broadcasts over the batch": ((dense(), dense(batch=1), dense(batch=1)), {}),
    "broadcasts over the heads": ((dense(), dense(1), dense(1)), {}),
    "has a mask and is_causal": (
        (dense(),) * 3,
        {"attn_mask": torch.ones(6, 6, dtype=torch.bool), "is_causal": True},
    ),
    "nested tensors": ((nested(),) * 3, {}),
    "dropout": ((dense(),) * 3, {"dropout_p": 1.0}),
    "scale": ((dense(),) * 3, {"scale": -1.0}),
}


@pytest.mark.parametrize("reason", NOT_JUDGED)
def test_what_no_configuration_says_runs_as_torch_runs_it(
    reason: str, selector_of: Make, logged: Callable[[], list[str]]
) -> None:
    arguments, options = NOT_JUDGED[reason]
    with pytest.raises(UsageError, match=reason):
        config_of_call(*arguments, **options)
    denying = selector_of({FLASH: ALL, MATH: ALL})
    with pytest.raises(UsageError, match=reason):
        attention(*arguments, **options, guard=Guard(denying, "gate"))
    assert not logged()
    guard = Guard(denying)
    for _ in range(2):
        torch.manual_seed(0)
        found = attention(*arguments, **options, guard=guard)
        torch.manual_seed(0)
        expected = scaled_dot_product_attention(*arguments, **options)
        pairs = (
            [(found, expected)]
            if not found.is_nested
            else zip(found.unbind(), expected.unbind(), strict=True)
        )
        assert all(torch.equal(one, other) for one, other in pairs)
    (line,) = logged()
    assert reason in line


def test_a_call_on_a_device_that_was_not_scanned_is_not_judged(
    matrix_of: Callable[..., Matrix], logged: Callable[[], list[str]]
) -> None:
    matrix = matrix_of({FLASH: ALL, MATH: ALL}, kind="cuda")
    live = Match(frozenset({0}), "", {})
    guard = Guard(Selector(matrix, live, devices=matrix.devices, installed=None))
    query = dense()
    attention(query, query, query, guard=guard)
    assert "runs on cpu" in logged()[0]


def ran(function: Callable[[], Any]) -> list[str]:
    """Return which kernels a function ran, in order; a call that leaves no trace was math."""
    with Recorder() as recorder:
        function()
    return [RAN[name] for name in recorder.seen or ["math"]]


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.filter_too_much])
@given(case=callable_cases().filter(lambda case: 0 < case.work < 1 << 24))
def test_what_torch_can_run_is_what_it_runs(case: Case) -> None:
    """The first is what torch takes itself; each of the others runs where it is forced, no other does."""
    call = Call(case, make(case, CPU))
    with deterministic(case):
        facts = torch_call.facts(
            call.q,
            call.k,
            call.v,
            call.options.get("attn_mask"),
            case.dropout,
            case.mask == "causal-top-left",
            case.scale,
            case.heads != case.heads_kv,
            None,
            None,
        )
        names = runnable(torch_call.call_of(facts))
        assert ran(lambda: call.forward(scaled_dot_product_attention)) == [names[0]]
        for name, member in MEMBERS.items():
            with sdpa_kernel(member):
                if name in names:
                    assert ran(lambda: call.forward(scaled_dot_product_attention)) == [name]
                else:
                    with pytest.raises(RuntimeError):
                        call.forward(scaled_dot_product_attention)
        said = torch_call.call_of_case(case, "cpu")
        assert runnable(said) == names


def test_each_mode_runs_what_it_decides(selector_of: Make) -> None:
    query = dense().requires_grad_()
    case = Case(heads=4, heads_kv=4, batch=2, seqlen_q=6, seqlen_kv=6, head_dim=8, head_dim_v=8)

    def of(selector: Selector, mode: Any = "veto", **options: Any) -> list[str]:
        guard = Guard(selector, mode)
        return ran(lambda: attention(query, query, query, guard=guard, **options))

    assert of(selector_of()) == [FLASH]
    assert of(selector_of({FLASH: ALL})) == [MATH]
    assert of(selector_of({FLASH: {"pass": ("forward",)}})) == [FLASH]
    assert of(selector_of({FLASH: ALL}), "observe") == [FLASH]
    assert of(selector_of({FLASH: ALL}, (case,)), "gate") == [MATH]
    assert of(selector_of({}, (case,)), "gate") == [FLASH]
    assert of(selector_of({MATH: ALL}), dropout_p=0.0) == [FLASH]
    with pytest.raises(NoBackendError, match="at layer 7"):
        of(selector_of({MATH: ALL}), dropout_p=0.5, where="layer 7")  # flash cannot, math may not
    with pytest.raises(NoBackendError):
        of(selector_of(), "gate")


def test_the_gradients_are_those_of_the_kernel_that_runs(selector_of: Make) -> None:
    query, key, value = (dense().requires_grad_() for _ in range(3))
    out = attention(query, key, value, guard=Guard(selector_of({FLASH: ALL})))
    found = torch.autograd.grad(out.square().sum(), (query, key, value))
    with sdpa_kernel(SDPBackend.MATH):
        other = scaled_dot_product_attention(query, key, value)
        expected = torch.autograd.grad(other.square().sum(), (query, key, value))
    assert all(map(torch.equal, found, expected))


def test_taking_another_backend_is_said_once_a_configuration(
    selector_of: Make, logged: Callable[[], list[str]]
) -> None:
    guard = Guard(selector_of({FLASH: ALL}))
    for length in (6, 7, 6, 7):
        query = dense(length=length)
        attention(query, query, query, guard=guard, where="layer 1")
    assert len(logged()) == 2
    assert all(line.startswith("torch-flash denied: ") for line in logged())
    assert all(line.endswith("; torch-math runs instead") for line in logged())
    attention(query, query, query, guard=Guard(selector_of({FLASH: ALL}), "observe"))
    attention(query, query, query, guard=Guard(selector_of()))
    assert len(logged()) == 2


def test_a_call_that_mixes_layouts_is_asked_for_each(selector_of: Make) -> None:
    """A rule on a layout that no tensor lies in denies nothing, though the layout is unsaid."""
    arguments = (transposed(), dense(), dense())

    def under(layout: str) -> list[str]:
        guard = Guard(selector_of({FLASH: {"layout": (layout,)}}))
        return ran(lambda: attention(*arguments, guard=guard))

    assert under("transposed") == under("contiguous") == [MATH]
    assert under("packed") == under("inner-stride") == under("varlen") == [FLASH]
    case = Case(heads=4, heads_kv=4, batch=2, seqlen_q=6, seqlen_kv=6, head_dim=8, head_dim_v=8)
    forward = structs.replace(case, pass_="forward", needs_grad="none")
    one = selector_of({}, (forward,))
    with pytest.raises(NoBackendError, match="layout"):
        attention(*arguments, guard=Guard(one, "gate"))
    both = selector_of({}, (forward, structs.replace(forward, layout="transposed")))
    assert ran(lambda: attention(*arguments, guard=Guard(both, "gate"))) == [FLASH]


def test_the_gradient_of_a_mask_beside_others_is_asked_for(selector_of: Make) -> None:
    query = dense().requires_grad_()
    mask = torch.zeros(2, 4, 6, 6).requires_grad_()
    with pytest.raises(NoBackendError):  # torch has only math for it
        attention(query, query, query, mask, guard=Guard(selector_of({MATH: {"needs_grad": ("mask",)}})))
    guard = Guard(selector_of({MATH: {"needs_grad": ("q",)}}))
    assert ran(lambda: attention(query, query, query, mask, guard=guard)) == [MATH]


def test_a_mask_denies_by_what_it_may_hold_unless_it_is_known(selector_of: Make) -> None:
    guard = Guard(selector_of({FLASH: {"masked_rows": ("finfo-min",)}}))
    query = dense()
    harmless, harmful = torch.zeros(6, 6), torch.zeros(6, 6)
    harmful[0] = LOW

    def of(mask: Tensor | None, **options: Any) -> list[str]:
        return ran(lambda: attention(query, query, query, mask, guard=guard, **options))

    assert of(None) == of(torch.ones(6, 6, dtype=torch.bool)) == [FLASH]
    assert of(harmless) == [MATH]
    assert of(harmless, masked_rows="none") == of(harmless, look_at_mask=True)[-1:] == [FLASH]
    assert of(harmful, look_at_mask=True) == [MATH]


def test_the_switches_of_the_job_are_respected_and_left_as_they_were(selector_of: Make) -> None:
    query = dense()
    plain, denying = Guard(selector_of()), Guard(selector_of({MATH: ALL}))
    with sdpa_kernel([SDPBackend.MATH, SDPBackend.EFFICIENT_ATTENTION]):
        assert ran(lambda: attention(query, query, query, guard=plain)) == [MATH]
        with pytest.raises(NoBackendError) as caught:
            attention(query, query, query, guard=denying)
        assert [one.backend for one in caught.value.decision.candidates] == [MATH]
        assert not torch.backends.cuda.flash_sdp_enabled()  # type: ignore[no-untyped-call]  # torch's
    assert torch.backends.cuda.flash_sdp_enabled()  # type: ignore[no-untyped-call]  # torch's
    with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION), pytest.raises(RuntimeError, match=r"(?i)no .*backend"):
        attention(query, query, query, guard=plain)  # torch has none, and says so itself
    assert ran(lambda: attention(query, query, query, guard=plain)) == [FLASH]


def test_threads_do_not_run_each_others_kernels(selector_of: Make) -> None:
    guards = {FLASH: Guard(selector_of()), MATH: Guard(selector_of({FLASH: ALL}))}
    found: dict[str, set[str]] = {FLASH: set(), MATH: set()}
    start = threading.Barrier(4)

    def work(name: str) -> None:
        query = dense()
        start.wait()
        for _ in range(50):
            found[name] |= set(ran(lambda: attention(query, query, query, guard=guards[name])))

    threads = [threading.Thread(target=work, args=(name,)) for name in (FLASH, MATH) * 2]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {FLASH: {FLASH}, MATH: {MATH}}


def test_torch_without_its_private_names(selector_of: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """The order of the registry stands in; what torch cannot run it refuses itself."""
    monkeypatch.delattr(torch, "_fused_sdp_choice")
    monkeypatch.delattr(torch._C, "_get_sdp_priority_order")
    query = dense()
    call = torch_call.call_of(
        torch_call.facts(query, query, query, None, 0.0, False, None, False, None, None)
    )
    assert runnable(call) == ("torch-cudnn", "torch-efficient", FLASH, MATH)
    denied = {"torch-cudnn": ALL, "torch-efficient": ALL}
    with pytest.raises(RuntimeError, match=r"(?i)no .*backend"):
        attention(query, query, query, guard=Guard(selector_of(denied)))


@pytest.mark.parametrize("square", [False, True])
def test_the_bottom_right_mask_of_torch(square: bool, selector_of: Make) -> None:  # noqa: FBT001  # a case
    query, key = dense(), dense(length=6 if square else 9)
    bias = causal_lower_right(6, key.shape[2])
    assert ran(lambda: attention(query, key, key, bias, guard=Guard(selector_of()))) == [FLASH]
    denying = Guard(selector_of({FLASH: {"mask": ("causal-bottom-right",)}}))
    assert ran(lambda: attention(query, key, key, bias, guard=denying)) == [MATH]
    found = attention(query, key, key, bias, guard=denying)
    expected = scaled_dot_product_attention(query, key, key, bias)
    torch.testing.assert_close(found, expected)


SAID = AttentionConfig(
    pass_="backward",
    dtype="float32",
    head_dim=8,
    head_dim_v=8,
    heads=4,
    heads_kv=4,
    batch=2,
    seqlen_q=6,
    seqlen_kv=6,
    mask="none",
    dropout=0.0,
    layout="contiguous",
)


def test_a_block_runs_what_is_decided_for_what_it_states(
    selector_of: Make, logged: Callable[[], list[str]]
) -> None:
    query = dense().requires_grad_()

    def plain() -> list[str]:
        return ran(lambda: scaled_dot_product_attention(query, query, query))

    with backends(Guard(selector_of({FLASH: ALL})), SAID) as name:
        assert (name, plain()) == (MATH, [MATH])
    assert plain() == [FLASH]
    assert len(logged()) == 1
    with backends(Guard(selector_of({MATH: ALL})), SAID) as name:
        assert (name, plain()) == (FLASH, [FLASH])
        with pytest.raises(RuntimeError):  # flash alone was decided, and it has no dropout
            scaled_dot_product_attention(query, query, query, dropout_p=0.1)
    with backends(Guard(selector_of({FLASH: ALL}), "observe"), SAID) as name:
        assert (name, plain()) == (None, [FLASH])


def test_a_block_that_nothing_may_run_is_not_entered(selector_of: Make) -> None:
    for selector, mode in ((selector_of({FLASH: ALL, MATH: ALL}), "veto"), (selector_of(), "gate")):
        guard = Guard(selector, mode)  # type: ignore[arg-type]  # one of them
        with pytest.raises(NoBackendError, match="at block"), backends(guard, SAID, where="block"):
            pytest.fail("entered")
    for config in (structs.replace(SAID, heads=3, heads_kv=2), structs.replace(SAID, layout="varlen")):
        with pytest.raises(UsageError), backends(Guard(selector_of()), config):
            pytest.fail("entered")
