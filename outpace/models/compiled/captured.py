"""Captured: a pass of one size as a CUDA graph, and the memory through which the host talks to it."""

from __future__ import annotations

from collections.abc import Callable, Sequence as Seq
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from outpace.core.lm import Picked
from outpace.models.compiled import packing
from outpace.models.compiled.capture import Replay
from outpace.models.hf.stages import LayerSpan
from outpace.models.segment import Segment
from outpace.sampling.sampler import MinP, Pick, TopK, TopP

SIZES = (2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)  # tokens of a pass, rounded up
SLOTS = (2, 4, 8, 16, 32, 64)  # requests of a pass, rounded up
# Of a token: id, position, entry, bits; words of noise, temperature; top_k, top_p, min_p.
NOISE, HEAT, LIMITS = (
    slice(3 + packing.WORDS, 5 + packing.WORDS),
    5 + packing.WORDS,
    slice(6 + packing.WORDS, 9 + packing.WORDS),
)
COLUMNS = LIMITS.stop
FOUND = 4  # numbers of a choice: token, largest logit, probability, whether it is sure
BUFFERS = 2  # that the host writes in turns


class GraphKey(NamedTuple):
    """What a graph is made for."""

    tokens: int
    slots: int
    taps: tuple[int, ...] = ()
    span: LayerSpan | None = None  # of layers; None: all of them
    heads: bool = True  # whether logits are wanted
    filtered: bool = False  # whether tokens are left out before a choice
    turn: int = 0  # of two graphs: one runs while what the other left is read

    @classmethod
    def of(cls, jobs: Seq[Segment], taps: tuple[int, ...] = ()) -> GraphKey:
        tokens = sum(len(job.tokens) for job in jobs)
        size = cls(next(n for n in SIZES if n >= tokens), next(n for n in SLOTS if n >= len(jobs)), taps)
        return size._replace(filtered=any(limits(job.pick) is not None for job in jobs))


def limits(pick: Pick | None) -> list[float] | None:
    """What the graph is told of its filters; None: nothing, because it has none, or some that a graph has not."""
    found = [0.0, 0.0, 0.0]
    for keep in pick.filters if pick is not None else ():
        match keep:
            case TopK():
                found[0] = keep.count
            case TopP():
                found[1] = keep.mass
            case MinP():
                found[2] = keep.share
            case _:
                return None
    return found if any(found) else None


class GraphOutputs(NamedTuple):
    """What a captured pass leaves in its memory."""

    logits: Tensor | None  # [tokens, vocab]
    states: Tensor | None  # [tokens, hidden]: what leaves the last layer of a span
    recorded: dict[int, Tensor]  # tap -> [tokens, hidden]
    chosen: Tensor | None  # [FOUND, tokens]


class Staging:
    """What the host tells a pass. The device may be behind: a buffer is written again only when it has been read."""

    def __init__(self, count: int, device: torch.device):
        self.given = torch.zeros(count, dtype=torch.int64, device=device)
        self._buffers = [torch.zeros(count, dtype=torch.int64, pin_memory=True) for _ in range(BUFFERS)]
        self._views = [buffer.numpy() for buffer in self._buffers]
        self._read = [torch.cuda.Event() for _ in range(BUFFERS)]
        self._turn = 0

    def open(self) -> np.ndarray[Any, np.dtype[np.int64]]:  # [count]
        """Memory to write to, until `send`."""
        self._turn = (self._turn + 1) % BUFFERS
        self._read[self._turn].synchronize()
        return self._views[self._turn]

    def send(self) -> None:
        self.given.copy_(self._buffers[self._turn], non_blocking=True)

    def sent(self) -> None:
        """Behind `send`, when the device has something to do: this asks for the stream, which takes a while."""
        self._read[self._turn].record()


@dataclass
class CapturedPass:
    """A graph, and the memory through which it is talked to."""

    replay: Replay[GraphOutputs]
    staging: Staging
    entering: Tensor | None  # [tokens, hidden]: states that enter, behind the first layer or beside the tokens
    read: Tensor  # [FOUND, tokens]: the choices on the host, pinned
    size: GraphKey

    def launch(self) -> None:
        """Run it with what was staged."""
        self.replay()
        self.staging.sent()

    @property
    def left(self) -> GraphOutputs:
        return self.replay.left

    @property
    def ids(self) -> Tensor:  # [tokens]
        return self.staging.given[: self.size.tokens]


class PickBuffer:
    """The choices of a pass that is under way."""

    def __init__(self, captured: CapturedPass, count: int):
        self._done, self._read = torch.cuda.Event(), captured.read[:, :count]
        self._done.record()

    def wait(self) -> None:
        self._done.synchronize()

    @cached_property
    def rows(self) -> list[list[float]]:  # [FOUND][tokens]
        self.wait()
        return self._read.tolist()


class PendingPicks(Picked):
    """A job's part of them: whoever reads it waits, and until then the host has time for other things."""

    def __init__(self, coming: PickBuffer, part: slice, again: Callable[[], Picked]):
        self._coming, self._part, self._again = coming, part, again

    def wait(self) -> None:
        self._coming.wait()

    @property
    def fed(self) -> list[int]:
        return [int(token) for token in self._coming.rows[0][self._part]]

    @cached_property
    def _unsure(self) -> Picked | None:
        """The choices made anew, where more tokens may be left by the filters than the device has looked at."""
        return None if all(self._coming.rows[3][self._part]) else self._again()

    @property
    def tokens(self) -> Seq[int]:  # type: ignore[override]
        return self.fed if self._unsure is None else self._unsure.tokens

    @property
    def best(self) -> list[float]:  # type: ignore[override]
        return self._coming.rows[1][self._part]

    @property
    def probs(self) -> list[float]:  # type: ignore[override]
        return self._coming.rows[2][self._part] if self._unsure is None else self._unsure.probs
