"""Draft trees that a model with compiled passes grows on the device. The host reads once, at the end.

Each level feeds its likeliest nodes to the next. One program runs one level, with `width` nodes of each slot. On a GPU
it is captured, so growing a tree replays the same graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence as Seq
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from outpace.core.lm import DraftShape, DraftToken
from outpace.core.tree import Tree
from outpace.models.compiled import packing
from outpace.models.compiled.device_tree import DeviceTrees, DraftDevice, TreeLevels
from outpace.models.compiled.graph_pass import BATCHES, rounded
from outpace.models.hf.cache import SCRAP
from outpace.models.hf.module import STATE, recording
from outpace.models.segment import Segment

if TYPE_CHECKING:
    from outpace.models.compiled.runner import CompiledRunner


class NodePlaces(NamedTuple):
    """Where the nodes of a program are written, and which entries they see."""

    slots: Tensor  # [3, batch]: first pool entry of the slot, its entries including the root, 1 for a used slot
    bits: Tensor  # [batch, width, words]: the ancestors of the nodes that are fed next
    own: Tensor  # [levels, width, words]: the bit that stands for each node

    @classmethod
    def empty(cls, levels: TreeLevels) -> NodePlaces:
        batch, width, device = levels.rows, levels.width, levels.tokens.device
        count = len(levels.candidates)
        own = torch.zeros(count * width, packing.WORDS, dtype=torch.int64)
        for node in range(min(count * width, packing.LONGEST)):
            own[node, node // 64] = torch.tensor(1) << node % 64
        place = torch.zeros(3, batch, dtype=torch.int64, device=device)
        bits = torch.zeros(batch, width, packing.WORDS, dtype=torch.int64, device=device)
        return cls(place, bits, own.view(count, width, packing.WORDS).to(device))


class TreeProgram(NamedTuple):
    """The program that grows trees of one batch size and one width."""

    trees: DeviceTrees
    place: NodePlaces


class DraftTrees:
    """Draft trees of a model with compiled passes."""

    def __init__(self, runner: CompiledRunner):
        self.runner, self.lm = runner, runner.lm
        self._programs: dict[tuple[int, int], TreeProgram] = {}
        self._generation = runner.cache.generation

    def fit(self, shapes: Seq[DraftShape]) -> bool:
        """Return whether trees of these shapes, one per slot, can be grown here."""
        lm, width, ids = self.lm, shapes[0].width, getattr(self.lm.model, "ids", None)
        entries = 1 + (max(shape.depth for shape in shapes) - 1) * width  # the last level is not fed
        return (
            1 < width <= min(lm.vocab if ids is None else len(ids), SCRAP)
            and len(shapes) <= packing.MOST_SEGMENTS
            and self._batch(len(shapes)) * width <= self.runner.most_tokens
            and entries <= packing.LONGEST
            and all(window is None or window > entries for window in lm.windows)
        )

    def _batch(self, slots: int) -> int:
        return slots if self.lm.device.type == "cpu" else rounded(slots, BATCHES)

    def reserve(self, slots: Seq[int], shapes: Seq[DraftShape]) -> None:
        """Reserve room for everything that will be fed, or raise `CacheFull`."""
        fed = (max(shape.depth for shape in shapes) - 1) * shapes[0].width
        tree, held = Tree.chain([0] * (1 + fed)), [(index, self.lm.slots[index]) for index in slots]
        self.lm.reserve([Segment(index, slot.length, slot.pending, tree) for index, slot in held])

    @torch.no_grad()
    def grow(self, slots: Seq[int], tokens: Seq[int], shapes: Seq[DraftShape]) -> list[list[DraftToken]]:
        """Return the likeliest `nodes` draft tokens after each slot and its token, parents first; all of one width."""
        lm, width = self.lm, shapes[0].width
        scores = lm.score([Tree([token]) for token in tokens], slots)  # also feeds the pending tokens
        trees, place = self._program(self._batch(len(slots)), width)
        where = [(self.runner.cache.base(slot), lm.slots[slot].length + 1, 1) for slot in slots]
        where += [(0, 0, 0)] * (trees.levels.rows - len(slots))
        place.slots.copy_(torch.tensor(where).T)
        place.bits.copy_(place.own[0].expand_as(place.bits))
        found = trees.grow(torch.cat([score.logits.all() for score in scores]), self._left(slots), shapes)
        for index, token, read in zip(slots, tokens, found, strict=True):
            slot = lm.slots[index]
            # A head that feeds its own states back did not see those of the text, so its tree cannot be kept.
            slot.layout = Tree([token]) if lm.takes_features else read.fed_after(token)
            slot.scored = len(slot.layout)
        return [read.draft_tokens(shape) for read, shape in zip(found, shapes, strict=True)]

    def _left(self, slots: Seq[int]) -> Tensor | None:
        """Return the states at the roots, for a model that takes features."""  # [slots, hidden]
        if not self.lm.takes_features:
            return None
        left = [self.lm.slots[slot].provisional for slot in slots]
        return torch.stack([states[-1] for states in left if states is not None])

    def _program(self, batch: int, width: int) -> TreeProgram:
        runner, lm = self.runner, self.lm
        if self._generation != runner.cache.generation:  # the pool has moved, and captured programs read the old one
            self._programs.clear()
            self._generation = runner.cache.generation
        if (batch, width) not in self._programs:
            hidden = runner.module.config.get_text_config().hidden_size if lm.takes_features else 0
            device = DraftDevice(lm.device, hidden, lm.model.dtype)
            ids = getattr(lm.model, "ids", None)
            levels = TreeLevels.empty(packing.LONGEST // width + 1, batch, width, ids, device)
            place = NodePlaces.empty(levels)
            trees = DeviceTrees(levels, self._level(levels, place), runner.graph_memory)
            self._programs[batch, width] = TreeProgram(trees, place)
        return self._programs[batch, width]

    def _level(self, levels: TreeLevels, place: NodePlaces) -> Callable[[], None]:
        batch, width, device = levels.rows, levels.width, levels.tokens.device
        base, length, live = place.slots
        runner = self.runner
        ranks, first = torch.arange(width, device=device), torch.arange(batch, device=device) * width
        # Pad to two segments, because a size of one would compile as another program.
        none = torch.zeros(max(2 - batch, 0), 4, dtype=torch.int64, device=device)

        def advance() -> None:
            # Padding is written to the pool's scrap entries.
            entries = (base + length + levels.level * width) * live
            positions = (length + levels.level).repeat_interleave(width)
            segments = torch.cat([torch.stack([first, live * width, base, length], dim=1), none])
            where, bits = (entries[:, None] + ranks).flatten(), place.bits.flatten(0, 1)
            given = runner.module_inputs(positions, runner.attention(where, segments, bits, positions))
            if levels.entering is not None:
                given["features"] = levels.entering.flatten(0, 1)[None]
            if levels.ids is not None:
                given["narrow"] = True  # logits of the draft vocabulary only: the full one takes most of the time
            with recording(runner.module, STATE if levels.entering is not None else ()) as recorded:
                logits = runner.module(input_ids=levels.tokens.flatten()[None], **given).logits[0]
            parents = levels.advance(logits, recorded[-1] if recorded else None)
            above = place.bits.gather(1, parents[..., None].expand_as(place.bits))
            place.bits.copy_(above | place.own.index_select(0, levels.level))

        return advance
