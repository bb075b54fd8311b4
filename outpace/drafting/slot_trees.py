"""Trees from the slots of parallel heads, grown on the device without the host.

Independent slots are ranked all at once, and the best paths are found level by level: as many nodes of each level go on
as the tree may have, so the tree is the likeliest of its size. The slots of a linked head depend on the tokens before
them, so each level runs the link, for the likeliest `width` paths.
"""

from __future__ import annotations

import torch
from torch import Tensor

from outpace.heads.parallel import Parallel
from outpace.models.compiled.drafts.device_tree import RankedTokens, TreeLevels


def grow(head: Parallel, levels: TreeLevels, slots: Tensor, tokens: Tensor, depth: int) -> None:
    """Grow trees of `depth` levels after these tokens, from the slots of the head."""  # [rows, slots, hidden], [rows]
    if head.link is None:
        _grow_independent(head, levels, slots[:, :depth])
    else:
        _grow_linked(head, levels, slots[:, :depth], tokens)


def _grow_independent(head: Parallel, levels: TreeLevels, slots: Tensor) -> None:  # [rows, slots, hidden]
    noise = levels.rules.noise[: slots.shape[1]].transpose(0, 1)
    found = levels.rank(head.logits(slots), noise)
    for level in range(slots.shape[1]):
        ranked = RankedTokens(*(side[:, level : level + 1] for side in found))
        if level:
            levels.advance(ranked, None)
        else:
            levels.open(ranked, None)


def _grow_linked(head: Parallel, levels: TreeLevels, slots: Tensor, tokens: Tensor) -> None:  # [rows, slots, hidden]
    assert head.link is not None
    rows, beam = levels.tokens.shape
    left = head.link(slots[:, 0], torch.zeros_like(slots[:, 0]), head.embed(tokens))
    levels.open(levels.rank(head.logits(left)[:, None], levels.rules.noise[0][:, None]), left)
    for level in range(1, slots.shape[1]):
        assert levels.entering is not None, "the state of a linked slot depends on that of its parent"
        own = slots[:, level, None].expand(rows, beam, -1).flatten(0, 1)
        left = head.link(own, levels.entering.flatten(0, 1), head.embed(levels.tokens.flatten()))
        ranked = levels.rank(head.logits(left).unflatten(0, (rows, beam)), levels.rules.noise[level][:, None])
        levels.advance(ranked, left)
