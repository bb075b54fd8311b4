"""Models that keep their own kind of state, by snapshot and replay: hybrids, state-space models, unusual attention.

Each row has a Transformers cache of its own. A recurrent state cannot be cut back, so it is saved before a pass; when a
draft was not accepted whole, the saved state returns and the accepted tokens ride on the next pass. Chains only.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence as Seq
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache, DynamicCache, PreTrainedModel

from outpace.core.lm import LM, Reference
from outpace.core.tree import ROOT
from outpace.errors import UnsupportedModel, UsageError
from outpace.models.hf.module import apart, context_length, decoder_layers, embeddings_of, recording, twin
from outpace.models.hf.reference import ModelReference
from outpace.models.segment import Segment, SegmentOutput
from outpace.models.slots import RIDE, SlotLM

PROBE = 16  # tokens of context in the trial of a model


class SkippedLayer(nn.Module):
    """A layer that is left out."""

    def __init__(self, layer: nn.Module, pair: bool):
        super().__init__()
        self.layer, self.pair = layer, pair

    def forward(self, hidden: Tensor, *args: object, **kwargs: object) -> Tensor | tuple[Tensor]:
        return (hidden,) if self.pair else hidden

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("layer"), name)  # models ask a layer for its kind


@dataclass
class SavedState:
    """A row's state before nodes that may be rejected, and how many tokens that state has seen."""

    cache: Cache
    length: int


class SnapshotLM(SlotLM):
    """Any Transformers causal LM with a cache, one row at a time."""

    trees = False

    def __init__(self, model: PreTrainedModel):
        super().__init__()
        self.model, self.ends = model, embeddings_of(model)
        self.twin = twin(model)
        with suppress(UnsupportedModel):  # it may have no list of layers
            self.stack = len(getattr(*decoder_layers(self.twin)))
        self.vocab: int = model.config.get_text_config().vocab_size
        self.context: int = context_length(model.config)
        accepted = inspect.signature(model.forward).parameters
        self.cache_argument = "cache_params" if "cache_params" in accepted else "past_key_values"
        self.selects = "logits_to_keep" in accepted
        self.caches: dict[int, Cache] = {}
        self.saved: dict[int, SavedState] = {}
        self.resumes = self._probe()
        if not self.resumes:
            self.chunk = self.context  # what follows the first chunk of a prompt would run one by one

    @torch.no_grad()
    def _probe(self) -> bool:
        """True when several tokens can follow a state in one pass; `UnsupportedModel` when none can be put back."""
        name = type(self.model).__name__
        tokens = [(11 + 7 * i) % self.vocab for i in range(PROBE + 4)]
        start, rest = tokens[:PROBE], tokens[PROBE:]
        cache = self._fresh()
        try:
            first = self._feed(cache, start)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            raise UnsupportedModel(f"{name} cannot be run with a Transformers cache: {error}") from error
        if apart(self._feed(self._fresh(), start[:-4]), first[:-4]) > 0.1:
            raise UnsupportedModel(f"{name} is not causal: what it says of a token depends on the tokens after it")
        saved = _snapshot(cache)
        one_by_one = torch.cat([self._feed(cache, [token]) for token in rest])
        again = self._feed(_snapshot(saved), rest[:1])
        if all(_untouched(layer) for layer in cache.layers) or apart(again, one_by_one[:1]) > 0.01:
            raise UnsupportedModel(f"{name} keeps its state outside of a Transformers cache, which is not supported")
        # Some start anew at every pass of more than one token. The two ways then differ by a part of what the context
        # changes in the logits; else by rounding, which is far less.
        context = apart(self._feed(self._fresh(), rest), one_by_one)
        return apart(self._feed(saved, rest), one_by_one) <= max(0.1 * context, 1e-4)

    def slice(self, layers: Seq[int], eager: bool = False) -> LM:
        """The other layers are passed through, so that none loses its number in the cache."""
        if not layers or 0 not in layers or any(not 0 <= i < self.stack for i in layers):
            raise UsageError(f"a slice takes layers 0 to {self.stack - 1}, the first among them, got {list(layers)}")
        for pair in (False, True):  # what a layer returns is the model's own affair
            part = twin(self.model)
            decoder, name = decoder_layers(part)
            stack = getattr(decoder, name)
            setattr(
                decoder, name, nn.ModuleList(x if i in layers else SkippedLayer(x, pair) for i, x in enumerate(stack))
            )
            try:
                sliced = SnapshotLM(part)
                sliced.worker = self.worker
                return sliced
            except UnsupportedModel as error:
                problem = error
        raise UnsupportedModel(f"{type(self.model).__name__} cannot be run without some of its layers: {problem}")

    @property
    def device(self) -> torch.device:
        return self.model.get_input_embeddings().weight.device

    def _fresh(self) -> Cache:
        return DynamicCache(config=self.model.config)

    def _feed(self, cache: Cache, tokens: list[int], keep: int | None = None) -> Tensor:  # [keep or all, vocab]
        ids = torch.tensor([tokens], device=self.device)
        options = {} if keep is None or not self.selects else {"logits_to_keep": keep}
        out = self.twin(input_ids=ids, use_cache=True, **{self.cache_argument: cache}, **options)
        return out.logits[0, -keep:] if keep is not None else out.logits[0]

    def reference(self) -> Reference:
        return ModelReference(self.twin)

    def reserve(self, jobs: Seq[Segment]) -> None:
        """These caches grow by themselves."""

    @torch.no_grad()
    def forward(self, jobs: Seq[Segment], taps: tuple[int, ...]) -> list[SegmentOutput]:
        try:
            return [self._forward(job, taps) for job in jobs]
        except BaseException:
            # A pass that broke off has moved some states and not others: no row of it can be trusted.
            for job in jobs:
                row = self.rows[job.row]
                row.pending = row.tokens + row.pending
                row.forget_tree()
                self._truncate(job.row, row, self.crop(job.row, 0))
            raise

    def _forward(self, job: Segment, taps: tuple[int, ...]) -> SegmentOutput:
        if job.row not in self.caches:
            self.caches[job.row] = self._fresh()
        cache = self.caches[job.row]
        # A root alone is always kept, so plain decoding saves nothing, and neither does the root of a draft.
        if job.tree is not None and len(job.tree) > 1 and job.row not in self.saved:
            self.saved[job.row] = SavedState(_snapshot(cache), job.start + job.since)
        tokens, nodes = job.tokens, len(job.tokens) - len(job.pending)
        step = len(tokens) if self.resumes or job.start == 0 else 1
        logits, states = [], []
        for at in range(0, len(tokens), step):
            with recording(self.twin, taps) as recorded:
                logits.append(self._feed(cache, tokens[at : at + step], min(step, max(nodes, 1))))
            states.append(recorded)
        hidden = {tap: torch.cat([recorded[tap] for recorded in states]) for tap in taps}
        return SegmentOutput(torch.cat(logits)[-nodes:] if job.tree is not None else None, hidden)

    def release(self, row: int) -> None:
        if self.rows[row].tree is not None:  # its nodes are in the state, and only the root is sure to be of the text
            self._cut_back(row, [ROOT])
        super().release(row)

    def keep_row(self, index: int, path: list[int]) -> None:
        self._cut_back(index, path)
        row = self.rows[index]
        while len(row.pending) > RIDE:
            self._run([Segment(index, len(row.tokens), row.pending[: self.chunk])])

    def _cut_back(self, index: int, path: list[int]) -> None:
        """Keep these nodes: in the state if they are all that it has seen, else as tokens that the next pass feeds."""
        row, saved = self.rows[index], self.saved.pop(index, None)
        whole = len(path) == row.scored
        super().keep_row(index, path)
        if whole:
            return
        wanted = row.tokens
        if saved is not None and saved.length <= len(wanted):
            self.caches[index], length = saved.cache, saved.length
        else:
            length = self.crop(index, 0)
        self._truncate(index, row, length)
        row.pending = wanted[length:]

    def commit(self, row: int, path: list[int]) -> None:
        """A chain that is kept whole lies where it was written."""

    def crop(self, row: int, length: int) -> int:
        self.caches.pop(row, None)
        self.saved.pop(row, None)
        return 0

    def copy(self, source: int, target: int, length: int) -> bool:
        if length != len(self.rows[source].tokens) or self.rows[source].tree is not None:
            return False
        self.caches[target] = _snapshot(self.caches[source])
        self.saved.pop(target, None)
        return True


def _untouched(layer: object) -> bool:
    states = [*getattr(layer, "conv_states", {}).values(), *getattr(layer, "recurrent_states", {}).values()]
    return getattr(layer, "keys", None) is None and all(state is None for state in states)


def _snapshot(cache: Cache) -> Cache:
    """A cache that later passes of the original cannot change: keys and values are replaced as they grow, so they are
    shared; other states sit in dicts and are written in place, so they are copied."""
    saved = copy.copy(cache)
    saved.layers = [copy.copy(layer) for layer in cache.layers]
    for layer in saved.layers:
        for name, value in vars(layer).items():
            if isinstance(value, dict):
                setattr(layer, name, {k: v.clone() if isinstance(v, Tensor) else v for k, v in value.items()})
    return saved
