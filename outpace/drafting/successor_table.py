"""Successors: the table of Token Recycling. What the target last thought could follow each token."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from outpace.core.tree import Tree
from outpace.sampling import native

EMPTY = -1
BLOCK = 256  # tokens


class Successors:
    """Every scored node, accepted or not, leaves the target's `k` likeliest successors of its token, in order."""

    def __init__(self, k: int):
        self.k = k
        self.table = torch.empty(0, k, dtype=torch.int64)  # [vocab, k], kept across requests

    def sized(self, vocab: int) -> Tensor:
        """The table, made when the vocabulary is known."""  # [vocab, k]
        if len(self.table) < vocab:
            self.table = torch.full((vocab, self.k), EMPTY)
        return self.table

    def row(self, token: int) -> list[int]:
        return self.table[token].tolist()

    def learn_text(self, tokens: Seq[int]) -> None:
        """A text that is new teaches what follows a token that the target was never asked about."""
        text = torch.tensor(tokens)
        new = self.table[text[:-1], 0] == EMPTY
        self.table[text[:-1][new], 0] = text[1:][new]

    def learn(self, tree: Tree, logits: Tensor) -> None:  # [nodes, vocab]
        last = {token: node for node, token in enumerate(tree.tokens)}  # a token that stands twice: the last wins
        successors = likeliest(logits, self.k).to(self.table)  # [nodes, k]
        self.table[list(last)] = successors[list(last.values())]


def likeliest(logits: Tensor, k: int) -> Tensor:  # [nodes, vocab] -> [nodes, k]
    """The k best tokens in order. On a CPU by blocks: the best lie in the k blocks with the highest tops."""
    nodes, vocab = logits.shape
    if logits.is_cuda or vocab < k * BLOCK:
        return logits.topk(k).indices
    found = native.top_k(logits, k)
    if found is not None:
        return found
    if vocab % BLOCK:
        logits = torch.nn.functional.pad(logits, (0, -vocab % BLOCK), value=-torch.inf)
    blocks = logits.view(nodes, -1, BLOCK)
    best = blocks.amax(-1).topk(k).indices  # [nodes, k]
    found = blocks.gather(1, best[:, :, None].expand(-1, -1, BLOCK)).flatten(1).topk(k).indices
    return best.gather(1, found // BLOCK) * BLOCK + found % BLOCK
