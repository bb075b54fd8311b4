"""Draft trees that a model with compiled passes grows on the device. The host reads once, at the end.

The first program feeds the pending tokens and the root of every slot. Each level feeds its likeliest nodes to the next:
one program runs one level, with `width` nodes of each slot. On a GPU both are captured, so growing a tree launches a
few graphs, one after the other, and waits for none of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence as Seq
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from outpace.core.lm import DraftShape, DraftToken
from outpace.core.tree import Tree
from outpace.models.cache.pool import SCRAP
from outpace.models.compiled import packing
from outpace.models.compiled.drafts.device_tree import (
    DeviceTree,
    DraftDevice,
    TreeLevels,
    TreeRules,
    TreeSizes,
    TreeStart,
    rules_of,
)
from outpace.models.compiled.drafts.root_pass import RootPass, RootSize
from outpace.models.compiled.graph_pass import BATCHES, replayed, rounded
from outpace.models.hf.module import STATE, recording
from outpace.models.segment import Segment
from outpace.models.transfer import HostCopy
from outpace.sampling.sampler import Pick

if TYPE_CHECKING:
    from outpace.models.compiled.runner import CompiledRunner

DEPTHS = (8, 16, 32, 64)  # levels of a program, rounded up


class NodePlaces(NamedTuple):
    """Where the nodes of a program are written, and which entries they see."""

    # [2 + groups, batch]: entries of the slot including the root, 1 for a used slot, and the place of its text in each
    # group of layers
    slots: Tensor
    bits: Tensor  # [batch, width, words]: the ancestors of the nodes that are fed next
    own: Tensor  # [levels, width, words]: the bit that stands for each node

    @classmethod
    def empty(cls, levels: TreeLevels, groups: int) -> NodePlaces:
        (batch, count, _, width), device = levels.sizes, levels.tokens.device
        own = torch.zeros(count * width, packing.WORDS, dtype=torch.int64)
        for node in range(min(count * width, packing.LONGEST)):
            own[node, node // 64] = torch.tensor(1) << node % 64
        place = torch.zeros(2 + groups, batch, dtype=torch.int64, device=device)
        bits = torch.zeros(batch, width, packing.WORDS, dtype=torch.int64, device=device)
        return cls(place, bits, own.view(count, width, packing.WORDS).to(device))


class FirstLevel(NamedTuple):
    """The first pass of a draft, and the program that runs it and opens the trees."""

    root: RootPass
    run: Callable[[], None]


class TreeProgram:
    """The programs that grow trees of one batch size and one shape."""

    def __init__(self, runner: CompiledRunner, sizes: TreeSizes, sampled: bool, memory: Any):
        """`memory` is a pool for captured graphs; None: nothing is captured."""
        self.runner, self.sizes, self._memory, lm = runner, sizes, memory, runner.lm
        self._sent = torch.zeros(sizes.numbers, dtype=torch.int64, device=lm.device)  # what the host said of the trees
        hidden = runner.module.config.get_text_config().hidden_size if lm.takes_features else 0
        self.levels = TreeLevels.empty(
            sizes, TreeRules.of_numbers(self._sent, sizes), sampled, getattr(lm.model, "ids", None),
            DraftDevice(lm.device, hidden, lm.model.dtype),
        )  # fmt: skip
        self.place, (batch, _, _, width) = NodePlaces.empty(self.levels, len(runner.cache.groups)), sizes
        self._ranks = torch.arange(width, device=lm.device)
        self._firsts_of_rows = torch.arange(batch, device=lm.device) * width
        # Pad to two segments, because a size of one would compile as another program.
        self._padding = torch.zeros(max(2 - batch, 0), 4, dtype=torch.int64, device=lm.device)
        self.advance = replayed(self._level, memory)
        self._firsts: dict[int, FirstLevel] = {}  # by tokens
        self._ends: dict[tuple[int, int], tuple[Callable[[], Tensor], HostCopy]] = {}

    def first(self, size: RootSize, states: Tensor | None) -> FirstLevel:
        """Return the first level after a first pass of this size."""
        if size.tokens not in self._firsts:
            root = RootPass(self.runner, size, states, narrow=self.levels.ids is not None)

            def run() -> None:
                self._sent.copy_(root.numbers)
                out = root.run()
                noise = self.levels.rules.noise[0][:, None]
                self.levels.open(self.levels.rank(out.logits[:, None], noise), out.left)
                self.place.slots.copy_(root.places)
                self.place.bits.copy_(self.place.own[0].expand_as(self.place.bits))

            self._firsts[size.tokens] = FirstLevel(root, replayed(run, self._memory))
        return self._firsts[size.tokens]

    def read(self, shapes: Seq[DraftShape]) -> list[DeviceTree]:
        """Read the trees, one per row. This is where the host waits."""
        depth = max(shape.depth for shape in shapes)
        count = min(max(shape.nodes for shape in shapes), depth * self.sizes.beam * self.sizes.width)
        if (depth, count) not in self._ends:
            nodes = not self.runner.lm.takes_features
            end = replayed(lambda: self.levels.numbers(depth, count, nodes), self._memory)
            self._ends[depth, count] = end, HostCopy(end())
        end, copy = self._ends[depth, count]
        copy.source = end()
        return [DeviceTree.from_numbers(row, count, self.sizes) for row in copy.read()[: len(shapes)].tolist()]

    def _level(self) -> None:
        """Feed the nodes of a level, and go to the next one."""
        runner, levels, (batch, _, _, width) = self.runner, self.levels, self.sizes
        length, live, *origins = self.place.slots
        # Padding is written to the pool's scrap entries.
        entries = [(origin + length + levels.level * width) * live for origin in origins]
        positions = (length + levels.level).repeat_interleave(width)
        jobs = [torch.stack([self._firsts_of_rows, live * width, origin, length], dim=1) for origin in origins]
        segments = [torch.cat([table, self._padding]) for table in jobs]
        where, bits = [(entry[:, None] + self._ranks).flatten() for entry in entries], self.place.bits.flatten(0, 1)
        given = runner.module_inputs(positions, runner.attention(where, segments, bits, positions))
        if levels.entering is not None:
            given["features"] = levels.entering.flatten(0, 1)[None]
        if levels.ids is not None:
            given["narrow"] = True  # logits of the draft vocabulary only: the full one takes most of the time
        with recording(runner.module, STATE if levels.entering is not None else ()) as recorded:
            logits = runner.module(input_ids=levels.tokens.flatten()[None], **given).logits[0]
        below = (levels.level + 1).clamp(max=self.sizes.levels - 1)
        ranked = levels.rank(logits.unflatten(0, (batch, width)), levels.noise_after(below))
        parents = levels.advance(ranked, recorded[-1] if recorded else None)
        above = self.place.bits.gather(1, parents[..., None].expand_as(self.place.bits))
        self.place.bits.copy_(above | self.place.own.index_select(0, levels.level))


class DraftTrees:
    """Draft trees of a model with compiled passes."""

    def __init__(self, runner: CompiledRunner):
        self.runner, self.lm = runner, runner.lm
        self._programs: dict[tuple[TreeSizes, bool], TreeProgram] = {}
        self._generation = -1
        self._memory: Any = None

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

    @property
    def _exact(self) -> bool:
        """Whether programs have the exact size of a pass, because nothing is captured."""
        return self.runner.graph_memory is None

    def _batch(self, slots: int) -> int:
        return slots if self._exact else rounded(slots, BATCHES)

    def reserve(self, slots: Seq[int], shapes: Seq[DraftShape]) -> None:
        """Reserve room for everything that will be fed, or raise `CacheFull`."""
        fed = (max(shape.depth for shape in shapes) - 1) * shapes[0].width
        tree, held = Tree.chain([0] * (1 + fed)), [(index, self.lm.slots[index]) for index in slots]
        self.lm.reserve([Segment(index, slot.length, slot.pending, tree) for index, slot in held])

    @torch.no_grad()
    def grow(self, segments: Seq[Segment], shapes: Seq[DraftShape], picks: Seq[Pick]) -> list[list[DraftToken]]:
        """Return the likeliest `nodes` draft tokens after each root, parents first; all of one width."""
        lm, depth = self.lm, max(shape.depth for shape in shapes)
        ahead = lm.before + 1
        starts = [
            TreeStart(shape, pick, segment.start + len(segment.pending) + ahead)
            for segment, shape, pick in zip(segments, shapes, picks, strict=True)
        ]
        program = self._program(starts)
        size = RootSize.of_segments(segments, program.sizes.numbers, program.sizes.rows, self._exact)
        first = program.first(size, segments[0].features)
        first.root.send(segments, rules_of(starts, program.sizes))
        first.run()
        first.root.staging.mark_in_use()
        for _ in range(depth - 1):
            program.advance()
        found = program.read(shapes)
        for segment, read in zip(segments, found, strict=True):
            root = segment.tree.tokens[0]
            # A head that feeds its own states back did not see those of the text, so its tree cannot be kept.
            fed = Tree([root]) if lm.takes_features else read.fed_after(root, program.sizes.width)
            lm.slots[segment.slot].take(segment, fed)
        return [read.draft_tokens(shape.nodes) for read, shape in zip(found, shapes, strict=True)]

    def _program(self, starts: Seq[TreeStart]) -> TreeProgram:
        if self._generation != self.runner.cache.generation:  # the pool has moved, and programs read the old one
            self._programs.clear()
            self._generation, self._memory = self.runner.cache.generation, self.runner.new_pool()
        width, depth = starts[0].shape.width, max(start.shape.depth for start in starts)
        sizes = TreeSizes(self._batch(len(starts)), rounded(depth, DEPTHS), width, width)
        key = sizes, any(start.pick.temperature for start in starts)
        if key not in self._programs:
            self._programs[key] = TreeProgram(self.runner, *key, self._memory)
        return self._programs[key]
