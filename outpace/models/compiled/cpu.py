"""Compiled passes of a few tokens on a CPU, with our own kernels. Prompts run eagerly on the same cache."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from outpace.models.compiled import packing
from outpace.models.compiled.layers import with_int8_linears
from outpace.models.compiled.runner import CompiledRunner
from outpace.models.hf.eager import places, split
from outpace.models.hf.head_lm import HeadLM
from outpace.models.hf.int8 import quantize
from outpace.models.hf.lm import TransformersLM
from outpace.models.hf.module import recording, twin
from outpace.models.hf.stages import LayerSpan, StageOutputs
from outpace.models.kernels import cpu
from outpace.models.segment import Segment, SegmentOutput, packed_features

FEWEST = 2  # tokens and segments of a pass; a size of one would compile as another program


class CpuRunner(CompiledRunner):
    """Compiled passes of a float32 model on a CPU."""

    most_tokens = 64  # beyond this, torch's own matrix products are as fast

    @classmethod
    def problem(cls, lm: TransformersLM) -> str | None:
        if lm.device.type != "cpu" or lm.model.dtype != torch.float32:
            return "the CPU kernels need a float32 model on a CPU"
        if not cpu.available():
            return "no C++ compiler with OpenMP was found"
        return None

    def compiled_pass(self, segments: Seq[Segment], taps: tuple[int, ...]) -> list[SegmentOutput]:
        with recording(self.module, taps) as recorded:
            logits = self._run(segments, places(segments))
        return split(segments, logits, recorded)

    @torch.no_grad()
    def _run(self, segments: Seq[Segment], nodes: list[int]) -> Tensor:  # [nodes, vocab]
        ids, given = self._packed(segments)
        return self.module(input_ids=ids[None], **given, logits_to_keep=torch.tensor(nodes)).logits[0]

    @torch.no_grad()
    def compiled_span(
        self, span: LayerSpan, segments: Seq[Segment], entering: Tensor | None, nodes: list[int] | None
    ) -> StageOutputs:
        ids, given = self._packed(segments)
        if entering is not None and len(entering) < len(ids):
            entering = torch.nn.functional.pad(entering, (0, 0, 0, len(ids) - len(entering)))
        wanted = None if nodes is None else torch.tensor(nodes)
        out = self.stages.of_span(span).run(ids, entering, wanted, **given)
        return out._replace(states=out.states[: sum(segment.count for segment in segments)])

    def _packed(self, segments: Seq[Segment]) -> tuple[Tensor, dict[str, Any]]:
        """Return the tokens of a pass and the other arguments of the module."""
        count = sum(segment.count for segment in segments)
        packed = packing.pack(segments, self.cache, max(FEWEST, count), max(FEWEST, len(segments)))
        columns = torch.tensor(packed.columns)
        ids, positions, bits = columns[0], columns[1], columns[3:].T.contiguous()
        where = [columns[2], *torch.tensor(packed.more)]
        plan = self.attention(where, list(torch.tensor(packed.segments)), bits, positions)
        return ids, self.module_inputs(positions, plan) | packed_features(segments, len(ids))

    def attach(self, head: PreTrainedModel) -> TransformersLM:
        # A pass is bound by reading its weights from memory, and a draft tolerates the rounding of int8.
        lm = HeadLM.of_head(quantize(twin(head)))
        lm.fuse = head.fuse  # type: ignore[assignment]
        return HeadLM.of_head(head) if type(self).install(lm) is None else lm

    def prepare_head(self, head: Any) -> Any:
        return with_int8_linears(head)  # int8 weights, as in `attach`
