"""Trees that a draft grows by itself: every level feeds its likeliest nodes to the next, and the host reads once.

One program is one level: so many nodes of each row. It lists the likeliest tokens behind each of them, and makes the
likeliest of those, by the chance of their whole path, the nodes of the next level. Nothing of it asks the host.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence as Seq
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from outpace.models import lane
from outpace.models.chosen import Guess, Shape
from outpace.models.job import Job
from outpace.models.taps import recording
from outpace.tree import Tree

if TYPE_CHECKING:
    from outpace.models.fast import FastLM

STATE = (-1,)  # the tap of what a model feeds back to itself


class State(NamedTuple):
    """What the program reads and advances. Candidates of a level lie by the node that they follow, then by rank."""

    place: Tensor  # [2, rows]: where the row begins in the pool, its entries with the root
    level: Tensor  # [1]: of the nodes that are fed next
    own: Tensor  # [levels, width, words]: the bit of each node among the ancestors
    tokens: Tensor  # [rows, width]: the nodes that are fed next
    reach: Tensor  # [rows, width]: logarithm of the chance of their paths
    bits: Tensor  # [rows, width, words]
    entering: Tensor | None  # [rows, width, hidden], for a model that takes states
    listed: Tensor  # [levels, rows, width * width]: tokens that could follow
    reached: Tensor  # the same: their reach
    fed: Tensor  # [levels, rows, width]: which candidates of a level became its nodes

    @classmethod
    def empty(cls, rows: int, width: int, lm: FastLM) -> State:
        levels, device = lane.LONGEST // width + 1, lm.device

        def whole(*sizes: int) -> Tensor:
            return torch.zeros(*sizes, dtype=torch.int64, device=device)

        own = torch.zeros(levels * width, lane.WORDS, dtype=torch.int64)
        for node in range(min(levels * width, lane.LONGEST)):
            own[node, node // 64] = torch.tensor(1) << node % 64
        entering = None
        if lm.feeds:
            hidden = lm.quick.config.get_text_config().hidden_size
            entering = torch.zeros(rows, width, hidden, dtype=lm.model.dtype, device=device)
        return cls(
            place=whole(2, rows), level=whole(1), own=own.view(levels, width, lane.WORDS).to(device),
            tokens=whole(rows, width), reach=torch.zeros(rows, width, device=device),
            bits=whole(rows, width, lane.WORDS), entering=entering,
            listed=whole(levels, rows, width * width), fed=whole(levels, rows, width),
            reached=torch.zeros(levels, rows, width * width, device=device),
        )  # fmt: skip

    @property
    def rows(self) -> int:
        return self.tokens.shape[0]

    @property
    def width(self) -> int:
        return self.tokens.shape[1]


class Level(NamedTuple):
    """The program of a level."""

    state: State
    advance: Callable[[], None]


class Branches:
    """Trees of a model with compiled passes."""

    def __init__(self, lm: FastLM):
        self.lm = lm
        self._levels: dict[tuple[int, int], Level] = {}

    def fit(self, shapes: Seq[Shape]) -> bool:
        """Whether trees of these shapes can be grown, a row each."""
        lm, width = self.lm, shapes[0].width
        entries = 1 + (max(shape.depth for shape in shapes) - 1) * width  # the last level is not fed
        return (
            1 < width <= lm.vocab
            and len(shapes) <= lane.MOST_JOBS
            and len(shapes) * width <= lm.most_tokens
            and entries <= lane.LONGEST
            and all(window is None or window > entries for window in lm.windows)
        )

    def reserve(self, rows: Seq[int], shapes: Seq[Shape]) -> None:
        """Room for all that will be fed, before anything is; raises `CacheFull`."""
        fed = (max(shape.depth for shape in shapes) - 1) * shapes[0].width
        held = [(row, self.lm.rows[row]) for row in rows]
        self.lm.reserve([Job(index, len(row.tokens), row.pending, Tree.chain([0] * (1 + fed))) for index, row in held])

    @torch.no_grad()
    def grow(self, rows: Seq[int], tokens: Seq[int], shapes: Seq[Shape]) -> list[list[Guess]]:
        """The likeliest `nodes` guesses behind each row and its token, parents first; all of one width."""
        lm, width, depth = self.lm, shapes[0].width, max(shape.depth for shape in shapes)
        scores = lm.score([Tree([token]) for token in tokens], rows)  # with what the rows have pending
        state, advance = self._level(len(rows), width)
        self._open(state, torch.cat([score.logits for score in scores]), rows)
        for _ in range(depth - 1):
            advance()
        found = _read(state, shapes)
        for row, token, read in zip(rows, tokens, found, strict=True):
            held = lm.rows[row]
            held.tree = Tree([token]) if lm.feeds else read.fed_behind(token)  # states that were fed back are no text's
            held.scored = len(held.tree)
        return [read.guesses(shape) for read, shape in zip(found, shapes, strict=True)]

    def _open(self, state: State, logits: Tensor, rows: Seq[int]) -> None:
        """From the law behind the roots: the first level."""  # [rows, vocab]
        lm, width = self.lm, state.width
        place = [[lm.cache.base(row) for row in rows], [len(lm.rows[row].tokens) + 1 for row in rows]]
        state.place.copy_(torch.tensor(place))
        state.level.zero_()
        values, likeliest = logits.float().topk(width)
        reach = values - logits.float().logsumexp(-1, keepdim=True)
        state.tokens.copy_(likeliest)
        state.reach.copy_(reach)
        state.bits.copy_(state.own[0].expand_as(state.bits))
        state.reached[0].fill_(-torch.inf)  # one node has fewer candidates than so many
        state.listed[0, :, :width], state.reached[0, :, :width] = likeliest, reach
        state.fed[0].copy_(torch.arange(width).expand(state.rows, -1))
        if state.entering is not None:
            for i, row in enumerate(rows):
                left = lm.rows[row].provisional
                assert left is not None, "a model that takes states leaves some"
                state.entering[i] = left[-1]

    def _level(self, rows: int, width: int) -> Level:
        if (rows, width) not in self._levels:
            state = State.empty(rows, width, self.lm)
            self._levels[rows, width] = Level(state, self._program(state))
        return self._levels[rows, width]

    def _program(self, state: State) -> Callable[[], None]:
        rows, width, device = state.rows, state.width, state.tokens.device
        base, length = state.place
        ranks, first = torch.arange(width, device=device), torch.arange(rows, device=device) * width
        many = torch.full_like(first, width)
        none = torch.zeros(max(2 - rows, 0), 4, dtype=torch.int64, device=device)  # one job is another program

        def advance() -> None:
            where = ((base + length + state.level * width)[:, None] + ranks).flatten()
            positions = (length + state.level).repeat_interleave(width)
            jobs = torch.cat([torch.stack([first, many, base, length], dim=1), none])
            lanes = self.lm.lanes(where, jobs, state.bits.flatten(0, 1), positions)
            given = dict(position_ids=positions[None], past_key_values=self.lm.cache, use_cache=True, reach=lanes)
            if state.entering is not None:
                given["features"] = state.entering.flatten(0, 1)[None]
            with recording(self.lm.quick, STATE if state.entering is not None else ()) as recorded:
                logits = self.lm.quick(input_ids=state.tokens.flatten()[None], **given).logits[0].float()
            _advance(state, logits, recorded[-1] if recorded else None)

        return advance


def _advance(state: State, logits: Tensor, left: Tensor | None) -> None:
    """From the nodes of a level, whose laws these are, to the next."""  # [rows * width, vocab], [.., hidden]
    rows, width = state.rows, state.width
    values, likeliest = logits.topk(width)
    chances = (values - logits.logsumexp(-1, keepdim=True)).view(rows, width, width)
    reach = (state.reach[..., None] + chances).flatten(1)
    best = reach.topk(width)
    listed, parents = likeliest.view(rows, width * width), best.indices // width  # [rows, width]
    state.level.add_(1)
    state.listed.index_copy_(0, state.level, listed[None])
    state.reached.index_copy_(0, state.level, reach[None])
    state.fed.index_copy_(0, state.level, best.indices[None])
    state.tokens.copy_(listed.gather(1, best.indices))
    state.reach.copy_(best.values)
    above = state.bits.gather(1, parents[..., None].expand_as(state.bits))
    state.bits.copy_(above | state.own.index_select(0, state.level))
    if state.entering is not None and left is not None:
        states = left.view(rows, width, -1)
        state.entering.copy_(states.gather(1, parents[..., None].expand_as(states)))


class Read(NamedTuple):
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


def _read(state: State, shapes: Seq[Shape]) -> list[Read]:
    """All rows in one look."""
    rows, width, depth = len(shapes), state.width, max(shape.depth for shape in shapes)
    for row, shape in enumerate(shapes):
        state.reached[shape.depth : depth, row].fill_(-torch.inf)  # deeper than this row may go
    reached = state.reached[:depth, :rows].transpose(0, 1).flatten(1)  # [rows, levels * width * width]
    best = reached.topk(min(max(shape.nodes for shape in shapes), reached.shape[1]))
    tokens = state.listed[:depth, :rows].transpose(0, 1).flatten(1).gather(1, best.indices)
    fed = state.fed[:depth, :rows]
    words = state.listed[:depth, :rows].gather(2, fed)
    sides = [fed.transpose(0, 1).flatten(1), words.transpose(0, 1).flatten(1)]
    numbers = torch.cat([t.double() for t in (best.indices, tokens, best.values, *sides)], dim=1).tolist()
    count, found = best.indices.shape[1], []
    for row in numbers:
        picked, guessed, reach = (row[i * count : (i + 1) * count] for i in range(3))
        rest = [[int(n) for n in row[at : at + width]] for at in range(3 * count, len(row), width)]
        found.append(Read([int(n) for n in picked], [int(n) for n in guessed], reach, rest[:depth], rest[depth:]))
    return found
