"""Levels: a tree of guesses that grows on the device, a level at a time, and is read by the host once.

At each level a draft says what could follow the nodes that it was fed. The likeliest of all those, by the chance of
their whole path, are the nodes that it is fed next. Nothing of it asks the host, so a level can be a captured graph.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from typing import NamedTuple

import torch
from torch import Tensor

from outpace.models.chosen import Guess, Shape
from outpace.tree import Tree

STATE = (-1,)  # the tap of what a model feeds back to itself


class Fed(NamedTuple):
    """What a draft feeds back to itself with each node: states of the hidden size, in its precision."""

    hidden: int
    dtype: torch.dtype


class Levels(NamedTuple):
    """The trees of several rows. Candidates of a level lie by the node that they follow, then by rank."""

    level: Tensor  # [1]: of the nodes that are fed next
    tokens: Tensor  # [rows, width]: the nodes that are fed next
    reach: Tensor  # [rows, width]: logarithm of the chance of their paths
    entering: Tensor | None  # [rows, width, hidden], for a model that takes states
    listed: Tensor  # [levels, rows, width * width]: tokens that could follow
    reached: Tensor  # the same: their reach
    fed: Tensor  # [levels, rows, width]: which candidates of a level became its nodes

    @classmethod
    def empty(cls, levels: int, rows: int, width: int, device: torch.device, fed: Fed | None) -> Levels:
        def whole(*sizes: int) -> Tensor:
            return torch.zeros(*sizes, dtype=torch.int64, device=device)

        return cls(
            level=whole(1), tokens=whole(rows, width), reach=torch.zeros(rows, width, device=device),
            entering=torch.zeros(rows, width, fed.hidden, dtype=fed.dtype, device=device) if fed else None,
            listed=whole(levels, rows, width * width), fed=whole(levels, rows, width),
            reached=torch.zeros(levels, rows, width * width, device=device),
        )  # fmt: skip

    @property
    def rows(self) -> int:
        return self.tokens.shape[0]

    @property
    def width(self) -> int:
        return self.tokens.shape[1]

    def open(self, logits: Tensor, left: Tensor | None) -> None:
        """From the laws behind the roots, of the first rows, and what the model left there: the first level."""
        rows, width = len(logits), self.width  # [rows, vocab], [rows, hidden]
        self.level.zero_()
        values, likeliest = logits.float().topk(width)
        reach = values - logits.float().logsumexp(-1, keepdim=True)
        self.tokens[:rows], self.reach[:rows] = likeliest, reach
        self.reached[0].fill_(-torch.inf)  # one node has fewer candidates than so many
        self.listed[0, :rows, :width], self.reached[0, :rows, :width] = likeliest, reach
        self.fed[0].copy_(torch.arange(width).expand(self.rows, -1))
        if self.entering is not None and left is not None:
            self.entering[:rows] = left[:, None]

    def advance(self, logits: Tensor, left: Tensor | None) -> Tensor:
        """From the nodes of a level, whose laws these are, to the next; returns which of them each follows."""
        rows, width = self.rows, self.width  # [rows * width, vocab], [rows * width, hidden] -> [rows, width]
        values, likeliest = logits.float().topk(width)
        chances = (values - logits.float().logsumexp(-1, keepdim=True)).view(rows, width, width)
        reach = (self.reach[..., None] + chances).flatten(1)
        best = reach.topk(width)
        listed, parents = likeliest.view(rows, width * width), best.indices // width
        self.level.add_(1).clamp_(max=len(self.listed) - 1)
        self.listed.index_copy_(0, self.level, listed[None])
        self.reached.index_copy_(0, self.level, reach[None])
        self.fed.index_copy_(0, self.level, best.indices[None])
        self.tokens.copy_(listed.gather(1, best.indices))
        self.reach.copy_(best.values)
        if self.entering is not None and left is not None:
            states = left.view(rows, width, -1)
            self.entering.copy_(states.gather(1, parents[..., None].expand_as(states)))
        return parents

    def read(self, shapes: Seq[Shape]) -> list[Grown]:
        """All rows in one look."""
        rows, width, depth = len(shapes), self.width, max(shape.depth for shape in shapes)
        for row, shape in enumerate(shapes):
            self.reached[shape.depth : depth, row].fill_(-torch.inf)  # deeper than this row may go
        reached = self.reached[:depth, :rows].transpose(0, 1).flatten(1)  # [rows, levels * width * width]
        best = reached.topk(min(max(shape.nodes for shape in shapes), reached.shape[1]))
        tokens = self.listed[:depth, :rows].transpose(0, 1).flatten(1).gather(1, best.indices)
        fed = self.fed[:depth, :rows]
        words = self.listed[:depth, :rows].gather(2, fed)
        sides = [fed.transpose(0, 1).flatten(1), words.transpose(0, 1).flatten(1)]
        numbers = torch.cat([t.double() for t in (best.indices, tokens, best.values, *sides)], dim=1).tolist()
        count, found = best.indices.shape[1], []
        for row in numbers:
            picked, guessed, reach = (row[i * count : (i + 1) * count] for i in range(3))
            rest = [[int(n) for n in row[at : at + width]] for at in range(3 * count, len(row), width)]
            found.append(Grown([int(n) for n in picked], [int(n) for n in guessed], reach, rest[:depth], rest[depth:]))
        return found


class Grown(NamedTuple):
    """A row's tree, as numbers."""

    best: list[int]  # places of the likeliest candidates, of all levels
    tokens: list[int]
    reach: list[float]
    fed: list[list[int]]  # [levels]: which candidates of the level became its nodes
    words: list[list[int]]  # [levels]: their tokens

    def guesses(self, shape: Shape) -> list[Guess]:
        size, place, found = shape.width**2, dict[int, int](), list[Guess]()
        reached = dict(zip(self.best, self.reach, strict=True))
        order = sorted(zip(self.best, self.tokens, strict=True), key=lambda c: (-reached[c[0]], c[0]))
        for candidate, token in order[: shape.nodes]:
            level, rank = divmod(candidate, size)
            above = (level - 1) * size + self.fed[level - 1][rank // shape.width] if level else -1
            if reached[candidate] == -math.inf or (level and above not in place):
                continue
            place[candidate] = len(found)
            prob = math.exp(reached[candidate] - reached.get(above, 0.0))
            found.append(Guess(token, prob, place.get(above, -1)))
        return found

    def fed_behind(self, root: int) -> Tree:
        """The tree that the model has seen."""
        tree, width = Tree([root]), len(self.fed[0])
        for level, (chosen, words) in enumerate(zip(self.fed[:-1], self.words, strict=False)):
            for candidate, word in zip(chosen, words, strict=True):
                tree.add(1 + (level - 1) * width + candidate // width if level else 0, word)
        return tree
