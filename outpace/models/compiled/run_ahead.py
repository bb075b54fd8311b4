"""Ahead: the next pass of rows for which nobody guesses, sent off before the host has read the one before it.

Such a pass is known but for its tokens, and those lie where the last pass chose them: on the device. So it starts
there, and the host's work is hidden behind it. Whether it is the pass that is wanted is seen when one is asked for: if
a row goes on in another way, it ran in vain, and what it wrote is overwritten.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import NamedTuple

from outpace.core.lm import Picked
from outpace.core.tree import Tree
from outpace.models.compiled.captured import CapturedPass
from outpace.models.segment import Segment, SegmentOutput
from outpace.sampling.sampler import Pick

FOLLOW, MOST_DOUBT = 0.1, 0.3  # weight of the newest pass in an average; share of passes that may be in vain


class LastPass(NamedTuple):
    """The pass that was sent off last."""

    captured: CapturedPass
    jobs: Seq[Segment]
    outputs: list[SegmentOutput]

    def next(self, rows: Seq[int], picks: Seq[Pick | None]) -> list[Segment] | None:
        """The pass behind it: each row with one token, for which stands the place of its choice; None: not known."""
        places, at = dict[int, int](), 0
        for job, output in zip(self.jobs, self.outputs, strict=True):
            at += len(job.tokens)
            if job.tree is not None and len(job.tree) == 1 and output.chosen is not None and output.chosen.there:
                places[job.row] = at - 1
        if any(row not in places for row in rows) or any(pick is None for pick in picks):
            return None
        held = {job.row: job.end for job in self.jobs}
        return [
            Segment(row, held[row], [], Tree([places[row]]), pick=pick) for row, pick in zip(rows, picks, strict=True)
        ]


class SentAhead(NamedTuple):
    """A row's part in a pass that was sent ahead."""

    job: Segment
    before: Picked  # where the token that it fed was chosen
    output: SegmentOutput

    def answers(self, job: Segment) -> bool:
        alike = job.start == self.job.start and not job.pending and job.pick == self.job.pick
        return alike and job.tree is not None and job.tree.tokens == [self.before.fed[-1]]


@dataclass
class RunAhead:
    """What was sent ahead, and nobody has asked for yet."""

    taps: tuple[int, ...] = ()
    rows: dict[int, SentAhead] = field(default_factory=dict)

    @classmethod
    def of(cls, last: LastPass, jobs: Seq[Segment], outputs: Seq[SegmentOutput]) -> RunAhead:
        before = {job.row: output.chosen for job, output in zip(last.jobs, last.outputs, strict=True)}
        found = cls(last.captured.size.taps)
        for job, output in zip(jobs, outputs, strict=True):
            chosen = before[job.row]
            assert chosen is not None, "`next` was asked"
            found.rows[job.row] = SentAhead(job, chosen, output)
        return found

    def take(self, jobs: Seq[Segment], taps: tuple[int, ...]) -> list[SegmentOutput] | None:
        """What it found for these jobs, if it was sent for them; else it was in vain."""
        sent, self.rows = self.rows, {}
        if taps != self.taps or not all(job.row in sent and sent[job.row].answers(job) for job in jobs):
            return None
        return [sent[job.row].output for job in jobs]

    def drop(self, row: int) -> None:
        """The row holds another text now."""
        self.rows.pop(row, None)


@dataclass
class RunAheadGate:
    """How often a pass leaves a choice to the host: what began ahead of that was in vain for all of its rows."""

    often: float = 0.0  # share of the last passes
    seen: bool = False  # in the pass before

    def next(self) -> bool:
        """Whether a pass should begin ahead."""
        self.often += FOLLOW * (self.seen - self.often)
        self.seen = False
        return self.often < MOST_DOUBT
