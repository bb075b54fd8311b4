"""Trees that a draft grows by itself: every level feeds its likeliest nodes to the next, and the host reads once.

One program is one level: so many nodes of each row. On a GPU it is captured, so a tree is the same graph replayed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence as Seq
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from outpace.core.lm import DraftShape, DraftToken
from outpace.core.tree import Tree
from outpace.models.compiled import packing
from outpace.models.compiled.device_tree import STATE, DeviceTrees, DraftDevice, TreeLevels
from outpace.models.hf.module import recording
from outpace.models.hf.pooled_cache import SCRAP
from outpace.models.segment import Segment

if TYPE_CHECKING:
    from outpace.models.compiled.cpu import CompiledLM

SLOTS = (2, 4, 8, 16, 32, 64)  # rows of a captured program, rounded up


class NodePlaces(NamedTuple):
    """Where the nodes of a program go, beside what they are."""

    rows: Tensor  # [3, rows]: where the row begins in the pool, its entries with the root, 1 for a row that is used
    bits: Tensor  # [rows, width, words]: the ancestors of the nodes that are fed next
    own: Tensor  # [levels, width, words]: the bit of each node among the ancestors

    @classmethod
    def empty(cls, levels: TreeLevels) -> NodePlaces:
        rows, width, device = levels.rows, levels.width, levels.tokens.device
        count = len(levels.listed)
        own = torch.zeros(count * width, packing.WORDS, dtype=torch.int64)
        for node in range(min(count * width, packing.LONGEST)):
            own[node, node // 64] = torch.tensor(1) << node % 64
        place = torch.zeros(3, rows, dtype=torch.int64, device=device)
        bits = torch.zeros(rows, width, packing.WORDS, dtype=torch.int64, device=device)
        return cls(place, bits, own.view(count, width, packing.WORDS).to(device))


class TreeProgram(NamedTuple):
    """How trees of so many rows and of one width grow."""

    trees: DeviceTrees
    place: NodePlaces


class DraftTrees:
    """Trees of a model with compiled passes."""

    def __init__(self, lm: CompiledLM):
        self.lm = lm
        self._programs: dict[tuple[int, int], TreeProgram] = {}
        self._generation = lm.cache.generation

    def fit(self, shapes: Seq[DraftShape]) -> bool:
        """Whether trees of these shapes can be grown, a row each."""
        lm, width, ids = self.lm, shapes[0].width, getattr(self.lm.model, "ids", None)
        entries = 1 + (max(shape.depth for shape in shapes) - 1) * width  # the last level is not fed
        return (
            1 < width <= min(lm.vocab if ids is None else len(ids), SCRAP)
            and len(shapes) <= packing.MOST_JOBS
            and self._slots(len(shapes)) * width <= lm.most_tokens
            and entries <= packing.LONGEST
            and all(window is None or window > entries for window in lm.windows)
        )

    def _slots(self, rows: int) -> int:
        return rows if self.lm.device.type == "cpu" else next(n for n in SLOTS if n >= rows)

    def reserve(self, rows: Seq[int], shapes: Seq[DraftShape]) -> None:
        """Room for all that will be fed, before anything is; raises `CacheFull`."""
        fed = (max(shape.depth for shape in shapes) - 1) * shapes[0].width
        held = [(row, self.lm.rows[row]) for row in rows]
        self.lm.reserve(
            [Segment(index, len(row.tokens), row.pending, Tree.chain([0] * (1 + fed))) for index, row in held]
        )

    @torch.no_grad()
    def grow(self, rows: Seq[int], tokens: Seq[int], shapes: Seq[DraftShape]) -> list[list[DraftToken]]:
        """The likeliest `nodes` guesses behind each row and its token, parents first; all of one width."""
        lm, width = self.lm, shapes[0].width
        scores = lm.score([Tree([token]) for token in tokens], rows)  # with what the rows have pending
        trees, place = self._program(self._slots(len(rows)), width)
        where = [(lm.cache.base(row), len(lm.rows[row].tokens) + 1, 1) for row in rows]
        where += [(0, 0, 0)] * (trees.levels.rows - len(rows))
        place.rows.copy_(torch.tensor(where).T)
        place.bits.copy_(place.own[0].expand_as(place.bits))
        found = trees.grow(torch.cat([score.logits for score in scores]), self._left(rows), shapes)
        for row, token, read in zip(rows, tokens, found, strict=True):
            held = lm.rows[row]
            held.tree = Tree([token]) if lm.feeds else read.fed_behind(token)  # states that were fed back are no text's
            held.scored = len(held.tree)
        return [read.guesses(shape) for read, shape in zip(found, shapes, strict=True)]

    def _left(self, rows: Seq[int]) -> Tensor | None:
        """What a model that takes states left at the roots."""  # [rows, hidden]
        if not self.lm.feeds:
            return None
        left = [self.lm.rows[row].provisional for row in rows]
        return torch.stack([states[-1] for states in left if states is not None])

    def _program(self, slots: int, width: int) -> TreeProgram:
        if self._generation != self.lm.cache.generation:  # the pool moved: captured programs read the old one
            self._programs.clear()
            self._generation = self.lm.cache.generation
        if (slots, width) not in self._programs:
            lm = self.lm
            hidden = lm.quick.config.get_text_config().hidden_size if lm.feeds else 0
            fed = DraftDevice(lm.device, hidden, lm.model.dtype)
            levels = TreeLevels.empty(packing.LONGEST // width + 1, slots, width, getattr(lm.model, "ids", None), fed)
            place = NodePlaces.empty(levels)
            self._programs[slots, width] = TreeProgram(
                DeviceTrees(levels, self._level(levels, place), lm.graph_memory), place
            )
        return self._programs[slots, width]

    def _level(self, levels: TreeLevels, place: NodePlaces) -> Callable[[], None]:
        rows, width, device = levels.rows, levels.width, levels.tokens.device
        base, length, live = place.rows
        ranks, first = torch.arange(width, device=device), torch.arange(rows, device=device) * width
        none = torch.zeros(max(2 - rows, 0), 4, dtype=torch.int64, device=device)  # one job is another program

        def advance() -> None:
            behind = (base + length + levels.level * width) * live  # what only fills up is written to the pool's scrap
            positions = (length + levels.level).repeat_interleave(width)
            jobs = torch.cat([torch.stack([first, live * width, base, length], dim=1), none])
            lanes = self.lm.lanes((behind[:, None] + ranks).flatten(), jobs, place.bits.flatten(0, 1), positions)
            given = dict(position_ids=positions[None], past_key_values=self.lm.cache, use_cache=True, reach=lanes)
            if levels.entering is not None:
                given["features"] = levels.entering.flatten(0, 1)[None]
            if levels.ids is not None:
                given["narrow"] = True  # of the tokens that it knows: the others take most of the time
            with recording(self.lm.quick, STATE if levels.entering is not None else ()) as recorded:
                logits = self.lm.quick(input_ids=levels.tokens.flatten()[None], **given).logits[0]
            parents = levels.advance(logits, recorded[-1] if recorded else None)
            above = place.bits.gather(1, parents[..., None].expand_as(place.bits))
            place.bits.copy_(above | place.own.index_select(0, levels.level))

        return advance
