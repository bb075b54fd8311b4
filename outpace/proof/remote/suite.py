"""Suite: what is asked of a server, in order."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from outpace.api import Model
from outpace.proof.records import Check
from outpace.proof.remote import checks
from outpace.proof.remote.answers import Answers, ServerPlan
from outpace.proof.remote.law import sampled_law
from outpace.proof.remote.local import Local, every_token
from outpace.proof.remote.server import HTTPFailure, Server
from outpace.proof.remote.settings import Settings
from outpace.proof.suite import Question


def server_questions(on: Server, off: Server | None, local: Model | None, plan: ServerPlan) -> list[Question]:
    """Next to a server without speculation, or the same one told so, or a local model, or both; alone it is less."""
    answers = Answers(on, off, plan)
    judge = None if local is None else Local(local, answers)
    asked: dict[str, Callable[[], Check]] = {"repeatable": partial(checks.repeatable, answers)}
    if off is not None:
        asked["greedy = off"] = partial(checks.greedy_equals_off, answers)
    if judge is not None:
        asked["every token"] = partial(every_token, judge)
    asked["logprobs"] = partial(checks.logprobs, answers, judge)
    asked["same seed"] = partial(checks.same_seed, answers)
    if off is not None or judge is not None:
        asked["sampled law"] = partial(sampled_law, answers, judge)
    asked |= Settings(answers, judge).all()
    asked["concurrent = alone"] = partial(checks.concurrent_equals_alone, answers)
    return [Question(on.base, name, partial(_guarded, on.base, name, ask)) for name, ask in asked.items()]


def _guarded(subject: str, name: str, ask: Callable[[], Check]) -> Check:
    """An error of the server itself is a finding, once it has answered at all."""
    try:
        return ask()
    except HTTPFailure as failure:
        if name == "repeatable":
            raise
        return Check(subject, name, "skip" if failure.refusal else "fail", str(failure))
