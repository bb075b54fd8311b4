"""Any Transformers causal LM as an `LM`, through our attention function and our cache.

The user's model is never touched: we run a view of it, a copy of the module tree that shares every tensor, with its own
config. All rows of a pass are packed into one sequence of length "nodes of all rows", so nothing is padded.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence as Seq
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from outpace.core.lm import LM, MemoryNeed, Reference
from outpace.core.tree import Tree
from outpace.errors import CacheFull, UnsupportedModel
from outpace.models.early_exit import EarlyLM
from outpace.models.hf import attention
from outpace.models.hf.cache import SlotCache
from outpace.models.hf.module import (
    apart,
    context_length,
    decoder_layers,
    embeddings_of,
    recording,
    twin,
    view,
    windows,
)
from outpace.models.hf.reference import ModelReference
from outpace.models.hf.stages import LayerSpan, Stage, StageOutputs, resume
from outpace.models.memory import free, weights
from outpace.models.segment import Segment, SegmentOutput, joined
from outpace.models.slots import SlotLM

logger = logging.getLogger(__name__)
PROBE = 8  # tokens of each text on which an adapter is tried


def places(jobs: Seq[Segment]) -> list[int]:
    """Where the nodes of all trees stand among the tokens of a packed pass."""
    nodes, at = list[int](), 0
    for job in jobs:
        nodes.extend(range(at + len(job.pending), at + len(job.tokens)))
        at += len(job.tokens)
    return nodes


class PackedLM(SlotLM):
    """A model whose attention goes through `AttentionInterface`: trees, ragged batches, packed passes."""

    def __init__(self, model: PreTrainedModel, layers: Seq[int] | None = None, cache_limit: int | None = None):
        super().__init__()
        text = model.config.get_text_config()
        found = windows(model.config)
        assert found is not None, "`fitting` was not asked"
        self.model = model
        self.layers = list(layers) if layers is not None else list(range(len(found)))
        self.view = view(model, layers)
        self.windows = [found[i] for i in self.layers]
        self.view.config._attn_implementation = attention.NAME
        self.vocab: int = text.vocab_size
        self.context: int = context_length(model.config)
        self.cache = SlotCache(len(self.layers), cache_limit)
        self.stack, self.ends = len(self.layers), embeddings_of(model)
        self.slices: dict[tuple[int, ...], PackedLM] = {}
        self._stages: dict[tuple[int, LayerSpan], Stage] = {}

    @classmethod
    def fitting(cls, model: PreTrainedModel, cache_limit: int | None = None) -> PackedLM | None:
        """The adapter, if every layer attends through our function, and two short texts that are scored as one packed
        pass, and then go on, get the logits that the model itself gives them."""
        if not model._supports_attention_backend or windows(model.config) is None:
            return None
        lm = cls(model)
        try:
            if not lm._agrees():
                return None
        except torch.OutOfMemoryError:
            raise
        except (UnsupportedModel, TypeError, ValueError, AttributeError, LookupError, RuntimeError):
            return None  # whatever it is that this model does differently, it can do so with a cache of its own
        lm.cache.measure()
        lm.clear()
        lm.cache.limit = cache_limit
        return lm

    @torch.no_grad()
    def _agrees(self) -> bool:
        texts = [[(start + 7 * i) % self.vocab for i in range(PROBE)] for start in (11, 12)]
        theirs = twin(self.model)(input_ids=torch.tensor(texts, device=self.device), use_cache=False).logits
        rows = [self.acquire([]) for _ in texts]
        ours = []
        for part in (slice(0, PROBE // 2), slice(PROBE // 2, PROBE)):
            trees = [Tree.chain(text[part]) for text in texts]
            ours.append(torch.stack([scores.logits for scores in self.score(trees, rows)]))
            self.keep([list(range(len(tree))) for tree in trees], rows)
        for row in rows:
            self.release(row)
        # Only rounding may differ: a mask, a bias or a mixing of tokens that we do not know of changes far more.
        return apart(torch.cat(ours, dim=1), theirs) <= max(0.01, 8 * torch.finfo(theirs.dtype).eps)

    @property
    def device(self) -> torch.device:
        return self.view.get_input_embeddings().weight.device

    def slice(self, layers: Seq[int], eager: bool = False) -> PackedLM:
        """Made once, unless it is not worth to be compiled."""
        if eager:
            return self._part(layers)
        if tuple(layers) not in self.slices:
            self.slices[tuple(layers)] = self.ready(self._part(layers))
        return self.slices[tuple(layers)]

    def _part(self, layers: Seq[int], kind: type[PackedLM] | None = None) -> PackedLM:
        part = (kind or type(self))(self.model, layers, self.cache.limit)
        part.worker = self.worker
        part.cache.kinds = self.cache.kinds
        part.cache.token_bytes = self.cache.token_bytes * len(part.layers) // len(self.layers)
        return part

    def ready(self, part: PackedLM) -> PackedLM:
        """A slice as it will run."""
        return part

    def trial(self, layers: Seq[int]) -> Reference:
        """Some of the layers as they are, without a cache and without compiling: to see what they say."""
        return ModelReference(view(self.model, layers))

    def clear(self) -> None:
        super().clear()
        for part in self.slices.values():
            part.clear()

    @property
    def fingerprint(self) -> str:
        """What the cost of a pass depends on, beside the machine."""
        kind = f"{type(self).__name__} of {type(self.model).__name__}"
        return f"{kind}, {len(self.layers)} layers, {self.weights} bytes"

    @cached_property
    def weights(self) -> int:
        """Bytes of all weights, those of layers outside a slice too."""
        return weights(self.model)

    def memory(self, tokens: int) -> MemoryNeed:
        return MemoryNeed(self.weights, self.cache.token_bytes, tokens, self.cache.nbytes + free(self.device))

    def reference(self) -> Reference:
        return ModelReference(view(self.model, self.layers))

    def reserve(self, jobs: Seq[Segment]) -> None:
        for job in jobs:
            try:
                self.cache.reserve(job.row, job.end)
            except CacheFull:
                self.clear()
                self.cache.reserve(job.row, job.end)

    def crop(self, row: int, length: int) -> int:
        if length == 0:
            self.cache.forget(row)
        return length

    def commit(self, row: int, path: list[int]) -> None:
        self.cache.move(row, len(self.rows[row].tokens), path)

    def copy(self, source: int, target: int, length: int) -> bool:
        try:
            self.cache.copy(source, target, length)
        except CacheFull:
            return False  # the target row will be filled by a prefill, or that will say that there is no room
        return True

    def share(self, layers: int) -> float:
        decoder, name = decoder_layers(self.view)
        stack, head = weights(getattr(decoder, name)), weights(self.view.get_output_embeddings())
        return (layers / self.stack * stack + head) / (stack + head)

    def early(self, layers: int) -> LM | None:
        return EarlyLM(self, layers)

    def begin(self, jobs: Seq[Segment], layers: int) -> list[SegmentOutput]:
        ran = self.part(LayerSpan(0, layers), jobs, None, places(jobs))
        assert ran.logits is not None
        return self.split(jobs, ran.logits, {layers: ran.states})

    def resume(self, jobs: Seq[Segment]) -> list[SegmentOutput]:
        """A pass in which some tokens go on from where a draft has brought them."""
        for job in jobs:
            if (done := job.resumed) is not None:
                self.cache.move(job.row, job.start + len(job.pending), done.nodes, done.layers)
        return self.split(jobs, resume(self, jobs, places(jobs)), {})

    def forward(self, jobs: Seq[Segment], taps: tuple[int, ...]) -> list[SegmentOutput]:
        if any(job.resumed is not None for job in jobs):
            return self.resume(jobs)
        nodes = places(jobs)
        with recording(self.view, taps) as recorded:
            logits = self._pass(jobs, nodes or [sum(len(job.tokens) for job in jobs) - 1])
        return self.split(jobs, logits, recorded)

    def split(self, jobs: Seq[Segment], logits: Tensor, recorded: dict[int, Tensor]) -> list[SegmentOutput]:
        """What the pass gave for each job; `logits` are of the nodes of all of them."""
        outputs, at, node = [], 0, 0
        for job in jobs:
            count, fed = len(job.tokens), len(job.pending)
            rows = logits[node : node + count - fed] if job.tree is not None else None
            outputs.append(SegmentOutput(rows, {tap: states[at : at + count] for tap, states in recorded.items()}))
            at, node = at + count, node + count - fed
        return outputs

    @torch.no_grad()
    def _pass(self, jobs: Seq[Segment], nodes: list[int]) -> Tensor:  # [nodes, vocab]
        ids, given = self._given(jobs)
        wanted = torch.tensor(nodes, device=self.device)
        out = self.view(input_ids=ids[None], **given, logits_to_keep=wanted)
        if (calls := given["reach"].calls) != self.stack:
            raise UnsupportedModel(f"{calls} of {self.stack} layers attend through our function")
        return out.logits[0]

    def _given(self, jobs: Seq[Segment]) -> tuple[Tensor, dict[str, Any]]:
        """The tokens of a pass, and all else that the model is given with them."""
        ids, positions = self._inputs(jobs).to(self.device)
        reach, beside = self._reach(jobs), joined(jobs, len(ids))
        given = dict(position_ids=positions[None], past_key_values=self.cache, use_cache=True, reach=reach)
        return ids, given | beside

    @torch.no_grad()
    def part(
        self, span: LayerSpan, jobs: Seq[Segment], entering: Tensor | None, nodes: list[int] | None
    ) -> StageOutputs:
        """A pass of some of the layers, on `entering` if they are not the first."""  # [tokens, hidden], nodes
        ids, given = self._given(jobs)
        wanted = None if nodes is None else torch.tensor(nodes, device=self.device)
        return self.stage(self.view, span).run(ids, entering, wanted, **given)

    def stage(self, model: PreTrainedModel, span: LayerSpan) -> Stage:
        key = id(model), span
        if key not in self._stages:
            self._stages[key] = Stage(model, span)
        return self._stages[key]

    def _inputs(self, jobs: Seq[Segment]) -> Tensor:  # [2, tokens of all jobs]: ids and positions
        return torch.tensor([[t for job in jobs for t in job.tokens], [p for job in jobs for p in job.positions]])

    def _reach(self, jobs: Seq[Segment]) -> attention.EagerAttention:
        return attention.EagerAttention(self.cache, jobs, self.windows, self.device)
