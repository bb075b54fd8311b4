"""Outpace: the open-weight models you already run, answering faster, with proof that the answer did not change."""

from outpace.api import Model
from outpace.drafter import Drafter
from outpace.dropin import custom_generate
from outpace.engine import Engine
from outpace.errors import OutpaceError, RequestFailed, UnsupportedModel, UsageError
from outpace.loading import load, wrap
from outpace.policy import Policy
from outpace.registry import METHODS, POLICIES
from outpace.request import Request
from outpace.rollout import Rollout, rollout
from outpace.sample import Sampling
from outpace.sequence import Sequence, Step
from outpace.stats import Stats
from outpace.stream import Completion, Piece, Stream
from outpace.tree import Budget, Tree
from outpace.verify import VERIFIERS, Verifier
from outpace.version import __version__

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
