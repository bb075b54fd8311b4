"""Fed: models that take a state beside each token, as adapters. Heads that are asked token by token are such models.

A row holds the text from its second token on: what enters with token t is the target's state of token t - 1. Guesses
have no such state yet, so what the head itself left at their parent enters with them. That is forgotten when the text
goes on: committed tokens are fed again, with the target's own states.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from outpace.core.sequence import common_prefix
from outpace.models.compiled.cpu import CompiledLM
from outpace.models.compiled.cuda_graph import GraphLM
from outpace.models.hf.int8 import quantize
from outpace.models.hf.lm import PackedLM
from outpace.models.hf.module import twin
from outpace.models.segment import Segment, SegmentOutput

STATE = (-1,)  # the tap of what a head feeds back


class HeadLM:
    """What the adapters below have in common; a mixin in front of one."""

    before = 1  # tokens of the text that are not in the row

    def __init__(self, *given: Any):
        super().__init__(*given)
        self._features: dict[int, tuple[int, Tensor]] = {}  # row -> place of the first, [places, hidden]

    def acquire(self, tokens: list[int], taps: tuple[int, ...] = ()) -> int:
        return super().acquire(tokens[1:], STATE)  # type: ignore[misc]

    def known(self, row: int, text: list[int]) -> int:
        """How many of the target's states for this text the row needs no more."""
        return common_prefix(self.rows[row].tokens, text[1:])  # type: ignore[attr-defined]

    def feed(self, row: int, first: int, features: Tensor) -> None:
        """The states that enter with the tokens of the row, from place `first` on."""  # [places, hidden]
        self._features[row] = first, features

    def _sync(self, wanted: list[int], index: int) -> None:
        if self.rows[index].tree is not None:  # type: ignore[attr-defined]
            self.keep_row(index, [])  # type: ignore[attr-defined]
        super()._sync(wanted[1:], index)  # type: ignore[misc]

    def forward(self, jobs: Seq[Segment], taps: tuple[int, ...]) -> list[SegmentOutput]:
        return super().forward([replace(job, features=self._entering(job)) for job in jobs], taps)  # type: ignore[misc]

    def _entering(self, job: Segment) -> Tensor | None:  # [tokens of the job, hidden]
        if job.row not in self._features:
            return None
        first, features = self._features[job.row]
        at = job.start - first
        if job.tree is None:
            return features[at : at + len(job.pending)]
        if not job.since:
            assert len(job.tree) == 1, "a tree grows from its root"
            return features[at : at + len(job.pending) + 1]
        left = self.rows[job.row].provisional  # type: ignore[attr-defined]
        assert left is not None, "nodes are scored after their parents"
        return left[job.tree.parents[job.since :]]

    def release(self, row: int) -> None:
        self._features.pop(row, None)
        super().release(row)  # type: ignore[misc]


class EagerHeadLM(HeadLM, PackedLM):
    """Eagerly."""


class CompiledHeadLM(HeadLM, CompiledLM):
    """Compiled, on a CPU."""


class GraphHeadLM(HeadLM, GraphLM):
    """As CUDA graphs."""


def adapt_head(model: PreTrainedModel, compiled: bool) -> EagerHeadLM | CompiledHeadLM | GraphHeadLM:
    """The adapter of a model that takes states."""
    if compiled and model.device.type == "cpu":
        # A pass takes as long as its weights take to come from memory, and a guess may be a little different.
        fast = CompiledHeadLM.of(_packed(quantize(twin(model))))
        return fast if isinstance(fast, CompiledHeadLM) else _packed(model)
    packed = _packed(model)
    return GraphHeadLM.of(packed) if compiled else packed  # type: ignore[return-value]


def _packed(model: PreTrainedModel) -> EagerHeadLM:
    packed = EagerHeadLM.fitting(model)
    assert isinstance(packed, EagerHeadLM), "a head is made of layers that attend through our function"
    return packed
