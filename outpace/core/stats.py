"""Stats: counters of what speculation did for a request, which can be merged over requests."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, field
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from outpace.core.sequence import Step


@dataclass
class Stats:
    """Counters of one request, or of many merged; times are seconds of the whole batch that ran the request."""

    passes: int = 0
    tokens: int = 0  # committed
    drafted: int = 0
    accepted: int = 0
    offered: list[int] = field(default_factory=list)  # passes whose tree reached depth i + 1 on the chosen path
    matched: list[int] = field(default_factory=list)  # how many of these passes accepted a node there
    seconds: dict[str, float] = field(default_factory=dict)  # keys: prefill, draft, score, verify, keep

    @property
    def tokens_per_pass(self) -> float:
        return self.tokens / self.passes if self.passes else 0.0

    @property
    def acceptance(self) -> float:
        """Share of the drafted nodes that were accepted (in a tree, most nodes cannot be)."""
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def acceptance_by_depth(self) -> list[float]:
        return [m / o for m, o in zip(self.matched, self.offered, strict=True)]

    def add(self, step: Step) -> None:
        self.passes += 1
        self.tokens += len(step.tokens)
        self.drafted += step.drafted
        self.accepted += step.accepted
        for depth in range(min(len(step.path), len(step.tokens))):  # no choice was made at later nodes
            if not step.layout.children(step.path[depth]):
                break
            if depth == len(self.offered):
                self.offered.append(0)
                self.matched.append(0)
            self.offered[depth] += 1
            self.matched[depth] += depth + 1 < len(step.path)

    def spend(self, seconds: dict[str, float]) -> None:
        """Add the times of a pass that included this request."""
        for name, spent in seconds.items():
            self.seconds[name] = self.seconds.get(name, 0.0) + spent

    def merge(self, other: Stats) -> Stats:
        """Return the sum of both; times are added too, so merge only statistics of separate runs."""
        return Stats(
            self.passes + other.passes,
            self.tokens + other.tokens,
            self.drafted + other.drafted,
            self.accepted + other.accepted,
            [sum(pair) for pair in zip_longest(self.offered, other.offered, fillvalue=0)],
            [sum(pair) for pair in zip_longest(self.matched, other.matched, fillvalue=0)],
            {k: self.seconds.get(k, 0.0) + other.seconds.get(k, 0.0) for k in {*self.seconds, *other.seconds}},
        )

    def to_dict(self) -> dict[str, Any]:
        derived = {"tokens_per_pass": self.tokens_per_pass, "acceptance": self.acceptance}
        return asdict(self) | derived | {"acceptance_by_depth": self.acceptance_by_depth}


class timed:
    """Add the run time of a `with` block to `seconds[name]`. A class, for speed: several run in every pass."""

    __slots__ = ("name", "seconds", "start")

    def __init__(self, seconds: dict[str, float], name: str) -> None:
        self.seconds, self.name = seconds, name

    def __enter__(self) -> None:
        self.start = time.perf_counter()

    def __exit__(self, *raised: object) -> None:
        self.seconds[self.name] = self.seconds.get(self.name, 0.0) + time.perf_counter() - self.start
