"""The outputs of a pass of llama.cpp: logits and choices, read from its memory when they are needed."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

import torch
from torch import Tensor

from outpace.core.lm import Logits
from outpace.models.gguf.runtime import Runtime
from outpace.sampling.native import Best
from outpace.sampling.top_k import likeliest


class FetchedLogits(Logits):
    """Logits in llama.cpp's memory, fetched node by node when they are read, because that is slow."""

    def __init__(self, runtime: Runtime, places: list[int]):
        self._runtime, self._places, self._pass = runtime, places, runtime.passes
        self._known: dict[int, Tensor] = {}

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, node: int) -> Tensor:  # [vocab]
        if node not in self._known:
            assert self._pass == self._runtime.passes, "logits are read before the next pass"
            self._known[node] = self._runtime.logits(self._places[node])
        return self._known[node]

    def peek(self, node: int) -> Tensor:  # [vocab]
        if node in self._known or not self._runtime.in_place:
            return self[node]
        assert self._pass == self._runtime.passes, "logits are read before the next pass"
        return self._runtime.peek(self._places[node])

    def all(self) -> Tensor:  # [nodes, vocab]
        return torch.stack([self[node] for node in range(len(self))])

    def likeliest(self) -> Best:
        rows = [likeliest(self.peek(node)) for node in range(len(self))]
        return Best([row.tokens[0] for row in rows], [row.logits[0] for row in rows])

    def top_k(self, k: int) -> Tensor:  # [nodes, k]
        assert self._pass == self._runtime.passes, "logits are read before the next pass"
        return torch.cat([self._runtime.top_k(place, k) for place in self._places])

    def wait(self) -> None:
        """Do nothing: llama.cpp returns when a pass is done."""


class LazyPicks(Seq[int]):
    """The likeliest token of each node, computed when it is read: nodes below a rejected draft token never are."""

    def __init__(self, runtime: Runtime, places: list[int]):
        self._runtime, self._places, self._pass = runtime, places, runtime.passes

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, index: Any) -> Any:
        assert self._pass == self._runtime.passes, "choices are read before the next pass"
        return self._runtime.greedy(self._places[index])
