"""Token choices of a captured pass. They are read from the device when needed; the host redoes uncertain ones."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from outpace.core.lm import Picked
from outpace.models.hf.lm import TransformersLM
from outpace.models.kernels import logprobs
from outpace.models.segment import Segment, SegmentOutput
from outpace.models.transfer import sent
from outpace.sampling.logprobs import Logprob
from outpace.sampling.noise import words

FOLLOW, MOST_UNSURE = 0.1, 0.3  # weight of the newest pass in the average; share of passes that may be corrected


@dataclass
class RunAheadGate:
    """Closes while the device is often uncertain: each corrected choice discards the pass that was launched ahead."""

    share: float = 0.0  # moving average of passes whose choices the host corrected
    unsure: bool = False  # whether the host corrected the previous pass

    def is_open(self) -> bool:
        """Return whether to launch the next pass ahead. Call it once per pass, since it updates the average."""
        self.share += FOLLOW * (self.unsure - self.share)
        self.unsure = False
        return self.share < MOST_UNSURE


class PickBuffer:
    """The choices of a pass that may still be running."""

    def __init__(self, host: Tensor):  # [FOUND, tokens], pinned
        self._done, self._read = torch.cuda.Event(), host
        self._done.record()

    def wait(self) -> None:
        self._done.synchronize()

    @cached_property
    def numbers(self) -> list[list[float]]:  # [FOUND][tokens]
        self.wait()
        return self._read.tolist()

    @cached_property
    def tokens(self) -> list[int]:
        return [int(token) for token in self.numbers[0]]

    @cached_property
    def sure(self) -> bool:
        """Whether the device is certain of every choice."""
        return all(self.numbers[3])


class LogprobBuffer:
    """The log-probabilities of the chosen tokens of some rows, which the device computes behind their pass."""

    def __init__(self, logits: Tensor, chosen: Tensor, rows: list[int], most: int):
        """`most` is the largest number of likeliest tokens that a row reports."""  # [tokens, vocab], [tokens]
        self._places = {row: i for i, row in enumerate(rows)}
        self._most = min(most, logits.shape[-1])
        asked = sent(np.array(rows, dtype=np.int32), logits.device)
        found = logprobs.launch(logits, asked, chosen, self._most)
        self._host = torch.empty(found.shape, dtype=found.dtype, pin_memory=found.is_cuda)
        self._host.copy_(found, non_blocking=True)
        self._done = torch.cuda.Event()
        self._done.record()

    @cached_property
    def _numbers(self) -> list[list[float]]:
        self._done.synchronize()
        return self._host.tolist()

    def read(self, row: int, token: int, count: int) -> Logprob:
        own, entropy, *rest = self._numbers[self._places[row]]
        best, logs = map(int, rest[:count]), rest[self._most : self._most + count]
        return Logprob(token, own, dict(zip(best, logs, strict=True)), entropy)


@dataclass
class PickSource:
    """What the choices of a pass are read from."""

    lm: TransformersLM
    gate: RunAheadGate
    logits: Tensor  # [tokens, vocab]: what the device chose from, edits included
    buffer: PickBuffer
    logprobs: LogprobBuffer | None = None


class PendingPicks(Picked):
    """The choices of one segment. Only reading them waits for the device, so the host can work until then."""

    def __init__(self, source: PickSource, segment: Segment, part: slice):
        self._source, self._segment, self._part = source, segment, part

    def wait(self) -> None:
        self._source.buffer.wait()

    @property
    def device_tokens(self) -> list[int]:
        return self._source.buffer.tokens[self._part]

    @cached_property
    def _corrected(self) -> Picked | None:
        """The choices remade by the host, where rounding may decide one; else None."""
        buffer = self._source.buffer
        return None if buffer.sure or all(buffer.numbers[3][self._part]) else self._again()

    @property
    def tokens(self) -> Seq[int]:  # type: ignore[override]
        return self.device_tokens if self._corrected is None else self._corrected.tokens

    @property
    def best(self) -> list[float]:  # type: ignore[override]
        return self._source.buffer.numbers[1][self._part]

    @property
    def probs(self) -> list[float]:  # type: ignore[override]
        return self._source.buffer.numbers[2][self._part] if self._corrected is None else self._corrected.probs

    def logprob(self, node: int) -> Logprob | None:
        pick, logprobs = self._segment.pick, self._source.logprobs
        if logprobs is None or pick is None or pick.logprobs is None or self._corrected is not None:
            return None
        return logprobs.read(self._part.start + node, self.device_tokens[node], pick.logprobs)

    def _again(self) -> Picked:
        """Choose among the tokens that the filters keep, with the sums of the reference."""
        segment, lm = self._segment, self._source.lm
        assert segment.pick is not None
        self._source.gate.unsure = True
        logits = self._source.logits[self._part]
        best, kept = logits.amax(-1), logits.float() / segment.pick.temperature
        for keep in segment.pick.filters:
            kept = keep(kept)
        positions = torch.tensor(segment.positions[len(segment.pending) :], device=lm.device)
        noise = words(segment.pick.seed, positions + lm.before + 1)
        tokens, _, probs, _ = torch.ops.outpace.choose(kept, noise, torch.ones_like(best, dtype=torch.float32)).tolist()
        return Picked([int(token) for token in tokens], best.tolist(), probs, on_device=False)


def detached(output: SegmentOutput) -> SegmentOutput:
    """Wait for an output and copy it to memory that the next pass does not overwrite."""
    logits, picked = output.logits, output.picked
    picked = picked and Picked(picked.tokens, picked.best, picked.probs)
    return replace(output, logits=logits.clone() if isinstance(logits, Tensor) else logits, picked=picked)
