"""SnapshotLM: hybrids, state-space models and models with unusual attention, run by snapshot and replay.

Each slot has its own Transformers cache. A recurrent state cannot be rolled back, so it is saved before a pass. If a
draft is not fully accepted, the saved state is restored and the accepted tokens join the next pass. Chains only.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache, DynamicCache, PreTrainedModel

from outpace.core.lm import LM, Reference
from outpace.core.tree import ROOT
from outpace.errors import UnsupportedModel, UsageError
from outpace.models.embeddings import Embeddings
from outpace.models.hf.head_lm import HeadLM
from outpace.models.hf.module import context_length, decoder_layers, embeddings_of, layer_count, recording, twin
from outpace.models.hf.reference import ModelReference
from outpace.models.hf.tolerance import apart
from outpace.models.memory import weights
from outpace.models.segment import Segment, SegmentOutput
from outpace.models.slots import MAX_DEFERRED, SlotLM

PROBE = 16  # context tokens when a model is probed


class SkippedLayer(nn.Module):
    """A layer that a slice leaves out: it returns its input, as a tuple if `pair` is set."""

    def __init__(self, layer: nn.Module, pair: bool):
        super().__init__()
        self.layer, self.pair = layer, pair

    def forward(self, hidden: Tensor, *args: object, **kwargs: object) -> Tensor | tuple[Tensor]:
        return (hidden,) if self.pair else hidden

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("layer"), name)  # models read attributes of a layer, such as its type


@dataclass
class SavedState:
    """A slot's state before nodes that may be rejected, and the number of tokens that it has seen."""

    cache: Cache
    length: int


class SnapshotLM(SlotLM):
    """Any Transformers causal LM with a cache, run one slot at a time."""

    trees = False

    def __init__(self, model: PreTrainedModel):
        super().__init__()
        self.model = model
        self.twin = twin(model)
        self.vocab: int = model.config.get_text_config().vocab_size
        self.max_length: int = context_length(model.config)
        self.identity = f"{type(model).__name__}, by snapshots, {model.dtype}, {weights(model)} bytes"
        count = layer_count(self.twin)
        self.layers = SnapshotLayers(self, count) if count else None
        self.states = SnapshotStates(self)
        self.weights = SnapshotWeights(self)
        accepted = inspect.signature(model.forward).parameters
        self.cache_argument = "cache_params" if "cache_params" in accepted else "past_key_values"
        self.selects = "logits_to_keep" in accepted
        self.caches: dict[int, Cache] = {}
        self.saved: dict[int, SavedState] = {}
        self.resumes = self._probe()
        if not self.resumes:
            self.chunk = self.max_length  # tokens after a prompt's first chunk would run one at a time

    @torch.no_grad()
    def _probe(self) -> bool:
        """Return whether several tokens can follow a state in one pass.

        Raise `UnsupportedModel` if a state cannot be restored.
        """
        name = type(self.model).__name__
        tokens = [(11 + 7 * i) % self.vocab for i in range(PROBE + 4)]
        start, rest = tokens[:PROBE], tokens[PROBE:]
        cache = self._fresh()
        try:
            first = self._advance(cache, start)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            raise UnsupportedModel(f"{name} cannot be run with a Transformers cache: {error}") from error
        if apart(self._advance(self._fresh(), start[:-4]), first[:-4]) > 0.1:
            raise UnsupportedModel(f"{name} is not causal: its logits at a token depend on the tokens after it")
        saved = _snapshot(cache)
        one_by_one = torch.cat([self._advance(cache, [token]) for token in rest])
        again = self._advance(_snapshot(saved), rest[:1])
        if all(_untouched(layer) for layer in cache.layers) or apart(again, one_by_one[:1]) > 0.01:
            raise UnsupportedModel(f"{name} keeps its state outside of a Transformers cache, which is not supported")
        # Some models restart from an empty state in every pass of more than one token. The two results then differ by
        # a part of the context's effect on the logits; otherwise they differ by rounding, which is far less.
        context = apart(self._advance(self._fresh(), rest), one_by_one)
        return apart(self._advance(saved, rest), one_by_one) <= max(0.1 * context, 1e-4)

    @property
    def device(self) -> torch.device:
        return self.model.get_input_embeddings().weight.device

    def _fresh(self) -> Cache:
        return DynamicCache(config=self.model.config)

    def _advance(self, cache: Cache, tokens: list[int], keep: int | None = None) -> Tensor:  # [keep or all, vocab]
        ids = torch.tensor([tokens], device=self.device)
        options = {} if keep is None or not self.selects else {"logits_to_keep": keep}
        out = self.twin(input_ids=ids, use_cache=True, **{self.cache_argument: cache}, **options)
        return out.logits[0, -keep:] if keep is not None else out.logits[0]

    def reference(self) -> Reference:
        return ModelReference(self.twin)

    def reserve(self, segments: Seq[Segment]) -> None:
        """Do nothing: these caches grow on demand."""

    @torch.no_grad()
    def forward(self, segments: Seq[Segment], taps: tuple[int, ...]) -> list[SegmentOutput]:
        try:
            return [self._forward(segment, taps) for segment in segments]
        except BaseException:
            # An interrupted pass has advanced some states and not others, so none of its slots can be trusted.
            for segment in segments:
                slot = self.slots[segment.slot]
                slot.pending = slot.tokens + slot.pending
                slot.forget_layout()
                self._truncate(segment.slot, slot, self.crop(segment.slot, 0))
            raise

    def _forward(self, segment: Segment, taps: tuple[int, ...]) -> SegmentOutput:
        if segment.slot not in self.caches:
            self.caches[segment.slot] = self._fresh()
        cache = self.caches[segment.slot]
        # A lone root is always kept, so neither plain decoding nor the root of a draft saves a state.
        if segment.layout is not None and len(segment.layout) > 1 and segment.slot not in self.saved:
            self.saved[segment.slot] = SavedState(_snapshot(cache), segment.start + segment.since)
        tokens, nodes = segment.tokens, segment.count - len(segment.pending)
        step = len(tokens) if self.resumes or segment.start == 0 else 1
        logits, states = [], []
        for at in range(0, len(tokens), step):
            with recording(self.twin, taps) as recorded:
                logits.append(self._advance(cache, tokens[at : at + step], min(step, max(nodes, 1))))
            states.append(recorded)
        hidden = {tap: torch.cat([recorded[tap] for recorded in states]) for tap in taps}
        return SegmentOutput(torch.cat(logits)[-nodes:] if segment.layout is not None else None, hidden)

    def release(self, slot: int) -> None:
        # The nodes of a layout are in the state, and only the root surely belongs to the text.
        if self.slots[slot].layout is not None:
            self._cut_back(slot, [ROOT])
        super().release(slot)

    def keep_slot(self, index: int, path: list[int]) -> None:
        self._cut_back(index, path)
        slot = self.slots[index]
        while len(slot.pending) > MAX_DEFERRED:
            self._run([Segment(index, slot.length, slot.pending[: self.chunk])])

    def _cut_back(self, index: int, path: list[int]) -> None:
        """Keep these nodes: in the state if it has seen no others, else as tokens that the next pass feeds."""
        slot, saved = self.slots[index], self.saved.pop(index, None)
        whole = len(path) == slot.scored
        super().keep_slot(index, path)
        if whole:
            return
        wanted = slot.tokens
        if saved is not None and saved.length <= len(wanted):
            self.caches[index], length = saved.cache, saved.length
        else:
            length = self.crop(index, 0)
        self._truncate(index, slot, length)
        slot.pending = wanted[length:]

    def commit(self, slot: int, path: list[int]) -> None:
        """Do nothing: a fully accepted chain stays where it was written."""

    def crop(self, slot: int, length: int) -> int:
        self.caches.pop(slot, None)
        self.saved.pop(slot, None)
        return 0

    def copy(self, source: int, target: int, length: int) -> bool:
        if length != len(self.slots[source].tokens) or self.slots[source].layout is not None:
            return False
        self.caches[target] = _snapshot(self.caches[source])
        self.saved.pop(target, None)
        return True


def _untouched(layer: object) -> bool:
    states = [*getattr(layer, "conv_states", {}).values(), *getattr(layer, "recurrent_states", {}).values()]
    return getattr(layer, "keys", None) is None and all(state is None for state in states)


def _snapshot(cache: Cache) -> Cache:
    """Copy a cache so that later passes of the original cannot change the copy.

    Keys and values are replaced as they grow, so they are shared. Other states sit in dicts and are written in place,
    so they are cloned.
    """
    saved = copy.copy(cache)
    saved.layers = [copy.copy(layer) for layer in cache.layers]
    for layer in saved.layers:
        for name, value in vars(layer).items():
            if isinstance(value, dict):
                setattr(layer, name, {k: v.clone() if isinstance(v, Tensor) else v for k, v in value.items()})
    return saved


class SnapshotLayers:
    """The layers of a `SnapshotLM`; a slice passes through those that it leaves out."""

    def __init__(self, lm: SnapshotLM, count: int):
        self.lm, self.count = lm, count

    def slice(self, layers: Seq[int], compile: bool = True) -> LM:
        """Return a model that passes through the other layers, so that each layer keeps its index in the cache."""
        if not layers or 0 not in layers or any(not 0 <= i < self.count for i in layers):
            raise UsageError(f"a slice takes layers 0 to {self.count - 1} and must include layer 0, got {list(layers)}")
        model = self.lm.model
        for pair in (False, True):  # some models' layers return a tensor, others a tuple
            part = twin(model)
            decoder, name = decoder_layers(part)
            stack = enumerate(getattr(decoder, name))
            setattr(decoder, name, nn.ModuleList(x if i in layers else SkippedLayer(x, pair) for i, x in stack))
            try:
                sliced = SnapshotLM(part)
                sliced.worker = self.lm.worker
                return sliced
            except UnsupportedModel as error:
                problem = error
        raise UnsupportedModel(f"{type(model).__name__} cannot be run without some of its layers: {problem}")

    def early_exit(self, count: int) -> None:
        """Return None: a state cannot continue from the first layers."""

    def cost_share(self, count: int) -> float:
        return count / self.count

    def reference(self, layers: Seq[int]) -> Reference:
        part = self.slice(layers, compile=False)
        assert part.reference is not None
        return part.reference()


class SnapshotStates:
    """The hidden states and embeddings of a `SnapshotLM`."""

    captures = False

    def __init__(self, lm: SnapshotLM):
        self.lm = lm
        self.embeddings: Embeddings | None = embeddings_of(lm.model)

    def read(self, slot: int, first: int = 0) -> Tensor | None:  # [tokens - first, taps]
        return self.lm.slots[slot].hidden.since(first)

    def attach(self, head: PreTrainedModel) -> LM:
        return HeadLM.of_head(head)

    def prepare_head(self, head: Any) -> Any:
        return head


class SnapshotWeights:
    """The weights of a `SnapshotLM`; its caches grow on demand, so their size is not known in advance."""

    def __init__(self, lm: SnapshotLM):
        self.lm, self.version = lm, 0

    def changed(self) -> None:
        self.lm.clear()
        self.version += 1

    def memory(self, tokens: int, requests: int = 1) -> None:
        return None
