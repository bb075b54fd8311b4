"""The likeliest tokens of each row of logits, found without sorting a large vocabulary."""

from __future__ import annotations

import torch
from torch import Tensor

from outpace.sampling import native

BLOCK = 256  # tokens


def likeliest(logits: Tensor) -> native.Best:  # [nodes, vocab] or [vocab]
    """Return the likeliest token of each row, and its logit, which is not finite where the row is not."""
    found = native.largest(logits)
    if found is not None:
        return found
    best = logits.view(-1, logits.shape[-1]).max(-1)
    return native.Best(best.indices.tolist(), best.values.tolist())


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
