"""Linked: the slots of a parallel head as a model that drafts, for heads whose slots are told what comes before them.

What takes long is done once per text, for all slots: `place` hands it over. A node of a tree then costs one small
layer and the output: it takes its slot, by its depth, and what its parent's slot had become.
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
from outpace.models.compiled.device_tree import STATE, DeviceTrees, DraftDevice, TreeLevels
from outpace.models.compiled.graph_pass import BATCHES, rounded
from outpace.models.segment import Segment, SegmentOutput
from outpace.sampling.sampler import Pick

ENDLESS = 1 << 62  # a text may be as long as it likes: its slots are all that is seen of it


class LinkedProgram(NamedTuple):
    """How trees of so many rows and of one width grow."""

    trees: DeviceTrees
    slots: Tensor  # [slots, rows, hidden]


class LinkedLM(CachelessLM):
    """What follows a guess, by a slot and a link."""

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
        """Take what the head says about the text of this slot."""  # [slots of the head, hidden]
        self._slots[slot] = slots

    def feed(self, tokens: Seq[list[int]], slots: Seq[int], limit: int | None = None) -> bool:
        for slot in slots:
            self.slots[slot].forget_layout()
        return True

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
        told = torch.tensor(tokens, device=self.device)
        states = self._told(torch.cat(slots), torch.cat(before), told)
        parts = zip(self._distributions(states).split(counts), states.split(counts), strict=True)
        return [SegmentOutput(distribution, {STATE[0]: left}) for distribution, left in parts]

    @torch.no_grad()
    def draft(
        self, slots: Seq[int], tokens: Seq[int], shapes: Seq[DraftShape], picks: Seq[Pick]
    ) -> list[list[DraftToken]] | None:
        """Where nothing is sampled: all levels without a look at one."""
        width = shapes[0].width
        if any(pick.temperature for pick in picks) or width > self.choices or len(slots) > BATCHES[-1]:
            return None
        trees, given = self._program(len(slots), width)
        placed = torch.stack([self._slots[slot] for slot in slots], dim=1)  # [slots of the head, batch, hidden]
        given[: len(placed), : len(slots)] = placed
        left = self._told(placed[0], torch.zeros_like(placed[0]), torch.tensor(tokens, device=self.device))
        found = trees.grow(self.head.logits(left), left, shapes)
        return [grown.draft_tokens(shape) for grown, shape in zip(found, shapes, strict=True)]

    def _program(self, rows: int, width: int) -> LinkedProgram:
        rows = rows if self._memory is None else rounded(rows, BATCHES)
        if (rows, width) not in self._programs:
            steps, embed = self.head.spec.steps, self.head.embed.weight
            levels = TreeLevels.empty(
                steps, rows, width, self.head.ids, DraftDevice(self.device, embed.shape[1], embed.dtype)
            )
            slots = torch.zeros(steps, rows, embed.shape[1], dtype=embed.dtype, device=self.device)

            def advance() -> None:
                assert levels.entering is not None
                own = slots.index_select(0, (levels.level + 1).clamp(max=steps - 1))[0]  # [rows, hidden]
                own = own[:, None].expand_as(levels.entering).flatten(0, 1)
                left = self._told(own, levels.entering.flatten(0, 1), levels.tokens.flatten())
                levels.advance(self.head.logits(left), left)

            self._programs[rows, width] = LinkedProgram(DeviceTrees(levels, advance, self._memory), slots)
        return self._programs[rows, width]

    def _told(self, slots: Tensor, before: Tensor, tokens: Tensor) -> Tensor:  # [nodes, hidden] twice, [nodes]
        assert self.head.link is not None
        return self.head.link(slots, before, self.head.embed(tokens))

    def _distributions(self, states: Tensor) -> Tensor:  # [nodes, hidden] -> [nodes, vocab]
        return self.head.spread(self.head.logits(states), self.vocab)

    @torch.no_grad()
    def behind(self, slots: Tensor, path: Seq[int]) -> Tensor:
        """What follows some guesses, the root first."""  # [slots, hidden] -> [vocab]
        before = torch.zeros_like(slots[0])
        for slot, token in zip(slots, path, strict=False):
            before = self._told(slot, before, torch.tensor(token, device=self.device))
        return self._distributions(before)


class LinkedDistributions:
    """The distributions of one request's next tokens, each asked for behind the guesses before it: as `slots.Slots`."""

    def __init__(self, lm: LinkedLM, seq: Sequence, slots: Tensor, width: int):  # [slots, hidden]
        self.lm, self.seq, self.slots, self.width = lm, seq, slots, width
        self._seen: dict[tuple[int, ...], RankedCandidates | None] = {}

    def behind(self, path: list[int]) -> RankedCandidates | None:
        key = tuple(path)
        if len(path) < len(self.slots) and key not in self._seen:
            distribution = fitted(self.lm.behind(self.slots, [self.seq.tokens[-1], *path])[None], self.seq.vocab)
            try:
                (self._seen[key],) = ranked_candidates(self.seq, distribution, [self.seq.tokens + path], self.width)
            except RequestFailed:  # no token that the head knows is allowed here
                self._seen[key] = None
        return self._seen.get(key)
