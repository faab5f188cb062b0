"""attnprobe: measure which attention backend may run which configuration on this device.

`import attnprobe` loads neither torch nor the command line; names are imported on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from attnprobe.config import AttentionConfig, Case
    from attnprobe.errors import AttnprobeError, MatrixError, NoVerdictError, UsageError
    from attnprobe.matrix.store import read_matrix
    from attnprobe.verdict import Evidence, Verdict

__version__ = "0.1.0"

_HOME = {
    "AttentionConfig": "attnprobe.config",
    "AttnprobeError": "attnprobe.errors",
    "Case": "attnprobe.config",
    "Evidence": "attnprobe.verdict",
    "MatrixError": "attnprobe.errors",
    "NoVerdictError": "attnprobe.errors",
    "UsageError": "attnprobe.errors",
    "Verdict": "attnprobe.verdict",
    "read_matrix": "attnprobe.matrix.store",
}

__all__ = [
    "AttentionConfig",
    "AttnprobeError",
    "Case",
    "Evidence",
    "MatrixError",
    "NoVerdictError",
    "UsageError",
    "Verdict",
    "__version__",
    "read_matrix",
]


def __getattr__(name: str) -> object:
    """Import a public name from the module it lives in."""
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    msg = f"module 'attnprobe' has no attribute {name!r}"
    raise AttributeError(msg)


def __dir__() -> list[str]:
    """Return the public names."""
    return __all__
