"""TransformersLM: a Transformers causal model as the engine's target or draft, with our attention function and cache.

The user's model is never touched. We run a view of it: a copy of the module tree that shares every tensor, with its own
config. All segments of a pass are packed into one sequence, so nothing is padded. The `Runner` decides how a pass runs.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Self

import torch
from transformers import PreTrainedModel

from outpace.core.lm import Reference, RunAhead, SelfDraft
from outpace.core.tree import Tree
from outpace.errors import CacheFull, UnsupportedModel, UsageError
from outpace.models.cache.cuts import WORTH, Cut
from outpace.models.hf.cache import SlotCache
from outpace.models.hf.eager import EagerRunner, Runner
from outpace.models.hf.layers import TransformersLayers, TransformersStates, TransformersWeights, resume
from outpace.models.hf.module import context_length, twin, view, windows
from outpace.models.hf.reference import ModelReference
from outpace.models.hf.tolerance import agree
from outpace.models.quantized import kinds
from outpace.models.segment import Segment, SegmentOutput, common_prefix
from outpace.models.slots import SlotLM

PROBE = 8  # tokens of each text on which a model is tested


class TransformersLM(SlotLM):
    """A model whose attention goes through `AttentionInterface`: trees, ragged batches, packed passes."""

    before = 0  # leading tokens of the text that are not in a slot

    def __init__(self, model: PreTrainedModel, layers: Seq[int] | None = None, cache_limit: int | None = None):
        super().__init__()
        known = windows(model.config)
        assert known is not None, "`fitting` was not called first"
        self.model = model
        self.indices = list(layers) if layers is not None else list(range(len(known)))  # of its layers in the model
        self.view = view(model, layers)
        self.windows = [known[i] for i in self.indices]
        self.vocab: int = model.config.get_text_config().vocab_size
        self.max_length: int = context_length(model.config)
        self.cache = SlotCache(self.windows, cache_limit)
        self.takes_features: bool = getattr(model, "takes_features", False)
        self.eager = EagerRunner(self)
        self.runner: Runner = self.eager
        self.layers: TransformersLayers = TransformersLayers(self)
        self.states: TransformersStates = TransformersStates(self)
        self.weights: TransformersWeights = TransformersWeights(self)

    @classmethod
    def fitting(cls, model: PreTrainedModel, cache_limit: int | None = None) -> Self | None:
        """Return the model as a `TransformersLM`, or None if it must run with its own cache.

        Every layer has to attend through our function. Two short texts, scored as one packed pass and then continued,
        have to get the logits that the model itself gives them.
        """
        if not model._supports_attention_backend or windows(model.config) is None:
            return None
        lm = cls(model)
        try:
            if not lm._agrees():
                return None
        except torch.OutOfMemoryError:
            raise
        except (UnsupportedModel, TypeError, ValueError, AttributeError, LookupError, RuntimeError):
            return None  # whatever this model does differently, it can do with its own cache
        lm.cache.measure()
        lm.clear()
        lm.cache.limit = cache_limit
        return lm

    @torch.no_grad()
    def _agrees(self) -> bool:
        texts = [[(start + 7 * i) % self.vocab for i in range(PROBE)] for start in (11, 12)]
        theirs = twin(self.model)(input_ids=torch.tensor(texts, device=self.device), use_cache=False).logits
        slots = [self.acquire([]) for _ in texts]
        ours = []
        for part in (slice(0, PROBE // 2), slice(PROBE // 2, PROBE)):
            trees = [Tree.chain(text[part]) for text in texts]
            ours.append(torch.stack([scores.logits.all() for scores in self.score(trees, slots)]))
            self.keep([list(range(len(tree))) for tree in trees], slots)
        for slot in slots:
            self.release(slot)
        # Only rounding may differ: an unknown mask, bias or mixing of tokens would change far more.
        return agree(torch.cat(ours, dim=1), theirs)

    @property
    def asynchronous(self) -> bool:  # type: ignore[override]
        return self.runner.asynchronous

    @property
    def chunk(self) -> int:  # type: ignore[override]
        return self.runner.chunk

    @property
    def shares_prompts(self) -> bool:  # type: ignore[override]
        return self.runner.shares_prompts

    @property
    def prompt_tokens(self) -> int:  # type: ignore[override]
        return self.chunk

    def prepare(self, requests: int) -> None:
        self.runner.prepare(requests)

    @property
    def late_prompts(self) -> bool:  # type: ignore[override]
        return self.runner.late_prompts

    @property
    def late_choices(self) -> bool:  # type: ignore[override]
        return self.runner.late_choices

    @property
    def usual_batch(self) -> int:  # type: ignore[override]
        return self.runner.usual_batch

    @property
    def drafts(self) -> SelfDraft | None:  # type: ignore[override]
        return self.runner.drafts

    @property
    def run_ahead(self) -> RunAhead | None:  # type: ignore[override]
        return self.runner.run_ahead

    @property
    def identity(self) -> str:  # type: ignore[override]
        extra = f", {self.runner.extra_bytes} bytes of copies" if self.runner.extra_bytes else ""
        kind = (
            f"{type(self.model).__name__}, {self.runner.kind}, {', '.join([*kinds(self.model), str(self.model.dtype)])}"
        )
        return f"{kind}, {self.layers.count} layers, {self.weights.bytes} bytes{extra}"

    @property
    def token_price(self) -> float:  # type: ignore[override]
        return 0.08 if self.device.type == "cpu" else 0.0

    @property
    def device(self) -> torch.device:
        return self.view.get_input_embeddings().weight.device

    def reference(self) -> Reference:
        return ModelReference(view(self.model, self.indices))

    def sliced(self, layers: Seq[int]) -> TransformersLM:
        """Return a new model of some of the layers, which runs eagerly."""
        if not layers or any(not 0 <= i < len(self.indices) for i in layers):
            raise UsageError(f"a slice takes layers 0 to {len(self.indices) - 1}, got {list(layers)}")
        part = TransformersLM(self.model, [self.indices[i] for i in layers], self.cache.limit)
        part.worker = self.worker
        part.cache.kinds = self.cache.kinds
        part.cache.set_layer_bytes([self.cache.layer_bytes[i] for i in layers])
        return part

    def forward(self, segments: Seq[Segment], taps: tuple[int, ...]) -> list[SegmentOutput]:
        if any(segment.resumed is not None for segment in segments):
            return self._resume(segments)
        return self.runner.forward(segments, taps)

    def _resume(self, segments: Seq[Segment]) -> list[SegmentOutput]:
        """Run a pass in which some tokens continue from the layer that an early-exit draft has reached."""
        for segment in segments:
            if (done := segment.resumed) is not None:
                self.cache.move(segment.slot, segment.start + len(segment.pending), done.nodes, done.layers)
        return resume(self.runner, self.layers.count, segments)

    def with_states(self, segment: Segment) -> Segment:
        """Return the segment with the target's hidden states that enter with its tokens; only a head takes some."""
        return segment

    def clear(self) -> None:
        super().clear()
        for part in self.layers.slices.values():
            part.clear()

    def release(self, slot: int) -> None:
        self.runner.forget(slot)
        super().release(slot)

    def _begin(self, wanted: list[int], index: int) -> list[int]:
        self.runner.forget(index)
        slot, before = self.slots[index], self.slots[index].tokens
        text = super()._begin(wanted, index)
        if len(slot.pending) >= WORTH and self.cache.cuts.groups:  # do slots know more of it than they could give?
            alike = [other.tokens for other in self.slots if (other.context, other.taps) == (slot.context, slot.taps)]
            parted = max(common_prefix(tokens, text) for tokens in [before, *alike])
            if parted - len(slot.tokens) >= WORTH:
                self._expect_cut(index, Cut(parted, parted=True))
        return text

    def reserve(self, segments: Seq[Segment]) -> None:
        for slot in self.cache.wide.difference(segment.slot for segment in segments):  # their prompts have run
            self.cache.reserve(slot, self.slots[slot].length, self.slots[slot].end)
        for segment in segments:
            slot, start, soon = segment.slot, min(segment.start, self.slots[segment.slot].length), None
            if segment.layout is None:  # a prompt, which is fed in chunks
                soon = start + self.chunk
                self._expect_cut(slot, Cut(segment.end))
            try:
                self.cache.reserve(slot, start, segment.end, soon)
            except CacheFull:
                self.clear()
                self.cache.reserve(slot, start, segment.end, soon)

    def reach(self, slot: int, length: int) -> int:
        return self.cache.cuts.kept(slot, length)

    def crop(self, slot: int, length: int) -> int:
        return self.cache.crop(slot, length)

    def _expect_cut(self, slot: int, cut: Cut) -> None:
        """Keep what this slot needs to be cut back so far, while windows move on."""
        self.cache.cuts.expect(slot, cut)

    def commit(self, slot: int, path: list[int]) -> None:
        self.cache.move(slot, self.slots[slot].length, path)

    def copy(self, source: int, target: int, length: int) -> bool:
        try:
            self.cache.copy(source, target, length)
        except CacheFull:
            return False  # the prefill then fills the target slot, or reports that there is no room
        return True
