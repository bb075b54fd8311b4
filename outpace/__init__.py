"""Outpace: the open-weight models you already run, answering faster, with proof that the answer did not change.

Names are imported when they are first used, so that `outpace --help` does not wait for torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from outpace.version import __version__

if TYPE_CHECKING:
    from outpace.api import Model
    from outpace.drafter import Drafter
    from outpace.dropin import custom_generate
    from outpace.engine import Engine
    from outpace.errors import OutpaceError, RequestFailed, UnsupportedModel, UsageError
    from outpace.loading import load, wrap
    from outpace.policy import Policy
    from outpace.registry import METHODS, POLICIES, VERIFIERS
    from outpace.request import Request
    from outpace.rollouts import Rollout, rollout
    from outpace.sequence import Sequence, Step
    from outpace.settings import Sampling
    from outpace.stats import Stats
    from outpace.stream import Completion, Piece, Stream
    from outpace.tree import Budget, Tree
    from outpace.verify import Verifier

_PLACES = {
    "api": ("Model",),
    "drafter": ("Drafter",),
    "dropin": ("custom_generate",),
    "engine": ("Engine",),
    "errors": ("OutpaceError", "RequestFailed", "UnsupportedModel", "UsageError"),
    "loading": ("load", "wrap"),
    "policy": ("Policy",),
    "registry": ("METHODS", "POLICIES", "VERIFIERS"),
    "request": ("Request",),
    "rollouts": ("Rollout", "rollout"),
    "sequence": ("Sequence", "Step"),
    "settings": ("Sampling",),
    "stats": ("Stats",),
    "stream": ("Completion", "Piece", "Stream"),
    "tree": ("Budget", "Tree"),
    "verify": ("Verifier",),
}
_NAMES = {name: f"outpace.{module}" for module, names in _PLACES.items() for name in names}

__all__ = [
    "METHODS",
    "POLICIES",
    "VERIFIERS",
    "Budget",
    "Completion",
    "Drafter",
    "Engine",
    "Model",
    "OutpaceError",
    "Piece",
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
