"""LeaderLM: the model as the first process has it. Whatever it runs, all processes run.

The engine, the methods, the policies and the sampler run on the first process alone. So one process measures time,
drafts and chooses, and nothing that it decides can come out differently elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from functools import cached_property
from typing import Any

import torch.distributed as dist
from torch import Tensor

from outpace.core.layout import Layout
from outpace.core.lm import LM, Context, HiddenStates, Picks, Reference, Scores
from outpace.models.embeddings import Embeddings
from outpace.models.memory import MemoryNeed
from outpace.models.tensor_parallel.leader import Leader, SharedObject


class LeaderLM(LM):
    """A model, or a part of its layers, of which every process has a share."""

    def __init__(self, leader: Leader, shared: SharedObject, ends: SharedObject):
        lm: LM = shared.part
        self._leader, self._shared = leader, shared
        self.vocab, self.max_length, self.worker = lm.vocab, lm.max_length, lm.worker
        self.identity = f"{lm.identity}, {dist.get_world_size()} processes"
        self.trees, self.token_price, self.lazy_logits = lm.trees, lm.token_price, lm.lazy_logits
        self.prompt_tokens, self.usual_batch = lm.prompt_tokens, lm.usual_batch
        self.layers = None if lm.layers is None else LeaderLayers(leader, shared, ends)
        self.states = None if lm.states is None else LeaderStates(leader, lm.states, ends)  # type: ignore[assignment]
        self.weights = None if lm.weights is None else LeaderWeights(leader, shared)  # type: ignore[assignment]

    def close(self) -> None:
        """Let the other processes end. Then this model cannot run any more."""
        self._leader.close()

    def acquire(self, tokens: list[int], *, context: Context = None, taps: tuple[int, ...] = ()) -> int:
        return self._leader.run(self._shared, "acquire", tokens, context=context, taps=taps)

    def release(self, slot: int) -> None:
        self._leader.tell(self._shared, "release", slot)

    def feed(
        self, tokens: Seq[list[int]], slots: Seq[int], limit: int | None = None, defer: bool = False
    ) -> list[bool]:
        return self._leader.run(self._shared, "feed", tokens, slots, limit, defer) if slots else []

    def score(
        self, layouts: Seq[Layout], slots: Seq[int], since: Seq[int] | None = None, picks: Picks = None
    ) -> list[Scores]:
        return self._leader.run(self._shared, "score", layouts, slots, since)

    def keep(self, paths: Seq[list[int]], slots: Seq[int]) -> None:
        if slots:
            self._leader.run(self._shared, "keep", paths, slots)

    def clear(self) -> None:
        self._leader.tell(self._shared, "clear")

    def reused(self, slot: int) -> int:
        return self._shared.part.reused(slot)

    def prepare(self, requests: int) -> None:
        self._leader.run(self._shared, "prepare", requests)

    def reference(self) -> Reference:
        return self._reference

    @cached_property
    def _reference(self) -> Reference:
        return LeaderReference(self._leader, self._leader.make(self._shared, "reference"))


class LeaderReference:
    """The reference of a shared model."""

    def __init__(self, leader: Leader, shared: SharedObject):
        self._leader, self._shared = leader, shared

    def native(self, tokens: list[int], count: int) -> Tensor:
        return self._leader.run(self._shared, "native", tokens, count)

    def precise(self, tokens: list[int], count: int) -> Tensor:
        return self._leader.run(self._shared, "precise", tokens, count)


class LeaderLayers:
    """The layers of a shared model."""

    def __init__(self, leader: Leader, shared: SharedObject, ends: SharedObject):
        self._leader, self._shared, self._ends = leader, shared, ends
        self.count: int = shared.part.layers.count

    def slice(self, layers: Seq[int], compile: bool = True) -> LM:
        made = self._leader.make(self._shared, "layers.slice", list(layers), compile)
        return LeaderLM(self._leader, made, self._ends)

    def early_exit(self, count: int) -> LM | None:
        made = self._leader.make(self._shared, "layers.early_exit", count)
        return None if made.part is None else LeaderLM(self._leader, made, self._ends)

    def cost_share(self, count: int) -> float:
        share: float = self._shared.part.layers.cost_share(count)
        return share

    def reference(self, layers: Seq[int]) -> Reference:
        return LeaderReference(self._leader, self._leader.make(self._shared, "layers.reference", list(layers)))


class LeaderWeights:
    """The weights of a shared model; memory is this process's."""

    def __init__(self, leader: Leader, shared: SharedObject):
        self._leader, self._shared = leader, shared

    @property
    def version(self) -> int:
        version: int = self._shared.part.weights.version
        return version

    def changed(self) -> None:
        self._leader.run(self._shared, "weights.changed")

    def memory(self, tokens: int, requests: int = 1) -> MemoryNeed | None:
        need: MemoryNeed | None = self._shared.part.weights.memory(tokens, requests)
        return need


class LeaderStates:
    """The hidden states of a shared model, which every process has as a whole, so a head runs on this one alone."""

    captures = False

    def __init__(self, leader: Leader, states: HiddenStates, ends: SharedObject):
        self._leader, self._states, self._ends = leader, states, ends

    @cached_property
    def embeddings(self) -> Embeddings | None:
        found: Embeddings | None = self._leader.run(self._ends, "whole")
        return found

    def read(self, slot: int, first: int = 0) -> Tensor | None:
        return self._states.read(slot, first)

    def attach(self, head: Any) -> LM:
        return self._states.attach(head)

    def prepare_head(self, head: Any) -> Any:
        return self._states.prepare_head(head)
