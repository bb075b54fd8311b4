"""Meter: what things take here. A pass by the measured costs, guessing by the clock of the requests."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from outpace.core.policy import PassReport
from outpace.policies.controller.costs import Costs

SIZES = 10  # of passes: 1, 2, up to 4, 8, 16 ... tokens
FORGET = 256  # passes after which what was seen of a size counts for half
EXPOSED = 0.05  # share of a pass that the host adds where it is not hidden, before that was measured
DOUBT = 3.0  # passes of one size that it takes to believe that it differs from the others


class RecentMedian:
    """The median of the last few values."""

    def __init__(self, count: int = 9):
        self._values: deque[float] = deque(maxlen=count)
        self._median: float | None = None

    def add(self, value: float) -> None:
        self._values.append(value)
        self._median = statistics.median_low(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def get(self, default: float) -> float:
        return default if self._median is None else self._median


@dataclass
class PassTimer:
    """A pass that is under way, and what was expected of it."""

    asked: int  # sequences whose drafter was asked
    levels: int  # of a draft model
    tokens: int  # in the pass; 0: there is more in it than was planned
    ahead: bool = False  # it began before the pass before it was read
    expected: float = 0.0  # seconds of the pass itself


class TimingCorrection:
    """How much longer passes take now than the costs say, by their size: machines get busy, measurements err."""

    def __init__(self) -> None:
        self._all = RecentMedian(17)
        self._sizes = [RecentMedian() for _ in range(SIZES)]
        self._last = [0] * SIZES  # passes there were when one of this size was seen
        self._passes = 0

    def add(self, tokens: int, ratio: float) -> None:
        self._passes += 1
        self._all.add(ratio)
        self._sizes[size(tokens)].add(ratio)
        self._last[size(tokens)] = self._passes

    def ratios(self) -> list[float]:
        """For each size; one that was not seen lately is as the others are."""
        usual = self._all.get(1.0)
        found = []
        for recent, last in zip(self._sizes, self._last, strict=True):
            weight = len(recent) * 0.5 ** ((self._passes - last) / FORGET)
            found.append((recent.get(usual) * weight + usual * DOUBT) / (weight + DOUBT))
        return found


def size(tokens: int) -> int:
    """Passes of 1, 2, 4, 8 ... tokens are the largest of their size."""
    return min((tokens - 1).bit_length(), SIZES - 1)


@dataclass
class Timing:
    """The figures that decisions are made with."""

    costs: Costs
    asking: RecentMedian = field(
        default_factory=RecentMedian
    )  # seconds of asking a drafter for a row, draft models aside
    level: RecentMedian = field(default_factory=RecentMedian)  # seconds of a level of a draft model
    drift: TimingCorrection = field(default_factory=TimingCorrection)
    hidden: RecentMedian = field(default_factory=lambda: RecentMedian(17))  # the same of passes that began ahead
    elapsed: float = 0.0
    timer: PassTimer | None = None

    def prices(self, rows: int, context: int) -> Callable[[int], float]:
        """Seconds of a pass that `rows` requests share, by the number of guesses in it."""
        curve, last, ratios = self.costs.curve, len(self.costs.curve) - 1, self.drift.ratios()
        fixed = self.costs.seconds(rows, rows, context) - curve[min(rows, last)]
        each = self.costs.seconds(rows + 1, rows, context) - fixed - curve[min(rows + 1, last)]
        return lambda n: (curve[min(rows + n, last)] + fixed + each * n) * ratios[size(rows + n)]

    def exposed(self, plain: float, rows: int) -> float:
        """Seconds that a pass without guesses takes longer when it cannot begin ahead, of `plain` in all."""
        usual = self.drift.ratios()[size(rows)]
        return max(0.0, plain * (1 - self.hidden.get((1 - EXPOSED) * usual) / usual))

    def start(self, timer: PassTimer, batch_size: int, context: int) -> None:
        """A pass begins."""
        if timer.tokens:
            timer.expected = self.costs.seconds(timer.tokens, batch_size, context)
        self.timer = timer

    def read(self, report: PassReport) -> None:
        """Learn from what the pass that was under way took."""
        timer, self.timer = self.timer, None
        if timer is None:
            return
        drafting = report.seconds.get("draft", 0.0)
        passing = sum(report.seconds.values()) - drafting - report.seconds.get("prefill", 0.0)
        self.elapsed += drafting + passing
        if timer.levels:
            self.level.add(max(0.0, drafting - timer.asked * self.asking.get(0.0)) / timer.levels)
        elif timer.asked:
            self.asking.add(drafting / timer.asked)
        if timer.tokens and timer.ahead:
            self.hidden.add(passing / timer.expected)
        elif timer.tokens:
            self.drift.add(timer.tokens, passing / timer.expected)
