"""torch: a guard in front of `scaled_dot_product_attention`, call by call or around code that cannot change.

The decision depends on nothing but what a call is (shapes, strides, flags), so it is looked up by that; under
`torch.compile` it is a constant of the graph. Kernels are switched by `sdpa_kernel`, which is one switch for
the whole process: calls from several threads take turns.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor
from torch.nn.attention import sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from attnprobe.config import AttentionConfig, MaskedRows, case_from
from attnprobe.errors import UsageError
from attnprobe.integrations import torch_call
from attnprobe.integrations.torch_choice import MEMBERS, runnable, switches
from attnprobe.select.policy import passes_gate

if TYPE_CHECKING:
    from attnprobe.integrations.guard import Guard
    from attnprobe.integrations.torch_call import Facts
    from attnprobe.select.explain import Candidate, Decision

REMEMBERED: Final = 65536
"""Most calls to remember for one guard; a job has a few, a sweep over lengths must not fill memory."""
_AS_TORCH: Final = ""

_log = logging.getLogger("attnprobe")
_lock = threading.RLock()


class _Memory:
    """What is known of the calls that one guard was asked about, and what was said of them."""

    def __init__(self) -> None:
        self.calls: dict[Facts, tuple[list[AttentionConfig], tuple[str, ...]] | str] = {}
        self.said: set[Any] = set()


_memories: weakref.WeakKeyDictionary[Guard, _Memory] = weakref.WeakKeyDictionary()


def config_of_call(  # noqa: PLR0913, PLR0917  # the signature of torch's call
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,  # noqa: FBT001, FBT002  # torch's name and place
    scale: float | None = None,
    enable_gqa: bool = False,  # noqa: FBT001, FBT002  # torch's name and place
    *,
    training: bool | None = None,
    masked_rows: MaskedRows | None = None,
    look_at_mask: bool = False,
) -> AttentionConfig:
    """Return what a call is, with q (B, H, S_q, D), k (B, H_kv, S_kv, D) and v (B, H_kv, S_kv, D_v).

    It is a backward pass where gradients are on and some input needs one; `training` says so or denies it
    instead. Unsaid are `layout` where the strides are those of no level, `needs_grad` where the inputs that
    need a gradient are, `dtype` where a float mask has another than q, and `masked_rows` where there is a
    mask, unless the caller states it or lets the mask be looked at, which waits for the device.

    Raises:
        UsageError: no configuration says the call: another dtype, another number of dimensions, nested
            tensors, a mask beside is_causal, broadcasting over batch or heads, dropout 1.
    """
    if look_at_mask and masked_rows is None:
        masked_rows = torch_call.rows_masked(attn_mask)
    facts = torch_call.facts(
        query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, training, masked_rows
    )
    return torch_call.config_of(torch_call.call_of(facts))


def attention(  # noqa: PLR0913, PLR0917  # the signature of torch's call
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,  # noqa: FBT001, FBT002  # torch's name and place
    scale: float | None = None,
    enable_gqa: bool = False,  # noqa: FBT001, FBT002  # torch's name and place
    *,
    guard: Guard,
    where: str = "",
    training: bool | None = None,
    masked_rows: MaskedRows | None = None,
    look_at_mask: bool = False,
) -> Tensor:
    """Return `scaled_dot_product_attention` of the same arguments, run by the backend that the guard decides.

    `where` names the layer, for the log and for errors. `training`, `masked_rows` and `look_at_mask`: see
    `config_of_call`; under torch.compile no mask is looked at. Mode "observe" calls torch as it is. A call
    that no configuration says runs as torch runs it, which is logged; mode "gate" refuses it.

    Raises:
        NoBackendError: veto or gate leaves no backend that torch can run here.
        UsageError: in mode "gate", a call that no configuration says.
    """
    arguments = (query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    if torch.compiler.is_compiling():
        found = torch_call.facts(*arguments, training, masked_rows)
        # A layer's name in the key would make a graph for every layer; only the log needs it.
        place = where if guard.mode == "observe" else ""
        matrix = guard.selector.digest
        name = _constant_decision(guard, guard.mode, guard.strength, matrix, place, found)
        if name == _AS_TORCH:
            return _call(arguments)
        with sdpa_kernel(MEMBERS[name]):
            return _call(arguments)
    if look_at_mask and masked_rows is None:
        masked_rows = torch_call.rows_masked(attn_mask)
    with _lock:
        name = _decide(guard, where, torch_call.facts(*arguments, training, masked_rows))
        if name != _AS_TORCH:
            with sdpa_kernel(MEMBERS[name]):
                return _call(arguments)
    return _call(arguments)


def _call(arguments: tuple[Any, ...]) -> Tensor:
    query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa = arguments
    return scaled_dot_product_attention(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )


@contextlib.contextmanager
def backends(guard: Guard, config: AttentionConfig, where: str = "") -> Iterator[str | None]:
    """Let torch run what is decided for `config`, and nothing else, in the block; give its name.

    For code whose calls cannot be changed: every call in the block is taken for the one that is stated.
    Enter it around a compiled function, not inside one; what is compiled in the block is not reused
    outside, nor under another decision. In mode "observe" nothing is changed and None is given.

    Raises:
        NoBackendError: veto or gate leaves no backend that torch can run here.
        UsageError: the configuration contradicts itself, or is of packed sequences.
    """
    kinds = {record.kind for record in guard.selector.matrix.devices}
    device = "cuda" if "cuda" in kinds and torch.cuda.is_available() else "cpu"
    with _lock:
        names = runnable(torch_call.call_of_case(case_from(config), device))
        decision = guard.decide(config, names, where)
    if guard.mode == "observe" or decision.backend is None:
        yield None
        return
    _tell(guard, decision)
    with sdpa_kernel(MEMBERS[decision.backend]), _compiled_apart(decision.backend):
        yield decision.backend


class _Apart(TorchFunctionMode):
    """Changes nothing; a graph that torch.compile made depends on which types of mode were on."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        return func(*args, **(kwargs or {}))


_APART: Final[dict[str, type[_Apart]]] = {name: type(f"_Apart_{name}", (_Apart,), {}) for name in MEMBERS}


@contextlib.contextmanager
def _compiled_apart(name: str) -> Iterator[None]:
    """Keep graphs of one backend from being served for another (pytorch#185449).

    torch keys neither its graphs in memory nor those on disk on the kernels that are switched on. A mode
    of its own type is part of the first key, the tag of the second.
    """
    settings: Any = getattr(torch.compiler, "config", None)
    tag = getattr(settings, "cache_key_tag", None)
    with contextlib.ExitStack() as stack:
        if tag is not None:
            stack.enter_context(settings.patch(cache_key_tag=f"{tag}attnprobe:{name};"))
        stack.enter_context(_APART[name]())
        yield


def _decide(guard: Guard, where: str, facts: Facts) -> str:
    """Return the name of the backend to run, or `_AS_TORCH`."""
    memory = _memory(guard)
    key = (facts, switches())
    known = memory.calls.get(key)
    if known is None:
        if len(memory.calls) >= REMEMBERED:
            memory.calls.clear()
        known = memory.calls[key] = _look(guard, facts)
    if isinstance(known, str):
        return _not_judged(guard, known)
    configs, left = known
    if not left:
        return _AS_TORCH  # torch has none that it may run, and says so itself
    for config in configs:
        decision = guard.decide(config, left, where)
        if guard.mode != "observe":
            _tell(guard, decision)
            left = tuple(one.backend for one in decision.candidates if _passes(guard, one))
    return _AS_TORCH if guard.mode == "observe" else left[0]


def _traced_decision(  # noqa: PLR0913, PLR0917  # what the graph depends on, one each
    guard: Guard, mode: str, strength: int | None, matrix: str, where: str, facts: Facts
) -> str:
    """Decide while torch.compile traces; each argument becomes a condition for using the graph again."""
    del mode, strength, matrix
    with _lock:
        return _decide(guard, where, facts)


_constant_decision: Final[Callable[..., str]] = torch.compiler.assume_constant_result(_traced_decision)  # type: ignore[no-untyped-call]  # torch leaves it untyped


def _look(guard: Guard, facts: Facts) -> tuple[list[AttentionConfig], tuple[str, ...]] | str:
    """Return what to ask for a call and what torch can run for it, its choice first; or why not to ask."""
    try:
        call = torch_call.call_of(facts)
        kind = call.device.partition(":")[0]
        selector = guard.selector
        if not selector.match.assumed and kind not in {one.kind for one in selector.matrix.devices}:
            return f"it runs on {kind}, of which the matrix says nothing"
        return torch_call.asking(torch_call.config_of(call), call), runnable(call)
    except UsageError as error:
        return error.why


def _passes(guard: Guard, one: Candidate) -> bool:
    return one.status != "denied" if guard.mode == "veto" else passes_gate(one, guard.strength)


def _memory(guard: Guard) -> _Memory:
    memory = _memories.get(guard)
    if memory is None:
        memory = _memories[guard] = _Memory()
    return memory


def _tell(guard: Guard, decision: Decision) -> None:
    """Log, once a configuration, that another backend runs than torch would have taken."""
    own = decision.candidates[0]
    said = _memory(guard).said
    key = (decision.config, own.backend, decision.backend)
    if decision.backend != own.backend and key not in said:
        said.add(key)
        _log.warning("%s %s: %s; %s runs instead", own.backend, own.status, own.reason, decision.backend)


def _not_judged(guard: Guard, why: str) -> str:
    """Let torch run what nothing is known of, and log it once; a gate lets nothing unknown through."""
    if guard.mode == "gate":
        raise UsageError(torch_call.NOT_JUDGED, why=why, fix="mode veto lets torch run it")
    said = _memory(guard).said
    if why not in said:
        said.add(why)
        _log.warning("an attention call is not judged: %s; it runs as torch chooses", why)
    return _AS_TORCH
