"""Capabilities of a Transformers model besides scoring: its layers, its hidden states and its weights."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from outpace.core.lm import LM, Reference
from outpace.models.early_exit import EarlyExitLM
from outpace.models.embeddings import Embeddings
from outpace.models.hf.eager import Runner, places, split
from outpace.models.hf.module import decoder_layers, embeddings_of, view
from outpace.models.hf.reference import ModelReference
from outpace.models.hf.stages import LayerSpan
from outpace.models.memory import MemoryNeed, free, weights
from outpace.models.segment import Segment, SegmentOutput

if TYPE_CHECKING:
    from outpace.models.hf.lm import TransformersLM


class TransformersLayers:
    """The decoder layers of a model: slices, early exits and their share of the cost."""

    def __init__(self, lm: TransformersLM):
        self.lm = lm
        self.count = len(lm.windows)
        self.slices: dict[tuple[int, ...], TransformersLM] = {}

    def slice(self, layers: Seq[int], compile: bool = True) -> TransformersLM:
        """Return a model of these layers. It is made once and cached, unless it should not be compiled."""
        if not compile:
            return self.lm.sliced(layers)
        if tuple(layers) not in self.slices:
            part = self.slices[tuple(layers)] = self.lm.sliced(layers)
            self.lm.runner.install_on_slice(part)
        return self.slices[tuple(layers)]

    def early_exit(self, count: int) -> LM | None:
        exits = getattr(self.lm.runner, "early_exit", None)
        return EarlyExitLM(self.lm, count, self.first_layers) if exits is None else exits(count)

    def first_layers(self, segments: Seq[Segment], count: int) -> list[SegmentOutput]:
        """Run the first `count` layers and the head; the output of these layers is returned as tap `count`."""
        out = self.lm.runner.span(LayerSpan(0, count), segments, None, places(segments))
        assert out.logits is not None
        return split(segments, out.logits, {count: out.states})

    def cost_share(self, count: int) -> float:
        decoder, name = decoder_layers(self.lm.view)
        stack, head = weights(getattr(decoder, name)), weights(self.lm.view.get_output_embeddings())
        return (count / self.count * stack + head) / (stack + head)

    def reference(self, layers: Seq[int]) -> Reference:
        return ModelReference(view(self.lm.model, [self.lm.indices[i] for i in layers]))


class TransformersStates:
    """The hidden states in a model's slots, and its embeddings."""

    def __init__(self, lm: TransformersLM):
        self.lm = lm
        self.embeddings: Embeddings | None = embeddings_of(lm.model)

    @property
    def captures(self) -> bool:
        return self.lm.runner.kind == "graphs"

    def read(self, slot: int, first: int = 0) -> Tensor | None:  # [tokens - first, taps]
        return self.lm.slots[slot].hidden.since(first)

    def attach(self, head: Any) -> LM:
        return self.lm.runner.attach(head)

    def prepare_head(self, head: Any) -> Any:
        return self.lm.runner.prepare_head(head)


class TransformersWeights:
    """The weights of a model, and the memory that they and the cache take."""

    def __init__(self, lm: TransformersLM):
        self.lm = lm
        self.version = 0

    def changed(self) -> None:
        self.lm.runner.weights_changed()
        self.lm.clear()
        self.version += 1

    @cached_property
    def bytes(self) -> int:
        """Bytes of all weights, including layers outside a slice."""
        return weights(self.lm.model)

    def memory(self, tokens: int, requests: int = 1) -> MemoryNeed:
        cache = self.lm.cache
        held, spare = self.bytes + self.lm.runner.extra_bytes, cache.spare_bytes(min(tokens, self.lm.chunk))
        limit = None if cache.limit is None else cache.limit - spare
        room = cache.nbytes + free(self.lm.device) - spare
        return MemoryNeed(held, cache.memory_kinds, tokens, requests, room, limit)


def resume(runner: Runner, count: int, segments: Seq[Segment]) -> list[SegmentOutput]:
    """Run a pass of `count` layers in which tokens enter at different layers.

    Each span of layers runs the tokens that have entered by then. The last span runs all segments, so its logits are
    those of the pass.
    """
    nodes = places(segments)
    states: dict[int, Tensor] = {}  # by segment: the states of its tokens that have entered
    logits = None
    cuts = {0, count, *(segment.resumed.layers for segment in segments if segment.resumed is not None)}
    for span in map(LayerSpan._make, pairwise(sorted(cuts))):
        parts: dict[int, Segment] = {}
        for i, segment in enumerate(segments):
            done = segment.resumed
            if done is not None and done.layers == span.first:
                states[i] = torch.cat([done.states, states[i]]) if i in states else done.states
            part = segment if done is None or done.layers <= span.first else segment.remainder()
            if part is not None:
                parts[i] = part
        if not parts:
            continue
        entering = torch.cat([states[i] for i in parts]) if span.first else None
        out = runner.span(span, list(parts.values()), entering, nodes if span.last == count else None)
        pieces = out.states.split([len(part.tokens) for part in parts.values()])
        states = dict(zip(parts, pieces, strict=True))
        logits = out.logits
    assert logits is not None, "every segment runs in the last span"
    return split(segments, logits, {})
