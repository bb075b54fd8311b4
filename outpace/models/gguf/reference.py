"""LlamaReference: plain passes of a GGUF model, which `outpace verify` compares the engine with."""

from __future__ import annotations

import torch
from torch import Tensor

from outpace.models.gguf.runtime import BatchEntry, File, Runtime


class LlamaReference:
    """One pass over a whole text in a separate cache. llama.cpp has only one precision."""

    def __init__(self, file: File):
        self.file = file

    def native(self, tokens: list[int], count: int) -> Tensor:
        runtime, found = Runtime(self.file, len(tokens) + 1), list[Tensor]()
        for first in range(0, len(tokens), self.file.largest_pass):
            part = tokens[first : first + self.file.largest_pass]
            wanted = [first + i >= len(tokens) - count for i in range(len(part))]
            entries = [BatchEntry(token, first + i, [0], wanted[i]) for i, token in enumerate(part)]
            runtime.decode(entries)
            found += [runtime.logits(i) for i, needed in enumerate(wanted) if needed]
        return torch.stack(found)

    def precise(self, tokens: list[int], count: int) -> Tensor:
        return self.native(tokens, count).double()
