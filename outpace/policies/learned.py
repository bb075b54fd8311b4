"""The policy "learned": a small classifier that predicts acceptance (DISCO)."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

from outpace.core.policy import Policy
from outpace.core.sequence import Sequence, Step
from outpace.core.tree import Signal
from outpace.errors import UsageError, check_ranges
from outpace.policies.judged import TOP, Example, examples, features


def classifier() -> nn.Sequential:
    return nn.Sequential(nn.Linear(TOP + 3, 16), nn.SiLU(), nn.Linear(16, 1))


def fit(seen: Iterable[Example], epochs: int = 200, seed: int = 0) -> nn.Sequential:
    """Train the classifier of the learned policy on judged draft tokens, as DISCO does offline."""
    data = list(seen)
    if not data:
        raise UsageError("no examples to fit: run a draft method first and collect `examples(step)`")
    x = torch.tensor([e.features() for e in data])
    y = torch.tensor([float(e.accepted) for e in data])
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        torch.manual_seed(seed)
        model = classifier()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
        for _ in range(epochs):
            optimizer.zero_grad()
            nn.functional.binary_cross_entropy_with_logits(model(x).squeeze(-1), y).backward()
            optimizer.step()
    return model.requires_grad_(False)


@dataclass
class Learned(Policy):
    """DISCO: predict acceptance with a small classifier on draft features, and stop below the threshold.

    Without weights it drafts to full depth until it has trained itself on the first judged draft tokens.
    """

    threshold: float = 0.5
    weights: str | Path | None = None  # a safetensors file written by `save`
    refit_every: int = 256  # examples between two trainings of a policy without weights; 0: never
    _model: nn.Sequential | None = field(default=None, init=False, repr=False)
    _seen: deque[Example] = field(default_factory=lambda: deque(maxlen=4096), init=False, repr=False)
    _new: int = field(default=0, init=False, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_ranges(self, threshold=(0, 1), refit_every=(0, math.inf))
        if self.weights is not None:
            from safetensors.torch import load_file

            self._model = classifier().requires_grad_(False)
            self._model.load_state_dict(load_file(self.weights))

    @classmethod
    def trained(cls, seen: Iterable[Example], threshold: float = 0.5) -> Learned:
        """Return a policy trained in advance, on `examples(step)` of earlier runs."""
        policy = cls(threshold=threshold, refit_every=0)
        policy._model = fit(seen)
        return policy

    def save(self, path: str | Path) -> None:
        from safetensors.torch import save_file

        if self._model is None:
            raise UsageError("this policy has not been trained yet")
        save_file(self._model.state_dict(), path)

    def keep_drafting(self, seq: Sequence, signal: Signal, depth: int) -> bool:
        if self._model is None:
            return True
        logit: Tensor = self._model(torch.tensor(features(signal, depth)))
        return logit.sigmoid().item() >= self.threshold

    def observe(self, seq: Sequence, step: Step) -> None:
        if self.weights is not None or not self.refit_every:
            return
        new = list(examples(step))
        self._seen.extend(new)
        self._new += len(new)
        if self._new >= self.refit_every:
            self._model, self._new = fit(self._seen, epochs=100), 0
