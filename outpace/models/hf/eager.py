"""Eager passes: a Transformers model's own layers, with all segments packed into one sequence.

A `Runner` decides how the passes of a `TransformersLM` run. The other runners fall back to the eager one.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from outpace.core.lm import RunAhead, SelfDraft
from outpace.errors import UnsupportedModel
from outpace.models.hf.attention import NAME, EagerAttention
from outpace.models.hf.module import recording
from outpace.models.hf.stages import LayerSpan, Stage, StageOutputs
from outpace.models.segment import Segment, SegmentOutput, packed_features
from outpace.models.slots import CHUNK

if TYPE_CHECKING:
    from outpace.models.hf.lm import TransformersLM


class Runner(Protocol):
    """The interface that runs the passes of a Transformers model."""

    kind: str  # part of the model's identity
    asynchronous: bool
    chunk: int  # prompt tokens per pass
    shares_prompts: bool  # whether prompts of several slots share passes
    usual_batch: int  # requests at a time, unless the caller says otherwise
    late_prompts: bool  # whether the last part of a prompt may run together with its first choice
    late_choices: bool  # whether choices may have edits and report log-probabilities
    extra_bytes: int  # of weight copies
    drafts: SelfDraft | None
    run_ahead: RunAhead | None

    def forward(self, segments: Seq[Segment], taps: tuple[int, ...]) -> list[SegmentOutput]:
        """Run one pass of all layers."""

    def span(
        self, span: LayerSpan, segments: Seq[Segment], entering: Tensor | None, nodes: list[int] | None
    ) -> StageOutputs:
        """Run one pass of some layers, on `entering` if they are not the first."""  # [tokens, hidden], places

    def prepare(self, requests: int) -> None:
        """Prepare passes of up to this many requests."""

    def forget(self, slot: int) -> None:
        """Discard passes begun ahead for this slot, which is about to hold another text."""

    def weights_changed(self) -> None:
        """Handle weights that have changed in place."""

    def install_on_slice(self, part: TransformersLM) -> None:
        """Make a slice of the model use the same kind of runner."""

    def attach(self, head: PreTrainedModel) -> TransformersLM:
        """Return a head that drafts one token per step as a model with the same kind of runner."""

    def prepare_head(self, head: Any) -> Any:
        """Return a head that drafts several tokens at once in the form that runs fastest beside this model."""


class EagerRunner:
    """Passes through the model's own code, with our attention and our cache."""

    kind = "eager"
    asynchronous = False
    chunk = CHUNK
    shares_prompts = False
    usual_batch = 16
    late_prompts = False
    late_choices = False
    extra_bytes = 0
    drafts: SelfDraft | None = None
    run_ahead: RunAhead | None = None

    def __init__(self, lm: TransformersLM, alone: bool = False):
        self.lm = lm
        self.alone = alone  # one query at a time, over its own path: the same arithmetic in every pass
        self.module = lm.view
        self.module.config._attn_implementation = NAME
        self.stages = Stages(self.module)

    def forward(self, segments: Seq[Segment], taps: tuple[int, ...]) -> list[SegmentOutput]:
        nodes = places(segments)
        with recording(self.module, taps) as recorded:
            logits = self._pass(segments, nodes or [sum(segment.count for segment in segments) - 1])
        return split(segments, logits, recorded)

    @torch.no_grad()
    def _pass(self, segments: Seq[Segment], nodes: list[int]) -> Tensor:  # [nodes, vocab]
        ids, given = self.inputs(segments)
        wanted = torch.tensor(nodes, device=self.lm.device)
        out = self.module(input_ids=ids[None], **given, logits_to_keep=wanted)
        if (calls := given["attention_plan"].calls) != len(self.lm.windows):
            raise UnsupportedModel(f"only {calls} of {len(self.lm.windows)} layers use our attention function")
        return out.logits[0]

    def inputs(self, segments: Seq[Segment]) -> tuple[Tensor, dict[str, Any]]:
        """Return the token ids of a pass, and all other arguments of the model."""
        ids, positions = self.ids_and_positions(segments).to(self.lm.device)
        plan = EagerAttention(self.lm.cache, segments, self.lm.windows, self.lm.device, self.alone)
        given = dict(position_ids=positions[None], past_key_values=self.lm.cache, use_cache=True, attention_plan=plan)
        return ids, given | packed_features(segments, len(ids))

    def ids_and_positions(self, segments: Seq[Segment]) -> Tensor:  # [2, tokens of all segments]
        ids = [token for segment in segments for token in segment.tokens]
        return torch.tensor([ids, [place for segment in segments for place in segment.positions]])

    @torch.no_grad()
    def span(
        self, span: LayerSpan, segments: Seq[Segment], entering: Tensor | None, nodes: list[int] | None
    ) -> StageOutputs:
        ids, given = self.inputs(segments)
        wanted = None if nodes is None else torch.tensor(nodes, device=self.lm.device)
        return self.stages.of_span(span).run(ids, entering, wanted, **given)

    def prepare(self, requests: int) -> None:
        """Do nothing: a pass needs no preparation."""

    def forget(self, slot: int) -> None:
        """Do nothing: no pass is begun ahead here."""

    def weights_changed(self) -> None:
        """Do nothing: this runner has no copies of weights."""

    def install_on_slice(self, part: TransformersLM) -> None:
        """Do nothing: a new slice already runs eagerly."""

    def attach(self, head: PreTrainedModel) -> TransformersLM:
        from outpace.models.hf.head_lm import HeadLM  # it imports this module

        return HeadLM.of_head(head)

    def prepare_head(self, head: Any) -> Any:
        return head


class Stages:
    """A cache of the layer spans of one module that have been run so far."""

    def __init__(self, module: PreTrainedModel):
        self.module = module
        self._known: dict[LayerSpan, Stage] = {}

    def of_span(self, span: LayerSpan) -> Stage:
        if span not in self._known:
            self._known[span] = Stage(self.module, span)
        return self._known[span]


def places(segments: Seq[Segment]) -> list[int]:
    """Return the positions of all layouts' nodes among the tokens of a packed pass."""
    nodes, at = list[int](), 0
    for segment in segments:
        nodes.extend(range(at + len(segment.pending), at + segment.count))
        at += segment.count
    return nodes


def split(segments: Seq[Segment], logits: Tensor, recorded: dict[int, Tensor]) -> list[SegmentOutput]:
    """Split a pass's output by segment; `logits` has a row for each node of all segments."""
    outputs, at, node = [], 0, 0
    for segment in segments:
        count, fed = segment.count, len(segment.pending)
        own = logits[node : node + count - fed] if segment.layout is not None else None
        outputs.append(SegmentOutput(own, {tap: states[at : at + count] for tap, states in recorded.items()}))
        at, node = at + count, node + count - fed
    return outputs
