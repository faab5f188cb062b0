"""Transformer Engine's real Python sources, in a process of their own.

The distribution `transformer-engine` holds them without a compiled part. Here they are imported with what
cannot be here replaced, at the lowest place: the compiled library, the Triton kernels, what CUDA says of the
device, and the kernels of flash-attn. Run as a program this file imports them once, then runs each test in
a fork of its own; `in_te` makes such a test.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import gc
import importlib
import importlib.abc
import importlib.machinery
import importlib.metadata
import importlib.util
import inspect
import io
import json
import logging
import os
import subprocess
import sys
import traceback
import types
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PLACE = "transformer_engine.pytorch.attention.dot_product_attention"
REPLACED = (
    "transformer_engine.pytorch.triton",
    "transformer_engine.common.triton",
    "onnx",
    "onnxscript",
    "einops",
)
"""Kernels, and what the sources import for other things than choosing a backend."""


def in_te(test: Callable[..., None]) -> Callable[..., None]:
    """Let a test run where Transformer Engine is; its first argument is a fresh `TE`."""

    def over_there(te_process: Process, **arguments: Any) -> None:
        te_process.run(test, arguments)

    functools.update_wrapper(over_there, test)
    _, *others = inspect.signature(test).parameters.values()
    here = inspect.Parameter("te_process", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    # pytest asks for the fixtures of this side; the other side looks for `__wrapped__`.
    over_there.__signature__ = inspect.Signature([here, *others])  # type: ignore[attr-defined]
    return over_there


class Process:
    """The process that holds the sources."""

    def __init__(self) -> None:
        environment = {k: v for k, v in os.environ.items() if not k.startswith(("NVTE_", "ATTNPROBE_"))}
        self.child = subprocess.Popen(
            [sys.executable, __file__],
            cwd=ROOT,
            env=environment | {"OMP_NUM_THREADS": "1", "NVTE_PROJECT_BUILDING": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, test: Callable[..., None], arguments: dict[str, Any]) -> None:
        """Run a test in a fork, and fail with its words if it fails."""
        order = {"file": inspect.getfile(test), "name": test.__name__, "arguments": arguments}
        assert self.child.stdin is not None
        assert self.child.stdout is not None
        self.child.stdin.write(json.dumps(order) + "\n")
        self.child.stdin.flush()
        said = self.child.stdout.readline()
        assert said, "the process that holds Transformer Engine ended"
        failed = json.loads(said)
        if failed:
            raise AssertionError(failed)

    def close(self) -> None:
        assert self.child.stdin is not None
        self.child.stdin.close()
        self.child.wait(timeout=60)
        assert self.child.stdout is not None
        self.child.stdout.close()


class _Loader(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Gives modules in which every name is there."""

    def find_spec(self, name: str, path: object, target: object = None) -> Any:  # noqa: ARG002  # importlib's
        if name in REPLACED or name.startswith(tuple(f"{one}." for one in REPLACED)):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> types.ModuleType:
        return _Anything(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


class _Named:
    """A decorator, a type, a value: whatever a source makes of a name at import."""

    def __call__(self, *given: Any, **_: Any) -> Any:
        return given[0] if given and callable(given[0]) else self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __getitem__(self, _: Any) -> Any:
        return self


class _Anything(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Named()


class _Enumerations(type):
    def __getattr__(cls, name: str) -> int:
        if name.startswith("_"):
            raise AttributeError(name)
        return 0


class Library(types.ModuleType):
    """`transformer_engine_torch`: two enumerations as they are, of the others only that they are there."""

    DType = enum.IntEnum(
        "DType",
        "kByte kInt32 kFloat32 kFloat16 kBFloat16 kFloat8E4M3 kFloat8E5M2 kFloat4E2M1",
        start=0,
    )
    NVTE_Fused_Attn_Backend = enum.IntEnum(
        "NVTE_Fused_Attn_Backend", {"NVTE_No_Backend": -1, "NVTE_F16_arbitrary_seqlen": 1, "NVTE_FP8": 2}
    )

    def __init__(self) -> None:
        super().__init__("transformer_engine_torch")
        self.fused = False
        self.get_cudnn_version = lambda: 91800
        self.get_fused_attn_backend = self._fused

    def _fused(self, *given: Any) -> Any:
        kinds = self.NVTE_Fused_Attn_Backend
        kind = kinds.NVTE_F16_arbitrary_seqlen if self.fused else kinds.NVTE_No_Backend
        return (kind, "not in this test") if len(given) == 1 else kind  # until 2.19 no reason came with it

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        setattr(self, name, _Enumerations(name, (int,), {}))
        return vars(self)[name]


class _Into(logging.Handler):
    def __init__(self, lines: list[str]) -> None:
        super().__init__(logging.WARNING)
        self.lines = lines

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


class TE:
    """Transformer Engine as one test sees it: SM 12.0, flash-attn 2.8.3 alone, no FusedAttention."""

    def __init__(self, library: Library) -> None:
        self.library = library
        self.utils: Any = importlib.import_module(f"{PLACE}.utils")
        self.attention: Any = importlib.import_module(f"{PLACE}.dot_product_attention")
        self.kernels: Any = importlib.import_module(f"{PLACE}.backends")
        self._sm = (12, 0)
        self.logged: list[str] = []
        import torch

        torch.cuda.current_device = lambda: 0
        torch.cuda.get_device_properties = lambda *_: types.SimpleNamespace(  # type: ignore[assignment]
            major=self._sm[0], minor=self._sm[1]
        )
        self.advised: list[str] = []
        for name, lines in (("attnprobe", self.logged), ("DotProductAttention", self.advised)):
            logging.getLogger(name).addHandler(_Into(lines))
        self.flash(2, "2.8.3")

    def device(self, major: int, minor: int) -> None:
        """Let CUDA say that the device is of this compute capability."""
        self._sm = (major, minor)
        importlib.import_module(
            "transformer_engine.pytorch.utils"
        )._get_device_compute_capability.cache_clear()

    def flash(self, major: int, version: str, validate: Any = None) -> None:
        """Install a version of flash-attn, as `backends.py` records it."""
        from packaging.version import Version

        versions = self.utils.FlashAttentionUtils
        if major == 2:
            versions.version = Version(version)
            versions.set_flash_attention_version()
        elif major == 3:
            versions.fa3_version = Version(version)
            versions.set_flash_attention_3_params()
        else:
            versions.fa4_version = Version(version)
            versions.v4_validate_head_dims = staticmethod(validate) if validate else None
            versions.set_flash_attention_4_params()

    def layer(self, head_dim: int = 256, **options: Any) -> Callable[..., str]:
        """Return a DotProductAttention, causal and with dropout 0.1, that says which kernels it called.

        It runs on tensors that have a shape and say they are on a GPU, but no memory.
        """
        import torch
        from torch._subclasses.fake_tensor import FakeTensorMode

        ran: list[str] = []

        def kernel(name: str) -> Any:
            def call(*tensors: Any, **_: Any) -> Any:
                ran.append(name)
                return torch.empty_like(next(one for one in tensors if isinstance(one, torch.Tensor)))

            return call

        torch.cuda.is_available = lambda: True  # it would not be made without
        torch.cuda.is_current_stream_capturing = lambda: False
        self.kernels.flash_attn_func = kernel("flash-attn-2")
        self.kernels.flash_attn_varlen_func = kernel("flash-attn-2")
        options = {"attention_dropout": 0.1, "qkv_format": "bshd", "attn_mask_type": "causal"} | options
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        with mode:
            layer = self.attention.DotProductAttention(2, head_dim, **options)
            layer.unfused_attention.forward = kernel("transformer-engine-unfused")
            layer.fused_attention.forward = kernel("transformer-engine-fused")
            q, k, v = (torch.empty(1, 128, 2, head_dim, device="cuda", dtype=torch.bfloat16) for _ in "qkv")

        def run(*, training: bool = True) -> str:
            layer.train(training)
            with mode, warnings.catch_warnings():
                # Transformer Engine compares data pointers to tell layouts apart; these have none.
                warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")
                layer(q, k, v)
            return ran.pop()

        return run

    def params(self, **changed: Any) -> Any:
        """Return AttentionParams: training, bfloat16, head dim 256, causal, dropout 0.1; and changes."""
        import torch

        plain: dict[str, Any] = {
            "qkv_dtype": torch.bfloat16,
            "qkv_layout": "bshd_bshd_bshd",
            "head_dim_qk": 256,
            "head_dim_v": 256,
            "attn_mask_type": "causal",
            "window_size": (-1, 0),
            "attention_dropout": 0.1,
            "core_attention_bias_shape": None,
            "core_attention_bias_requires_grad": False,
        } | changed
        plain.setdefault("softmax_scale", plain["head_dim_qk"] ** -0.5)
        known = self.utils.AttentionParams.__dataclass_fields__
        return self.utils.AttentionParams(**{k: v for k, v in plain.items() if k in known or k in changed})

    def choice(self, **changed: Any) -> str:
        """Return what Transformer Engine's selector chooses, by our names."""
        return name_of(self.utils.get_attention_backend(self.params(**changed)))


def name_of(returned: Any) -> str:
    """Return which backend an answer chooses, by our name; "" for none."""
    flash, version, fused, _, unfused, _ = returned
    if flash:
        return f"flash-attn-{version.major}"
    return "transformer-engine-fused" if fused else "transformer-engine-unfused" if unfused else ""


def _import_sources() -> Library:
    """Import what holds the selector; not the packages above it, which load libraries and all the rest."""
    sys.meta_path.insert(0, _Loader())
    library = Library()
    sys.modules["transformer_engine_torch"] = library
    for name in ("transformer_engine", "transformer_engine.pytorch"):
        spec = importlib.util.find_spec(name)
        assert spec is not None, "transformer-engine is in the group `dev`"
        module: Any = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, module)
        else:
            module.__version__ = importlib.metadata.version("transformer-engine")
    # In the order of the package: the sources import each other in a circle.
    importlib.import_module("transformer_engine.pytorch.module")
    importlib.import_module(f"{PLACE}.dot_product_attention")
    return library


def _tested(order: dict[str, Any], library: Library) -> str:
    """Run one test; return why it failed, or "" where it did not."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            spec = importlib.util.spec_from_file_location("tested", order["file"])
            assert spec is not None
            assert spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            sys.modules["tested"] = module
            spec.loader.exec_module(module)
            original = getattr(module, order["name"]).__wrapped__
            original(TE(library), **order["arguments"])
    except BaseException:  # noqa: BLE001  # also of asserts and exits: the parent tells
        return traceback.format_exc() + said.getvalue()[-4000:]
    return ""


def _forked(order: dict[str, Any], library: Library) -> str:
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        os.close(reader)
        with os.fdopen(writer, "w") as pipe:
            pipe.write(_tested(order, library))
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        failed = pipe.read()
    status = os.waitpid(child, 0)[1]
    return failed or (f"the test ended with status {status}" if status else "")


def _orders() -> Iterator[dict[str, Any]]:
    for line in sys.stdin:
        yield json.loads(line)


if __name__ == "__main__":
    sys.path[0] = str(ROOT)
    # What the tests print must not come between the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    sources = _import_sources()
    for preloaded in (
        "pytest",
        "attnprobe.integrations.transformer_engine",
        "tests.integrations.te_matrices",
    ):
        importlib.import_module(preloaded)  # once, not in every fork
    gc.freeze()
    for one in _orders():
        answers.write(json.dumps(_forked(one, sources)) + "\n")
        answers.flush()
