"""Advice on methods: record answers, time passes, replay and rank; then measure the best on held-out prompts."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence as Seq
from dataclasses import asdict, dataclass, field
from typing import Any

from outpace.advise import overhead as costing
from outpace.advise.overhead import MeasuredPasses
from outpace.advise.rank import MethodChoice, Prediction, best, drafter_of, predict, replay
from outpace.advise.recording import Recording, record
from outpace.api.model import Model
from outpace.bench.contestants import OutpaceContestant, RunRules
from outpace.bench.run import AnswerSettings, Condition, Group, measure, warm_up
from outpace.bench.specs import PLAIN, MethodSpec
from outpace.bench.summary import Interval, speedup
from outpace.errors import UsageError
from outpace.sampling.settings import Sampling

LEAST = 4  # prompts: two to record, two to measure
Step = Callable[[str, int], Callable[[], object]]  # starts a named step of N parts; call its result after each part


@dataclass(frozen=True)
class AdviceQuestion:
    """What advice is wanted on: the model, the draft models, the prompts and how to sample."""

    model: Model
    drafts: dict[str, Model]
    prompts: list[list[int]]
    max_tokens: int = 64
    sampling: Sampling = field(default_factory=Sampling)

    def __post_init__(self) -> None:
        if len(self.prompts) < LEAST:
            raise UsageError(f"advice needs at least {LEAST} prompts, half to record and half to measure on")

    @property
    def recorded(self) -> list[list[int]]:
        return self.prompts[::2]

    @property
    def held_out(self) -> list[list[int]]:
        return self.prompts[1::2]


@dataclass(frozen=True)
class Outcome:
    """A prediction, and the speed-up measured on the held-out prompts."""

    prediction: Prediction
    measured: Interval

    @property
    def error(self) -> float:
        """The relative error of the prediction against the measurement."""
        return self.prediction.speedup.value / self.measured.value - 1


@dataclass(frozen=True)
class Advice:
    """All predictions and measurements."""

    predictions: list[Prediction]  # best first
    outcomes: list[Outcome]
    costs: MeasuredPasses
    recorded: int
    held_out: int

    def to_dict(self) -> dict[str, Any]:
        table = self.costs.table()
        return {
            "predictions": [_fields(p) for p in self.predictions],
            "outcomes": [
                {"name": o.prediction.candidate.name, "predicted": asdict(o.prediction.speedup),
                 "measured": asdict(o.measured), "error": o.error}
                for o in self.outcomes
            ],
            "costs": {"chain": table.chain, "tree": table.tree, "prompt_token": table.prompt},
            "recorded": self.recorded,
            "held_out": self.held_out,
        }  # fmt: skip


def _fields(prediction: Prediction) -> dict[str, Any]:
    """Return a prediction under the names of the report's fields."""
    found = asdict(prediction)
    return {"name": prediction.candidate.name, **found, "rows_per_pass": found.pop("nodes_per_pass")}


def advise(question: AdviceQuestion, candidates: Seq[MethodChoice], count: int, rounds: int, step: Step) -> Advice:
    """Predict the speed-up of all candidates, and measure the best `count` of them."""
    model = question.model
    done = step("recording the target's answers", len(question.recorded))
    recordings = record(model, question.recorded, question.max_tokens, question.sampling, done)
    costs = _costs(question, recordings, candidates, step)
    done = step("replaying the drafters", len(candidates))
    predictions = []
    for candidate in candidates:
        found = replay(model, recordings, candidate, question.drafts, question.sampling)
        predictions.append(predict(found, recordings, costs))
        done()
    predictions.sort(key=lambda p: -p.speedup.value)
    outcomes = _measure(question, best(predictions, count), rounds, step)
    return Advice(predictions, outcomes, costs, len(recordings), len(question.held_out))


def _costs(
    question: AdviceQuestion, recordings: Seq[Recording], candidates: Seq[MethodChoice], step: Step
) -> MeasuredPasses:
    middle = statistics.median(len(r.prompt) + len(r.answer) // 2 for r in recordings)
    largest = max(drafter_of(question.model, candidate, question.drafts).limit.nodes for candidate in candidates) + 1
    context = min(int(middle), question.model.lm.max_length - largest - costing.PASSES - 4)
    done = step("timing passes of the target", costing.steps(largest, question.model.lm.trees))
    return costing.measure(question.model, max(2, context), largest, done)


def _measure(question: AdviceQuestion, chosen: Seq[Prediction], rounds: int, step: Step) -> list[Outcome]:
    if not chosen:
        return []
    settings = AnswerSettings(question.max_tokens, question.sampling)
    groups = [
        Group(i, Condition("held out", temperature=question.sampling.temperature), [str(i)], [prompt], settings)
        for i, prompt in enumerate(question.held_out)
    ]
    plain = OutpaceContestant(question.model, MethodSpec.parse(PLAIN))
    contestants = [plain, *(_contestant(question, p.candidate) for p in chosen)]
    done = step("measuring the best", len(contestants) * (1 + rounds * len(groups)))
    warm_up(contestants, groups[0], done)
    runs = measure(contestants, groups, rounds, lambda _: done())
    return [Outcome(p, speedup(runs, p.candidate.name, PLAIN)) for p in chosen]


def _contestant(question: AdviceQuestion, candidate: MethodChoice) -> OutpaceContestant:
    draft = question.drafts[candidate.draft] if candidate.draft is not None else None
    contestant = OutpaceContestant(
        question.model, MethodSpec.parse(candidate.method), draft, RunRules(MethodSpec.parse(candidate.policy))
    )
    contestant.name = candidate.name
    return contestant
