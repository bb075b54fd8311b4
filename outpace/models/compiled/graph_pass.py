"""A forward pass of one size as a CUDA graph, the graphs that choose its tokens, and the buffers between them and the
host."""

from __future__ import annotations

from collections.abc import Callable, Sequence as Seq
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from outpace.models.compiled import packing
from outpace.models.hf.stages import LayerSpan
from outpace.models.segment import Segment
from outpace.sampling.noise import Array, words_of
from outpace.sampling.sampler import Filter, MinP, Pick, TopK, TopP, TypicalP

SIZES = (2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)  # tokens of a pass, rounded up
BATCHES = (2, 4, 8, 16, 32, 64, 96, 128, 192, 256)  # segments of a pass, rounded up
# Columns of a token: id, position, pool entry, bits, noise words, temperature, top_k, top_p, min_p, typical_p.
NOISE, TEMPERATURE = slice(3 + packing.WORDS, 5 + packing.WORDS), 5 + packing.WORDS
LIMITS = slice(6 + packing.WORDS, 10 + packing.WORDS)
COLUMNS = LIMITS.stop  # then the pool entries in further groups of layers, a column for each group
FOUND = 4  # numbers of a choice: token, largest logit, probability, whether it is certain
BUFFERS = 2  # host buffers, written in turns


def rounded(count: int, sizes: Seq[int]) -> int:
    """Return the smallest of these sizes that holds `count`."""
    return next(size for size in sizes if size >= count)


class GraphKey(NamedTuple):
    """The properties of a pass that need a graph of their own."""

    tokens: int
    batch: int
    taps: tuple[int, ...] = ()
    span: LayerSpan | None = None  # the layers that run; None: all
    heads: bool = True  # whether logits are computed
    turn: int = 0  # 0 or 1, for two graphs in turns: one runs while the outputs of the other are read

    @classmethod
    def of_pass(cls, segments: Seq[Segment], taps: tuple[int, ...] = ()) -> GraphKey:
        tokens = sum(segment.count for segment in segments)
        return cls(rounded(tokens, SIZES), rounded(len(segments), BATCHES), taps)


class ChoiceKey(NamedTuple):
    """The properties of the choices of a pass that need a graph of their own."""

    filters: tuple[int, ...] = ()  # rows of `limits` (top_k, top_p, min_p, typical_p) that some token has
    edited: bool = False  # whether the logits are edited first, in a copy

    @classmethod
    def of_pass(cls, segments: Seq[Segment]) -> ChoiceKey:
        picks = [segment.pick for segment in segments if segment.pick is not None]
        given = {limits(pick.filters) for pick in picks}
        filters = tuple(i for i, row in enumerate(zip(*given, strict=True)) if any(row))
        return cls(filters, any(pick.edits for pick in picks))


NO_LIMITS = (0.0, 0.0, 0.0, 0.0)


class PassInputs(NamedTuple):
    """The inputs of a pass, which are parts of one buffer."""

    table: Tensor  # [COLUMNS + groups - 1, tokens]
    segments: Tensor  # [groups, batch, 4]

    @staticmethod
    def size(key: GraphKey, groups: int) -> int:
        """Return the size of the buffer in a model with this many groups of layers."""
        return key.tokens * (COLUMNS + groups - 1) + groups * key.batch * 4

    @classmethod
    def of_buffer(cls, buffer: Tensor, key: GraphKey, groups: int) -> PassInputs:
        columns = COLUMNS + groups - 1
        table, segments = buffer.split([columns * key.tokens, groups * key.batch * 4])
        return cls(table.view(columns, key.tokens), segments.view(groups, key.batch, 4))

    @property
    def where(self) -> list[Tensor]:  # [groups] of [tokens]
        return [self.table[2], *self.table[COLUMNS:]]


@lru_cache(maxsize=1024)
def limits(filters: tuple[Filter, ...]) -> tuple[float, ...]:
    """Return the filters of a choice as input of a graph, 0 for none: top_k, top_p, min_p, typical_p."""
    found = [0.0, 0.0, 0.0, 0.0]
    for keep in filters:
        match keep:
            case TopK():
                found[0] = keep.count
            case TopP():
                found[1] = keep.mass
            case MinP():
                found[2] = keep.share
            case TypicalP():
                found[3] = keep.mass
    return tuple(found)


def fill_picks(table: Array, picks: Seq[Pick | None], positions: Array) -> None:
    """Write the columns of choices at these positions of the text: noise words, temperatures and filters."""
    count, temperatures = len(picks), [0.0 if pick is None else pick.temperature for pick in picks]
    if any(temperatures):
        table[NOISE, :count] = words_of([0 if pick is None else pick.seed for pick in picks], positions).T
        table[TEMPERATURE, :count] = np.array(temperatures).view(np.int64)
    if any(pick is not None and pick.filters for pick in picks):
        kept = [NO_LIMITS if pick is None else limits(pick.filters) for pick in picks]
        table[LIMITS, :count] = np.array(kept, dtype=np.float64).T.copy().view(np.int64)


class GraphOutputs(NamedTuple):
    """What a captured pass leaves in its memory."""

    logits: Tensor | None  # [tokens, vocab]
    states: Tensor | None  # [tokens, hidden]: output of the last layer of a span
    recorded: dict[int, Tensor]  # tap -> [tokens, hidden]


class Staging:
    """The inputs that the host sends to a pass. A host buffer is reused only after the device has read it."""

    def __init__(self, count: int, device: torch.device):
        pinned = device.type != "cpu"
        self.given = torch.zeros(count, dtype=torch.int64, device=device)
        self._buffers = [torch.zeros(count, dtype=torch.int64, pin_memory=pinned) for _ in range(BUFFERS)]
        self._views = [buffer.numpy() for buffer in self._buffers]
        self._read = [torch.cuda.Event() for _ in range(BUFFERS)] if pinned else []
        self._turn = 0

    def open(self) -> Array:  # int64 [count]
        """Return a host buffer to fill before `send`."""
        self._turn = (self._turn + 1) % BUFFERS
        for event in self._read[self._turn : self._turn + 1]:
            event.synchronize()
        return self._views[self._turn]

    def send(self) -> None:
        self.given.copy_(self._buffers[self._turn], non_blocking=True)

    def mark_in_use(self) -> None:
        """Mark the buffer as in use. Call this after the launch, since it looks up the stream, which takes a while."""
        for event in self._read[self._turn : self._turn + 1]:
            event.record()


class CapturedChoice(NamedTuple):
    """A graph that chooses a token after every token of a pass."""

    replay: Replay[Tensor]  # [FOUND, tokens]
    host: Tensor  # the same on the host, pinned
    edited: Tensor | None  # float32 [tokens, vocab]: the logits it reads, where they are edited first

    @property
    def chosen(self) -> Tensor:  # [FOUND, tokens]
        return self.replay.left


@dataclass
class CapturedPass:
    """A graph, its input and output buffers, and the graphs of its choices."""

    replay: Replay[GraphOutputs]
    staging: Staging
    entering: Tensor | None  # [tokens, hidden]: input states of later layers, or features beside the tokens
    key: GraphKey
    choices: dict[ChoiceKey, CapturedChoice] = field(default_factory=dict)

    def launch(self) -> None:
        """Run the graph on the staged inputs."""
        self.replay()
        self.staging.mark_in_use()

    @property
    def outputs(self) -> GraphOutputs:
        return self.replay.left

    @property
    def ids(self) -> Tensor:  # [tokens]
        return self.table[0]

    @property
    def table(self) -> Tensor:  # int64 [COLUMNS, tokens]
        """The columns of the staged tokens."""
        return self.staging.given[: self.key.tokens * COLUMNS].view(COLUMNS, self.key.tokens)


T = TypeVar("T")


@dataclass(frozen=True)
class Replay(Generic[T]):
    """A CUDA graph and the function it was captured from, which keeps alive the tensors that the graph reads."""

    graph: torch.cuda.CUDAGraph
    function: Callable[[], T]
    left: T  # what the function returned, in the graph's memory

    def __call__(self) -> T:
        self.graph.replay()
        return self.left


def replayed(function: Callable[[], T], memory: Any) -> Callable[[], T]:
    """Return the function as a graph in this memory pool; without a pool, as it is."""
    return function if memory is None else capture(function, memory)


@torch.no_grad()
def capture(function: Callable[[], T], memory: Any) -> Replay[T]:
    """Capture what a function launches as a graph, in a memory pool that graphs share."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # warm up: compile, and let libraries initialize
        for _ in range(2):
            function()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=memory, capture_error_mode="thread_local"):
        left = function()
    return Replay(graph, function, left)
