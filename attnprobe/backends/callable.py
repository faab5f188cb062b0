"""A user's own attention: any differentiable callable with the call shape of torch's SDPA.

Named `FILE.py:NAME` or `package.module:NAME`. It gets q, k, v of shape (B, H, S, D) and, only where the
case needs them, the keywords attn_mask, dropout_p, is_causal, scale, enable_gqa.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attnprobe.backends._sdpa import signature_refuses, torch_materials
from attnprobe.backends.calling import attend
from attnprobe.backends.interface import Refusal
from attnprobe.errors import UsageError
from attnprobe.materials.source import backend_name, file_material
from attnprobe.matrix.schema import Material

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from attnprobe.backends.interface import Outputs
    from attnprobe.config import Case
    from attnprobe.device.interface import Device
    from attnprobe.probe.inputs import Tensors


class CallableBackend:
    """One callable under the name it was given by."""

    def __init__(self, name: str, function: Callable[..., Tensor], source: Material) -> None:
        """Keep the function and what it was read from."""
        self.name = name
        self._function = function
        self._source = source

    def materials(self) -> Sequence[Material]:
        """Return torch and the file or module that the callable is in."""
        return (*torch_materials(), self._source)

    def missing(self, device: Device) -> str | None:  # noqa: ARG002  # it was imported, so it is here
        """Return None."""
        return None

    def declares(self, case: Case, device: Device) -> Refusal | None:  # noqa: ARG002
        """Return what the call shape cannot say."""
        if case.layout == "varlen":
            return Refusal("the call shape has no argument for sequences packed end to end")
        refusal = signature_refuses(case)
        if refusal is None:
            return None
        return Refusal(refusal.reason.replace("scaled_dot_product_attention", "the call shape"))

    def kernel_key(self, case: Case) -> str | None:  # noqa: ARG002
        """Return None: what a callable compiles is its own affair."""
        return None

    def run(self, case: Case, tensors: Tensors) -> Outputs:
        """Call it and differentiate it."""
        return attend(self._function, case, tensors, plain_mask=True)


def load(spec: str) -> CallableBackend:
    """Return the callable that `FILE.py:NAME` or `package.module:NAME` names.

    Raises:
        UsageError: no such file, module or name, an import that raises, or not callable.
    """
    place, colon, name = spec.rpartition(":")
    if not colon or not place or not name:
        raise UsageError(
            f"--backend {spec} names no known backend",
            why="a callable of your own is FILE.py:NAME or package.module:NAME",
            fix="`attnprobe doctor` lists the known backends",
        )
    module, source = _module(spec, place)
    function: Any = module
    for part in name.split("."):
        function = getattr(function, part, None)
    if function is None:
        raise UsageError(f"--backend {spec}: {place} has no {name}")
    if not callable(function):
        raise UsageError(f"--backend {spec} is a {type(function).__name__}, not callable")
    return CallableBackend(backend_name(spec), function, source)


def _module(spec: str, place: str) -> tuple[Any, Material]:
    path = Path(place)
    try:
        return _from_file(path) if path.suffix == ".py" else _from_package(place)
    except FileNotFoundError:
        raise UsageError(f"--backend {spec}: {place} does not exist") from None
    except (Exception, SystemExit) as error:  # noqa: BLE001  # a user's module may raise anything
        raise UsageError(
            f"--backend {spec} cannot be imported", why=f"{type(error).__name__}: {error}"
        ) from None


def _from_file(path: Path) -> tuple[Any, Material]:
    source = file_material(path)
    name = f"{path.stem}_{hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:8]}"
    module_spec = importlib.util.spec_from_file_location(name, path)
    assert module_spec is not None
    assert module_spec.loader is not None
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[name] = module
    module_spec.loader.exec_module(module)
    return module, source


def _from_package(place: str) -> tuple[Any, Material]:
    if str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))  # last: nothing there may stand before an installed library
    module = importlib.import_module(place)
    version = str(getattr(module, "__version__", "unknown"))
    return module, Material(name=place.partition(".")[0], version=version)
