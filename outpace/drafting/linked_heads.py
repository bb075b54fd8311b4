"""A linked parallel head as a draft model: its link layer adds the preceding draft tokens to each slot of the head.

The expensive part runs once per text, for all slots, and `place` stores its result. A tree node then costs only the
link layer and the output layer. Their inputs are the slot at the node's depth, the parent's state and the token.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any, NamedTuple

import torch
from torch import Tensor

from outpace.core.lm import Context, DraftShape, DraftToken
from outpace.core.sequence import Sequence
from outpace.drafting.candidates import RankedCandidates, fitted, ranked_candidates
from outpace.errors import RequestFailed
from outpace.heads.parallel import Parallel
from outpace.models.cacheless import CachelessLM
from outpace.models.compiled.device_tree import DeviceTrees, DraftDevice, TreeLevels
from outpace.models.compiled.graph_pass import BATCHES, rounded
from outpace.models.hf.module import STATE
from outpace.models.segment import Segment, SegmentOutput
from outpace.sampling.sampler import Pick

ENDLESS = 1 << 62  # no limit: only the head's slots are read, never the text


class LinkedProgram(NamedTuple):
    """The program that grows trees of one batch size and one width."""

    trees: DeviceTrees
    slots: Tensor  # [slots, batch, hidden]


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
        self._programs: dict[tuple[int, int], LinkedProgram] = {}
        self._memory: Any = torch.cuda.graph_pool_handle() if self.device.type == "cuda" else None

    def acquire(self, tokens: list[int], *, context: Context = None, taps: tuple[int, ...] = ()) -> int:
        return super().acquire([], taps=STATE)

    def release(self, slot: int) -> None:
        self._slots.pop(slot, None)
        super().release(slot)

    def place(self, slot: int, slots: Tensor) -> None:
        """Store the head's states for the text in this slot of the cache."""  # [slots of the head, hidden]
        self._slots[slot] = slots

    def feed(self, tokens: Seq[list[int]], slots: Seq[int], limit: int | None = None) -> list[bool]:
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
        width = shapes[0].width
        if any(pick.temperature for pick in picks) or width > self.choices or len(slots) > BATCHES[-1]:
            return None
        trees, given = self._program(len(slots), width)
        placed = torch.stack([self._slots[slot] for slot in slots], dim=1)  # [slots of the head, batch, hidden]
        given[: len(placed), : len(slots)] = placed
        left = self._link(placed[0], torch.zeros_like(placed[0]), torch.tensor(tokens, device=self.device))
        found = trees.grow(self.head.logits(left), left, shapes)
        return [grown.draft_tokens(shape) for grown, shape in zip(found, shapes, strict=True)]

    def _program(self, batch: int, width: int) -> LinkedProgram:
        batch = batch if self._memory is None else rounded(batch, BATCHES)
        if (batch, width) not in self._programs:
            steps, embed = self.head.spec.steps, self.head.embed.weight
            levels = TreeLevels.empty(
                steps, batch, width, self.head.ids, DraftDevice(self.device, embed.shape[1], embed.dtype)
            )
            slots = torch.zeros(steps, batch, embed.shape[1], dtype=embed.dtype, device=self.device)

            def advance() -> None:
                assert levels.entering is not None
                own = slots.index_select(0, (levels.level + 1).clamp(max=steps - 1))[0]  # [batch, hidden]
                own = own[:, None].expand_as(levels.entering).flatten(0, 1)
                left = self._link(own, levels.entering.flatten(0, 1), levels.tokens.flatten())
                levels.advance(self.head.logits(left), left)

            self._programs[batch, width] = LinkedProgram(DeviceTrees(levels, advance, self._memory), slots)
        return self._programs[batch, width]

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
