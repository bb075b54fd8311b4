"""A linked parallel head as a draft model: its link layer adds the preceding draft tokens to each slot of the head.

The expensive part runs once per text, for all slots, and `place` stores its result. A tree node then costs only the
link layer and the output layer. Their inputs are the slot at the node's depth, the parent's state and the token.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from outpace.core.lm import Context, DraftShape, DraftToken
from outpace.core.sequence import Sequence
from outpace.drafting import slot_trees
from outpace.drafting.candidates import RankedCandidates, fitted, ranked_candidates
from outpace.errors import RequestFailed
from outpace.heads.parallel import Parallel
from outpace.models.cacheless import CachelessLM
from outpace.models.compiled.drafts.device_tree import (
    DeviceTree,
    DraftDevice,
    TreeLevels,
    TreeRules,
    TreeSizes,
    TreeStart,
    rules_of,
)
from outpace.models.hf.module import STATE
from outpace.models.segment import Segment, SegmentOutput
from outpace.sampling.sampler import Pick

ENDLESS = 1 << 62  # no limit: only the head's slots are read, never the text


class LinkedLM(CachelessLM):
    """Predicts the token after a node from the head's slot at its depth and the link layer."""

    max_length = ENDLESS

    def __init__(self, head: Parallel, vocab: int):
        super().__init__()
        self.head, self.vocab = head, vocab
        self.device = head.embed.weight.device
        self.choices = vocab if head.ids is None else len(head.ids)
        self.drafts = self
        self._slots: dict[int, Tensor] = {}  # slot of the cache -> [slots of the head, hidden]

    def acquire(self, tokens: list[int], *, context: Context = None, taps: tuple[int, ...] = ()) -> int:
        return super().acquire([], taps=STATE)

    def release(self, slot: int) -> None:
        self._slots.pop(slot, None)
        super().release(slot)

    def place(self, slot: int, slots: Tensor) -> None:
        """Store the head's states for the text in this slot of the cache."""  # [slots of the head, hidden]
        self._slots[slot] = slots

    def feed(
        self, tokens: Seq[list[int]], slots: Seq[int], limit: int | None = None, defer: bool = False
    ) -> list[bool]:
        for slot in slots:
            self.slots[slot].forget_layout()
        return [True] * len(slots)

    @torch.no_grad()
    def forward(self, segments: Seq[Segment], taps: tuple[int, ...]) -> list[SegmentOutput]:
        slots, before, tokens, counts = list[Tensor](), list[Tensor](), list[int](), list[int]()
        for segment in segments:
            tree = segment.tree
            new = range(segment.since, len(tree))
            own, left = self._slots[segment.slot], self.slots[segment.slot].provisional
            slots.append(own[[tree.depths[node] for node in new]])
            if segment.since and left is not None:
                before.append(left[tree.parents[segment.since :]])
            else:
                assert len(tree) == 1, "a tree grows from its root"
                before.append(torch.zeros_like(own[:1]))
            tokens += segment.tokens
            counts.append(len(new))
        ids = torch.tensor(tokens, device=self.device)
        states = self._link(torch.cat(slots), torch.cat(before), ids)
        parts = zip(self._distributions(states).split(counts), states.split(counts), strict=True)
        return [SegmentOutput(distribution, {STATE[0]: left}) for distribution, left in parts]

    @torch.no_grad()
    def draft(
        self, slots: Seq[int], tokens: Seq[int], shapes: Seq[DraftShape], picks: Seq[Pick]
    ) -> list[list[DraftToken]] | None:
        """Draft all levels on the device without reading any of them back; for greedy decoding only."""
        width, depth = shapes[0].width, max(shape.depth for shape in shapes)
        if any(pick.temperature for pick in picks) or width > self.choices:
            return None
        sizes = TreeSizes(len(slots), self.head.spec.steps, width, width)
        starts = [TreeStart(shape, pick, 0) for shape, pick in zip(shapes, picks, strict=True)]
        rules = TreeRules.of_numbers(torch.from_numpy(rules_of(starts, sizes)).to(self.device), sizes)
        embed = self.head.embed.weight
        fed = DraftDevice(self.device, embed.shape[1], embed.dtype)
        levels = TreeLevels.empty(sizes, rules, False, self.head.ids, fed)
        placed = torch.stack([self._slots[slot] for slot in slots])  # [batch, slots of the head, hidden]
        slot_trees.grow(self.head, levels, placed, torch.tensor(tokens, device=self.device), depth)
        count = min(max(shape.nodes for shape in shapes), depth * width**2)
        found = levels.numbers(depth, count).tolist()
        trees = [DeviceTree.from_numbers(numbers, count, sizes) for numbers in found]
        return [tree.draft_tokens(shape.nodes) for tree, shape in zip(trees, shapes, strict=True)]

    def _link(self, slots: Tensor, before: Tensor, tokens: Tensor) -> Tensor:  # [nodes, hidden] twice, [nodes]
        assert self.head.link is not None
        return self.head.link(slots, before, self.head.embed(tokens))

    def _distributions(self, states: Tensor) -> Tensor:  # [nodes, hidden] -> [nodes, vocab]
        return self.head.spread(self.head.logits(states), self.vocab)

    @torch.no_grad()
    def logits_after(self, slots: Tensor, path: Seq[int]) -> Tensor:
        """The logits after the tokens of `path`, which starts with the root."""  # [slots, hidden] -> [vocab]
        before = torch.zeros_like(slots[0])
        for slot, token in zip(slots, path, strict=False):
            before = self._link(slot, before, torch.tensor(token, device=self.device))
        return self._distributions(before)


class LinkedDistributions:
    """The candidates after any path of one request's draft tokens; implements `parallel_trees.PathDistributions`."""

    def __init__(self, lm: LinkedLM, seq: Sequence, slots: Tensor, width: int):  # [slots, hidden]
        self.lm, self.seq, self.slots, self.width = lm, seq, slots, width
        self._seen: dict[tuple[int, ...], RankedCandidates | None] = {}

    def candidates_after(self, path: list[int]) -> RankedCandidates | None:
        key = tuple(path)
        if len(path) < len(self.slots) and key not in self._seen:
            distribution = fitted(self.lm.logits_after(self.slots, [self.seq.tokens[-1], *path])[None], self.seq.vocab)
            try:
                (self._seen[key],) = ranked_candidates(self.seq, distribution, [self.seq.tokens + path], self.width)
            except RequestFailed:  # none of the head's tokens is allowed here
                self._seen[key] = None
        return self._seen.get(key)
