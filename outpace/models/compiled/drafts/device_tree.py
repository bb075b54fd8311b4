"""Draft trees that grow on the device, level by level, and that the host reads once.

At each level the draft ranks the tokens that may follow the nodes of the level before. The candidates with the
likeliest paths become the nodes of the next level. No step needs the host, so on a GPU every step is captured.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from outpace.core.lm import DraftShape, DraftToken
from outpace.core.tree import Tree
from outpace.models.kernels import noised  # noqa: F401 (it defines an operator)
from outpace.sampling.noise import words_of
from outpace.sampling.sampler import Pick

RULES = 3  # numbers of a tree besides its noise: its depth, its width and its temperature


class DraftDevice(NamedTuple):
    """Where a draft runs, and the state that it feeds back to itself with each node."""

    device: torch.device
    hidden: int = 0  # size of the state; 0: the draft takes none
    dtype: torch.dtype = torch.float32


class TreeSizes(NamedTuple):
    """The sizes of the trees that one program grows."""

    rows: int
    levels: int
    width: int  # candidates after a node
    beam: int  # candidates of a level that become nodes

    @property
    def numbers(self) -> int:
        """How many numbers the host sends about the trees."""
        return (RULES + 2 * self.levels) * self.rows


class TreeStart(NamedTuple):
    """What the host says about a tree before it grows."""

    shape: DraftShape
    pick: Pick  # how the target chooses, since a sampled tree is ranked with the same noise
    position: int  # of the first draft token in the text


def rules_of(starts: Seq[TreeStart], sizes: TreeSizes) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return what the host sends about these trees, one per row."""  # [RULES + 2 * levels, rows]
    count, found = len(starts), np.zeros((RULES + 2 * sizes.levels, sizes.rows), dtype=np.int64)
    found[0, :count] = [start.shape.depth for start in starts]
    found[1, :count] = [start.shape.width for start in starts]
    temperatures = np.array([start.pick.temperature for start in starts])
    found[2, :count] = temperatures.view(np.int64)
    if temperatures.any():
        first = np.array([start.position for start in starts])
        positions = (first + np.arange(sizes.levels)[:, None]).reshape(-1)
        words = words_of([start.pick.seed for start in starts] * sizes.levels, positions)
        found[RULES:, :count] = words.reshape(sizes.levels, count, 2).transpose(0, 2, 1).reshape(-1, count)
    return found


class TreeRules(NamedTuple):
    """The rules of the trees of a batch, one row per request, as the device reads them."""

    deepest: Tensor  # [rows]: levels of each tree
    widest: Tensor  # [rows]: candidates after each node
    temperature: Tensor  # [rows]; 0: greedy
    noise: Tensor  # [levels, rows, 2]: the words of the noise of each level's candidates

    @classmethod
    def of_numbers(cls, numbers: Tensor, sizes: TreeSizes) -> TreeRules:
        """Read what `rules_of` made, in place."""
        table = numbers.view(-1, sizes.rows)
        noise = table[RULES:].view(sizes.levels, 2, sizes.rows).transpose(1, 2)
        return cls(table[0], table[1], table[2].view(torch.float64), noise)


class RankedTokens(NamedTuple):
    """The likeliest tokens after some nodes, and the log probabilities that the target chooses them."""

    tokens: Tensor  # [rows, nodes, width]
    log_probs: Tensor  # [rows, nodes, width]


class TreeLevels(NamedTuple):
    """The trees of a batch, one row per request. Candidates of a level are ordered by parent node, then by rank."""

    sizes: TreeSizes
    rules: TreeRules
    sampled: bool  # whether any tree may be sampled; then all candidates are ranked with noise
    level: Tensor  # [1]: the level of the newest nodes
    tokens: Tensor  # [rows, beam]: the newest nodes
    log_probs: Tensor  # [rows, beam]: log probabilities of their paths
    entering: Tensor | None  # [rows, beam, hidden]: input states, for a draft that takes states
    candidates: Tensor  # [levels, rows, beam * width]: candidate tokens
    candidate_log_probs: Tensor  # [levels, rows, beam * width]: log probabilities of their paths
    fed: Tensor  # [levels, rows, beam]: which candidates of a level became its nodes
    ids: Tensor | None  # token ids of the draft vocabulary, if the draft has a smaller one

    @classmethod
    def empty(
        cls, sizes: TreeSizes, rules: TreeRules, sampled: bool, ids: Tensor | None, fed: DraftDevice
    ) -> TreeLevels:
        device, (rows, levels, width, beam) = fed.device, sizes

        def whole(*sizes: int) -> Tensor:
            return torch.zeros(*sizes, dtype=torch.int64, device=device)

        return cls(
            sizes, rules, sampled, level=whole(1), tokens=whole(rows, beam),
            log_probs=torch.zeros(rows, beam, device=device),
            entering=torch.zeros(rows, beam, fed.hidden, dtype=fed.dtype, device=device) if fed.hidden else None,
            candidates=whole(levels, rows, beam * width), fed=whole(levels, rows, beam),
            candidate_log_probs=torch.zeros(levels, rows, beam * width, device=device), ids=ids,
        )  # fmt: skip

    def noise_after(self, level: Tensor) -> Tensor:
        """Return the noise words of the candidates of a level."""  # [1] -> [rows, 1, 2]
        return self.rules.noise.index_select(0, level)[0][:, None]

    def rank(self, logits: Tensor, noise: Tensor) -> RankedTokens:
        """Rank the tokens after some nodes, as the target will choose among them."""
        # [rows, nodes, vocab or draft vocab], [rows, 1 or nodes, 2]
        rows, nodes, vocab = logits.shape
        ids = self.ids if self.ids is not None and vocab == len(self.ids) else None
        scores = logits.float()
        if self.sampled:
            words = noise.expand(rows, nodes, 2).reshape(-1, 2)
            temperatures = self.rules.temperature[:, None].expand(rows, nodes).reshape(-1)
            scores = torch.ops.outpace.noised(scores.flatten(0, 1), words, temperatures, ids).view_as(scores)
        values, places = scores.topk(self.sizes.width)
        log_probs = values - scores.logsumexp(-1, keepdim=True)
        ranks = torch.arange(self.sizes.width, device=logits.device)
        late = ranks >= self.rules.widest[:, None, None]  # [rows, 1, width]
        return RankedTokens(places if ids is None else ids[places], log_probs.masked_fill(late, -torch.inf))

    def open(self, ranked: RankedTokens, left: Tensor | None) -> None:
        """Start the first level from the tokens after the roots and the states that the draft left there."""
        width = self.sizes.width  # [rows, 1, width], [rows, hidden]
        self.level.zero_()
        self.candidate_log_probs[0].fill_(-torch.inf)  # a root has only `width` candidates
        self.candidates[0, :, :width], self.candidate_log_probs[0, :, :width] = (
            ranked.tokens[:, 0],
            ranked.log_probs[:, 0],
        )
        self._extend(self.candidates[0], self.candidate_log_probs[0])
        if self.entering is not None and left is not None:
            self.entering.copy_(left[:, None].expand_as(self.entering))

    def advance(self, ranked: RankedTokens, left: Tensor | None) -> Tensor:
        """Go from the nodes of a level, with these candidates, to the next level; return the new nodes' parents."""
        rows, (_, _, width, beam) = len(self.tokens), self.sizes  # [rows, beam, width], [rows * beam, hidden]
        log_probs = (self.log_probs[..., None] + ranked.log_probs).flatten(1)
        candidates = ranked.tokens.expand(rows, beam, width).flatten(1)
        self.level.add_(1).clamp_(max=len(self.candidates) - 1)
        self.candidates.index_copy_(0, self.level, candidates[None])
        self.candidate_log_probs.index_copy_(0, self.level, log_probs[None])
        parents = self._extend(candidates, log_probs) // width
        if self.entering is not None and left is not None:
            states = left.view(rows, beam, -1)
            self.entering.copy_(states.gather(1, parents[..., None].expand_as(states)))
        return parents

    def _extend(self, candidates: Tensor, log_probs: Tensor) -> Tensor:
        """Make the likeliest candidates the newest nodes; return their places."""  # [rows, beam * width] twice
        best = log_probs.topk(self.sizes.beam)
        self.fed.index_copy_(0, self.level, best.indices[None])
        self.tokens.copy_(candidates.gather(1, best.indices))
        self.log_probs.copy_(best.values)
        return best.indices

    def numbers(self, depth: int, count: int, with_nodes: bool = False) -> Tensor:
        """Return the `count` likeliest candidates of each row, within its depth: places, tokens, log probabilities and
        the places of their parents; with the places and tokens of all nodes, if wanted."""
        # [rows, 4 * count], [rows, 4 * count + 2 * depth * beam]
        size, (_, _, width, beam) = self.candidates.shape[2], self.sizes
        late = torch.arange(depth, device=self.level.device)[:, None] >= self.rules.deepest  # [levels, rows]
        log_probs = self.candidate_log_probs[:depth].masked_fill(late[..., None], -torch.inf)
        best = log_probs.transpose(0, 1).flatten(1).topk(count)
        places = best.indices
        tokens, fed = (side[:depth].transpose(0, 1).flatten(1) for side in (self.candidates, self.fed))
        level, node = places // size - 1, places % size // width  # of the parent, among the nodes of its level
        above = level * size + fed.gather(1, (level * beam + node).clamp(min=0))
        found = [places, tokens.gather(1, places), best.values, above.masked_fill(level < 0, -1)]
        if with_nodes:
            chosen = self.candidates[:depth].gather(2, self.fed[:depth])
            found += [fed, chosen.transpose(0, 1).flatten(1)]
        return torch.cat([side.double() for side in found], dim=1)


class DeviceTree(NamedTuple):
    """The tree of one request, read from the device."""

    places: list[int]  # of the likeliest candidates, among those of all levels
    tokens: list[int]
    log_probs: list[float]
    above: list[int]  # places of their parents; -1: the root
    fed: list[list[int]]  # [levels]: which candidates of the level became its nodes, if that was read
    fed_tokens: list[list[int]]  # [levels]: their tokens

    @classmethod
    def from_numbers(cls, numbers: list[float], count: int, sizes: TreeSizes) -> DeviceTree:
        """Read one row of `TreeLevels.numbers`."""
        places, tokens, log_probs, above = (numbers[i * count : (i + 1) * count] for i in range(4))
        rest = list(map(int, numbers[4 * count :]))
        nodes = [rest[at : at + sizes.beam] for at in range(0, len(rest), sizes.beam)]
        half = len(nodes) // 2
        return cls(
            list(map(int, places)), list(map(int, tokens)), log_probs, list(map(int, above)), nodes[:half], nodes[half:]
        )

    def draft_tokens(self, nodes: int) -> list[DraftToken]:
        """Return the `nodes` likeliest draft tokens, parents first."""
        place, reached, found = {-1: -1}, {-1: 0.0}, list[DraftToken]()
        order = sorted(
            zip(self.places, self.tokens, self.log_probs, self.above, strict=True), key=lambda c: (-c[2], c[0])
        )
        for candidate, token, log_prob, above in order[:nodes]:
            if log_prob == -math.inf or above not in place:
                continue
            place[candidate], reached[candidate] = len(found), log_prob
            found.append(DraftToken(token, math.exp(log_prob - reached[above]), place[above]))
        return found

    def fed_after(self, root: int, width: int) -> Tree:
        """Return the tree of the nodes that were fed to the model; `width` is that of its candidates."""
        tree, beam = Tree([root]), len(self.fed[0])
        for level, (chosen, tokens) in enumerate(zip(self.fed[:-1], self.fed_tokens, strict=False)):
            for candidate, token in zip(chosen, tokens, strict=True):
                tree.add(1 + (level - 1) * beam + candidate // width if level else 0, token)
        return tree
