"""Medusa's network: one small layer per token ahead, on the target's last hidden state, optionally with others."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from outpace.heads.base import ChainStepOutput, HeadSpec
from outpace.heads.joins import StateFusion
from outpace.heads.parallel import Parallel, TextCache, TextInputs
from outpace.models.embeddings import Embeddings


class StateShift(nn.Module):
    """Predict a hidden state some tokens later: the state plus the output of one layer, which starts as zero."""

    def __init__(self, hidden: int, rank: int):
        super().__init__()
        narrow = [nn.Linear(hidden, rank, bias=False)] if rank else []
        last = nn.Linear(rank or hidden, hidden, bias=False)
        nn.init.zeros_(last.weight)
        self.layer = nn.Sequential(*narrow, last)

    def forward(self, states: Tensor) -> Tensor:
        return states + nn.functional.silu(self.layer(states))


class MedusaHead(Parallel):
    """Slot i is the state shifted by its own layer, before the target's output matrix or one shared by all slots."""

    kind: ClassVar[str] = "medusa"

    def __init__(self, embeddings: Embeddings, spec: HeadSpec, ids: Tensor | None = None):
        super().__init__(embeddings, spec, ids)
        self.shifts = nn.ModuleList(StateShift(embeddings.hidden, spec.rank) for _ in range(spec.steps))
        self.fuse = StateFusion(embeddings.hidden, len(spec.taps)) if len(spec.taps) > 1 else nn.Identity()

    @classmethod
    def defaults(cls, layer_count: int, given: dict[str, Any]) -> dict[str, Any]:
        return {"taps": (layer_count,)}

    def pieces(self) -> list[nn.Module]:
        return [*self.shifts, self.fuse, *([self.link] if self.link is not None else [])]

    @property
    def dtype(self) -> torch.dtype:
        return next(self.shifts.parameters()).dtype

    def fill(self, inputs: TextInputs, cache: TextCache | None, count: int) -> Tensor:
        last = self.fuse(inputs.hidden.index_select(0, inputs.last))
        return torch.stack([shift(last) for shift in self.shifts[:count]], dim=1)

    def unroll(self, tokens: Tensor, hidden: Tensor, steps: int, starts: Tensor | None = None) -> list[ChainStepOutput]:
        self.check(steps)
        columns = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        states = self.fuse(hidden.to(self.dtype))
        return self.step_outputs(tokens, columns, [shift(states) for shift in self.shifts[:steps]])
