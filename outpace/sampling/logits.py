"""Logits of a pass, as a verifier and the drafters read them."""

from __future__ import annotations

import torch
from torch import Tensor

from outpace.sampling.native import Best
from outpace.sampling.top_k import likeliest, top_k


class Logits:
    """Logits of the nodes that a pass scored. A runtime with its own memory fetches them when they are read."""

    def __init__(self, table: Tensor):  # [nodes, vocab]
        self._table = table

    def __len__(self) -> int:
        return len(self._table)

    def __getitem__(self, node: int) -> Tensor:  # [vocab]
        return self._table[node]

    def peek(self, node: int) -> Tensor:  # [vocab]
        """Return the same without a copy, to be read before the model's next pass."""
        return self[node]

    def all(self) -> Tensor:  # [nodes, vocab]
        """Return the logits of all nodes."""
        return self._table

    def likeliest(self) -> Best:
        """Return the likeliest token of each node."""
        return likeliest(self.all())

    def top_k(self, k: int) -> Tensor:  # [nodes, k]
        """Return the k likeliest tokens of each node in order."""
        return top_k(self._table, k)

    def wait(self) -> None:
        """Wait until the device has computed the logits."""
        if self._table.is_cuda:
            torch.cuda.synchronize()
