"""The parts of Transformer Engine that the guard holds on to, checked before it does.

Its `get_attention_backend` must be its own and return what is expected; what it returns is then read by
position. Versions of flash-attn are hidden from it by binding its code to a copy of its globals.
"""

from __future__ import annotations

import ast
import gc
import importlib
import inspect
import itertools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import metadata
from types import FunctionType, ModuleType
from typing import Any, Final

from attnprobe.errors import UsageError
from attnprobe.integrations.transformer_engine_config import FLASH_4, RETURNED

FLAGS: Final = {2: "is_installed", 3: "v3_is_installed", 4: "v4_is_installed"}
"""By major version of flash-attn, what `FlashAttentionUtils` calls it where it is there."""
_LOG: Final = logging.getLogger("attnprobe")
_PLACE: Final = "transformer_engine.pytorch.attention.dot_product_attention"


class Host:
    """The modules of Transformer Engine, the original selector, and the same without some versions.

    `utils` holds the selector, `versions` is its class of facts about flash-attn, `remembered` the one
    choice that DotProductAttention keeps.
    """

    def __init__(self) -> None:
        """Import Transformer Engine.

        Raises:
            UsageError: it cannot be imported, or its selector is not one that this version understands.
        """
        try:
            self.utils: Any = importlib.import_module(f"{_PLACE}.utils")
            self.attention: Any = importlib.import_module(f"{_PLACE}.dot_product_attention")
        except Exception as error:  # a compiled library that does not load raises anything
            raise UsageError(
                "Transformer Engine cannot be imported",
                why=f"{type(error).__name__}: {error}",
                fix="install transformer-engine[pytorch], 2.8 or later",
            ) from error
        try:
            self.original: FunctionType = self.utils.get_attention_backend
            self.versions: Any = self.utils.FlashAttentionUtils
            self.remembered: dict[str, Any] = self.attention._attention_backends  # noqa: SLF001  # exported
        except AttributeError as error:
            raise _not_understood(str(error)) from error
        _check_shape(self.original, self.utils)
        majors = [major for major, flag in FLAGS.items() if hasattr(self.versions, flag)]
        self.without: Mapping[tuple[int, ...], FunctionType] = {
            hidden: self._without(hidden)
            for count in range(1, len(majors))
            for hidden in itertools.combinations(majors, count)
        }
        self._validate = self._fa4_validator()

    def forget(self) -> None:
        """Let Transformer Engine ask again instead of taking what it remembers."""
        self.remembered["backend_selection_requires_update"] = True
        getattr(self.attention, "_thd_policy_backend_cache", []).clear()

    def refusal(self, known: Mapping[str, Any]) -> str:
        """Return why flash-attn 4 says that it does not take these head dims; empty where it does not."""
        if self._validate is None:
            return ""
        dims = known["head_dim_qk"], known["head_dim_v"]
        major = self.utils.get_device_compute_capability()[0]
        alignment = 16 // (4 if str(known["qkv_dtype"]) == "torch.float32" else 2)
        try:
            self._validate(*dims, major, alignment)
        except AssertionError as error:
            return f"_validate_head_dims of flash-attn 4 refuses: {error or dims}"
        except Exception as error:  # noqa: BLE001  # a private function of a beta; it must not end a job
            self._validate = None
            _report(f"_validate_head_dims ended with {type(error).__name__}: {error}")
        return ""

    def _fa4_validator(self) -> Callable[..., None] | None:
        """Return flash-attn 4's own check of head dims, where there is one."""
        if not getattr(self.versions, FLAGS[4], False):
            with_version = _version("flash-attn-4")
            if with_version and hasattr(self.versions, FLAGS[4]):
                _report(f"{with_version} is installed, Transformer Engine could not load it")
            return None
        found: Callable[..., None] | None = getattr(self.versions, "v4_validate_head_dims", None)
        if found is not None:
            return found
        try:
            found = importlib.import_module("flash_attn.cute.interface")._validate_head_dims  # noqa: SLF001  # its only check
        except Exception as error:  # noqa: BLE001  # the import of a beta raises anything
            _report(f"no _validate_head_dims, so its head dims are not checked: {error}")
        return found

    def _without(self, hidden: Sequence[int]) -> FunctionType:
        """Return the original as it would answer were these versions of flash-attn not installed."""
        masked: dict[str, Any] = {FLAGS[major]: False for major in hidden}
        # It would advise to install what is only hidden.
        masked |= dict.fromkeys(("warning_printed", "v3_warning_printed", "v4_warning_printed"), True)
        function = self.original
        names = dict(function.__globals__)
        # Without a name torch.compile takes these globals as they are, and not those of the module.
        del names["__name__"]
        names["FlashAttentionUtils"] = type("FlashAttentionUtils", (self.versions,), masked)
        return FunctionType(
            function.__code__, names, function.__name__, function.__defaults__, function.__closure__
        )


def refuse_captured(host: Host) -> None:
    """Raise UsageError where a CUDA graph is being captured, or was and is kept."""
    import torch

    cuda: Any = torch.cuda  # its functions have no types in some releases
    if getattr(host.attention, "is_graph_capturing", bool)() or (
        cuda.is_initialized()  # without that there are none, and to look takes a while
        and (
            cuda.is_current_stream_capturing()
            # The type, not isinstance: objects exist that answer for their class, and do work at it.
            or any(issubclass(type(one), cuda.CUDAGraph) for one in gc.get_objects())
        )
    ):
        raise UsageError(
            "a CUDA graph was captured before the guard was installed",
            why="it replays the kernels that were chosen without the guard",
            fix="call install() before anything is captured",
        )


def _check_shape(original: Any, utils: ModuleType) -> None:
    """Raise UsageError unless the selector is Transformer Engine's own and returns what `RETURNED` names."""
    if not isinstance(original, FunctionType) or original.__globals__ is not vars(utils):
        raise _not_understood(f"it was replaced by one of {getattr(original, '__module__', original)}")
    try:
        (tree,) = ast.parse(inspect.getsource(original)).body
    except (OSError, SyntaxError, ValueError) as error:
        raise _not_understood(f"its source cannot be read: {error}") from error
    statements = tuple(_statements(tree))
    returned = [_names(node.value) for node in statements if isinstance(node, ast.Return)]
    listed = [
        _names(node.value)
        for node in statements
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == RETURNED[-1]
    ]
    if set(returned) != {RETURNED}:
        raise _not_understood("it does not return " + ", ".join(RETURNED))
    if set(listed) != {RETURNED[0:5:2]}:
        raise _not_understood(f"{RETURNED[-1]} does not list " + ", ".join(RETURNED[0:5:2]))


def _statements(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield the statements of a function, not those of a function or a class inside it."""
    for node in ast.iter_child_nodes(tree):
        if not isinstance(node, (ast.expr, ast.FunctionDef, ast.ClassDef)):
            yield node
            yield from _statements(node)


def _names(value: ast.AST | None) -> tuple[str, ...]:
    """Return the names in a tuple or a list, "" for what is no name."""
    return tuple(one.id if isinstance(one, ast.Name) else "" for one in getattr(value, "elts", ()))


def _not_understood(why: str) -> UsageError:
    return UsageError(
        "the selector of this Transformer Engine is not understood",
        why=why,
        fix="those of 2.8 to 2.20 are; what NVTE_PLUGIN or another tool puts in their place is not",
    )


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return ""


def _report(what: str) -> None:
    _LOG.warning("%s: %s", FLASH_4, what)
