"""Suite: what is asked of a server, in order."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from outpace.api.model import Model
from outpace.verify.records import Check
from outpace.verify.servers import parity
from outpace.verify.servers.answers import ServerAnswers, ServerPlan
from outpace.verify.servers.client import HTTPFailure, Server
from outpace.verify.servers.distribution import sampled_distribution
from outpace.verify.servers.local import LocalJudge, every_token
from outpace.verify.servers.settings import SettingsCheck
from outpace.verify.suite import PlannedCheck


def server_questions(on: Server, off: Server | None, local: Model | None, plan: ServerPlan) -> list[PlannedCheck]:
    """Next to a server without speculation, or the same one told so, or a local model, or both; alone it is less."""
    answers = ServerAnswers(on, off, plan)
    judge = None if local is None else LocalJudge(local, answers)
    asked: dict[str, Callable[[], Check]] = {"repeatable": partial(parity.repeatable, answers)}
    if off is not None:
        asked["greedy = off"] = partial(parity.greedy_equals_off, answers)
    if judge is not None:
        asked["every token"] = partial(every_token, judge)
    asked["logprobs"] = partial(parity.logprobs, answers, judge)
    asked["same seed"] = partial(parity.same_seed, answers)
    if off is not None or judge is not None:
        asked["sampled distribution"] = partial(sampled_distribution, answers, judge)
    asked |= SettingsCheck(answers, judge).all()
    asked["concurrent = alone"] = partial(parity.concurrent_equals_alone, answers)
    return [PlannedCheck(on.base, name, partial(_guarded, on.base, name, ask)) for name, ask in asked.items()]


def _guarded(subject: str, name: str, ask: Callable[[], Check]) -> Check:
    """An error of the server itself is a finding, once it has answered at all."""
    try:
        return ask()
    except HTTPFailure as failure:
        if name == "repeatable":
            raise
        return Check(subject, name, "skip" if failure.refusal else "fail", str(failure))
