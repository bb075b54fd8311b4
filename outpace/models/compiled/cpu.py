"""FastLM: a packed model whose passes of a few tokens run compiled, with our kernels, on a pool of keys and values.

Prompts run eagerly on a CPU, on the same cache. What the compiled layers give is compared with the eager ones before
they are used: a model that does not agree, or cannot be compiled, stays eager.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence as Seq
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from outpace.core.lm import DraftShape, DraftToken, MemoryNeed
from outpace.core.tree import Tree
from outpace.models.compiled import packing as lane
from outpace.models.compiled.draft_tree import DraftTrees
from outpace.models.compiled.layers import compile_layers
from outpace.models.compiled.packing import CompiledAttention
from outpace.models.hf import attention
from outpace.models.hf.bf16_copies import Bf16Copies
from outpace.models.hf.lm import PackedLM, places
from outpace.models.hf.module import apart, recording, view
from outpace.models.hf.pooled_cache import CacheShape, PooledCache
from outpace.models.hf.stages import LayerSpan, StageOutputs
from outpace.models.kernels import cpu
from outpace.models.segment import Segment, SegmentOutput, joined
from outpace.sampling.sampler import Pick

logger = logging.getLogger(__name__)
T = TypeVar("T")
Forward = Callable[[Seq[Segment], tuple[int, ...]], list[SegmentOutput]]
FEWEST = 2  # tokens and slots of a pass: a size of one would be compiled as another program


class CompiledLM(PackedLM):
    """A packed model with compiled passes for a CPU."""

    most_tokens = 64  # in a compiled pass: with more, torch's own products are as fast
    quick_prompts = False  # whether parts of a prompt run compiled
    graph_memory: Any = None  # of captured passes, where there are any

    def __init__(self, packed: PackedLM, halves: Bf16Copies | None = None):
        super().__init__(packed.model, packed.layers, packed.cache.limit)
        ((heads, dim, dtype),) = packed.cache.kinds
        shape = CacheShape(len(packed.layers), heads, dim, dtype)
        self.cache: PooledCache = PooledCache(shape, self.device, packed.cache.limit)  # type: ignore[assignment]
        self.cache.kinds = packed.cache.kinds
        self.quick = view(packed.model, packed.layers)
        self.quick.config._attn_implementation = attention.NAME
        self.halves = halves or Bf16Copies()
        self.feeds: bool = getattr(self.model, "takes_features", False)
        self._branches = DraftTrees(self)
        if self.device.type == "cpu":
            self.halves.shorten(self.quick)
        self.compile_seconds = 0.0
        self.layer_kinds = compile_layers(self.quick, self.windows)

    @classmethod
    def of(cls, packed: PackedLM, halves: Bf16Copies | None = None) -> PackedLM:
        """The same model with compiled passes, or the model as it is, where they cannot be had."""
        problem = "its layers have caches of different shapes" if len(packed.cache.kinds) != 1 else cls.problem(packed)
        if problem is None:
            fast = cls(packed, halves)
            start = time.perf_counter()
            problem = fast.tried()
            if problem is not None and any(kind.kept for kind in fast.layer_kinds):
                for kind in fast.layer_kinds:
                    kind.forget()
                problem = fast.tried()
            if not all(kind.kept for kind in fast.layer_kinds):
                fast.compile_seconds = time.perf_counter() - start
            if problem is None:
                return fast
        logger.info("%s runs eagerly: %s", type(packed.model).__name__, problem)
        return packed

    @classmethod
    def problem(cls, packed: PackedLM) -> str | None:
        """Why a model cannot have compiled passes, as far as that can be seen without compiling."""
        if packed.device.type != "cpu" or packed.model.dtype != torch.float32:
            return "there are kernels for float32 on a CPU only"
        if not cpu.available():
            return "no C++ compiler with OpenMP was found"
        return None

    def tried(self) -> str | None:
        """Why compiled passes cannot be used; whatever the compiler stumbles over, the eager passes are there."""
        try:
            return self.check()
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            return reason(error)

    @torch.no_grad()
    def check(self) -> str | None:
        """Compile, and compare with eager passes on trees behind short texts; None when all is well.

        Alone and three together: a size that the compiler took for a constant is another one in the second pass.
        """
        for count in (1, 3):
            results = [self._probe(forward, count) for forward in (super().forward, self.quickly)]
            off = apart(results[1], results[0])
            # As much as when the adapter was tried: only rounding may differ.
            if off > max(0.01, 8 * torch.finfo(self.model.dtype).eps):
                return f"compiled layers are off by {off:.3f}"
        return None

    def _probe(self, forward: Forward, count: int) -> Tensor:  # [nodes, vocab]
        tokens = [(11 + 7 * i) % self.vocab for i in range(8)]
        jobs = []
        for i in range(count):
            tree = Tree.chain(tokens[4:])
            for node in range(3 - i):
                tree.add(node, (tokens[node] + 1) % self.vocab)
            jobs.append(Segment(self.acquire([]), 0, tokens[i:4], tree))
        self.reserve(jobs)
        logits = [output.logits.clone() for output in forward(jobs, ()) if output.logits is not None]
        for job in jobs:
            self.release(job.row)
        self.clear()
        return torch.cat(logits)

    def _part(self, layers: Seq[int], kind: type[PackedLM] | None = None) -> PackedLM:
        return super()._part(layers, kind or PackedLM)  # compiled afterwards, if at all

    def ready(self, part: PackedLM) -> PackedLM:
        return type(self).of(part, self.halves)

    @property
    def fingerprint(self) -> str:
        return f"{super().fingerprint}, {self.halves.bytes} in halves"

    def refresh(self) -> None:
        super().refresh()
        if self.most_tokens and self.halves.stale(self.view):
            logger.warning(
                "%s runs eagerly from now on: it has copies of weights that changed", type(self.model).__name__
            )
            self.most_tokens = 0

    def memory(self, tokens: int) -> MemoryNeed:
        found = super().memory(tokens)
        return replace(found, weights=found.weights + self.halves.bytes)

    def forward(self, jobs: Seq[Segment], taps: tuple[int, ...]) -> list[SegmentOutput]:
        if any(job.resumed is not None for job in jobs):
            return self.resume(jobs)
        found = self._attempt(jobs, lambda: self.quickly(jobs, taps))
        return super().forward(jobs, taps) if found is None else found

    def _attempt(self, jobs: Seq[Segment], quickly: Callable[[], T]) -> T | None:
        """What a compiled pass gives; None where there is none for these jobs."""
        prompts = any(job.tree is None for job in jobs)
        if (prompts and not self.quick_prompts) or not lane.fits(jobs, self.windows, self.most_tokens):
            return None
        try:
            return quickly()
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # a size that the compiler cannot do: what it wrote, the eager pass overwrites
            logger.warning("%s runs eagerly from now on: %s", type(self.model).__name__, reason(error))
            self.most_tokens = 0
            return None

    def guess(
        self, rows: Seq[int], tokens: Seq[int], shapes: Seq[DraftShape], picks: Seq[Pick]
    ) -> list[list[DraftToken]] | None:
        """Trees where nothing is sampled."""
        if any(pick.temperature for pick in picks) or not self._branches.fit(shapes):
            return None
        self._branches.reserve(rows, shapes)  # a full cache is no reason to give up compiled passes
        jobs = [Segment(row, len(self.rows[row].tokens), [], Tree([0])) for row in rows]
        return self._attempt(jobs, lambda: self._branches.grow(rows, tokens, shapes))

    def part(
        self, span: LayerSpan, jobs: Seq[Segment], entering: Tensor | None, nodes: list[int] | None
    ) -> StageOutputs:
        found = self._attempt(jobs, lambda: self._quick_part(span, jobs, entering, nodes))
        return super().part(span, jobs, entering, nodes) if found is None else found

    @torch.no_grad()
    def _quick_part(
        self, span: LayerSpan, jobs: Seq[Segment], entering: Tensor | None, nodes: list[int] | None
    ) -> StageOutputs:
        ids, given = self._packed(jobs)
        if entering is not None and len(entering) < len(ids):
            entering = torch.nn.functional.pad(entering, (0, 0, 0, len(ids) - len(entering)))
        wanted = None if nodes is None else torch.tensor(nodes)
        ran = self.stage(self.quick, span).run(ids, entering, wanted, **given)
        return ran._replace(states=ran.states[: sum(len(job.tokens) for job in jobs)])

    def quickly(self, jobs: Seq[Segment], taps: tuple[int, ...]) -> list[SegmentOutput]:
        """A compiled pass."""
        with recording(self.quick, taps) as recorded:
            logits = self.run(jobs, places(jobs))
        return self.split(jobs, logits, recorded)

    @torch.no_grad()
    def run(self, jobs: Seq[Segment], nodes: list[int]) -> Tensor:  # [nodes, vocab]
        ids, given = self._packed(jobs)
        return self.quick(input_ids=ids[None], **given, logits_to_keep=torch.tensor(nodes)).logits[0]

    def _packed(self, jobs: Seq[Segment]) -> tuple[Tensor, dict[str, Any]]:
        """The tokens of a pass, and all else that the model is given with them."""
        count = sum(len(job.tokens) for job in jobs)
        packing = lane.pack(jobs, self.cache, max(FEWEST, count), max(FEWEST, len(jobs)))
        columns = torch.tensor(packing.columns)
        ids, positions, where, bits = columns[0], columns[1], columns[2], columns[3:].T.contiguous()
        lanes = self.lanes(where, torch.tensor(packing.jobs), bits, positions)
        given = dict(position_ids=positions[None], past_key_values=self.cache, use_cache=True, reach=lanes)
        return ids, given | joined(jobs, len(ids))

    def lanes(self, where: Tensor, jobs: Tensor, bits: Tensor, positions: Tensor) -> tuple[CompiledAttention, ...]:
        sides = zip(self.cache.sides, self.windows, strict=True)
        return tuple(
            CompiledAttention(keys, values, where, jobs, bits, positions, window or 0)
            for (keys, values), window in sides
        )


def reason(error: Exception) -> str:
    """One line of it: a compiler says more."""
    return f"{type(error).__name__}: {next(iter(str(error).strip().splitlines()), '')}"
