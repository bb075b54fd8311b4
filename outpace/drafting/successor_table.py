"""The successor table of Token Recycling: the target's latest predictions of what follows each token."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from outpace.core.lm import Logits
from outpace.core.tree import Tree

EMPTY = -1


class Successors:
    """The `k` likeliest successors of each token, in order. Every scored node updates its token, accepted or not."""

    def __init__(self, k: int):
        self.k = k
        self.table = torch.empty(0, k, dtype=torch.int64)  # [vocab, k], kept across requests

    def sized(self, vocab: int) -> Tensor:
        """The table, allocated once the vocabulary size is known."""  # [vocab, k]
        if len(self.table) < vocab:
            self.table = torch.full((vocab, self.k), EMPTY)
        return self.table

    def row(self, token: int) -> list[int]:
        return self.table[token].tolist()

    def learn_text(self, tokens: Seq[int]) -> None:
        """Learn the successors in a new text, for tokens that the table has no entry for."""
        text = torch.tensor(tokens)
        new = self.table[text[:-1], 0] == EMPTY
        self.table[text[:-1][new], 0] = text[1:][new]

    def learn(self, tree: Tree, logits: Logits) -> None:
        last = {token: node for node, token in enumerate(tree.tokens)}  # if a token occurs twice, the last node wins
        successors = logits.top_k(self.k).to(self.table)  # [nodes, k]
        self.table[list(last)] = successors[list(last.values())]
