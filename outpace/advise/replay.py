"""Replay: an LM that knows only a recording, so that the whole loop runs without the target.

At a place that was recorded it says what the target said there. At others, which the answer does not reach, it says
what the target said elsewhere after the same two tokens, or the same one. That decides no acceptance; only drafters
that learn from rejected nodes (token recycling, lookahead) see the difference.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from outpace.advise.recording import Recording, places
from outpace.core.lm import LM, Reference
from outpace.errors import UsageError
from outpace.models.cacheless import CachelessLM
from outpace.models.segment import Segment, SegmentOutput

CERTAIN = 1e6  # a logit that no noise and no filter can move from the top


class ReplayLM(CachelessLM):
    """The target of a recording: right where it was recorded, and nearly free."""

    def __init__(self, target: LM, recordings: Seq[Recording]):
        super().__init__()
        self.recording: Recording | None = None  # what is replayed now
        self.vocab, self.context, self.trees, self.stack = target.vocab, target.context, target.trees, target.stack
        self._target = target
        self._endings = _by_ending(recordings)
        self._latest: dict[int, list[int]] = {}  # token -> what was last likely after it

    def forward(self, jobs: Seq[Segment], taps: tuple[int, ...]) -> list[SegmentOutput]:
        if taps:
            raise UsageError("a method that reads hidden states cannot be replayed from a recording of tokens")
        return [SegmentOutput(None if job.tree is None else self._score(job), {}) for job in jobs]

    def _score(self, job: Segment) -> Tensor:  # [new nodes, vocab]
        tree, recording = job.tree, self.recording
        assert tree is not None and recording is not None
        held = job.start + len(job.pending)  # tokens before the root
        path = tree.walk(recording.text[held:])
        at = {node: held + 1 + depth - len(recording.prompt) for depth, node in enumerate(path)}
        logits = torch.zeros(len(tree) - job.since, self.vocab)
        for node, place in list(enumerate(places(tree, at)))[job.since :]:
            token = tree.tokens[node]
            before = tree.tokens[tree.parents[node]] if node else recording.text[held - 1]
            likely = recording.likely.get(place) or self._alike(before, token)
            self._latest[token] = likely
            for rank, successor in enumerate(likely):
                logits[node - job.since, successor] = float(len(likely) - rank)
            if node in at and at[node] < len(recording.answer):
                logits[node - job.since, recording.answer[at[node]]] = CERTAIN
        return logits

    def _alike(self, before: int, token: int) -> list[int]:
        """What followed the same two tokens; else the same one, most recently or anywhere."""
        return self._elsewhere(before, token) or self._latest.get(token) or self._elsewhere(token)

    def _elsewhere(self, *ending: int) -> list[int]:
        found = self._endings.get(ending, {})
        return found.get(id(self.recording)) or next(iter(found.values()), [])

    def slice(self, layers: Seq[int], eager: bool = False) -> LM:
        return self._target.slice(layers, eager)  # a draft of the target's own layers has to run

    def share(self, layers: int) -> float:
        return self._target.share(layers)

    def reference(self) -> Reference:
        raise UsageError("a recording has no reference")


def _by_ending(recordings: Seq[Recording]) -> dict[tuple[int, ...], dict[int, list[int]]]:
    """The last one and two tokens before a place -> recording -> what was last likely there."""
    found: dict[tuple[int, ...], dict[int, list[int]]] = {}
    for recording in recordings:
        for (position, *tail), likely in recording.likely.items():
            text = [*recording.text[: len(recording.prompt) + position][-2:], *tail]
            for ending in (text[-1:], text[-2:]):
                found.setdefault(tuple(ending), {})[id(recording)] = likely
    return found
