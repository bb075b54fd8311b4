"""Results of checks: divergences, verdicts and reports.

pass   no difference
tie    the differing tokens are equally good within the model's own rounding
fail   rounding does not explain a difference
price  a lossy method: the quality it costs, instead of a verdict
skip   the check does not apply
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Verdict = Literal["pass", "tie", "fail", "price", "skip"]


@dataclass(frozen=True)
class Divergence:
    """A token that differs from the expected one."""

    prompt: int  # index of the prompt
    position: int  # index of the token in the answer
    expected: int
    got: int
    gap: float | None  # lead of the expected token in logits (noise included), in higher precision
    rounding: float | None  # how far the model's own rounding moves a logit
    explained: bool  # True: a tie
    texts: tuple[str, str] = ("", "")  # texts of the two tokens


@dataclass(frozen=True)
class Check:
    """The result of one check."""

    subject: str  # the method, or the server
    name: str
    verdict: Verdict
    summary: str
    divergences: list[Divergence] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def failed(self) -> bool:
        return self.verdict == "fail"


@dataclass(frozen=True)
class Report:
    """All checks of one model."""

    model: str
    settings: dict[str, Any]
    checks: list[Check]
    complete: bool = True  # False: interrupted before the last check

    @property
    def failed(self) -> bool:
        return any(check.failed for check in self.checks)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"verdict": "fail" if self.failed else "pass" if self.complete else "incomplete"}


def verdict_of(divergences: Seq[Divergence]) -> Verdict:
    if not divergences:
        return "pass"
    return "tie" if all(d.explained for d in divergences) else "fail"
