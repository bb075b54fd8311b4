"""Edits: changes of some logits, as records that torch and compiled code apply in the same way."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import numpy as np
import torch
from torch import Tensor

Array = np.ndarray[Any, np.dtype[Any]]
NOTHING = np.zeros(0)


class EditKind(IntEnum):
    """What an edit does with its tokens: the enum `Kind` of choose.cpp."""

    PENALIZE = 0  # divide a positive logit by the one value, multiply a negative one by it
    ADD = 1  # add a value for each token
    FORBID = 2
    KEEP = 3  # forbid all others; the tokens are bits


@dataclass(frozen=True)
class Edit:
    """A change of the logits of some tokens, each of which occurs once."""

    kind: EditKind
    tokens: Array  # [n] int64; of KEEP [bytes] uint8, where bit i % 8 of byte i // 8 stands for token i
    values: Array = field(default_factory=lambda: NOTHING)  # float64

    def apply(self, logits: Tensor) -> None:  # [vocab]
        """Change the logits in place."""
        if self.kind is EditKind.KEEP:
            bits = np.unpackbits(self.tokens, bitorder="little", count=logits.numel()).view(bool)
            logits[torch.from_numpy(~bits).to(logits.device)] = -torch.inf
            return
        index = torch.from_numpy(self.tokens).to(logits.device)
        if self.kind is EditKind.FORBID:
            logits.index_fill_(0, index, -torch.inf)
        elif self.kind is EditKind.ADD:
            logits.index_add_(0, index, torch.from_numpy(self.values).to(logits))
        else:
            # Not a number: to divide by one, PyTorch multiplies by its inverse on a GPU, which rounds twice.
            values, penalty = logits[index], logits.new_full((1,), float(self.values[0]))
            logits.index_copy_(0, index, torch.where(values < 0, values * penalty, values / penalty))
