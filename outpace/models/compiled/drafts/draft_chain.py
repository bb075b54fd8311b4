"""Draft chains on the device: each step feeds its choice to the next step, and the host reads once, at the end.

The first graph feeds the pending tokens and the root of every slot. Another runs one step, with one token for each
slot. The graphs themselves advance what changes between steps (lengths, the chosen token, the noise words), so a chain
replays the same graph. For an early-exit draft, the hidden states of the first layers are kept, so that the other
layers can resume from them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence as Seq
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from outpace.core.lm import DraftShape, DraftToken
from outpace.core.tree import Tree
from outpace.models.compiled import packing
from outpace.models.compiled.drafts.device_tree import TreeRules, TreeSizes, TreeStart, rules_of
from outpace.models.compiled.drafts.root_pass import RootPass, RootSize, root_segments
from outpace.models.compiled.graph_pass import BATCHES, Replay, Staging, capture, rounded
from outpace.models.hf.module import STATE, recording
from outpace.models.hf.stages import LayerSpan
from outpace.models.segment import Segment
from outpace.models.transfer import HostCopy
from outpace.sampling.sampler import Pick

if TYPE_CHECKING:
    from outpace.models.compiled.cuda_graph import GraphRunner

MOST_STEPS = 32
TOKEN, LENGTH, LIVE, STEP, ORIGINS = range(5)  # rows of `ChainState.given`; the last one for each group of layers


class ChainStart(NamedTuple):
    """Where a slot's chain starts: the token to feed, and the length of the slot."""

    slot: int
    token: int
    length: int
    pick: Pick


class ChainState:
    """The tensors that the graphs of one batch size read and advance."""

    def __init__(self, batch: int, runner: GraphRunner, span: LayerSpan | None):
        lm = runner.lm
        device, dtype, width = lm.device, lm.model.dtype, runner.module.config.get_text_config().hidden_size
        self.sizes = TreeSizes(batch, MOST_STEPS, 1, 1)
        self.given = torch.zeros(ORIGINS + len(runner.cache.groups), batch, dtype=torch.int64, device=device)
        self._sent = torch.zeros(self.sizes.numbers, dtype=torch.int64, device=device)
        self.rules = TreeRules.of_numbers(self._sent, self.sizes)
        self.out = torch.zeros(MOST_STEPS, 4, batch, dtype=torch.float64, device=device)  # the results of `choose`
        # [steps, batch, hidden]: output of a span of layers; [batch, hidden]: states that a head feeds back to itself.
        self.states = torch.zeros(MOST_STEPS, batch, width, dtype=dtype, device=device) if span is not None else None
        self.entering = torch.zeros(batch, width, dtype=dtype, device=device) if lm.takes_features else None
        self.found = HostCopy(self.out)

    def choose(self, logits: Tensor) -> None:
        """Choose the token of this step, and make it the one that the next step feeds."""  # [batch, vocab]
        token, step = self.given[TOKEN], self.given[STEP, :1]
        noise = self.rules.noise.index_select(0, step)[0]
        chosen = torch.ops.outpace.choose(logits, noise, self.rules.temperature)
        self.out.index_copy_(0, step, chosen[None])
        token.copy_(chosen[0])

    def begin(self, places: Tensor, numbers: Tensor) -> None:
        """Place the first step after these entries."""  # [2 + groups, batch] as in `RootPass.places`
        self._sent.copy_(numbers)
        self.given[LENGTH:STEP].copy_(places[:2])
        self.given[ORIGINS:].copy_(places[2:])
        self.given[STEP].zero_()

    def step(self) -> None:
        """Go on by one token."""
        self.given[LENGTH].add_(self.given[LIVE])
        self.given[STEP].add_(1)


class ChainStep(NamedTuple):
    """A captured draft step, and the inputs of a chain that starts at tokens which the host knows."""

    state: ChainState
    advance: Replay[None]
    staging: Staging
    begin: Replay[None]


class DraftedChain(NamedTuple):
    """The drafted chain of one slot."""

    tokens: list[DraftToken]
    states: Tensor | None  # [steps, hidden]: states of the fed tokens


class DraftChains:
    """The draft step of a model, or of its first layers, captured once per batch size."""

    def __init__(self, runner: GraphRunner, span: LayerSpan | None = None):
        self.runner, self.span = runner, span
        self._captured: dict[int, ChainStep] = {}
        self._firsts: dict[tuple[int, int], tuple[RootPass, Replay[None]]] = {}  # by tokens and batch size
        self._generation = -1
        self._memory: Any = None

    def draft(
        self, slots: Seq[int], tokens: Seq[int], shapes: Seq[DraftShape], picks: Seq[Pick]
    ) -> list[list[DraftToken]] | None:
        """Draft chains of the whole model after each slot and its token."""
        lm = self.runner.lm
        if not self.runner.most_tokens or len(slots) > packing.MOST_SEGMENTS:
            return None  # compiled passes were given up, or there are too many slots for one pass
        steps = min(max(shape.depth for shape in shapes), MOST_STEPS)
        fed = Tree.chain([0] * steps)
        lm.reserve([Segment(slot, lm.slots[slot].length, lm.slots[slot].pending, fed) for slot in slots])
        segments = root_segments(self.runner, slots, tokens)
        if not packing.fits(segments, lm.windows, self.runner.most_tokens):
            lm.catch_up(slots)  # too many tokens for one pass
            segments = root_segments(self.runner, slots, tokens)
        return self.runner.attempt(segments, lambda: self._whole(segments, picks, steps))

    @torch.no_grad()
    def _whole(self, segments: Seq[Segment], picks: Seq[Pick], steps: int) -> list[list[DraftToken]]:
        lm = self.runner.lm
        program = self._graph(rounded(len(segments), BATCHES))
        state = program.state
        size = RootSize.of_segments(segments, state.sizes.numbers, state.sizes.rows, exact=False)
        root, first = self._first(state, size, segments[0].features)
        ends = [segment.start + len(segment.pending) + lm.before + 1 for segment in segments]
        shape = DraftShape(steps)
        root.send(
            segments, rules_of([TreeStart(shape, *given) for given in zip(picks, ends, strict=True)], state.sizes)
        )
        first()
        root.staging.mark_in_use()
        for _ in range(steps - 1):
            program.advance()
        found = self._read(state, len(segments), steps, -1)
        for segment, drafted in zip(segments, found, strict=True):  # the last draft token was not fed
            chain = Tree.chain([segment.tree.tokens[0], *(token.token for token in drafted[:-1])])
            lm.slots[segment.slot].take(segment, chain)
        return found

    def _first(self, state: ChainState, size: RootSize, states: Tensor | None) -> tuple[RootPass, Replay[None]]:
        key = size.tokens, size.rows
        if key not in self._firsts:
            root = RootPass(self.runner, size, states, narrow=False)

            def run() -> None:
                out = root.run()
                state.begin(root.places, root.numbers)
                state.choose(out.logits)
                if state.entering is not None and out.left is not None:
                    state.entering.copy_(out.left)
                state.given[STEP].add_(1)

            self._firsts[key] = root, capture(run, self._memory)
        return self._firsts[key]

    def run(self, starts: Seq[ChainStart], steps: int) -> list[DraftedChain]:
        """Return the next `steps` draft tokens of each slot, with their probabilities."""
        program = self._graph(rounded(len(starts), BATCHES))
        state = program.state
        ahead = self.runner.lm.before + 1  # the token after position p is chosen with the noise of p + 1
        rules = [TreeStart(DraftShape(steps), start.pick, start.length + ahead) for start in starts]
        host = program.staging.open()
        cache = self.runner.cache
        places = np.zeros((3 + len(cache.groups), state.sizes.rows), dtype=np.int64)
        rows = [[start.token, start.length, 1, *cache.origins(start.slot)] for start in starts]
        places[:, : len(starts)] = np.array(rows).T
        host[: places.size] = places.reshape(-1)
        host[places.size :] = rules_of(rules, state.sizes).reshape(-1)
        program.staging.send()
        program.begin()
        program.staging.mark_in_use()
        for _ in range(steps):
            program.advance()
        found = self._read(state, len(starts), steps, 0)
        return [
            DraftedChain(drafted, None if state.states is None else state.states[:steps, i].clone())
            for i, drafted in enumerate(found)
        ]

    def _read(self, state: ChainState, rows: int, steps: int, parent: int) -> list[list[DraftToken]]:
        """Read the chains, whose first tokens follow this one. This is where the host waits."""
        tokens, _, probs, _ = state.found.read()[:steps, :, :rows].permute(1, 2, 0).tolist()
        return [
            [DraftToken(int(token), prob, parent + step) for step, (token, prob) in enumerate(zip(*row, strict=True))]
            for row in zip(tokens, probs, strict=True)
        ]

    def _graph(self, batch: int) -> ChainStep:
        if self._generation != self.runner.cache.generation:
            self._captured.clear()
            self._firsts.clear()
            self._generation, self._memory = self.runner.cache.generation, self.runner.new_pool()
        if batch not in self._captured:
            state = ChainState(batch, self.runner, self.span)
            rows = 3 + len(self.runner.cache.groups)
            staging = Staging(rows * batch + state.sizes.numbers, self.runner.lm.device)
            places = staging.given[: rows * batch].view(rows, batch)

            def begin() -> None:
                state.begin(places[1:], staging.given[rows * batch :])
                state.given[TOKEN].copy_(places[0])

            steps = [capture(function, self._memory) for function in (self._step(state), begin)]
            self._captured[batch] = ChainStep(state, steps[0], staging, steps[1])
        return self._captured[batch]

    def _step(self, state: ChainState) -> Callable[[], None]:
        runner = self.runner
        token, length, live, step, *origins = state.given
        first = torch.arange(len(token), device=token.device)
        bits = torch.zeros(len(token), packing.WORDS, dtype=torch.int64, device=token.device)
        bits[:, 0] = 1  # of the entries of this pass, a token sees only its own

        def advance() -> None:
            segments = [torch.stack([first, live, origin, length], dim=1) for origin in origins]
            where = [origin + length for origin in origins]
            given = runner.module_inputs(length, runner.attention(where, segments, bits, length))
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
            state.choose(logits)
            state.step()

        return advance
