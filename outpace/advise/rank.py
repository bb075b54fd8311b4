"""Ranking: replay every candidate, add up the measured times of its passes, and order by predicted speed-up."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from outpace import registry
from outpace.advise.overhead import CostTable, MeasuredPasses
from outpace.advise.recording import Recording
from outpace.advise.replay import ReplayLM
from outpace.api.model import Model
from outpace.api.request import Request
from outpace.bench.summary import Interval
from outpace.core.drafter import Drafter
from outpace.core.engine import Engine
from outpace.core.stats import Stats
from outpace.core.tree import Budget
from outpace.errors import UsageError
from outpace.sampling.settings import Sampling

DEPTHS = (1, 2, 4, 8, 16)
NODES = (4, 8, 16, 32)
RESAMPLES, SEED = 500, 0


@dataclass(frozen=True)
class MethodChoice:
    """A candidate: a method with a policy that sets its budget, and a draft model if it takes one."""

    method: str
    policy: str = "fixed"
    draft: str | None = None

    @property
    def name(self) -> str:
        parts = [self.method, self.draft, self.policy.partition(":")[2]]
        return ", ".join(part for part in parts if part)


class PassShape(NamedTuple):
    """The properties of a pass that determine its time."""

    size: int  # tokens in the pass
    is_chain: bool


@dataclass(frozen=True)
class ReplayWork:
    """The passes and the drafting time of one answer in a replay."""

    passes: Counter[PassShape]
    draft: float  # seconds of drafting


@dataclass(frozen=True)
class ReplayResult:
    """A candidate's replay of all recordings."""

    candidate: MethodChoice
    work: list[ReplayWork]  # one for each recording
    stats: Stats


@dataclass(frozen=True)
class Prediction:
    """The predicted figures of a candidate."""

    candidate: MethodChoice
    speedup: Interval
    tokens_per_pass: float
    draft_share: float
    nodes_per_pass: float
    acceptance_by_depth: list[float] = field(default_factory=list)


def candidates(methods: Seq[str], drafts: Seq[str]) -> list[MethodChoice]:
    """Return every method with its own budget and with smaller ones, and with each draft model if it takes one."""
    found = []
    for spec in methods:
        name, options = registry.parse(spec)
        cls = registry.find(name)
        if cls.policy != Drafter.policy:
            raise UsageError(f"{name!r} adapts to what pays, so advise cannot rank it: leave it out")
        takes_draft = "draft" in registry.options(cls)
        for draft in drafts if takes_draft else [None]:
            drafter = registry.method(name, **options, **({"draft": None} if takes_draft else {}))
            found += [MethodChoice(spec, policy, draft) for policy in _budgets(drafter.limit)]
    return found


def _budgets(limit: Budget) -> list[str]:
    if not limit.depth:
        return ["fixed"]
    if limit.width == 1:
        return ["fixed", *(f"fixed:depth={depth}" for depth in DEPTHS if depth < limit.depth)]
    return ["fixed", *(f"fixed:nodes={nodes}" for nodes in NODES if nodes < limit.nodes)]


def drafter_of(model: Model, candidate: MethodChoice, drafts: dict[str, Model]) -> Drafter:
    name, options = registry.parse(candidate.method)
    if candidate.draft is not None:
        options["draft"] = model.draft_of(drafts[candidate.draft])
    return registry.method(name, **options)


def replay(
    model: Model, recordings: Seq[Recording], candidate: MethodChoice, drafts: dict[str, Model], sampling: Sampling
) -> ReplayResult:
    """Run the engine over all recordings, one after the other, with a drafter that has learned nothing yet."""
    target = ReplayLM(model.lm, recordings)
    stand_in = Model(target, model.tokenizer, model.stop_token_ids)
    drafter, (name, options) = drafter_of(model, candidate, drafts), registry.parse(candidate.policy)
    policy = registry.policy(name, **options)
    work, total = [], Stats()
    for recording in recordings:
        target.recording = recording
        target.clear()
        for draft in drafts.values():
            draft.clear_cache()
        request = Request(
            recording.prompt, drafter, policy=policy, sampling=sampling, ignore_eos=True,
            max_tokens=len(recording.answer),
        )  # fmt: skip
        engine, seq = Engine(target), stand_in.sequence(request)
        engine.submit(seq)
        passes, spent = Counter[PassShape](), 0.0
        for event in engine.run():
            assert event.step is not None, "a replay cannot fail"
            passes[PassShape(len(event.step.tree), event.step.tree.is_chain)] += 1
            spent += event.seconds["draft"]
        work.append(ReplayWork(passes, spent))
        total = total.merge(seq.stats)
    return ReplayResult(candidate, work, total)


def predict(found: ReplayResult, recordings: Seq[Recording], costs: MeasuredPasses) -> Prediction:
    """Predict the speed-up: the ratio of total times; its interval resamples answers and timings."""
    table, random = costs.table(), np.random.default_rng(SEED)
    pairs = _times(found, recordings, table)  # [answers, plain and method]
    drawn = []
    for _ in range(RESAMPLES):
        index = random.integers(len(pairs), size=len(pairs))
        again = _times(found, recordings, costs.table(random))[index].sum(axis=0)
        drawn.append(again[0] / again[1])
    low, high = np.percentile(drawn, [2.5, 97.5])
    plain, method = pairs.sum(axis=0)
    passes = sum((work.passes for work in found.work), Counter[PassShape]())
    return Prediction(
        found.candidate,
        Interval(float(plain / method), float(low), float(high)),
        found.stats.tokens_per_pass,
        sum(work.draft for work in found.work) / float(method),
        sum(shape.size * count for shape, count in passes.items()) / max(1, passes.total()),
        found.stats.acceptance_by_depth,
    )


def _times(found: ReplayResult, recordings: Seq[Recording], table: CostTable) -> np.ndarray:
    """Return the seconds of each answer, with plain decoding and with this candidate."""  # [answers, 2]
    costs = {shape: table.seconds(*shape) for work in found.work for shape in work.passes}
    rows = []
    for recording, work in zip(recordings, found.work, strict=True):
        prefill = table.prompt * len(recording.prompt)
        plain = prefill + len(recording.answer) * table.seconds(1, True)
        rows.append([plain, prefill + work.draft + sum(costs[shape] * n for shape, n in work.passes.items())])
    return np.array(rows)


def best(predictions: Seq[Prediction], count: int) -> list[Prediction]:
    """Return the best `count` of the best variant of each method and draft, without plain decoding, the baseline."""
    ordered = sorted(predictions, key=lambda p: -p.speedup.value)
    first = {(p.candidate.method, p.candidate.draft): p for p in reversed(ordered)}
    chosen = sorted(first.values(), key=lambda p: -p.speedup.value)
    return [p for p in chosen if p.nodes_per_pass > 1][:count]
