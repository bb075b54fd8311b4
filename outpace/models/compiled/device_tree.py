"""Draft trees that grow on the device, level by level, and that the host reads once.

At each level the draft ranks the tokens that may follow the nodes it was fed. The candidates with the likeliest paths
become the nodes that it is fed next. No step needs the host, so on a GPU every step is captured.
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


class DraftDevice(NamedTuple):
    """Where a draft runs, and the state that it feeds back to itself with each node."""

    device: torch.device
    hidden: int = 0  # size of the state; 0: the draft takes none
    dtype: torch.dtype = torch.float32


class TreeLevels(NamedTuple):
    """The trees of a batch, one row per request. Candidates of a level are ordered by parent node, then by rank."""

    level: Tensor  # [1]: the level of the nodes that are fed next
    tokens: Tensor  # [rows, width]: the nodes that are fed next
    log_probs: Tensor  # [rows, width]: log probabilities of their paths
    entering: Tensor | None  # [rows, width, hidden]: input states, for a model that takes states
    candidates: Tensor  # [levels, rows, width * width]: candidate tokens
    candidate_log_probs: Tensor  # [levels, rows, width * width]: log probabilities of their paths
    fed: Tensor  # [levels, rows, width]: which candidates of a level became its nodes
    ids: Tensor | None  # token ids of the draft vocabulary, if the draft has a smaller one

    @classmethod
    def empty(cls, levels: int, rows: int, width: int, ids: Tensor | None, fed: DraftDevice) -> TreeLevels:
        device = fed.device

        def whole(*sizes: int) -> Tensor:
            return torch.zeros(*sizes, dtype=torch.int64, device=device)

        return cls(
            level=whole(1), tokens=whole(rows, width), log_probs=torch.zeros(rows, width, device=device),
            entering=torch.zeros(rows, width, fed.hidden, dtype=fed.dtype, device=device) if fed.hidden else None,
            candidates=whole(levels, rows, width * width), fed=whole(levels, rows, width),
            candidate_log_probs=torch.zeros(levels, rows, width * width, device=device), ids=ids,
        )  # fmt: skip

    @property
    def rows(self) -> int:
        return self.tokens.shape[0]

    @property
    def width(self) -> int:
        return self.tokens.shape[1]

    def open(self, logits: Tensor, left: Tensor | None) -> None:
        """Start the first level from the logits at the roots and the states that the model left there."""
        width, device = self.width, logits.device  # [rows, vocab], [rows, hidden]
        self.level.zero_()
        likeliest, log_probs = self._likeliest(logits)
        self.tokens.copy_(likeliest)
        self.log_probs.copy_(log_probs)
        self.candidate_log_probs[0].fill_(-torch.inf)  # a root has only `width` candidates
        self.candidates[0, :, :width], self.candidate_log_probs[0, :, :width] = likeliest, log_probs
        self.fed[0].copy_(torch.arange(width, device=device).expand(self.rows, -1))
        if self.entering is not None and left is not None:
            self.entering.copy_(left[:, None].expand_as(self.entering))

    def _likeliest(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Return the top tokens and their log probabilities."""
        # [nodes, vocab or draft vocab] -> [nodes, width] twice
        logits = logits.float()
        values, places = logits.topk(self.width)
        named = self.ids is not None and logits.shape[-1] == len(self.ids)
        return self.ids[places] if named else places, values - logits.logsumexp(-1, keepdim=True)  # type: ignore[index]

    def advance(self, logits: Tensor, left: Tensor | None) -> Tensor:
        """Go from the nodes of a level, with these logits, to the next level; return the parents of the new nodes."""
        rows, width = self.rows, self.width  # [rows * width, vocab], [rows * width, hidden] -> [rows, width]
        likeliest, probs = self._likeliest(logits)
        probs = probs.view(rows, width, width)
        log_probs = (self.log_probs[..., None] + probs).flatten(1)
        best = log_probs.topk(width)
        candidates, parents = likeliest.view(rows, width * width), best.indices // width
        self.level.add_(1).clamp_(max=len(self.candidates) - 1)
        self.candidates.index_copy_(0, self.level, candidates[None])
        self.candidate_log_probs.index_copy_(0, self.level, log_probs[None])
        self.fed.index_copy_(0, self.level, best.indices[None])
        self.tokens.copy_(candidates.gather(1, best.indices))
        self.log_probs.copy_(best.values)
        if self.entering is not None and left is not None:
            states = left.view(rows, width, -1)
            self.entering.copy_(states.gather(1, parents[..., None].expand_as(states)))
        return parents

    def numbers(self, depth: int, count: int, deepest: Tensor) -> Tensor:
        """Return the `count` likeliest candidates of each row, within its depth limit, and which nodes were fed."""
        # deepest: [rows]; of each row: places, tokens and log probabilities of candidates, then the nodes fed by level
        late = torch.arange(depth, device=deepest.device)[:, None] >= deepest  # [levels, rows]
        log_probs = self.candidate_log_probs[:depth].masked_fill(late[..., None], -torch.inf)
        best = log_probs.transpose(0, 1).flatten(1).topk(count)
        tokens = self.candidates[:depth].transpose(0, 1).flatten(1).gather(1, best.indices)
        fed = self.fed[:depth]
        fed_tokens = self.candidates[:depth].gather(2, fed)
        sides = [fed.transpose(0, 1).flatten(1), fed_tokens.transpose(0, 1).flatten(1)]
        return torch.cat([t.double() for t in (best.indices, tokens, best.values, *sides)], dim=1)


class DeviceTrees:
    """Grows the levels with functions that are captured once, if `memory` (a CUDA graph pool) is given."""

    def __init__(self, levels: TreeLevels, advance: Callable[[], None], memory: Any):
        self.levels, self._memory = levels, memory
        self._advance = self._replayed(advance)
        self._begin: Callable[[], Any] | None = None
        self._ends: dict[tuple[int, int], Callable[[], Any]] = {}
        self._deepest = torch.zeros(levels.rows, dtype=torch.int64, device=levels.tokens.device)

    def _replayed(self, function: Callable[[], Any]) -> Callable[[], Any]:
        return function if self._memory is None else capture(function, self._memory)

    def grow(self, logits: Tensor, left: Tensor | None, shapes: Seq[DraftShape]) -> list[DeviceTree]:
        """Grow trees from roots with these logits. The host waits once, at the end."""
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
    """The tree of one request, read from the device."""

    best: list[int]  # places of the likeliest candidates among those of all levels
    tokens: list[int]
    log_probs: list[float]
    fed: list[list[int]]  # [levels]: which candidates of the level became its nodes
    fed_tokens: list[list[int]]  # [levels]: their tokens

    @classmethod
    def from_numbers(cls, numbers: list[float], count: int, depth: int, width: int) -> DeviceTree:
        """Read one row of `TreeLevels.numbers`."""
        picked, tokens, log_probs = (numbers[i * count : (i + 1) * count] for i in range(3))
        rest = [[int(n) for n in numbers[at : at + width]] for at in range(3 * count, len(numbers), width)]
        return cls([int(n) for n in picked], [int(n) for n in tokens], log_probs, rest[:depth], rest[depth:])

    def draft_tokens(self, shape: DraftShape) -> list[DraftToken]:
        size, place, found = shape.width**2, dict[int, int](), list[DraftToken]()
        log_probs = dict(zip(self.best, self.log_probs, strict=True))
        order = sorted(zip(self.best, self.tokens, strict=True), key=lambda c: (-log_probs[c[0]], c[0]))
        for candidate, token in order[: shape.nodes]:
            level, rank = divmod(candidate, size)
            above = (level - 1) * size + self.fed[level - 1][rank // shape.width] if level else -1
            if log_probs[candidate] == -math.inf or (level and above not in place):
                continue
            place[candidate] = len(found)
            prob = math.exp(log_probs[candidate] - log_probs.get(above, 0.0))
            found.append(DraftToken(token, prob, place.get(above, -1)))
        return found

    def fed_after(self, root: int) -> Tree:
        """Return the tree of the nodes that were fed to the model."""
        tree, width = Tree([root]), len(self.fed[0])
        for level, (chosen, tokens) in enumerate(zip(self.fed[:-1], self.fed_tokens, strict=False)):
            for candidate, token in zip(chosen, tokens, strict=True):
                tree.add(1 + (level - 1) * width + candidate // width if level else 0, token)
        return tree
