"""Compiled passes as CUDA graphs, one for each size of a pass. Another graph behind it chooses the tokens.

Between two passes the host writes one small buffer and reads another. A graph is captured when its size first occurs.
Sizes are rounded up to a small set, so there are few graphs, and they share their memory.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence as Seq
from itertools import product

import numpy as np
import torch
from torch import Tensor

from outpace.core.lm import LM, DraftShape, DraftToken
from outpace.core.tree import Tree
from outpace.models.compiled import packing
from outpace.models.compiled.bf16_copies import Bf16Copies
from outpace.models.compiled.choices import Choices
from outpace.models.compiled.drafts.draft_chain import DraftChains
from outpace.models.compiled.drafts.early_exit_graph import EarlyExitGraphLM
from outpace.models.compiled.graph_pass import (
    BATCHES,
    COLUMNS,
    SIZES,
    CapturedPass,
    ChoiceKey,
    GraphKey,
    GraphOutputs,
    PassInputs,
    Staging,
    capture,
    fill_picks,
    rounded,
)
from outpace.models.compiled.picks import detached
from outpace.models.compiled.run_ahead import GraphsAhead, LastPass, PassAhead
from outpace.models.compiled.runner import CompiledRunner
from outpace.models.hf.eager import places, split
from outpace.models.hf.lm import TransformersLM
from outpace.models.hf.module import recording
from outpace.models.hf.stages import LayerSpan, StageOutputs
from outpace.models.hf.tolerance import apart, tolerance
from outpace.models.kernels import triton_runtime
from outpace.models.memory import free
from outpace.models.segment import Segment, SegmentOutput, packed_features
from outpace.models.slots import CHUNK, MAX_DEFERRED
from outpace.models.transfer import sent
from outpace.sampling.sampler import Pick

MOST_GRAPHS = 128  # beyond this, the least recently used graph is dropped
LARGEST_CHUNK = 4096  # prompt tokens of a pass; the matrix unit is busy with fewer
CHUNK_SHARE = 64  # the intermediate results of a chunk take at most this fraction of the device's memory
USUAL_TEXT, FREE_SHARE = 512, 4  # tokens of a request's text; the most of free memory for them, as a fraction
USUAL_FILTERS = ((), (1,), (0, 1))  # none; top_p; top_k and top_p


class GraphRunner(CompiledRunner):
    """Captured passes of a model on a CUDA or ROCm device."""

    kind = "graphs"
    asynchronous = True
    most_tokens = SIZES[-1]
    prompts = True
    shares_prompts = True
    usual_batch = packing.MOST_SEGMENTS
    late_prompts = True
    late_choices = True

    def __init__(self, lm: TransformersLM, copies: Bf16Copies | None = None):
        super().__init__(lm, copies)
        self._graphs: OrderedDict[GraphKey, CapturedPass] = OrderedDict()
        self._generation = self.cache.generation
        self.graph_memory = torch.cuda.graph_pool_handle()
        self._chains = DraftChains(self)
        self.choices = Choices(lm, lambda: self.graph_memory)
        self._ahead = GraphsAhead(self)
        self.run_ahead = self._ahead
        self.capture_seconds = 0.0
        self._chunk = prompt_chunk(lm)

    @classmethod
    def problem(cls, lm: TransformersLM) -> str | None:
        if lm.device.type != "cuda" or not triton_runtime.AVAILABLE:
            return "graphs need a GPU and Triton"
        if lm.model.dtype not in (torch.bfloat16, torch.float16, torch.float32):
            return f"there are no kernels for {lm.model.dtype}"
        return None

    @property
    def chunk(self) -> int:  # type: ignore[override]
        return self._chunk if self.most_tokens else CHUNK

    def early_exit(self, count: int) -> LM:
        return EarlyExitGraphLM(self, count)

    def forward(self, segments: Seq[Segment], taps: tuple[int, ...]) -> list[SegmentOutput]:
        """Run prompts without a graph, and a pass that is too large for a graph as several; both beat an eager pass."""
        prompts = [segment for segment in segments if len(segment.pending) > MAX_DEFERRED]
        if self.most_tokens and sum(segment.count for segment in prompts) > packing.LONGEST:
            self._ahead.last = None
            found = self._forward_prompts(prompts, taps)
            rest = [segment for segment in segments if segment.slot not in found]
            if rest:
                outputs = self.forward(rest, taps)
                found |= {segment.slot: output for segment, output in zip(rest, outputs, strict=True)}
                self._ahead.last = None  # it knows a part of the slots
            return [found[segment.slot] for segment in segments]
        parts = packing.parts(segments, self.most_tokens)
        if len(parts) == 1 or not self.most_tokens:
            return super().forward(segments, taps)
        outputs = list[SegmentOutput]()
        for part in parts:
            outputs += map(detached, super().forward(part, taps))
        return outputs

    def _forward_prompts(self, prompts: Seq[Segment], taps: tuple[int, ...]) -> dict[int, SegmentOutput]:
        """Run parts of prompts, each with its root at most; return the outputs by slot."""
        outputs = self.guarded(lambda: self.prompt_pass(prompts, taps)) or self.lm.eager.forward(prompts, taps)
        return {segment.slot: output for segment, output in zip(prompts, outputs, strict=True)}

    def compiled_pass(self, segments: Seq[Segment], taps: tuple[int, ...]) -> list[SegmentOutput]:
        if self._ahead.take(segments, taps):
            return self._ahead.outputs(segments)
        captured = self.captured(GraphKey.of_pass(segments, taps))
        if captured.entering is not None:
            beside = packed_features(segments, captured.key.tokens)
            captured.entering.copy_(beside["features"][0]) if beside else captured.entering.zero_()
        self.stage(captured, segments)
        captured.launch()
        self._ahead.last = self.choices.of_pass(captured, segments)
        return self._ahead.outputs(segments)

    @torch.no_grad()
    def prompt_pass(self, segments: Seq[Segment], taps: tuple[int, ...]) -> list[SegmentOutput]:
        """Run a chunk of prompts through the compiled layers, and choose the first tokens of those that end here."""
        packed = packing.pack_prompts(segments, self.cache, max(2, len(segments)))
        count = len(packed.columns[0])
        ids, positions, *where = sent([*packed.columns, *packed.more], self.lm.device)
        bits = torch.empty(0, packing.WORDS, dtype=torch.int64, device=self.lm.device)
        plan = self.attention(where, list(sent(packed.segments, self.lm.device)), bits, positions)
        given = self.module_inputs(positions, plan) | packed_features(segments, count)
        roots = places(segments)
        wanted = sent(roots or [count - 1], self.lm.device)  # a model always computes some logits
        with recording(self.module, taps) as recorded:
            logits = self.module(input_ids=ids[None], **given, logits_to_keep=wanted).logits[0]
        outputs = split(segments, logits, recorded)
        return self.choices.of_prompts(segments, outputs, logits) if roots else outputs

    def check(self) -> str | None:
        return super().check() or self._check_prompts()

    @torch.no_grad()
    def _check_prompts(self) -> str | None:
        """Compare the first tokens after prompts that ran compiled and eagerly; return None if they match."""
        lm, found = self.lm, list[Tensor]()
        texts = [[(13 + 5 * i) % lm.vocab for i in range(count)] for count in (packing.LONGEST + 50, 40)]
        for forward in (self.prompt_pass, lm.eager.forward):
            prompts = [Segment(lm.acquire([]), 0, text) for text in texts]
            roots = [Segment(prompt.slot, prompt.end, [], Tree([7])) for prompt in prompts]
            lm.reserve(roots)
            forward(prompts, ())
            outputs = lm.eager.forward(roots, ())
            found.append(torch.cat([output.logits for output in outputs if isinstance(output.logits, Tensor)]))
            for prompt in prompts:
                lm.release(prompt.slot)
            lm.clear()
        off = apart(*found)
        return f"compiled prompts differ from eager ones by {off:.3f}" if off > tolerance(lm.model.dtype) else None

    def launch_after(self, last: LastPass, segments: list[Segment]) -> CapturedPass:
        """Launch a pass that feeds the last pass's choices at these places, before the host has read them."""
        key = last.captured.key
        captured = self.captured(GraphKey.of_pass(segments, key.taps)._replace(turn=1 - key.turn))
        self.stage(captured, segments)
        assert last.chosen is not None, "what begins ahead follows choices"
        captured.ids.copy_(last.chosen[0].index_select(0, captured.ids))
        captured.launch()
        return captured

    def prepare(self, requests: int) -> None:
        """Capture the plain passes of all batch sizes, with the filters that many requests have."""
        if self.most_tokens:
            self.cache.expect(min(requests * USUAL_TEXT, free(self.lm.device) // FREE_SHARE // self.cache.token_bytes))
            sizes = [size for size in SIZES if size <= rounded(min(requests, BATCHES[-1]), SIZES)]
            for size, turn in product(reversed(sizes), (0, 1)):
                captured = self.captured(GraphKey(size, rounded(size, BATCHES), turn=turn))
                for filters, edited in product(USUAL_FILTERS, (False, True)):
                    self.choices.captured(captured, ChoiceKey(filters, edited))

    def choices_are_sure(self) -> bool:
        """Return whether the device made nearly all recent choices itself, so that a pass can build on them."""
        return self.choices.gate.is_open()

    def forget(self, slot: int) -> None:
        self._ahead.sent.drop(slot)

    def weights_changed(self) -> None:
        self._ahead.sent = PassAhead()
        super().weights_changed()

    @torch.no_grad()
    def compiled_span(
        self, span: LayerSpan, segments: Seq[Segment], entering: Tensor | None, nodes: list[int] | None
    ) -> StageOutputs:
        captured = self.captured(GraphKey.of_pass(segments)._replace(span=span, heads=nodes is not None))
        count = sum(segment.count for segment in segments)
        if entering is not None:
            assert captured.entering is not None
            captured.entering[:count].copy_(entering)
        self.stage(captured, segments)
        captured.launch()
        states, logits = captured.outputs.states, captured.outputs.logits
        assert states is not None
        wanted = None if nodes is None or logits is None else logits[_index(nodes)]
        return StageOutputs(states[:count].clone(), wanted)

    def draft(
        self, slots: Seq[int], tokens: Seq[int], shapes: Seq[DraftShape], picks: Seq[Pick]
    ) -> list[list[DraftToken]] | None:
        if shapes[0].width > 1:
            return super().draft(slots, tokens, shapes, picks)
        return self._chains.draft(slots, tokens, shapes, picks)

    def stage(self, captured: CapturedPass, segments: Seq[Segment]) -> None:
        """Send all inputs of a pass to the device in one copy."""
        tokens = captured.key.tokens
        packed = packing.pack(segments, self.cache, tokens, captured.key.batch)
        host = captured.staging.open()
        columns = COLUMNS + len(packed.more)
        table = host[: tokens * columns].reshape(columns, tokens)
        table[: 3 + packing.WORDS] = packed.columns
        table[3 + packing.WORDS : COLUMNS] = 0
        table[COLUMNS:] = packed.more or 0
        picks = [segment.pick for segment in segments for _ in segment.tokens]
        fill_picks(table, picks, table[1, : len(picks)] + self.lm.before + 1)
        host[tokens * columns :] = np.array(packed.segments).reshape(-1)
        captured.staging.send()

    def captured(self, key: GraphKey) -> CapturedPass:
        """Return the graph for this key; capture it if it is missing."""
        if self._generation != self.cache.generation:  # graphs know the pool and its size
            torch.cuda.synchronize()  # a graph may still be running
            self._graphs.clear()
            self.graph_memory = torch.cuda.graph_pool_handle()  # the old handle died with its last graph
            self._generation = self.cache.generation
        if key not in self._graphs:
            start = time.perf_counter()
            self._graphs[key] = self._capture(key)
            self.capture_seconds += time.perf_counter() - start
            if len(self._graphs) > MOST_GRAPHS:
                self._graphs.popitem(last=False)
        self._graphs.move_to_end(key)
        return self._graphs[key]

    def _capture(self, key: GraphKey) -> CapturedPass:
        lm = self.lm
        staging = Staging(PassInputs.size(key, len(self.cache.groups)), lm.device)
        entering = None
        if lm.takes_features or (key.span is not None and key.span.first):
            width = self.module.config.get_text_config().hidden_size
            entering = torch.zeros(key.tokens, width, dtype=lm.model.dtype, device=lm.device)
        run = self._program(key, staging.given, entering)
        return CapturedPass(capture(run, self.graph_memory), staging, entering, key)

    def _program(self, key: GraphKey, sent: Tensor, entering: Tensor | None) -> Callable[[], GraphOutputs]:
        inputs = PassInputs.of_buffer(sent, key, len(self.cache.groups))
        table, where, segments = inputs.table, inputs.where, list(inputs.segments)
        ids, positions, bits = table[0], table[1], table[3 : 3 + packing.WORDS]

        def run() -> GraphOutputs:
            given = self.module_inputs(positions, self.attention(where, segments, bits.T.contiguous(), positions))
            with recording(self.module, key.taps) as recorded:
                if key.span is None:
                    beside = {"features": entering[None]} if entering is not None else {}
                    return GraphOutputs(self.module(input_ids=ids[None], **beside, **given).logits[0], None, recorded)
                wanted = torch.arange(key.tokens, device=self.lm.device) if key.heads else None
                states, logits = self.stages.of_span(key.span).run(ids, entering, wanted, **given)
                return GraphOutputs(logits, states, recorded)

        return run


def prompt_chunk(lm: TransformersLM) -> int:
    """Return how many tokens of prompts to run at a time: many, if their intermediate results are small."""
    text, memory = lm.model.config.get_text_config(), torch.cuda.get_device_properties(lm.device).total_memory
    width = 8 * text.hidden_size + 3 * getattr(text, "intermediate_size", 4 * text.hidden_size)  # at a time, about
    most = memory // CHUNK_SHARE // (width * lm.model.dtype.itemsize)
    return max(CHUNK, min(LARGEST_CHUNK, most // CHUNK * CHUNK))


def _index(nodes: list[int]) -> slice | list[int]:
    """Return a slice for consecutive nodes, which needs no copy."""
    consecutive = nodes[-1] - nodes[0] == len(nodes) - 1
    return slice(nodes[0], nodes[-1] + 1) if consecutive else nodes
