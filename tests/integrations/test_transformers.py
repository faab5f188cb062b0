"""A small real model of transformers, trained on the CPU behind a guard and the matrix of a real scan."""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import attnprobe
from attnprobe.errors import NoBackendError, UsageError
from attnprobe.integrations.guard import Guard
from attnprobe.integrations.transformers import register
from attnprobe.select.selector import Selector

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

ALL = {"pass": ("forward", "backward")}
LOW = torch.finfo(torch.float32).min
BATCH, LENGTH = 2, 8
Model = Any
Gradients = dict[str, Tensor]


@pytest.fixture(scope="module")
def untrained() -> Model:
    config = transformers.LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_hidden_layers=2,
        vocab_size=50,
        max_position_embeddings=64,
        use_cache=False,
    )
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config)


@pytest.fixture(scope="module")
def tokens() -> Tensor:
    return torch.randint(50, (BATCH, LENGTH), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def selector(matrix_file: Path) -> Selector:
    return attnprobe.load(matrix_file)


@pytest.fixture
def model(untrained: Model) -> Iterator[Callable[[str], Model]]:
    def of(implementation: str) -> Model:
        made = copy.deepcopy(untrained)
        made.set_attn_implementation(implementation)
        return made.train()

    yield of
    torch._dynamo.reset()


def visible() -> tuple[Tensor, Tensor]:
    """Return which tokens are no padding, (B, S), and which key each query may see, (B, 1, S, S)."""
    real = torch.ones(BATCH, LENGTH, dtype=torch.bool)
    real[1, :3] = False
    causal = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    return real, causal & real[:, None, None, :]


def left_padded() -> Tensor:
    """Return the float mask that left padding makes: rows of padding are all finfo.min."""
    return torch.zeros(BATCH, 1, LENGTH, LENGTH).masked_fill(~visible()[1], LOW)


def gradients(model: Model, tokens: Tensor, mask: Tensor | None, labels: Tensor | None = None) -> Gradients:
    model.zero_grad()
    loss: Tensor = model(tokens, attention_mask=mask, labels=tokens if labels is None else labels).loss
    torch.autograd.backward(loss)
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def apart(found: Gradients, expected: Gradients) -> float:
    return max(float((found[name] - expected[name]).abs().max()) for name in expected)


def trained(model: Model, tokens: Tensor, mask: Tensor | None, steps: int = 3) -> Gradients:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(steps):
        gradients(model, tokens, mask)
        optimizer.step()
    return {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("padded", [False, True])
def test_training_steps_are_those_of_eager_attention(
    padded: bool,  # noqa: FBT001  # a case
    model: Callable[[str], Model],
    tokens: Tensor,
    selector: Selector,
) -> None:
    """Where no row of padding enters the loss; the last of them would predict the first token."""
    register(Guard(selector))
    real, _ = visible()
    labels = tokens.masked_fill(~real, -100)
    labels[1, 3] = -100
    mask = real.long() if padded else None
    models = [model("eager"), model("attnprobe")]
    for _ in range(3):
        eager, found = (gradients(one, tokens, mask, labels) for one in models)
        assert apart(found, eager) < 1e-6
        assert max(float(grad.abs().max()) for grad in eager.values()) > 1e-2
        for one in models:
            with torch.no_grad():
                for parameter in one.parameters():
                    parameter.sub_(0.5 * parameter.grad)


def test_rows_of_finfo_min_are_right_where_sdpa_is_wrong(
    model: Callable[[str], Model], tokens: Tensor, selector: Selector, logged: Callable[[], list[str]]
) -> None:
    register(Guard(selector))
    mask = left_padded()
    eager = gradients(model("eager"), tokens, mask)
    assert apart(gradients(model("sdpa"), tokens, mask), eager) > 0.1
    assert apart(gradients(model("attnprobe"), tokens, mask), eager) < 1e-6
    (line,) = logged()
    assert line.startswith("torch-flash denied: backward, float mask with a row masked whole by finfo.min")
    assert line.endswith("torch-math runs instead")


def test_a_harmless_mask_keeps_its_kernel_where_it_may_be_looked_at(
    model: Callable[[str], Model], tokens: Tensor, selector: Selector, kernels: Callable[..., str]
) -> None:
    harmless, harmful = torch.zeros(BATCH, 1, LENGTH, LENGTH), left_padded()
    for look, kernel in ((False, "math"), (True, "flash")):
        register(Guard(selector), look_at_mask=look)
        assert kernels(lambda: gradients(model("attnprobe"), tokens, harmless)) == kernel
        assert kernels(lambda: gradients(model("attnprobe"), tokens, harmful)) == "math"


def test_observing_a_training_run_changes_no_bit_and_says_what_would_change(
    model: Callable[[str], Model], tokens: Tensor, selector: Selector, tmp_path: Path
) -> None:
    log = tmp_path / "observed.jsonl"
    register(Guard(selector, "observe", log=log))
    mask = left_padded()
    found, expected = trained(model("attnprobe"), tokens, mask), trained(model("sdpa"), tokens, mask)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    lines = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    assert {line["where"] for line in lines} == {"layer 0", "layer 1"}
    for line in lines:
        assert (line["host"], line["veto"], "veto" in line["changes"]) == ("torch-flash", "torch-math", True)
        assert (line["config"]["mask"], line["config"]["seqlen_q"]) == ("float-broadcast", LENGTH)
        denied = next(one for one in line["candidates"] if one["backend"] == "torch-flash")
        assert (denied["status"], denied["evidence"], denied["verdict"]) == ("denied", "measured", "wrong")


def test_a_refusal_names_the_layer(
    model: Callable[[str], Model], tokens: Tensor, selector_of: Callable[..., Selector]
) -> None:
    register(Guard(selector_of({"torch-flash": ALL, "torch-math": ALL})))
    with pytest.raises(NoBackendError, match="at layer 0"):
        gradients(model("attnprobe"), tokens, None)
    register(Guard(selector_of(), "gate"))
    with pytest.raises(NoBackendError, match=r"torch-flash +unknown"):
        gradients(model("attnprobe"), tokens, None)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_is_asked_as_training(
    reentrant: bool,  # noqa: FBT001  # a case
    model: Callable[[str], Model],
    tokens: Tensor,
    selector: Selector,
    tmp_path: Path,
) -> None:
    """Reentrant checkpointing runs its first forward pass without gradients."""
    log = tmp_path / "observed.jsonl"
    register(Guard(selector))
    mask = left_padded()
    expected = gradients(model("eager"), tokens, mask)
    for guard in (Guard(selector), Guard(selector, "observe", log=log)):
        register(guard)
        one = model("attnprobe")
        one.gradient_checkpointing_enable({"use_reentrant": reentrant})
        found = gradients(one, tokens, mask)
        assert (apart(found, expected) < 1e-6) == (guard.mode == "veto")
    passes = {json.loads(line)["config"]["pass"] for line in log.read_text(encoding="utf-8").splitlines()}
    assert passes == {"backward"}
    one.eval()
    with torch.no_grad():
        one(tokens)
    last = json.loads(log.read_text(encoding="utf-8").splitlines()[-1])
    assert last["config"]["pass"] == "forward"


def test_decoding_with_one_query_gives_what_sdpa_gives(
    model: Callable[[str], Model], tokens: Tensor, selector_of: Callable[..., Selector]
) -> None:
    register(Guard(selector_of()))
    found, expected = (
        model(name).eval().generate(tokens, max_new_tokens=4, do_sample=False, use_cache=True, pad_token_id=0)
        for name in ("attnprobe", "sdpa")
    )
    assert found.shape == (BATCH, LENGTH + 4)
    assert torch.equal(found, expected)


@pytest.mark.slow
@pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf"
)  # torch's own reading
def test_a_compiled_model_runs_what_is_decided(
    model: Callable[[str], Model], tokens: Tensor, selector: Selector, kernels: Callable[..., str]
) -> None:
    """The whole model in one graph; and its layers, which share one though they have names."""
    register(Guard(selector))
    mask = left_padded()
    expected = gradients(model("eager"), tokens, mask)
    one = model("attnprobe")
    one.compile(fullgraph=True, backend="aot_eager")
    assert kernels(lambda: gradients(one, tokens, mask)) == "math"
    assert apart(gradients(one, tokens, mask), expected) < 1e-6
    assert kernels(lambda: gradients(one, tokens, None)) == "flash"
    two = model("attnprobe")
    counters = torch._dynamo.utils.counters["stats"]
    before = counters["unique_graphs"]
    for layer in two.model.layers:
        layer.compile(fullgraph=True, backend="aot_eager")
    assert apart(gradients(two, tokens, mask), expected) < 1e-6
    assert counters["unique_graphs"] == before + 1


def test_without_transformers_there_is_an_error_that_says_so(
    selector_of: Callable[..., Selector], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(UsageError, match=r"pip install 'transformers>=4\.53'"):
        register(Guard(selector_of()))
