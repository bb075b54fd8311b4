"""What a soak is told, and what it has found."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple


@dataclass(frozen=True)
class SoakSettings:
    """What is done, and for how long."""

    minutes: float = 30.0
    seed: int = 0
    clients: int = 16
    requests: int = 1_000_000  # at most
    asks: int = 72  # different requests
    tokens: int = 32  # of an answer, about
    long: int = 60  # numbers and topics of a long prompt, of about six tokens each
    think: float = 0.1  # most seconds that a client rests
    slots: int = 8  # of the server
    growth: float = 200.0  # most MB by which memory may grow once the server is warm
    log: Path = Path("build/soak-server.log")


class Check(NamedTuple):
    """A promise, and what was found."""

    name: str
    found: Any
    bound: str
    kept: bool


@dataclass
class SoakReport:
    """All that a soak has found."""

    seed: int
    counts: dict[str, int]
    checks: list[Check]
    violations: list[str]
    samples: list[dict[str, float]] = field(default_factory=list)

    @property
    def sound(self) -> bool:
        return all(check.kept for check in self.checks)

    def table(self) -> str:
        done = [f"| {name} | {count:,} |" for name, count in sorted(self.counts.items())]
        found = [f"| {c.name} | {c.found} | {c.bound} | {'yes' if c.kept else '**no**'} |" for c in self.checks]
        return "\n".join(
            ["| what was done | times |", "|---|--:|", *done, ""]
            + ["| check | found | bound | kept |", "|---|--:|--:|---|", *found]
            + [f"- {each[:2000]}" for each in self.violations]
        )
