"""The likeliest tokens of each row of logits, found without sorting a large vocabulary."""

from __future__ import annotations

import torch
from torch import Tensor

from outpace.sampling import native

BLOCK = 256  # tokens


def top_k(logits: Tensor, k: int) -> Tensor:  # [nodes, vocab] -> [nodes, k]
    """Return the k best tokens of each row in order."""
    if logits.is_cuda or logits.shape[-1] < k * BLOCK:
        return logits.topk(k).indices
    found = native.top_k(logits, k)
    return _by_blocks(logits, k) if found is None else found


def _by_blocks(logits: Tensor, k: int) -> Tensor:  # [nodes, vocab] -> [nodes, k]
    """Search the k blocks with the highest maxima, which hold the k best tokens."""
    nodes, vocab = logits.shape
    if vocab % BLOCK:
        logits = torch.nn.functional.pad(logits, (0, -vocab % BLOCK), value=-torch.inf)
    blocks = logits.view(nodes, -1, BLOCK)
    best = blocks.amax(-1).topk(k).indices  # [nodes, k]
    found = blocks.gather(1, best[:, :, None].expand(-1, -1, BLOCK)).flatten(1).topk(k).indices
    return best.gather(1, found // BLOCK) * BLOCK + found % BLOCK
