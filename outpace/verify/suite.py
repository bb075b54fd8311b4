"""The list of checks for a model, and the loop that runs them one after another."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from outpace.api.model import Model
from outpace.errors import UnsupportedModel
from outpace.registry import find, methods, options, parse, required
from outpace.verify.distribution import sampled_distribution
from outpace.verify.lossy import price
from outpace.verify.parity import PLAIN, Parity, keeps_seed
from outpace.verify.plan import Subject, VerifyPlan
from outpace.verify.records import Check


@dataclass(frozen=True)
class PlannedCheck:
    """A check that has not run yet."""

    subject: str
    name: str
    run: Callable[[], Check]


def planned_checks(plan: VerifyPlan, subjects: list[Subject], transformers: bool = False) -> list[PlannedCheck]:
    """List the checks: first those of plain decoding, then those of each method."""
    parity = Parity(plan)
    out = []
    for subject in [PLAIN, *(s for s in subjects if s.name != PLAIN.name)]:
        sequence = plan.model.sequence(plan.request(subject, plan.prompts[0]))
        try:
            sequence.target = plan.model.lm
            plan.model.worker.call(partial(sequence.drafter.open, sequence))
        except UnsupportedModel as error:
            refused = Check(subject.name, "all checks", "skip", str(error))
            out.append(PlannedCheck(subject.name, refused.name, partial(_given, refused)))
            continue
        if not (sequence.drafter.lossless and sequence.verifier.lossless):
            out.append(PlannedCheck(subject.name, "price", partial(price, plan, subject)))
            continue
        checks: dict[str, Callable[[Subject], Check]] = {
            "every token": parity.judged,
            "batch = alone": parity.batched,
            "callers = alone": parity.callers,
        }
        if subject is not PLAIN:
            checks = {"greedy = plain": parity.greedy, **checks}
            if keeps_seed(plan, subject):
                checks["same seed = plain"] = parity.seeded
        if sequence.verifier.needs_trees:
            del checks["every token"]  # contrastive search does not choose from a next-token distribution
        else:
            checks["sampled distribution"] = partial(sampled_distribution, plan)
        if transformers and subject is PLAIN:  # the other methods are compared with plain
            checks["greedy = Transformers"] = parity.transformers
        out += [PlannedCheck(subject.name, name, partial(run, subject)) for name, run in checks.items()]
    return out


def _given(check: Check) -> Check:
    return check


def subjects_of(specs: list[str], model: Model, draft: Model | None, shared: dict[str, Any]) -> list[Subject]:
    """Parse methods given as "name" or "name:option=value,..."; without any, take all that can run on this model."""
    if not specs:
        able = [name for name in methods() if draft is not None or "draft" not in required(find(name))]
        specs = [name for name in able if find(name).fits(model.lm)]
    subjects = []
    for spec in specs:
        name, given = parse(spec)
        if draft is not None and "draft" in options(find(name)):
            given["draft"] = draft
        subjects.append(Subject(spec, {"method": name, **shared, **given}))
    return subjects


def run_checks(checks: list[PlannedCheck]) -> Iterator[Check]:
    """Run the checks, and yield each result with its time."""
    for planned in checks:
        start = time.perf_counter()
        check = planned.run()
        yield replace(check, seconds=time.perf_counter() - start)
