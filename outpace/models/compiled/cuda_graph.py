"""GraphLM: compiled passes as CUDA graphs, one per size of a pass, with the choice of tokens inside.

Between two passes the host writes one small buffer and reads another. A graph is captured when its size first comes
up; sizes are rounded up to a few, so there are few graphs, and they share their memory.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence as Seq
from functools import partial

import numpy as np
import torch
from torch import Tensor

from outpace.core.lm import LM, DraftShape, DraftToken, Picked
from outpace.core.tree import Tree
from outpace.models.compiled import packing as lane
from outpace.models.compiled.capture import capture
from outpace.models.compiled.captured import (
    COLUMNS,
    FOUND,
    HEAT,
    LIMITS,
    NOISE,
    SIZES,
    CapturedPass,
    GraphKey,
    GraphOutputs,
    PendingPicks,
    PickBuffer,
    Staging,
    limits,
)
from outpace.models.compiled.cpu import CompiledLM
from outpace.models.compiled.draft_chain import MOST_STEPS, ChainStart, DraftChains
from outpace.models.compiled.early_exit_graph import EarlyGraphLM
from outpace.models.compiled.run_ahead import LastPass, RunAhead, RunAheadGate
from outpace.models.hf.bf16_copies import Bf16Copies
from outpace.models.hf.lm import PackedLM
from outpace.models.hf.module import recording
from outpace.models.hf.stages import LayerSpan, StageOutputs
from outpace.models.kernels import triton_runtime
from outpace.models.segment import Segment, SegmentOutput, joined
from outpace.models.slots import CHUNK
from outpace.sampling.noise import words, words_of
from outpace.sampling.sampler import Pick

MOST_GRAPHS = 48  # the one that was not used for longest goes
NO_LIMITS = [0.0, 0.0, 0.0]


class GraphLM(CompiledLM):
    """A model on a CUDA or ROCm device."""

    asynchronous = True
    most_tokens = SIZES[-1]
    quick_prompts = True
    before = 0  # tokens of the text that are not in a row

    def __init__(self, packed: PackedLM, halves: Bf16Copies | None = None):
        super().__init__(packed, halves)
        self._graphs: OrderedDict[GraphKey, CapturedPass] = OrderedDict()
        self._generation = self.cache.generation
        self.graph_memory = torch.cuda.graph_pool_handle()
        self._chains = DraftChains(self)
        self._last: LastPass | None = None
        self._ahead = RunAhead()
        self._doubt = RunAheadGate()
        self.capture_seconds = 0.0

    @classmethod
    def problem(cls, packed: PackedLM) -> str | None:
        if packed.device.type != "cuda" or not triton_runtime.AVAILABLE:
            return "graphs need a GPU and Triton"
        if packed.model.dtype not in (torch.bfloat16, torch.float16, torch.float32):
            return f"there are no kernels for {packed.model.dtype}"
        return None

    @property
    def chunk(self) -> int:  # type: ignore[override]
        """Of a prompt: what a graph can take, because to launch an eager pass takes longer than several graphs."""
        return lane.LONGEST if self.most_tokens else CHUNK

    def early(self, layers: int) -> LM | None:
        return EarlyGraphLM(self, layers)

    def forward(self, jobs: Seq[Segment], taps: tuple[int, ...]) -> list[SegmentOutput]:
        """Several passes where one would be too large to be captured: eagerly it takes far longer than those."""
        parts = lane.parts(jobs, self.most_tokens)
        if len(parts) == 1 or not self.most_tokens or any(job.resumed is not None for job in jobs):
            return super().forward(jobs, taps)
        return [_settled(output) for part in parts for output in super(GraphLM, self).forward(part, taps)]

    def quickly(self, jobs: Seq[Segment], taps: tuple[int, ...]) -> list[SegmentOutput]:
        outputs = self._ahead.take(jobs, taps)
        if outputs is not None:
            return outputs
        captured = self._captured(GraphKey.of(jobs, taps))
        if captured.entering is not None:
            beside = joined(jobs, captured.size.tokens)
            captured.entering.copy_(beside["features"][0]) if beside else captured.entering.zero_()
        self._stage(captured, jobs)
        captured.launch()
        outputs = self._outputs(captured, jobs)
        self._last = LastPass(captured, jobs, outputs)
        return outputs

    def ahead(self, rows: Seq[int], picks: Seq[Pick | None]) -> bool:
        last = self._last if self._doubt.next() else None
        jobs = None if last is None or self.feeds else last.next(rows, picks)
        if last is None or jobs is None or not all(self._follows(job) for job in jobs):
            return False
        try:
            return self._attempt(jobs, lambda: self._send(last, jobs)) or False
        except torch.OutOfMemoryError:
            return False  # for a graph that can be done without

    def _follows(self, job: Segment) -> bool:
        """Whether it is the root that the row scored last that this comes behind, and there is room."""
        row = self.rows[job.row]
        behind = row.tree is not None and len(row.tree) == 1 and job.start == len(row.tokens) + 1
        return behind and job.end <= self.cache.capacity[job.row]

    def _send(self, last: LastPass, jobs: list[Segment]) -> bool:
        size = last.captured.size
        captured = self._captured(GraphKey.of(jobs, size.taps)._replace(turn=1 - size.turn))
        self._stage(captured, jobs)
        chosen = last.captured.left.chosen
        assert chosen is not None, "a whole pass chooses"
        captured.ids.copy_(chosen[0].index_select(0, captured.ids))
        captured.launch()
        outputs = self._outputs(captured, jobs)
        self._ahead, self._last = RunAhead.of(last, jobs, outputs), LastPass(captured, jobs, outputs)
        return True

    def release(self, row: int) -> None:
        self._ahead.drop(row)
        super().release(row)

    def sync(self, tokens: Seq[list[int]], rows: Seq[int]) -> None:
        for row in rows:
            self._ahead.drop(row)
        super().sync(tokens, rows)

    def refresh(self) -> None:
        self._ahead = RunAhead()
        super().refresh()

    @torch.no_grad()
    def _quick_part(
        self, span: LayerSpan, jobs: Seq[Segment], entering: Tensor | None, nodes: list[int] | None
    ) -> StageOutputs:
        captured = self._captured(GraphKey.of(jobs)._replace(span=span, heads=nodes is not None))
        count = sum(len(job.tokens) for job in jobs)
        if entering is not None:
            assert captured.entering is not None
            captured.entering[:count].copy_(entering)
        self._stage(captured, jobs)
        captured.launch()
        states, logits = captured.left.states, captured.left.logits
        assert states is not None
        return StageOutputs(states[:count].clone(), None if nodes is None or logits is None else logits[_rows(nodes)])

    def guess(
        self, rows: Seq[int], tokens: Seq[int], shapes: Seq[DraftShape], picks: Seq[Pick]
    ) -> list[list[DraftToken]] | None:
        if shapes[0].width > 1:
            return super().guess(rows, tokens, shapes, picks)
        if not self.most_tokens or len(rows) > lane.MOST_JOBS:
            return None  # given up, or too many for a compiled pass
        steps = min(max(shape.depth for shape in shapes), MOST_STEPS)
        roots = [Tree([token]) for token in tokens]
        scores = self.score(roots, rows, picks=picks)  # with what the rows have pending
        found = []
        for score in scores:
            assert score.chosen is not None, "a choice without filters is made by the graph"
            found.append([DraftToken(score.chosen.tokens[0], score.chosen.probs[0])])
        if steps > 1:
            self.reserve([Segment(row, len(self.rows[row].tokens), [], Tree.chain([0] * steps)) for row in rows])
            links = [
                ChainStart(
                    guesses[0].token, self.cache.base(row), len(self.rows[row].tokens) + 1, pick, self._left(row)
                )
                for guesses, row, pick in zip(found, rows, picks, strict=True)
            ]
            for guesses, more in zip(found, self._chains.run(links, steps - 1), strict=True):
                guesses += more.guesses
        for row, root, guesses in zip(rows, tokens, found, strict=True):  # the last guess was not fed
            self.rows[row].tree = Tree.chain([root, *(guess.token for guess in guesses[:-1])])
            self.rows[row].scored = len(guesses)
        return found

    def _left(self, row: int) -> Tensor | None:
        """The state that enters with a row's first guess, in a model that takes any."""  # [hidden]
        left = self.rows[row].provisional
        return left[0] if self.feeds and left is not None else None

    def _stage(self, captured: CapturedPass, jobs: Seq[Segment]) -> None:
        """Everything that a pass needs to know, in one copy."""
        tokens = captured.size.tokens
        packing = lane.pack(jobs, self.cache, tokens, captured.size.slots)
        host = captured.staging.open()
        table = host[: tokens * COLUMNS].reshape(COLUMNS, tokens)
        table[: 3 + lane.WORDS] = packing.columns
        table[3 + lane.WORDS :] = 0
        picks = [job.pick for job in jobs for _ in job.tokens]
        heat = [0.0 if pick is None else pick.temperature for pick in picks]
        if any(heat):
            seeds, count = [0 if pick is None else pick.seed for pick in picks], len(picks)
            table[NOISE, :count] = words_of(seeds, table[1, :count] + self.before + 1).T
            table[HEAT, :count] = np.array(heat).view(np.int64)
        if captured.size.filtered:
            told = [limits(pick) or NO_LIMITS for pick in picks]
            table[LIMITS, : len(picks)] = np.array(told, dtype=np.float64).T.copy().view(np.int64)
        host[tokens * COLUMNS :] = np.array(packing.jobs).reshape(-1)
        captured.staging.send()

    def _outputs(self, captured: CapturedPass, jobs: Seq[Segment]) -> list[SegmentOutput]:
        coming = PickBuffer(captured, sum(len(job.tokens) for job in jobs))
        outputs, at = [], 0
        for job in jobs:
            first, end = at + len(job.pending), at + len(job.tokens)
            hidden = {tap: states[at:end].clone() for tap, states in captured.left.recorded.items()}
            assert captured.left.logits is not None
            logits, chosen = captured.left.logits[first:end], None
            if job.pick is not None:
                again = partial(self._redone, logits, job, job.pick)
                made = not job.pick.filters or limits(job.pick) is not None  # by the graph
                chosen = (
                    PendingPicks(coming, slice(first, end), again) if made else self._filtered(logits, job, job.pick)
                )
            outputs.append(SegmentOutput(logits, hidden, chosen))
            at = end
        return outputs

    def _redone(self, logits: Tensor, job: Segment, pick: Pick) -> Picked:
        self._doubt.seen = True
        return self._filtered(logits, job, pick)

    def _filtered(self, logits: Tensor, job: Segment, pick: Pick) -> Picked:
        """Choices among what the filters leave, where a graph cannot make them: they sort, or may leave many tokens."""
        best = logits.amax(-1)
        kept = logits.float() / pick.temperature
        for keep in pick.filters:
            kept = keep(kept)
        positions = torch.tensor(job.positions[len(job.pending) :], device=self.device)
        noise = words(pick.seed, positions + self.before + 1)
        tokens, _, probs, _ = torch.ops.outpace.choose(kept, noise, torch.ones_like(best, dtype=torch.float32)).tolist()
        return Picked([int(token) for token in tokens], best.tolist(), probs, there=False)

    def _captured(self, size: GraphKey) -> CapturedPass:
        if self._generation != self.cache.generation:  # the pool moved: graphs read the old one
            torch.cuda.synchronize()  # one of them may still run
            self._graphs.clear()
            self.graph_memory = torch.cuda.graph_pool_handle()  # the old one went with its last graph
            self._generation = self.cache.generation
        if size not in self._graphs:
            start = time.perf_counter()
            self._graphs[size] = self._capture(size)
            self.capture_seconds += time.perf_counter() - start
            if len(self._graphs) > MOST_GRAPHS:
                self._graphs.popitem(last=False)
        self._graphs.move_to_end(size)
        return self._graphs[size]

    def _capture(self, size: GraphKey) -> CapturedPass:
        staging = Staging(size.tokens * COLUMNS + size.slots * 4, self.device)
        read = torch.zeros(FOUND, size.tokens, dtype=torch.float64, pin_memory=True)
        entering = None
        if self.feeds or (size.span is not None and size.span.first):
            width = self.quick.config.get_text_config().hidden_size
            entering = torch.zeros(size.tokens, width, dtype=self.model.dtype, device=self.device)
        run = self._program(size, staging.given, entering)

        def pass_() -> GraphOutputs:
            left = run()
            if left.chosen is not None:
                read.copy_(left.chosen, non_blocking=True)
            return left

        replay = capture(pass_, self.graph_memory)
        return CapturedPass(replay, staging, entering, read, size)

    def _program(self, size: GraphKey, given: Tensor, entering: Tensor | None) -> Callable[[], GraphOutputs]:
        table = given[: size.tokens * COLUMNS].view(COLUMNS, size.tokens)
        jobs = given[size.tokens * COLUMNS :].view(size.slots, 4)
        ids, positions, where = table[0], table[1], table[2]
        bits, noise, heat, cut = table[3 : 3 + lane.WORDS], table[NOISE], table[HEAT], table[LIMITS]

        def run() -> GraphOutputs:
            lanes = self.lanes(where, jobs, bits.T.contiguous(), positions)
            given = dict(position_ids=positions[None], past_key_values=self.cache, use_cache=True, reach=lanes)
            states = None
            with recording(self.quick, size.taps) as recorded:
                if size.span is None:
                    beside = {"features": entering[None]} if entering is not None else {}
                    logits = self.quick(input_ids=ids[None], **beside, **given).logits[0]
                else:
                    wanted = torch.arange(size.tokens, device=self.device) if size.heads else None
                    states, logits = self.stage(self.quick, size.span).run(ids, entering, wanted, **given)
            if logits is None:
                return GraphOutputs(None, states, recorded, None)
            choice = logits, noise.T, heat.view(torch.float64)
            if size.filtered:
                chosen = torch.ops.outpace.choose_kept(*choice, cut.view(torch.float64))
            else:
                chosen = torch.ops.outpace.choose(*choice)
            return GraphOutputs(logits, states, recorded, chosen)

        return run


def _settled(output: SegmentOutput) -> SegmentOutput:
    """The same, waited for, in memory that the next pass does not write to."""
    logits, chosen = output.logits, output.chosen
    chosen = chosen and Picked(chosen.tokens, chosen.best, chosen.probs)
    return SegmentOutput(logits if logits is None else logits.clone(), output.hidden, chosen)


def _rows(nodes: list[int]) -> slice | list[int]:
    """Neighbours are read where they are."""
    together = nodes[-1] - nodes[0] == len(nodes) - 1
    return slice(nodes[0], nodes[-1] + 1) if together else nodes
