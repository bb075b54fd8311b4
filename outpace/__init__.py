"""Outpace: speculative decoding for the open-weight models you already run, with proof that answers do not change.

Names are imported on first use, so that `outpace --help` does not wait for torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from outpace.version import __version__

if TYPE_CHECKING:
    from outpace.api.custom_generate import custom_generate
    from outpace.api.load import load, wrap
    from outpace.api.model import Model
    from outpace.api.request import Request
    from outpace.api.rollouts import Rollout, rollout
    from outpace.api.stream import Chunk, Completion, Stream
    from outpace.core.drafter import Drafter
    from outpace.core.engine import Engine
    from outpace.core.policy import Policy
    from outpace.core.sequence import Sequence, Step
    from outpace.core.stats import Stats
    from outpace.core.tree import Budget, Tree
    from outpace.core.verifier import Verifier
    from outpace.errors import OutpaceError, RequestFailed, UnsupportedModel, UsageError
    from outpace.registry import METHODS, POLICIES, VERIFIERS
    from outpace.sampling.settings import Sampling

_PLACES = {
    "api.custom_generate": ("custom_generate",),
    "api.load": ("load", "wrap"),
    "api.model": ("Model",),
    "api.request": ("Request",),
    "api.rollouts": ("Rollout", "rollout"),
    "api.stream": ("Completion", "Chunk", "Stream"),
    "core.drafter": ("Drafter",),
    "core.engine": ("Engine",),
    "core.policy": ("Policy",),
    "core.sequence": ("Sequence", "Step"),
    "core.stats": ("Stats",),
    "core.tree": ("Budget", "Tree"),
    "core.verifier": ("Verifier",),
    "errors": ("OutpaceError", "RequestFailed", "UnsupportedModel", "UsageError"),
    "registry": ("METHODS", "POLICIES", "VERIFIERS"),
    "sampling.settings": ("Sampling",),
}
_NAMES = {name: f"outpace.{module}" for module, names in _PLACES.items() for name in names}

__all__ = [
    "METHODS",
    "POLICIES",
    "VERIFIERS",
    "Budget",
    "Chunk",
    "Completion",
    "Drafter",
    "Engine",
    "Model",
    "OutpaceError",
    "Policy",
    "Request",
    "RequestFailed",
    "Rollout",
    "Sampling",
    "Sequence",
    "Stats",
    "Step",
    "Stream",
    "Tree",
    "UnsupportedModel",
    "UsageError",
    "Verifier",
    "__version__",
    "custom_generate",
    "load",
    "rollout",
    "wrap",
]


def __getattr__(name: str) -> Any:
    if name not in _NAMES:
        raise AttributeError(f"module 'outpace' has no attribute {name!r}")
    found = globals()[name] = getattr(import_module(_NAMES[name]), name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *_NAMES})
