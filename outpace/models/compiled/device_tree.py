"""Trees that grow on the device, level by level, and are read by the host once.

At each level a draft ranks what could follow the nodes that it was fed. The candidates with the likeliest paths are the
nodes that it is fed next. No step needs the host, so all of it is captured on a GPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence as Seq
from typing import Any, NamedTuple

import torch
from torch import Tensor

from outpace.core.lm import DraftShape, DraftToken
from outpace.core.tree import Tree
from outpace.models.compiled.graph_pass import capture

STATE = (-1,)  # the tap of what a model feeds back to itself


class DraftDevice(NamedTuple):
    """Where a draft runs, and what it feeds back to itself with each node."""

    device: torch.device
    hidden: int = 0  # numbers of a state; 0: it takes none
    dtype: torch.dtype = torch.float32


class TreeLevels(NamedTuple):
    """The trees of several rows. Candidates of a level lie by the node that they follow, then by rank."""

    level: Tensor  # [1]: of the nodes that are fed next
    tokens: Tensor  # [rows, width]: the nodes that are fed next
    reach: Tensor  # [rows, width]: logarithm of the probability of their paths
    entering: Tensor | None  # [rows, width, hidden], for a model that takes states
    listed: Tensor  # [levels, rows, width * width]: tokens that could follow
    reached: Tensor  # the same: their reach
    fed: Tensor  # [levels, rows, width]: which candidates of a level became its nodes
    ids: Tensor | None  # of the tokens that the draft knows, if its distributions are over those alone

    @classmethod
    def empty(cls, levels: int, rows: int, width: int, ids: Tensor | None, fed: DraftDevice) -> TreeLevels:
        device = fed.device

        def whole(*sizes: int) -> Tensor:
            return torch.zeros(*sizes, dtype=torch.int64, device=device)

        return cls(
            level=whole(1), tokens=whole(rows, width), reach=torch.zeros(rows, width, device=device),
            entering=torch.zeros(rows, width, fed.hidden, dtype=fed.dtype, device=device) if fed.hidden else None,
            listed=whole(levels, rows, width * width), fed=whole(levels, rows, width),
            reached=torch.zeros(levels, rows, width * width, device=device), ids=ids,
        )  # fmt: skip

    @property
    def rows(self) -> int:
        return self.tokens.shape[0]

    @property
    def width(self) -> int:
        return self.tokens.shape[1]

    def open(self, logits: Tensor, left: Tensor | None) -> None:
        """From the distributions behind the roots, and what the model left there, to the first level."""
        width, device = self.width, logits.device  # [rows, vocab], [rows, hidden]
        self.level.zero_()
        likeliest, reach = self._likeliest(logits)
        self.tokens.copy_(likeliest)
        self.reach.copy_(reach)
        self.reached[0].fill_(-torch.inf)  # one node has fewer candidates than so many
        self.listed[0, :, :width], self.reached[0, :, :width] = likeliest, reach
        self.fed[0].copy_(torch.arange(width, device=device).expand(self.rows, -1))
        if self.entering is not None and left is not None:
            self.entering.copy_(left[:, None].expand_as(self.entering))

    def _likeliest(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens, and the logarithm of how likely they are."""
        # [nodes, vocab or known tokens] -> [nodes, width] twice
        logits = logits.float()
        values, places = logits.topk(self.width)
        named = self.ids is not None and logits.shape[-1] == len(self.ids)
        return self.ids[places] if named else places, values - logits.logsumexp(-1, keepdim=True)  # type: ignore[index]

    def advance(self, logits: Tensor, left: Tensor | None) -> Tensor:
        """From the nodes of a level, whose distributions these are, to the next; returns which of them each follows."""
        rows, width = self.rows, self.width  # [rows * width, vocab], [rows * width, hidden] -> [rows, width]
        likeliest, probs = self._likeliest(logits)
        probs = probs.view(rows, width, width)
        reach = (self.reach[..., None] + probs).flatten(1)
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

    def numbers(self, depth: int, count: int, deepest: Tensor) -> Tensor:
        """The `count` likeliest candidates of each row, no deeper than it may go, and which nodes were fed."""
        # deepest: [rows]; of each row: places, tokens and reach of the candidates, then by level what was fed
        late = torch.arange(depth, device=deepest.device)[:, None] >= deepest  # [levels, rows]
        reached = self.reached[:depth].masked_fill(late[..., None], -torch.inf)
        best = reached.transpose(0, 1).flatten(1).topk(count)
        tokens = self.listed[:depth].transpose(0, 1).flatten(1).gather(1, best.indices)
        fed = self.fed[:depth]
        words = self.listed[:depth].gather(2, fed)
        sides = [fed.transpose(0, 1).flatten(1), words.transpose(0, 1).flatten(1)]
        return torch.cat([t.double() for t in (best.indices, tokens, best.values, *sides)], dim=1)


class DeviceTrees:
    """Levels, and how they grow: by functions that are captured once, if there is memory for graphs."""

    def __init__(self, levels: TreeLevels, advance: Callable[[], None], memory: Any):
        self.levels, self._memory = levels, memory
        self._advance = self._replayed(advance)
        self._begin: Callable[[], Any] | None = None
        self._ends: dict[tuple[int, int], Callable[[], Any]] = {}
        self._deepest = torch.zeros(levels.rows, dtype=torch.int64, device=levels.tokens.device)

    def _replayed(self, function: Callable[[], Any]) -> Callable[[], Any]:
        return function if self._memory is None else capture(function, self._memory)

    def grow(self, logits: Tensor, left: Tensor | None, shapes: Seq[DraftShape]) -> list[DeviceTree]:
        """Trees behind roots with these distributions; the host waits once, at the end."""
        # [rows, vocab], [rows, hidden]
        rows, width, depth = len(shapes), self.levels.width, max(shape.depth for shape in shapes)
        count = min(max(shape.nodes for shape in shapes), depth * width**2)
        if self._begin is None:
            self._distribution = torch.zeros(self.levels.rows, logits.shape[1], device=logits.device)
            self._left = None if left is None else left.new_zeros(self.levels.rows, left.shape[1])
            self._begin = self._replayed(lambda: self.levels.open(self._distribution, self._left))
        if (depth, count) not in self._ends:
            self._ends[depth, count] = self._replayed(lambda: self.levels.numbers(depth, count, self._deepest))
        self._distribution[:rows] = logits
        if self._left is not None and left is not None:
            self._left[:rows] = left
        self._deepest[:rows] = torch.tensor([shape.depth for shape in shapes])
        self._begin()
        for _ in range(depth - 1):
            self._advance()
        return [DeviceTree.from_numbers(row, count, depth, width) for row in self._ends[depth, count]()[:rows].tolist()]


class DeviceTree(NamedTuple):
    """A row's tree, as numbers."""

    best: list[int]  # places of the likeliest candidates, of all levels
    tokens: list[int]
    reach: list[float]
    fed: list[list[int]]  # [levels]: which candidates of the level became its nodes
    words: list[list[int]]  # [levels]: their tokens

    @classmethod
    def from_numbers(cls, numbers: list[float], count: int, depth: int, width: int) -> DeviceTree:
        """From what `TreeLevels.numbers` says of a row."""
        picked, tokens, reach = (numbers[i * count : (i + 1) * count] for i in range(3))
        rest = [[int(n) for n in numbers[at : at + width]] for at in range(3 * count, len(numbers), width)]
        return cls([int(n) for n in picked], [int(n) for n in tokens], reach, rest[:depth], rest[depth:])

    def draft_tokens(self, shape: DraftShape) -> list[DraftToken]:
        size, place, found = shape.width**2, dict[int, int](), list[DraftToken]()
        reached = dict(zip(self.best, self.reach, strict=True))
        order = sorted(zip(self.best, self.tokens, strict=True), key=lambda c: (-reached[c[0]], c[0]))
        for candidate, token in order[: shape.nodes]:
            level, rank = divmod(candidate, size)
            above = (level - 1) * size + self.fed[level - 1][rank // shape.width] if level else -1
            if reached[candidate] == -math.inf or (level and above not in place):
                continue
            place[candidate] = len(found)
            prob = math.exp(reached[candidate] - reached.get(above, 0.0))
            found.append(DraftToken(token, prob, place.get(above, -1)))
        return found

    def fed_after(self, root: int) -> Tree:
        """The tree that the model has seen."""
        tree, width = Tree([root]), len(self.fed[0])
        for level, (chosen, words) in enumerate(zip(self.fed[:-1], self.words, strict=False)):
            for candidate, word in zip(chosen, words, strict=True):
                tree.add(1 + (level - 1) * width + candidate // width if level else 0, word)
        return tree
