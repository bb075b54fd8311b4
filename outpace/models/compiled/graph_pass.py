"""A forward pass of one size as a CUDA graph, and the buffers between it and the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence as Seq
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from outpace.models.compiled import packing
from outpace.models.hf.stages import LayerSpan
from outpace.models.segment import Segment
from outpace.sampling.sampler import Filter, MinP, TopK, TopP, TypicalP

SIZES = (2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)  # tokens of a pass, rounded up
BATCHES = (2, 4, 8, 16, 32, 64, 96, 128, 192, 256)  # segments of a pass, rounded up
# Columns of a token: id, position, pool entry, bits, noise words, temperature, top_k, top_p, min_p, typical_p.
NOISE, TEMPERATURE = slice(3 + packing.WORDS, 5 + packing.WORDS), 5 + packing.WORDS
LIMITS = slice(6 + packing.WORDS, 10 + packing.WORDS)
COLUMNS = LIMITS.stop
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
    filters: tuple[int, ...] = ()  # rows of `limits` (top_k, top_p, min_p, typical_p) that some token has
    turn: int = 0  # 0 or 1, for two graphs in turns: one runs while the outputs of the other are read

    @classmethod
    def of_pass(cls, segments: Seq[Segment], taps: tuple[int, ...] = ()) -> GraphKey:
        tokens = sum(segment.count for segment in segments)
        given = {limits(segment.pick.filters) for segment in segments if segment.pick is not None}
        filters = tuple(i for i, row in enumerate(zip(*given, strict=True)) if any(row))
        return cls(rounded(tokens, SIZES), rounded(len(segments), BATCHES), taps, filters=filters)


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


class GraphOutputs(NamedTuple):
    """What a captured pass leaves in its memory."""

    logits: Tensor | None  # [tokens, vocab]
    states: Tensor | None  # [tokens, hidden]: output of the last layer of a span
    recorded: dict[int, Tensor]  # tap -> [tokens, hidden]
    chosen: Tensor | None  # [FOUND, tokens]


class Staging:
    """The inputs that the host sends to a pass. A host buffer is reused only after the device has read it."""

    def __init__(self, count: int, device: torch.device):
        self.given = torch.zeros(count, dtype=torch.int64, device=device)
        self._buffers = [torch.zeros(count, dtype=torch.int64, pin_memory=True) for _ in range(BUFFERS)]
        self._views = [buffer.numpy() for buffer in self._buffers]
        self._read = [torch.cuda.Event() for _ in range(BUFFERS)]
        self._turn = 0

    def open(self) -> np.ndarray[Any, np.dtype[np.int64]]:  # [count]
        """Return a host buffer to fill before `send`."""
        self._turn = (self._turn + 1) % BUFFERS
        self._read[self._turn].synchronize()
        return self._views[self._turn]

    def send(self) -> None:
        self.given.copy_(self._buffers[self._turn], non_blocking=True)

    def mark_in_use(self) -> None:
        """Mark the buffer as in use. Call this after the launch, since it looks up the stream, which takes a while."""
        self._read[self._turn].record()


@dataclass
class CapturedPass:
    """A graph and its input and output buffers."""

    replay: Replay[GraphOutputs]
    staging: Staging
    entering: Tensor | None  # [tokens, hidden]: input states of later layers, or features beside the tokens
    host_choices: Tensor  # [FOUND, tokens]: the choices on the host, pinned
    key: GraphKey

    def launch(self) -> None:
        """Run the graph on the staged inputs."""
        self.replay()
        self.staging.mark_in_use()

    @property
    def outputs(self) -> GraphOutputs:
        return self.replay.left

    @property
    def ids(self) -> Tensor:  # [tokens]
        return self.staging.given[: self.key.tokens]


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
