"""The list of checks for a server."""

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


def server_checks(on: Server, off: Server | None, local: Model | None, plan: ServerPlan) -> list[PlannedCheck]:
    """List the checks of `on`; a server without speculation (`off`) and a local model each add some."""
    answers = ServerAnswers(on, off, plan)
    judge = None if local is None else LocalJudge(local, answers)
    checks: dict[str, Callable[[], Check]] = {"repeatable": partial(parity.repeatable, answers)}
    if off is not None:
        checks["greedy = off"] = partial(parity.greedy_equals_off, answers)
    if judge is not None:
        checks["every token"] = partial(every_token, judge)
    checks["logprobs"] = partial(parity.logprobs, answers, judge)
    checks["same seed"] = partial(parity.same_seed, answers)
    if off is not None or judge is not None:
        checks["sampled distribution"] = partial(sampled_distribution, answers, judge)
    checks |= SettingsCheck(answers, judge).all()
    checks["concurrent = alone"] = partial(parity.concurrent_equals_alone, answers)
    return [PlannedCheck(on.base, name, partial(_guarded, on.base, name, run)) for name, run in checks.items()]


def _guarded(subject: str, name: str, run: Callable[[], Check]) -> Check:
    """Report a server error as a result, except in the first check, where it ends the run."""
    try:
        return run()
    except HTTPFailure as failure:
        if name == "repeatable":
            raise
        return Check(subject, name, "skip" if failure.refusal else "fail", str(failure))
