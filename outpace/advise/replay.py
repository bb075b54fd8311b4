"""Replay: an LM that returns recorded predictions, so that the whole engine loop runs without the target.

At a recorded place it returns what the target predicted there. At other places, which are off the answer, it returns
what the target predicted elsewhere after the same two tokens, or after the same one. This never affects acceptance;
only drafters that learn from rejected nodes (token recycling, lookahead) see the difference.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from outpace.advise.recording import Recording, places
from outpace.core.lm import LM, Layers, Reference
from outpace.errors import UsageError
from outpace.models.cacheless import CachelessLM
from outpace.models.segment import Segment, SegmentOutput

CERTAIN = 1e6  # a logit so high that no noise and no filter can move it from the top


class ReplayLayers:
    """The target's layers, for drafts made of some of them, which have to run. They share no slots with a recording."""

    def __init__(self, layers: Layers):
        self._layers, self.count = layers, layers.count

    def slice(self, layers: Seq[int], compile: bool = True) -> LM:
        return self._layers.slice(layers, compile)

    def early_exit(self, count: int) -> None:
        """Return None: a recording has no early exit."""

    def cost_share(self, count: int) -> float:
        return self._layers.cost_share(count)

    def reference(self, layers: Seq[int]) -> Reference:
        return self._layers.reference(layers)


class ReplayLM(CachelessLM):
    """Stands in for the target: exact where it was recorded, and nearly free."""

    def __init__(self, target: LM, recordings: Seq[Recording]):
        super().__init__()
        self.recording: Recording | None = None  # the one that is replayed now
        self.vocab, self.max_length, self.trees = target.vocab, target.max_length, target.trees
        self.token_price = target.token_price
        self.layers = None if target.layers is None else ReplayLayers(target.layers)
        self._endings = _by_ending(recordings)
        self._latest: dict[int, list[int]] = {}  # token -> its latest likely successors

    def forward(self, segments: Seq[Segment], taps: tuple[int, ...]) -> list[SegmentOutput]:
        if taps:
            raise UsageError("a method that reads hidden states cannot be replayed from a recording of tokens")
        return [SegmentOutput(None if s.layout is None else self._score(s), {}) for s in segments]

    def _score(self, segment: Segment) -> Tensor:  # [new nodes, vocab]
        tree, recording = segment.tree, self.recording
        assert recording is not None
        held = segment.start + len(segment.pending)  # tokens before the root
        path = tree.walk(recording.text[held:])
        at = {node: held + 1 + depth - len(recording.prompt) for depth, node in enumerate(path)}
        logits = torch.zeros(len(tree) - segment.since, self.vocab)
        for node, place in list(enumerate(places(tree, at)))[segment.since :]:
            token = tree.tokens[node]
            before = tree.tokens[tree.parents[node]] if node else recording.text[held - 1]
            likely = recording.likely.get(place) or self._alike(before, token)
            self._latest[token] = likely
            for rank, successor in enumerate(likely):
                logits[node - segment.since, successor] = float(len(likely) - rank)
            if node in at and at[node] < len(recording.answer):
                logits[node - segment.since, recording.answer[at[node]]] = CERTAIN
        return logits

    def _alike(self, before: int, token: int) -> list[int]:
        """Return likely successors of the same two tokens; else of the same one, most recently or anywhere."""
        return self._elsewhere(before, token) or self._latest.get(token) or self._elsewhere(token)

    def _elsewhere(self, *ending: int) -> list[int]:
        found = self._endings.get(ending, {})
        return found.get(id(self.recording)) or next(iter(found.values()), [])

    def reference(self) -> Reference:
        raise UsageError("a recording has no reference")


def _by_ending(recordings: Seq[Recording]) -> dict[tuple[int, ...], dict[int, list[int]]]:
    """Map the last one or two tokens before a place -> recording -> the latest likely successors there."""
    found: dict[tuple[int, ...], dict[int, list[int]]] = {}
    for recording in recordings:
        for (position, *tail), likely in recording.likely.items():
            text = [*recording.text[: len(recording.prompt) + position][-2:], *tail]
            for ending in (text[-1:], text[-2:]):
                found.setdefault(tuple(ending), {})[id(recording)] = likely
    return found
