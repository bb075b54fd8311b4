"""Draft chains on the device: each step feeds its choice to the next step, and the host reads once, at the end.

One graph runs one step, with one token for each slot. The graph itself advances what changes between steps (lengths,
the chosen token, the noise words), so a chain replays the same graph. For an early-exit draft, the hidden states of the
first layers are kept, so that the other layers can resume from them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence as Seq
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from outpace.core.lm import DraftShape, DraftToken
from outpace.core.tree import Tree
from outpace.models.compiled import packing
from outpace.models.compiled.graph_pass import BATCHES, Replay, capture, rounded
from outpace.models.hf.module import STATE, recording
from outpace.models.hf.stages import LayerSpan
from outpace.models.segment import Segment
from outpace.sampling.noise import words
from outpace.sampling.sampler import Pick

if TYPE_CHECKING:
    from outpace.models.compiled.cuda_graph import GraphRunner

MOST_STEPS = 32
LENGTH, TEMPERATURE, STEP = 1, 4, 5  # rows of `ChainState.given`


class ChainStart(NamedTuple):
    """Where a slot's chain starts: the token to feed, the first pool entry of the slot, and its length."""

    token: int
    base: int
    length: int
    pick: Pick
    entering: Tensor | None = None  # [hidden], for a model that takes features


class ChainState(NamedTuple):
    """The tensors that the graph reads and advances."""

    # [2, 6, batch], pinned: token, length, base, 1 for a live slot, temperature, step; then their increments per step
    staged: Tensor
    given: Tensor  # the same on the device
    noise: Tensor  # [steps, batch, 2]
    out: Tensor  # [steps, 4, batch]: the results of `choose`
    states: Tensor | None  # [steps, batch, hidden]: output of a span of layers
    entering: Tensor | None  # [batch, hidden]: states that a model with features feeds back to itself

    @classmethod
    def empty(cls, batch: int, runner: GraphRunner, span: LayerSpan | None) -> ChainState:
        lm = runner.lm
        device, dtype, width = lm.device, lm.model.dtype, runner.module.config.get_text_config().hidden_size
        states = torch.zeros(MOST_STEPS, batch, width, dtype=dtype, device=device) if span is not None else None
        entering = torch.zeros(batch, width, dtype=dtype, device=device) if lm.takes_features else None
        staged = torch.zeros(2, 6, batch, dtype=torch.int64, pin_memory=True)
        noise = torch.zeros(MOST_STEPS, batch, 2, dtype=torch.int64, device=device)
        out = torch.zeros(MOST_STEPS, 4, batch, dtype=torch.float64, device=device)
        return cls(staged, staged.to(device), noise, out, states, entering)


class ChainStep(NamedTuple):
    """A captured draft step."""

    state: ChainState
    advance: Replay[None]


class DraftedChain(NamedTuple):
    """The drafted chain of one slot."""

    tokens: list[DraftToken]
    states: Tensor | None  # [steps, hidden]: states of the fed tokens


class DraftChains:
    """The draft step of a model, or of its first layers, captured once per batch size."""

    def __init__(self, runner: GraphRunner, span: LayerSpan | None = None):
        self.runner, self.span = runner, span
        self._captured: dict[int, ChainStep] = {}
        self._generation = -1

    def draft(
        self, slots: Seq[int], tokens: Seq[int], shapes: Seq[DraftShape], picks: Seq[Pick]
    ) -> list[list[DraftToken]] | None:
        """Draft chains of the whole model after each slot and its token."""
        lm = self.runner.lm
        if not self.runner.most_tokens or len(slots) > packing.MOST_SEGMENTS:
            return None  # compiled passes were given up, or there are too many slots for one pass
        steps = min(max(shape.depth for shape in shapes), MOST_STEPS)
        # The first pass also feeds the pending tokens of the slots.
        scores = lm.score([Tree([token]) for token in tokens], slots, picks=picks)
        found = []
        for score in scores:
            assert score.picked is not None, "the graph makes choices without filters"
            found.append([DraftToken(score.picked.tokens[0], score.picked.probs[0])])
        if steps > 1:
            chain = Tree.chain([0] * steps)
            lm.reserve([Segment(slot, lm.slots[slot].length, [], chain) for slot in slots])
            starts = [
                ChainStart(
                    drafted[0].token, self.runner.cache.base(slot), lm.slots[slot].length + 1, pick, self._left(slot)
                )
                for drafted, slot, pick in zip(found, slots, picks, strict=True)
            ]
            for drafted, more in zip(found, self.run(starts, steps - 1), strict=True):
                drafted += more.tokens
        for slot, root, drafted in zip(slots, tokens, found, strict=True):  # the last draft token was not fed
            lm.slots[slot].layout = Tree.chain([root, *(token.token for token in drafted[:-1])])
            lm.slots[slot].scored = len(drafted)
        return found

    def _left(self, slot: int) -> Tensor | None:
        """Return the input state of a slot's first draft token, for a model that takes features."""  # [hidden]
        left = self.runner.lm.slots[slot].provisional
        return left[0] if self.runner.lm.takes_features and left is not None else None

    def run(self, starts: Seq[ChainStart], steps: int) -> list[DraftedChain]:
        """Return the next `steps` draft tokens of each slot, with their probabilities."""
        state, advance = self._graph(rounded(len(starts), BATCHES))
        self._begin(state, starts, steps)
        for _ in range(steps):
            advance()
        tokens, _, probs, _ = state.out[:steps, :, : len(starts)].transpose(0, 1).tolist()
        chains = []
        for i in range(len(starts)):
            # Each token follows the one before it; the first follows a token that was drafted before the chain.
            drafted = [DraftToken(int(t[i]), p[i], step) for step, (t, p) in enumerate(zip(tokens, probs, strict=True))]
            chains.append(DraftedChain(drafted, None if state.states is None else state.states[:steps, i].clone()))
        return chains

    def _begin(self, state: ChainState, starts: Seq[ChainStart], steps: int) -> None:
        """Send the start of every slot in one copy, and the noise words where requests sample."""
        state.staged.zero_()
        rows = [[start.token, start.length, start.base, 1] for start in starts]
        state.staged[0, :4, : len(rows)] = torch.tensor(rows).T
        state.staged[1, LENGTH, : len(rows)] = 1
        state.staged[1, STEP] = 1
        temperatures = torch.tensor([start.pick.temperature for start in starts], dtype=torch.float64)
        state.staged[0, TEMPERATURE, : len(rows)] = temperatures.view(torch.int64)
        state.given.copy_(state.staged, non_blocking=True)
        if bool(temperatures.any()):
            noise = torch.zeros(steps, state.given.shape[2], 2, dtype=torch.int64)
            for i, start in enumerate(starts):  # the token after position p is chosen with the noise of p + 1
                positions = start.length + self.runner.lm.before + 1 + torch.arange(steps)
                noise[:, i] = words(start.pick.seed, positions)
            state.noise[:steps].copy_(noise)
        for i, start in enumerate(starts):
            if start.entering is not None:
                assert state.entering is not None
                state.entering[i].copy_(start.entering)

    def _graph(self, batch: int) -> ChainStep:
        if self._generation != self.runner.cache.generation:
            self._captured.clear()
            self._generation = self.runner.cache.generation
        if batch not in self._captured:
            state = ChainState.empty(batch, self.runner, self.span)
            self._captured[batch] = ChainStep(state, capture(self._step(state), self.runner.graph_memory))
        return self._captured[batch]

    def _step(self, state: ChainState) -> Callable[[], None]:
        runner = self.runner
        (token, length, base, live, temperature, step), growth = state.given
        first = torch.arange(len(token), device=token.device)
        bits = torch.zeros(len(token), packing.WORDS, dtype=torch.int64, device=token.device)
        bits[:, 0] = 1  # of the entries of this pass, a token sees only its own

        def advance() -> None:
            segments = torch.stack([first, live, base, length], dim=1)
            given = runner.module_inputs(length, runner.attention(base + length, segments, bits, length))
            if state.entering is not None:
                with recording(runner.module, STATE) as recorded:
                    logits = runner.module(input_ids=token[None], features=state.entering[None], **given).logits[0]
                state.entering.copy_(recorded[-1])
            elif self.span is None:
                logits = runner.module(input_ids=token[None], **given).logits[0]
            else:
                out = runner.stages.of_span(self.span).run(token, None, first, **given)
                assert out.logits is not None and state.states is not None
                logits = out.logits
                state.states.index_copy_(0, step[:1], out.states[None])
            noise = state.noise.index_select(0, step[:1])[0]
            chosen = torch.ops.outpace.choose(logits, noise, temperature.view(torch.float64))
            state.out.index_copy_(0, step[:1], chosen[None])
            token.copy_(chosen[0])
            state.given[0].add_(growth)

        return advance
