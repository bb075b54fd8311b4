"""Parallel heads in captured graphs: one graph reads new states, fills the slots of all requests and grows the trees.

Keys and values of the texts lie in one pool, each text in a region of it, so everything that a graph reads has a fixed
place. The host sends one small buffer, and reads one: the finished trees.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence as Seq
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from outpace.core.lm import DraftShape, DraftToken
from outpace.drafting import slot_trees
from outpace.heads.parallel import Parallel, Text, TextInputs
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
from outpace.models.compiled.graph_pass import BATCHES, SIZES, Staging, replayed, rounded
from outpace.models.compiled.packing import CompiledAttention
from outpace.models.hf.attention import AttentionRule
from outpace.models.hf.cache import PooledCache
from outpace.models.hf.tolerance import apart, tolerance
from outpace.models.transfer import HostCopy, sent
from outpace.sampling.sampler import Pick

logger = logging.getLogger(__name__)
STATES = (8, *SIZES[3:], 1024, 2048)  # states that a graph reads, rounded up
NODES = (8, 16, 32, 64, 96, 128, 256)  # nodes of a tree, rounded up
MOST_READ = 64  # states of a text that a graph reads; of a longer one, the first are read before
PART = 1024  # states that are read at a time before a graph runs
MOST_LOGITS = 2**29  # of all slots of a draft, beyond which they would take too much memory
COLUMNS = 5  # of a text: newest token, its position, first pool entry, 1 for a used row, place of its last state


class SlotRequest(NamedTuple):
    """A request's part in a draft."""

    slot: int  # in `SlotGraphs`
    first: int  # position of the first of `states`
    states: Tensor  # [states, taps * hidden]: the target's states that were not read, up to the last one
    token: int  # the newest one, which has no state yet
    shape: DraftShape
    pick: Pick

    @property
    def start(self) -> int:
        """The position of the newest token."""
        return self.first + len(self.states)


class ProgramSize(NamedTuple):
    """What needs a graph of its own."""

    states: int
    sizes: TreeSizes
    nodes: int
    sampled: bool


class PooledTexts:
    """The texts of a draft in a pool (implements `heads.parallel.TextCache`)."""

    def __init__(self, cache: PooledCache, entries: Tensor, blocks: tuple[Tensor, ...] = ()):
        """`entries` are the pool's entries for new states; `blocks` say where blocks are and what they see."""
        self.cache, self.entries, self.blocks = cache, entries, blocks

    def write(self, layer: int, keys_values: Tensor) -> None:  # [2, kv heads, states, dim]
        for side, new in zip(self.cache.sides[layer], keys_values, strict=True):
            side.index_copy_(0, self.entries, new.transpose(0, 1))

    def attend(self, layer: int, queries: Tensor, keys_values: Tensor) -> Tensor:
        """Attend from all blocks at once."""  # [heads, texts * size, dim], [2, kv heads, texts * size, dim]
        where, segments, bits, positions = self.blocks
        plan = CompiledAttention(*self.cache.sides[layer], where, segments, bits, positions, 0)
        rule = AttentionRule(queries.shape[-1] ** -0.5, None, None)
        found = plan.attend(torch.nn.Identity(), queries[None], keys_values[0][None], keys_values[1][None], rule)
        return found[0].transpose(0, 1)


class SlotProgram:
    """A captured draft of one size."""

    def __init__(self, graphs: SlotGraphs, size: ProgramSize, states: Tensor):
        """`states` are examples of those that it reads."""  # [states, taps * hidden]
        self.graphs, self.size, head = graphs, size, graphs.head
        rows, device = size.sizes.rows, graphs.device
        self.staging = Staging(2 * size.states + COLUMNS * rows + size.sizes.numbers, device)
        self.hidden = states.new_zeros(size.states, states.shape[1])
        given = self.staging.given
        self.positions, self.entries = given[: 2 * size.states].view(2, size.states)
        self.texts = given[2 * size.states : 2 * size.states + COLUMNS * rows].view(COLUMNS, rows)
        embed = head.embed.weight
        fed = DraftDevice(device, embed.shape[1] if head.link is not None else 0, embed.dtype)
        rules = TreeRules.of_numbers(given[2 * size.states + COLUMNS * rows :], size.sizes)
        self.levels = TreeLevels.empty(size.sizes, rules, size.sampled, head.ids, fed)
        self._block = torch.arange(getattr(head, "size", 1), device=device)
        self._first = torch.arange(rows, device=device) * len(self._block)
        self._bits = _all_seen(rows * len(self._block), len(self._block)).to(device)
        self._run = replayed(self._whole, graphs.memory)
        self._copy = HostCopy(self._run())

    def slots(self) -> Tensor:
        """Read the new states, and fill the slots."""  # [texts, slots, hidden]
        tokens, starts, bases, live, last = self.texts
        cache, inputs = None, TextInputs(self.hidden, self.positions, last, tokens, starts)
        if self.graphs.cache is not None:
            where = ((bases + starts)[:, None] + self._block).flatten()  # of rows without a text: scrap entries
            positions = (starts[:, None] + self._block).flatten()
            segments = torch.stack([self._first, live * len(self._block), bases, starts], dim=1)
            cache = PooledTexts(self.graphs.cache, self.entries, (where, segments, self._bits, positions))
        return self.graphs.head.fill(inputs, cache, self.size.sizes.levels)

    def _whole(self) -> Tensor:
        slots, depth = self.slots(), self.size.sizes.levels
        slot_trees.grow(self.graphs.head, self.levels, slots, self.texts[0], depth)
        return self.levels.numbers(depth, self.size.nodes)

    def send(self, requests: Seq[SlotRequest]) -> None:
        """Send what is new to the device, without waiting for it."""
        states, rows, sizes = self.size.states, len(requests), self.size.sizes
        host, cache = self.staging.open(), self.graphs.cache
        bases = [0 if cache is None else cache.origins(request.slot)[0] for request in requests]
        counts = [len(request.states) for request in requests]
        positions = np.concatenate([np.arange(r.first, r.start) for r in requests])
        host[: len(positions)] = positions
        host[states : 2 * states] = np.arange(states) % SCRAP
        host[states : states + len(positions)] = positions + np.repeat(bases, counts)
        table = host[2 * states : 2 * states + COLUMNS * sizes.rows].reshape(COLUMNS, sizes.rows)
        table[:] = 0
        table[0, :rows], table[1, :rows] = [r.token for r in requests], [r.start for r in requests]
        table[2, :rows], table[3, :rows] = bases, 1
        table[4, :rows] = np.cumsum(counts) - 1
        starts = [TreeStart(r.shape, r.pick, r.start + 1) for r in requests]
        host[2 * states + table.size :] = rules_of(starts, sizes).reshape(-1)
        self.staging.send()
        torch.cat([request.states for request in requests], out=self.hidden[: len(positions)])

    def draft(self, requests: Seq[SlotRequest]) -> list[list[DraftToken]]:
        """Draft all trees. The host waits once, at the end."""
        self.send(requests)
        self._copy.source = self._run()
        self.staging.mark_in_use()
        numbers = self._copy.read()[: len(requests)].tolist()
        trees = [DeviceTree.from_numbers(row, self.size.nodes, self.size.sizes) for row in numbers]
        return [tree.draft_tokens(request.shape.nodes) for tree, request in zip(trees, requests, strict=True)]


class SlotGraphs:
    """The captured drafts of one head, and what it caches of the texts."""

    def __init__(self, head: Parallel, limit: int | None = None):
        self.head, self.device, self.on = head, head.embed.weight.device, True
        self.choices = len(head.embed.weight) if head.ids is None else len(head.ids)
        shape = head.cache_shape
        self.cache = None if shape is None else PooledCache([None] * shape.layers, shape, self.device, limit)
        self.read: dict[int, int] = {}  # slot -> states that its cache holds
        self.memory: Any = None
        self._depth, self._checked = 0, False
        self._programs: dict[ProgramSize, SlotProgram] = {}
        self._generation = -1

    def acquire(self) -> int:
        slot = next(i for i in range(len(self.read) + 1) if i not in self.read)
        self.read[slot] = 0
        return slot

    def release(self, slot: int) -> None:
        del self.read[slot]
        if self.cache is not None:
            self.cache.forget(slot)

    def first(self, slot: int, count: int) -> int:
        """Return the first of the text's `count` states that the next draft needs: at least the last one."""
        return count - 1 if self.cache is None else min(self.read[slot], count - 1)

    def draft(self, requests: Seq[SlotRequest]) -> list[list[DraftToken]] | None:
        """Return the likeliest trees, parents first; None where the head has to run without a graph."""
        shapes = [request.shape for request in requests]
        if not self.on or not requests or len(requests) > BATCHES[-1] or max(s.nodes for s in shapes) > NODES[-1]:
            return None
        if self.head.link is not None and len({shape.width for shape in shapes}) > 1:
            return None  # as many paths go on as the width says
        if self.cache is not None:  # outside of `try`: a full cache is no reason to give up graphs
            for request in requests:
                self.cache.reserve(request.slot, 0, request.start + self.head.spec.steps + 1)
        try:
            return self._draft(requests)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # of a size that cannot be captured; without a graph the drafts are the same
            logger.warning("the %s head runs without graphs from now on: %s", self.head.kind, error)
            self.on = False
            self._programs.clear()
            return None

    @torch.no_grad()
    def _draft(self, requests: Seq[SlotRequest]) -> list[list[DraftToken]] | None:
        if self.cache is not None:
            requests = [self._read_ahead(request) for request in requests]
        size = self._size(requests)
        if size.sizes.rows * size.sizes.levels * self.choices > MOST_LOGITS:
            return None
        found = self._program(size, requests[0].states).draft(requests)
        for request in requests:
            self.read[request.slot] = request.start
        return found

    def _size(self, requests: Seq[SlotRequest]) -> ProgramSize:
        shapes, states = [request.shape for request in requests], sum(len(request.states) for request in requests)
        # Requests near their end ask for less: a graph of the usual depth serves them too.
        self._depth = min(self.head.spec.steps, max(self._depth, *(shape.depth for shape in shapes)))
        width = min(self.choices, max(shape.width for shape in shapes))
        nodes = rounded(max(shape.nodes for shape in shapes), NODES)
        # A level of a tree of independent slots may hold nearly all of its nodes.
        beam = width if self.head.link is not None else nodes
        sizes = TreeSizes(rounded(len(requests), BATCHES), self._depth, width, beam)
        count = min(nodes, sizes.levels * beam * width)
        read = rounded(states, STATES) if states <= STATES[-1] else -(-states // STATES[-1]) * STATES[-1]
        return ProgramSize(read, sizes, count, any(request.pick.temperature for request in requests))

    def _program(self, size: ProgramSize, states: Tensor) -> SlotProgram:
        generation = 0 if self.cache is None else self.cache.generation
        if self._generation != generation:  # the pool has moved, and graphs read the old one
            self._programs.clear()
            self._generation, self.memory = generation, torch.cuda.graph_pool_handle()
        if size not in self._programs:
            if not self._checked:
                self._check(states)
            self._programs[size] = SlotProgram(self, size, states)
        return self._programs[size]

    def _read_ahead(self, request: SlotRequest) -> SlotRequest:
        """Read the first states of a long text, such as a prompt, without a graph; return the rest of the request."""
        assert self.cache is not None
        base, ahead = self.cache.origins(request.slot)[0], max(0, len(request.states) - MOST_READ)
        for at in range(0, ahead, PART):
            part = request.states[at : min(at + PART, ahead)]
            positions = sent(list(range(request.first + at, request.first + at + len(part))), self.device)
            self.head.read(part, positions, PooledTexts(self.cache, positions + base))
        return request._replace(first=request.first + ahead, states=request.states[ahead:])

    def _check(self, states: Tensor) -> None:
        """Compare the slots of a program with those that the head fills without one; raise an error if they differ."""
        size = ProgramSize(STATES[0], TreeSizes(2, self._depth, 1, 1), 1, False)
        program, wide = SlotProgram(self, size, states), states.shape[1]
        slots, self._checked = [self.acquire() for _ in range(2)], True
        texts = [Text(token, torch.randn(count, wide).to(states)) for token, count in ((1, 5), (2, 3))]
        if self.cache is not None:
            for slot in slots:
                self.cache.reserve(slot, 0, STATES[0] + self.head.spec.steps)
        shape, pick = DraftShape(self._depth, 1, 1), Pick(0, 0.0)
        given = [
            SlotRequest(slot, 0, text.hidden, text.token, shape, pick)
            for slot, text in zip(slots, texts, strict=True)
            if text.hidden is not None
        ]
        if self.cache is None:
            given = [r._replace(first=len(r.states) - 1, states=r.states[-1:]) for r in given]
        program.draft(given)
        off = apart(program.slots(), self.head.slots(texts, self._depth))
        for slot in slots:
            self.release(slot)
        if off > tolerance(states.dtype):
            raise RuntimeError(f"captured slots differ from others by {off:.1g} (relative)")


def _all_seen(tokens: int, size: int) -> Tensor:
    """Return the bits of tokens that see all `size` tokens of their block."""  # [tokens, words]
    words = [packing.word(((1 << size) - 1) >> 64 * i) for i in range(packing.WORDS)]
    return torch.tensor([words] * tokens, dtype=torch.int64)
