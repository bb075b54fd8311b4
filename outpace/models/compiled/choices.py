"""Choices of the tokens of captured passes, by a graph of their own behind each pass.

The inputs of most choices are sent with the pass. Edits, such as penalties and grammars, depend on the text up to the
choice. So the pass is launched first, and while it runs the host works out the edits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence as Seq
from dataclasses import replace
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor

from outpace.models.compiled.graph_pass import (
    COLUMNS,
    FOUND,
    LIMITS,
    NOISE,
    TEMPERATURE,
    CapturedChoice,
    CapturedPass,
    ChoiceKey,
    GraphOutputs,
    capture,
    fill_picks,
)
from outpace.models.compiled.picks import LogprobBuffer, PendingPicks, PickBuffer, PickSource, RunAheadGate
from outpace.models.compiled.run_ahead import LastPass
from outpace.models.hf.lm import TransformersLM
from outpace.models.kernels import edit_logits
from outpace.models.segment import Segment, SegmentOutput
from outpace.models.transfer import sent
from outpace.sampling.edits import Edit
from outpace.sampling.noise_rule import GUMBEL
from outpace.sampling.sampler import LogitEdit


class Choices:
    """Makes the choices of the passes of one model."""

    def __init__(self, lm: TransformersLM, memory: Callable[[], Any]):
        """`memory` returns the memory pool of the model's graphs."""
        self.lm = lm
        self.gate = RunAheadGate()
        self._memory = memory
        self._edited: dict[int, Tensor] = {}  # by turn: float32 [tokens, vocab], shared by graphs of all sizes

    def of_pass(self, captured: CapturedPass, segments: Seq[Segment]) -> LastPass:
        """Choose the tokens of a pass that has been launched, and return its outputs."""
        logits, firsts = captured.outputs.logits, _first_rows(segments)
        assert logits is not None
        if all(segment.pick is None for segment in segments):
            return LastPass(captured, segments, list(_outputs(captured.outputs, segments, None)))
        choice = self.captured(captured, ChoiceKey.of_pass(segments))
        if choice.edited is not None:
            choice.edited.copy_(logits)
            edit_logits.apply(choice.edited, list(self._edits(segments, firsts)))
        choice.replay()
        buffer = PickBuffer(choice.host[:, : sum(segment.count for segment in segments)])
        read = logits if choice.edited is None else choice.edited
        source = PickSource(self.lm, self.gate, read, buffer, _logprobs(logits, choice.chosen[0], segments, firsts))
        return LastPass(captured, segments, list(_outputs(captured.outputs, segments, source)), choice.chosen)

    def of_prompts(self, segments: Seq[Segment], outputs: Seq[SegmentOutput], logits: Tensor) -> list[SegmentOutput]:
        """Choose the first token after each prompt that ends in this pass; `logits` are those of the roots.

        No graph does it, because these passes have any number of roots, and take long.
        """  # [roots, vocab]
        roots = [segment for segment in segments if segment.layout is not None]
        key, firsts = ChoiceKey.of_pass(roots), list(range(len(roots)))
        table = np.zeros((COLUMNS, len(roots)), dtype=np.int64)
        positions = np.array([segment.positions[-1] for segment in roots])
        fill_picks(table, [segment.pick for segment in roots], positions + self.lm.before + 1)
        read = logits
        if key.edited:
            read = logits.to(torch.float32, copy=True)
            edit_logits.apply(read, list(self._edits(roots, firsts)))
        chosen = choose(read, sent(table, self.lm.device), key.filters)
        host = torch.empty(chosen.shape, dtype=chosen.dtype, pin_memory=chosen.is_cuda)
        host.copy_(chosen, non_blocking=True)
        logprobs = _logprobs(logits, chosen[0], roots, firsts)
        source = PickSource(self.lm, self.gate, read, PickBuffer(host), logprobs)
        rows = {segment.slot: row for row, segment in enumerate(roots) if on_device(segment)}
        return [
            replace(output, picked=PendingPicks(source, segment, slice(rows[segment.slot], rows[segment.slot] + 1)))
            if segment.slot in rows
            else output
            for segment, output in zip(segments, outputs, strict=True)
        ]

    def captured(self, captured: CapturedPass, key: ChoiceKey) -> CapturedChoice:
        """Return the graph of these choices behind this pass; capture it if it is missing."""
        if key not in captured.choices:
            captured.choices[key] = self._capture(captured, key)
        return captured.choices[key]

    def _capture(self, captured: CapturedPass, key: ChoiceKey) -> CapturedChoice:
        edited = self._edited_logits(captured) if key.edited else None
        host = torch.zeros(FOUND, captured.key.tokens, dtype=torch.float64, pin_memory=True)
        return CapturedChoice(capture(self._program(captured, key, edited, host), self._memory()), host, edited)

    def _edited_logits(self, captured: CapturedPass) -> Tensor:  # float32 [tokens, vocab]
        tokens, turn = captured.key.tokens, captured.key.turn
        if turn not in self._edited or len(self._edited[turn]) < tokens:
            self._edited[turn] = torch.zeros(tokens, self.lm.vocab, device=self.lm.device)
        return self._edited[turn][:tokens]

    def _program(
        self, captured: CapturedPass, key: ChoiceKey, edited: Tensor | None, host: Tensor
    ) -> Callable[[], Tensor]:
        logits, table = captured.outputs.logits if edited is None else edited, captured.table
        assert logits is not None, "a pass of all layers has logits"

        def run() -> Tensor:  # [FOUND, tokens]
            chosen = choose(logits, table, key.filters)
            host.copy_(chosen, non_blocking=True)
            return chosen

        return run

    def _edits(self, segments: Seq[Segment], firsts: list[int]) -> Iterator[list[tuple[int, Edit]]]:
        """Yield the edits of a pass, in the order in which a row needs them; an edit comes with its row."""
        prefixes = list(self._prefixes(segments, firsts))
        for depth in range(max((len(edits) for _, _, edits in prefixes), default=0)):
            made = list[tuple[int, Edit]]()
            for row, prefix, edits in prefixes:
                if depth < len(edits):
                    made.append((row, edits[depth].edit(prefix)))
            yield made

    def _prefixes(
        self, segments: Seq[Segment], firsts: list[int]
    ) -> Iterator[tuple[int, list[int], tuple[LogitEdit, ...]]]:
        """Yield the row of each choice with edits, the text before the choice, and its edits."""
        for segment, first in zip(segments, firsts, strict=True):
            if segment.pick is not None and segment.pick.edits and on_device(segment):
                assert segment.layout is not None
                held = self.lm.slots[segment.slot].tokens + segment.pending
                for node in range(segment.since, len(segment.layout)):
                    row, fed = first + node - segment.since, segment.layout.tokens[: node + 1]
                    yield row, held + fed, segment.pick.edits


def choose(logits: Tensor, table: Tensor, filters: Seq[int]) -> Tensor:
    """Choose a token for each row of logits, by the columns of choices in the table."""
    # [tokens, vocab], [COLUMNS, tokens] -> [FOUND, tokens]
    given = logits, table[NOISE].T, table[TEMPERATURE].view(torch.float64)
    if not filters:
        return torch.ops.outpace.choose(*given)
    return torch.ops.outpace.choose_kept(*given, table[LIMITS].view(torch.float64), list(filters))


def _first_rows(segments: Seq[Segment]) -> list[int]:
    """Return the row of the first node of each segment of a pass."""
    ends = accumulate(segment.count for segment in segments)
    return [end - segment.count + len(segment.pending) for segment, end in zip(segments, ends, strict=True)]


def _logprobs(logits: Tensor, chosen: Tensor, segments: Seq[Segment], firsts: list[int]) -> LogprobBuffer | None:
    """Compute the log-probabilities of the chosen tokens, where a request reports them."""
    # [rows, vocab], [rows]
    rows, most = list[int](), 0
    for segment, first in zip(segments, firsts, strict=True):
        if segment.pick is not None and segment.pick.logprobs is not None and on_device(segment):
            rows += range(first, first + segment.count - len(segment.pending))
            most = max(most, segment.pick.logprobs)
    return LogprobBuffer(logits, chosen, rows, most) if rows else None


def _outputs(left: GraphOutputs, segments: Seq[Segment], source: PickSource | None) -> Iterator[SegmentOutput]:
    logits, recorded, at = left.logits, left.recorded, 0
    assert logits is not None
    # One copy for all segments: the next pass overwrites what the graph left.
    count = sum(segment.count for segment in segments)
    states = torch.cat([side[:count] for side in recorded.values()], dim=-1) if recorded else None
    for segment in segments:
        first, end = at + len(segment.pending), at + segment.count
        joined = None if states is None else states[at:end]
        hidden = {} if joined is None else dict(zip(recorded, joined.chunk(len(recorded), dim=-1), strict=True))
        picked = None
        if source is not None and on_device(segment):
            picked = PendingPicks(source, segment, slice(first, end))
        yield SegmentOutput(logits[first:end], hidden, picked, joined)
        at = end


def on_device(segment: Segment) -> bool:
    """Return whether the device makes the choices of this segment.

    It does not know other rules of noise. Edits of a tree need the text before each node, in any order: the host works
    them out for the nodes that it visits.
    """
    pick, layout = segment.pick, segment.layout
    if pick is None or layout is None or (pick.temperature and pick.rule != GUMBEL):
        return False
    return not pick.edits or layout.is_chain
