"""Token choices of a captured pass. They are read from the device when needed; the host redoes uncertain ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence as Seq
from dataclasses import dataclass
from functools import cached_property, partial

import torch
from torch import Tensor

from outpace.core.lm import Picked
from outpace.models.compiled.graph_pass import CapturedPass
from outpace.models.hf.lm import TransformersLM
from outpace.models.segment import Segment, SegmentOutput
from outpace.sampling.noise import words
from outpace.sampling.noise_rule import GUMBEL
from outpace.sampling.sampler import Pick

FOLLOW, MOST_UNSURE = 0.1, 0.3  # weight of the newest pass in the average; share of passes that may be corrected


class PickBuffer:
    """The choices of a pass that may still be running."""

    def __init__(self, captured: CapturedPass, count: int):
        self._done, self._read = torch.cuda.Event(), captured.host_choices[:, :count]
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


class PendingPicks(Picked):
    """The choices of one segment. Only reading them waits for the device, so the host can work until then."""

    def __init__(self, buffer: PickBuffer, part: slice, again: Callable[[], Picked]):
        self._buffer, self._part, self._again = buffer, part, again

    def wait(self) -> None:
        self._buffer.wait()

    @property
    def device_tokens(self) -> list[int]:
        return self._buffer.tokens[self._part]

    @cached_property
    def _corrected(self) -> Picked | None:
        """The choices remade by the host, where rounding may decide one; else None."""
        return None if self._buffer.sure or all(self._buffer.numbers[3][self._part]) else self._again()

    @property
    def tokens(self) -> Seq[int]:  # type: ignore[override]
        return self.device_tokens if self._corrected is None else self._corrected.tokens

    @property
    def best(self) -> list[float]:  # type: ignore[override]
        return self._buffer.numbers[1][self._part]

    @property
    def probs(self) -> list[float]:  # type: ignore[override]
        return self._buffer.numbers[2][self._part] if self._corrected is None else self._corrected.probs


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


class PickReader:
    """Turns the memory of a captured pass into outputs, and records how often the device was uncertain."""

    def __init__(self, lm: TransformersLM):
        self.lm = lm
        self.gate = RunAheadGate()

    def outputs(self, captured: CapturedPass, segments: Seq[Segment]) -> list[SegmentOutput]:
        buffer = PickBuffer(captured, sum(segment.count for segment in segments))
        outputs, at = [], 0
        for segment in segments:
            first, end = at + len(segment.pending), at + segment.count
            hidden = {tap: states[at:end].clone() for tap, states in captured.outputs.recorded.items()}
            assert captured.outputs.logits is not None
            logits = captured.outputs.logits[first:end]
            outputs.append(SegmentOutput(logits, hidden, self._picked(buffer, slice(first, end), logits, segment)))
            at = end
        return outputs

    def _picked(self, buffer: PickBuffer, part: slice, logits: Tensor, segment: Segment) -> Picked | None:
        pick = segment.pick
        if pick is None or (pick.temperature and pick.rule != GUMBEL):
            return None  # the host chooses, because the kernels implement no other rule
        return PendingPicks(buffer, part, partial(self._again, logits, segment, pick))

    def _again(self, logits: Tensor, segment: Segment, pick: Pick) -> Picked:
        """Choose among the tokens that the filters keep, with the sums of the reference."""
        self.gate.unsure = True
        best = logits.amax(-1)
        kept = logits.float() / pick.temperature
        for keep in pick.filters:
            kept = keep(kept)
        positions = torch.tensor(segment.positions[len(segment.pending) :], device=self.lm.device)
        noise = words(pick.seed, positions + self.lm.before + 1)
        tokens, _, probs, _ = torch.ops.outpace.choose(kept, noise, torch.ones_like(best, dtype=torch.float32)).tolist()
        return Picked([int(token) for token in tokens], best.tolist(), probs, on_device=False)


def detached(output: SegmentOutput) -> SegmentOutput:
    """Wait for an output and copy it to memory that the next pass does not overwrite."""
    logits, picked = output.logits, output.picked
    picked = picked and Picked(picked.tokens, picked.best, picked.probs)
    return SegmentOutput(logits.clone() if isinstance(logits, Tensor) else logits, output.hidden, picked)
