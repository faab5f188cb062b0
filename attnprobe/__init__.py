"""attnprobe: measure which attention backend may run which configuration on this device.

`import attnprobe` loads neither torch nor the command line; names are imported on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from attnprobe.config import AttentionConfig, Case
    from attnprobe.ensure import Ensured, ensure
    from attnprobe.errors import AttnprobeError, MatrixError, NoBackendError, NoVerdictError, UsageError
    from attnprobe.integrations.guard import Guard
    from attnprobe.matrix.store import read_matrix
    from attnprobe.select.explain import Candidate, Decision
    from attnprobe.select.loading import load
    from attnprobe.select.selector import Selector
    from attnprobe.verdict import Evidence, Verdict

__version__ = "0.1.0"

_HOME = {
    "AttentionConfig": "attnprobe.config",
    "AttnprobeError": "attnprobe.errors",
    "Candidate": "attnprobe.select.explain",
    "Case": "attnprobe.config",
    "Decision": "attnprobe.select.explain",
    "Ensured": "attnprobe.ensure",
    "Evidence": "attnprobe.verdict",
    "Guard": "attnprobe.integrations.guard",
    "MatrixError": "attnprobe.errors",
    "NoBackendError": "attnprobe.errors",
    "NoVerdictError": "attnprobe.errors",
    "Selector": "attnprobe.select.selector",
    "UsageError": "attnprobe.errors",
    "Verdict": "attnprobe.verdict",
    "ensure": "attnprobe.ensure",
    "load": "attnprobe.select.loading",
    "read_matrix": "attnprobe.matrix.store",
}

__all__ = [
    "AttentionConfig",
    "AttnprobeError",
    "Candidate",
    "Case",
    "Decision",
    "Ensured",
    "Evidence",
    "Guard",
    "MatrixError",
    "NoBackendError",
    "NoVerdictError",
    "Selector",
    "UsageError",
    "Verdict",
    "__version__",
    "ensure",
    "load",
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
