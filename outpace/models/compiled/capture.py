"""Capture: work on a device that is launched again and again as one, once it has been seen."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch

T = TypeVar("T")


@dataclass(frozen=True)
class Replay(Generic[T]):
    """A CUDA graph, and the function that it was captured from, which holds the tensors that the graph reads."""

    graph: torch.cuda.CUDAGraph
    function: Callable[[], T]
    left: T  # what the function returned, in the graph's memory

    def __call__(self) -> T:
        self.graph.replay()
        return self.left


@torch.no_grad()
def capture(function: Callable[[], T], memory: Any) -> Replay[T]:
    """A graph of what a function launches, in a pool of memory that graphs share."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # compile, and let libraries set themselves up
        for _ in range(2):
            function()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=memory, capture_error_mode="thread_local"):
        left = function()
    return Replay(graph, function, left)
