"""Chains of a draft that stay on the device: every step feeds its own choice to the next, and the host reads once.

One graph is one step: a token for each row. What changes from step to step (lengths, the choice, the noise's words)
is advanced by the graph itself, so a chain is the same graph replayed. The draft may be the first layers of a model:
then what leaves them is kept, for the others to go on from.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence as Seq
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from outpace.core.lm import DraftToken
from outpace.models.compiled import packing
from outpace.models.compiled.capture import Replay, capture
from outpace.models.hf.module import recording
from outpace.models.hf.stages import LayerSpan
from outpace.sampling.noise import words
from outpace.sampling.sampler import Pick

if TYPE_CHECKING:
    from outpace.models.compiled.cuda_graph import GraphLM

MOST_STEPS = 32
LENGTH, HEAT, STEP = 1, 4, 5  # among what is given


class ChainStart(NamedTuple):
    """Where a row's chain goes on: the token to feed, where its row begins, how many entries it has."""

    token: int
    base: int
    length: int
    pick: Pick
    entering: Tensor | None = None  # [hidden], for a model that takes states


class ChainState(NamedTuple):
    """What the graph reads and advances."""

    # [2, 6, slots], pinned: token, length, base, 1 for a live slot, temperature, step; then what each grows by
    staged: Tensor
    given: Tensor  # the same on the device
    noise: Tensor  # [steps, slots, 2]
    out: Tensor  # [steps, 4, slots]: what `choose` gives
    states: Tensor | None  # [steps, slots, hidden]: what leaves a span of layers
    entering: Tensor | None  # [slots, hidden]: what a model that takes states feeds back to itself

    @classmethod
    def empty(cls, slots: int, lm: GraphLM, span: LayerSpan | None) -> ChainState:
        device, dtype, width = lm.device, lm.model.dtype, lm.quick.config.get_text_config().hidden_size
        states = torch.zeros(MOST_STEPS, slots, width, dtype=dtype, device=device) if span is not None else None
        entering = torch.zeros(slots, width, dtype=dtype, device=device) if lm.feeds else None
        staged = torch.zeros(2, 6, slots, dtype=torch.int64, pin_memory=True)
        noise = torch.zeros(MOST_STEPS, slots, 2, dtype=torch.int64, device=device)
        out = torch.zeros(MOST_STEPS, 4, slots, dtype=torch.float64, device=device)
        return cls(staged, staged.to(device), noise, out, states, entering)


class ChainStep(NamedTuple):
    """A captured step."""

    state: ChainState
    advance: Replay[None]


class DraftedChain(NamedTuple):
    """A row's chain."""

    guesses: list[DraftToken]
    states: Tensor | None  # [steps, hidden], of what was fed


class DraftChains:
    """The step of a model, or of its first layers, captured once for each number of slots."""

    def __init__(self, lm: GraphLM, span: LayerSpan | None = None):
        self.lm, self.span = lm, span
        self._captured: dict[int, ChainStep] = {}
        self._generation = -1

    def run(self, links: Seq[ChainStart], steps: int) -> list[DraftedChain]:
        """The next `steps` tokens of each row, with their probabilities."""
        slots = next(n for n in (2, 4, 8, 16, 32, 64) if n >= len(links))
        state, advance = self._graph(slots)
        self._begin(state, links, steps)
        for _ in range(steps):
            advance()
        tokens, _, probs, _ = state.out[:steps, :, : len(links)].transpose(0, 1).tolist()
        drawn = []
        for i in range(len(links)):
            # A step follows the guess before it, and the first one follows a guess that was made before the chain.
            guesses = [DraftToken(int(t[i]), p[i], step) for step, (t, p) in enumerate(zip(tokens, probs, strict=True))]
            drawn.append(DraftedChain(guesses, None if state.states is None else state.states[:steps, i].clone()))
        return drawn

    def _begin(self, state: ChainState, links: Seq[ChainStart], steps: int) -> None:
        """Where every row stands, in one copy; and the words of the noise, where there is any."""
        state.staged.zero_()
        rows = [[link.token, link.length, link.base, 1] for link in links]
        state.staged[0, :4, : len(rows)] = torch.tensor(rows).T
        state.staged[1, LENGTH, : len(rows)] = 1
        state.staged[1, STEP] = 1
        heat = torch.tensor([link.pick.temperature for link in links], dtype=torch.float64)
        state.staged[0, HEAT, : len(rows)] = heat.view(torch.int64)
        state.given.copy_(state.staged, non_blocking=True)
        if bool(heat.any()):
            noise = torch.zeros(steps, state.given.shape[2], 2, dtype=torch.int64)
            for i, link in enumerate(links):  # the token after position p is chosen with the noise of p + 1
                noise[:, i] = words(link.pick.seed, link.length + self.lm.before + 1 + torch.arange(steps))
            state.noise[:steps].copy_(noise)
        for i, link in enumerate(links):
            if link.entering is not None:
                assert state.entering is not None
                state.entering[i].copy_(link.entering)

    def _graph(self, slots: int) -> ChainStep:
        if self._generation != self.lm.cache.generation:
            self._captured.clear()
            self._generation = self.lm.cache.generation
        if slots not in self._captured:
            state = ChainState.empty(slots, self.lm, self.span)
            self._captured[slots] = ChainStep(state, capture(self._step(state), self.lm.graph_memory))
        return self._captured[slots]

    def _step(self, state: ChainState) -> Callable[[], None]:
        (token, length, base, live, heat, step), growth = state.given
        first = torch.arange(len(token), device=token.device)
        bits = torch.zeros(len(token), packing.WORDS, dtype=torch.int64, device=token.device)
        bits[:, 0] = 1  # of this pass a token sees itself

        def advance() -> None:
            jobs = torch.stack([first, live, base, length], dim=1)
            lanes = self.lm.lanes(base + length, jobs, bits, length)
            given = dict(position_ids=length[None], past_key_values=self.lm.cache, use_cache=True, reach=lanes)
            if state.entering is not None:
                with recording(self.lm.quick, (-1,)) as recorded:
                    logits = self.lm.quick(input_ids=token[None], features=state.entering[None], **given).logits[0]
                state.entering.copy_(recorded[-1])
            elif self.span is None:
                logits = self.lm.quick(input_ids=token[None], **given).logits[0]
            else:
                ran = self.lm.stage(self.lm.quick, self.span).run(token, None, first, **given)
                assert ran.logits is not None and state.states is not None
                logits = ran.logits
                state.states.index_copy_(0, step[:1], ran.states[None])
            noise = state.noise.index_select(0, step[:1])[0]
            chosen = torch.ops.outpace.choose(logits, noise, heat.view(torch.float64))
            state.out.index_copy_(0, step[:1], chosen[None])
            token.copy_(chosen[0])
            state.given[0].add_(growth)

        return advance
