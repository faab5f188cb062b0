"""Transformer Engine: take away from its choice of an attention backend what a matrix denies.

`install(guard)` rebinds `get_attention_backend` in the module from which DotProductAttention calls it. What
the original returns is filtered: a backend that is denied gives way to another version of FlashAttention,
then FusedAttention, then UnfusedDotProductAttention, as far as Transformer Engine itself allows them. To
learn of another version the original is asked again with its code bound to a copy of its globals in which
a version is not installed. No flag, no variable of the environment and no file is changed, and what
Transformer Engine refuses stays refused.

The decision goes by `is_training`: Transformer Engine remembers one choice by its parameters, and a
recomputed forward pass runs in another grad mode than the first.
"""

from __future__ import annotations

import contextlib
import contextvars
import itertools
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import msgspec
from msgspec import structs

from attnprobe.errors import NoBackendError, UsageError
from attnprobe.integrations.guard import Guard
from attnprobe.integrations.transformer_engine_config import (
    FLASH,
    FLASH_4,
    FUSED,
    UNFUSED,
    Question,
    answer,
    offered,
    plain,
    question,
)
from attnprobe.integrations.transformer_engine_host import FLAGS, Host, refuse_captured
from attnprobe.select import advisories
from attnprobe.select.asked import asked
from attnprobe.select.explain import Candidate, Decision, narrowing
from attnprobe.select.selector import REMEMBERED
from attnprobe.verdict import Evidence, Verdict

_LOG: Final = logging.getLogger("attnprobe")
_WHERE: Final = "transformer-engine"
_FORWARD_ONLY: Final = contextvars.ContextVar("attnprobe_forward_only", default=False)
_lock: Final = threading.RLock()
_installed: Installed | None = None


@contextlib.contextmanager
def forward_only() -> Iterator[None]:
    """Promise that what runs in here in training mode gets no backward pass.

    A backend whose backward pass is broken is then kept. It holds for this thread; Transformer Engine does
    not remember what it chose meanwhile. Compiled code does not see it and is decided by `is_training`. Do
    not use it beside a thread that trains with mixed THD policies: Transformer Engine remembers those apart.
    Without an installed guard it does nothing.
    """
    token = _FORWARD_ONLY.set(True)
    _forget()
    try:
        yield
    finally:
        _FORWARD_ONLY.reset(token)
        _forget()


def _forget() -> None:
    if _installed is not None:
        _installed.host.forget()


def install(guard: Guard) -> Installed:
    """Let a guard filter what Transformer Engine chooses in this process, from now on.

    A second time with the same guard changes nothing. Call it before a CUDA graph is captured: a graph
    replays the kernels it was captured with.

    Raises:
        UsageError: Transformer Engine cannot be imported, or its selector is not one that this version
            understands; another guard is installed; a CUDA graph is there already.
    """
    global _installed  # noqa: PLW0603  # one process has one Transformer Engine, so one guard
    with _lock:
        if _installed is None:
            host = Host()
            refuse_captured(host)
            _installed = Installed(guard, host)
            host.forget()
        elif _installed.guard is not guard:
            raise UsageError(
                "another guard filters what Transformer Engine chooses",
                why="it has one selector for the whole process",
                fix="uninstall() what install() returned before",
            )
        return _installed


class Installed:
    """What `install` returns: the guard, the host, and the way back."""

    def __init__(self, guard: Guard, host: Host) -> None:
        """Rebind the selector of the host."""
        self.guard = guard
        self.host = host
        self._replacement = _replacement(host, _Judge(guard, host))
        host.utils.get_attention_backend = self._replacement

    def uninstall(self) -> None:
        """Bind the original again; a second time does nothing.

        Raises:
            UsageError: something else was bound over it since.
        """
        global _installed  # noqa: PLW0603  # as in install
        with _lock:
            if _installed is not self:
                return
            if self.host.utils.get_attention_backend is not self._replacement:
                raise UsageError(
                    "the selector of Transformer Engine was bound again after attnprobe",
                    fix="undo that first, then uninstall()",
                )
            self.host.utils.get_attention_backend = self.host.original
            self.host.forget()
            _installed = None


class _Judge:
    """Which of the backends that Transformer Engine allows may run a call."""

    def __init__(self, guard: Guard, host: Host) -> None:
        self._guard = guard
        self._host = host
        self._said: set[object] = set()
        self._decided: dict[tuple[Any, ...], str] = {}

    def allowed(self, names: tuple[str, ...], known: dict[str, Any], *, compiling: bool, peek: bool) -> str:
        """Return the backend that may run, the first of `names` if it may, or "" where none may.

        `known` is what `plain` returns. `peek`: whether the first may run, without a word about it.

        Raises:
            NoBackendError: none may; not at a peek, nor while `compiling`, where it would be lost.
        """
        with _lock:
            forward = _FORWARD_ONLY.get() and not compiling and known["is_training"]
            if forward:
                # The next call with these parameters may be one that trains.
                self._host.remembered["attention_params"] = None
            guard = self._guard
            key = (guard.mode, guard.strength, names, forward, compiling, peek, *known.values())
            found = self._decided.get(key)
            if found is None:
                if len(self._decided) >= REMEMBERED:
                    self._decided.clear()
                found = self._decided[key] = self._look(
                    names, known, forward=forward, quiet=peek or compiling, peek=peek
                )
            return found

    def _look(
        self, names: tuple[str, ...], known: dict[str, Any], *, forward: bool, quiet: bool, peek: bool
    ) -> str:
        """Return what `allowed` returns, for the first time."""
        groups = _groups(names, known, forward=forward)
        try:
            if self._guard.mode == "observe":
                return "" if peek else self._observed(*groups[0])
            return self._vetoed(groups, known, quiet=quiet, peek=peek)
        except UsageError as error:
            if self._guard.mode == "gate":
                raise
            self._say(("usage", str(error)), "not judged: %s", error)
            return names[0]

    def _vetoed(
        self,
        groups: Sequence[tuple[Question, tuple[str, ...]]],
        known: dict[str, Any],
        *,
        quiet: bool,
        peek: bool,
    ) -> str:
        seen: list[Candidate] = []
        for asking, group in groups:
            decision = self._asked(asking, group, known)
            seen += decision.candidates
            if decision.backend is not None:
                if asking.unjudged:
                    self._say_unjudged(asking, decision.backend)
                if not peek and decision.backend != groups[0][1][0]:
                    self._say_changed(groups[0], seen, decision.backend)
                return decision.backend
        if quiet:
            return ""
        unjudged = "".join(f"; {words}: not judged" for words in groups[0][0].unjudged)
        raise NoBackendError(
            f"no attention backend of Transformer Engine may run this call{unjudged}",
            structs.replace(decision, candidates=tuple(seen)),
        )

    def _asked(self, asking: Question, group: tuple[str, ...], known: dict[str, Any]) -> Decision:
        """Return the decision among backends that get the same configuration."""
        refused = self._host.refusal(known) if FLASH_4 in group else ""
        left = tuple(name for name in group if not refused or name != FLASH_4)
        decision = self._chosen(asking, left or group)
        if not refused:
            return decision
        said = Candidate(
            backend=FLASH_4,
            status="denied",
            verdict=Verdict.REFUSED,
            evidence=Evidence.DECLARED,
            reason=refused,
        )
        others = (one for one in decision.candidates if one.backend != FLASH_4)
        return structs.replace(
            decision, backend=decision.backend if left else None, candidates=(said, *others)
        )

    def _chosen(self, asking: Question, group: tuple[str, ...]) -> Decision:
        if not asking.unjudged:
            try:
                return self._guard.decide(asking.config, group, _WHERE)
            except NoBackendError as error:
                return error.decision
        mode = self._guard.mode
        decision = self._guard.selector.select(asking.config, mode, self._guard.strength, group)
        if mode == "gate":
            return structs.replace(decision, backend=None)
        kept = (one.backend for one in decision.candidates if not self._for_sure(decision, one))
        return structs.replace(decision, backend=next(kept, None))

    def _for_sure(self, decision: Decision, one: Candidate) -> bool:
        """Whether a denial holds whatever the fields are that could not be said."""
        query = asked(decision.config)
        if one.evidence is Evidence.REPORTED:
            report = next((r for r in advisories.read() if r.id == one.rule), None)
            return report is not None and all(
                set(query.levels.get(axis, ())) <= set(levels) for axis, levels in report.when.items()
            )
        rules = (b.rules for b in self._guard.selector.matrix.backends if b.name == one.backend)
        rule = next((r for r in itertools.chain(*rules) if r.id == one.rule and not r.cases), None)
        return rule is not None and not narrowing(rule, query)

    def _observed(self, asking: Question, group: tuple[str, ...]) -> str:
        """Write down what the guard would do, and return what Transformer Engine chose."""
        if not asking.unjudged or self._chosen(asking, group[:1]).backend is None:
            self._guard.decide(asking.config, group, _WHERE)
        else:
            self._say_unjudged(asking, group[0])
        return group[0]

    def _say_unjudged(self, asking: Question, backend: str) -> None:
        words = ", ".join(f"{one}: not judged" for one in asking.unjudged)
        self._say((words, backend), "%s; %s is let through", words, backend)

    def _say_changed(
        self, first: tuple[Question, tuple[str, ...]], seen: Sequence[Candidate], chosen: str
    ) -> None:
        config, name = first[0].config, first[1][0]
        one = next(one for one in seen if one.backend == name)
        # Lengths change from step to step; once for all of one level is often enough.
        self._say(
            (name, chosen, one.rule, *asked(config).levels.values()),
            "Transformer Engine chose %s, %s runs instead: %s (%s)",
            name,
            chosen,
            one.reason,
            ", ".join(f"{field} {value}" for field, value in msgspec.to_builtins(config).items()),
        )

    def _say(self, key: object, message: str, *values: object) -> None:
        if key not in self._said:
            self._said.add(key)
            _LOG.warning(message, *values)


def _groups(
    names: Sequence[str], known: dict[str, Any], *, forward: bool
) -> list[tuple[Question, tuple[str, ...]]]:
    """Return runs of backends that get the same configuration, with it."""
    runs = itertools.groupby(names, key=lambda name: question(known, name, forward_only=forward))
    return [(asking, tuple(group)) for asking, group in runs]


def _replacement(host: Host, judge: _Judge) -> Callable[..., Any]:
    """Return what is bound in place of the original.

    `torch.compile` traces it as it traces the original: all that depends on more than the parameters is in
    `allowed`, which takes and returns plain values and is a constant of the compiled code.
    """
    import torch

    original = host.original

    def judged(names: tuple[str, ...], *, compiling: bool, peek: bool, **known: Any) -> str:
        return judge.allowed(names, known, compiling=compiling, peek=peek)

    def none_left(names: tuple[str, ...], known: dict[str, Any]) -> None:
        judge.allowed(names, known, compiling=False, peek=False)

    compiler: Any = torch.compiler  # its functions have no types in some releases
    allowed: Callable[..., str] = compiler.assume_constant_result(judged)
    raise_none_left: Callable[..., None] = compiler.disable(none_left)

    def get_attention_backend(attention_params: Any = None) -> Any:
        returned = original(attention_params)
        names = offered(returned)
        if not names:
            return returned
        known = plain(attention_params)
        compiling = torch.compiler.is_compiling()
        if compiling:
            _as_constants(known)
        if allowed(names[:1], compiling=compiling, peek=True, **known) == names[0]:
            return returned
        answers = _flash_versions(host, attention_params, returned)
        for name in (FUSED, UNFUSED):
            if name in names:
                answers[name] = returned
        order = (names[0], *[name for name in answers if name != names[0]])
        chosen = allowed(order, compiling=compiling, peek=False, **known)
        if not chosen:
            raise_none_left(order, known)
        return answer(chosen, answers[chosen])

    get_attention_backend.__wrapped__ = original  # type: ignore[attr-defined]  # for tools that look
    return get_attention_backend


def _as_constants(known: dict[str, Any]) -> None:
    """Let compiled code hold for these numbers only, as Transformer Engine does with lengths; in place."""
    from torch.fx.experimental.symbolic_shapes import guard_scalar

    for name, value in known.items():
        if isinstance(value, (int, float)):
            known[name] = guard_scalar(value)


def _flash_versions(host: Host, params: Any, returned: Any) -> dict[str, Any]:
    """Return the answers that choose a version of flash-attn, in the order of Transformer Engine."""
    answers: dict[str, Any] = {}
    hidden: list[int] = []
    while returned[5][0] and returned[1].major not in hidden:
        answers[FLASH + str(returned[1].major)] = returned
        hidden = sorted([*hidden, returned[1].major])
        others = [m for m, flag in FLAGS.items() if m not in hidden and getattr(host.versions, flag, False)]
        if not others or tuple(hidden) not in host.without:
            break
        returned = host.without[tuple(hidden)](params)
    return answers
