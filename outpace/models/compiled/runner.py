"""CompiledRunner: the base class of compiled passes on a CPU and CUDA graphs on a GPU.

Both run a view of the model with compiled layers, on a pooled KV cache. The compiled layers are compared with eager
passes before they are used: a model that does not match, or cannot be compiled, stays eager.
"""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence as Seq
from typing import Any, ClassVar, Self, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from outpace.core.lm import DraftShape, DraftToken, RunAhead, SelfDraft
from outpace.core.tree import Tree
from outpace.models.cache.pool import CacheShape
from outpace.models.compiled import packing
from outpace.models.compiled.bf16_copies import Bf16Copies
from outpace.models.compiled.drafts.draft_tree import DraftTrees
from outpace.models.compiled.drafts.root_pass import root_segments
from outpace.models.compiled.layers import compile_layers
from outpace.models.compiled.packing import CompiledAttention
from outpace.models.hf.attention import NAME
from outpace.models.hf.cache import PooledCache
from outpace.models.hf.eager import Stages
from outpace.models.hf.head_lm import HeadLM
from outpace.models.hf.lm import TransformersLM
from outpace.models.hf.module import view
from outpace.models.hf.stages import LayerSpan, StageOutputs
from outpace.models.hf.tolerance import apart, tolerance
from outpace.models.quantized import COARSE, quantized_layers
from outpace.models.segment import Segment, SegmentOutput
from outpace.models.slots import CHUNK
from outpace.sampling.sampler import Pick

logger = logging.getLogger(__name__)
T = TypeVar("T")
Forward = Callable[[Seq[Segment], tuple[int, ...]], list[SegmentOutput]]


class CompiledRunner(ABC):
    """Runs compiled passes of a model, and eager ones where a pass cannot be compiled."""

    kind = "compiled"
    asynchronous = False
    chunk = CHUNK
    shares_prompts = False
    usual_batch = 16
    late_prompts = False
    late_choices = False
    run_ahead: RunAhead | None = None
    graph_memory: Any = None  # memory pool of captured graphs, if there are any
    most_tokens: int  # in a compiled pass; 0: compiled passes were given up
    prompts: ClassVar[bool] = False  # whether chunks of a prompt run compiled

    def __init__(self, lm: TransformersLM, copies: Bf16Copies | None = None):
        self.lm = lm
        ((heads, dim, dtype),) = lm.cache.kinds
        shape = CacheShape(len(lm.windows), heads, dim, dtype)
        self.cache = PooledCache(lm.windows, shape, lm.device, lm.cache.limit)
        self.module = view(lm.model, lm.indices)
        self.module.config._attn_implementation = NAME
        self.stages = Stages(self.module)
        self.copies = copies or Bf16Copies()
        if lm.device.type == "cpu":
            self.copies.replace_linears(self.module)
        self.compile_seconds = 0.0
        self.layer_kinds = compile_layers(self.module, lm.windows)
        self.drafts: SelfDraft = self
        self._trees = DraftTrees(self)

    @classmethod
    def install(cls, lm: TransformersLM, copies: Bf16Copies | None = None) -> Self | None:
        """Make this model run compiled passes; if it cannot, leave it as it is and return None."""
        eager, cache = lm.runner, lm.cache
        problem = "its layers have caches of different shapes" if len(cache.kinds) != 1 else cls.problem(lm)
        if problem is None:
            runner = cls(lm, copies)
            lm.cache = runner.cache
            start = time.perf_counter()
            problem = runner.failure()
            if problem is not None and any(kind.kept for kind in runner.layer_kinds):
                for kind in runner.layer_kinds:
                    kind.forget()
                problem = runner.failure()
            if not all(kind.kept for kind in runner.layer_kinds):
                runner.compile_seconds = time.perf_counter() - start
            if problem is None:
                lm.runner = runner  # type: ignore[assignment]
                return runner
        lm.runner, lm.cache = eager, cache
        logger.info("%s runs eagerly: %s", type(lm.model).__name__, problem)
        return None

    @classmethod
    @abstractmethod
    def problem(cls, lm: TransformersLM) -> str | None:
        """Return why a model cannot run compiled passes, or None; checked without compiling."""

    @abstractmethod
    def compiled_pass(self, segments: Seq[Segment], taps: tuple[int, ...]) -> list[SegmentOutput]:
        """Run one compiled pass of all layers."""

    @abstractmethod
    def compiled_span(
        self, span: LayerSpan, segments: Seq[Segment], entering: Tensor | None, nodes: list[int] | None
    ) -> StageOutputs:
        """Run one compiled pass of some layers."""

    @property
    def extra_bytes(self) -> int:
        return self.copies.bytes

    def failure(self) -> str | None:
        """Return why compiled passes cannot be used, or None. Any compiler error counts; eager passes still work."""
        try:
            return self.check()
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            return reason(error)

    @torch.no_grad()
    def check(self) -> str | None:
        """Compile, and compare with eager passes on trees after short texts; return None if they match.

        Batch sizes 1 and 3 are run, so a size that the compiler took for a constant differs in the second pass.
        """
        for count in (1, 3):
            eager, compiled = (self._probe(forward, count) for forward in (self.lm.eager.forward, self.compiled_pass))
            off = apart(compiled, eager)
            if off > self._tolerance():
                return f"compiled layers differ from eager ones by {off:.1g} (relative)"
        return None

    def _tolerance(self) -> float:
        """Return how far compiled passes may be from eager ones, which prompts and large trees still run.

        The compiler may leave out a rounding between the steps of a quantised layer. In float32 that would be seen.
        """
        dtype = self.lm.model.dtype
        fine = dtype.itemsize >= 4 and any(quantized_layers(self.lm.model))
        return COARSE if fine else tolerance(dtype)

    def _probe(self, forward: Forward, count: int) -> Tensor:  # [nodes, vocab]
        lm = self.lm
        tokens = [(11 + 7 * i) % lm.vocab for i in range(8)]
        segments = []
        for i in range(count):
            tree = Tree.chain(tokens[4:])
            for node in range(3 - i):
                tree.add(node, (tokens[node] + 1) % lm.vocab)
            segments.append(Segment(lm.acquire([]), 0, tokens[i:4], tree))
        lm.reserve(segments)
        logits = [output.logits.clone() for output in forward(segments, ()) if isinstance(output.logits, Tensor)]
        for segment in segments:
            lm.release(segment.slot)
        lm.clear()
        return torch.cat(logits)

    def forward(self, segments: Seq[Segment], taps: tuple[int, ...]) -> list[SegmentOutput]:
        found = self.attempt(segments, lambda: self.compiled_pass(segments, taps))
        return self.lm.eager.forward(segments, taps) if found is None else found

    def span(
        self, span: LayerSpan, segments: Seq[Segment], entering: Tensor | None, nodes: list[int] | None
    ) -> StageOutputs:
        found = self.attempt(segments, lambda: self.compiled_span(span, segments, entering, nodes))
        return self.lm.eager.span(span, segments, entering, nodes) if found is None else found

    def attempt(self, segments: Seq[Segment], run: Callable[[], T]) -> T | None:
        """Return the result of a compiled pass, or None if these segments cannot run compiled."""
        prompts = any(segment.layout is None for segment in segments)
        if (prompts and not self.prompts) or not packing.fits(segments, self.lm.windows, self.most_tokens):
            return None
        return self.guarded(run)

    def guarded(self, run: Callable[[], T]) -> T | None:
        """Return the result of compiled code, or None if it fails; then the model runs eagerly from now on."""
        try:
            return run()
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # a size that fails to compile; the eager pass overwrites what was written
            logger.warning("%s runs eagerly from now on: %s", type(self.lm.model).__name__, reason(error))
            self.most_tokens = 0
            return None

    def attention(
        self, where: Seq[Tensor], segments: Seq[Tensor], bits: Tensor, positions: Tensor
    ) -> tuple[CompiledAttention, ...]:
        """Return the attention inputs of each layer of a pass; `where` and `segments` are those of each group."""
        layers = zip(self.cache.sides, self.lm.windows, self.cache.group_of, strict=True)
        return tuple(
            CompiledAttention(keys, values, where[group], segments[group], bits, positions, window or 0)
            for (keys, values), window, group in layers
        )

    def module_inputs(self, positions: Tensor, plan: tuple[CompiledAttention, ...]) -> dict[str, Any]:
        """Return the arguments of the module besides the tokens of a pass."""
        return dict(position_ids=positions[None], past_key_values=self.cache, use_cache=True, attention_plan=plan)

    def draft(
        self, slots: Seq[int], tokens: Seq[int], shapes: Seq[DraftShape], picks: Seq[Pick]
    ) -> list[list[DraftToken]] | None:
        """Draft trees; where nothing is captured, with greedy requests only."""
        sampled = any(pick.temperature for pick in picks)
        if not self.most_tokens or (sampled and self.graph_memory is None) or not self._trees.fit(shapes):
            return None
        self._trees.reserve(slots, shapes)  # outside `attempt`: a full cache is no reason to give up compiled passes
        segments = root_segments(self, slots, tokens)
        if not packing.fits(segments, self.lm.windows, self.most_tokens):
            self.lm.catch_up(slots)  # too many tokens for one pass
            segments = root_segments(self, slots, tokens)
        return self.attempt(segments, lambda: self._trees.grow(segments, shapes, picks))

    def new_pool(self) -> Any:
        """Return a memory pool for graphs of their own, or None if nothing is captured. A pool dies with its graphs."""
        return None if self.graph_memory is None else torch.cuda.graph_pool_handle()

    def prepare(self, requests: int) -> None:  # noqa: B027 (code for one size serves all)
        """Prepare passes of up to this many requests."""

    def forget(self, slot: int) -> None:  # noqa: B027 (only a subclass launches passes ahead)
        """Called before the slot takes another text."""

    def weights_changed(self) -> None:
        if self.most_tokens and self.copies.stale(self.lm.view):
            name = type(self.lm.model).__name__
            logger.warning(
                "%s runs eagerly from now on: its weights changed, and its 16-bit copies of them are stale", name
            )
            self.most_tokens = 0

    def install_on_slice(self, part: TransformersLM) -> None:
        type(self).install(part, self.copies)

    def attach(self, head: PreTrainedModel) -> TransformersLM:
        lm = HeadLM.of_head(head)
        type(self).install(lm)
        return lm

    def prepare_head(self, head: Any) -> Any:
        return head


def reason(error: Exception) -> str:
    """Return the first line of an error, since compiler errors are long."""
    return f"{type(error).__name__}: {next(iter(str(error).strip().splitlines()), '')}"
