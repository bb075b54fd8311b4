"""Timing: how long a pass and a draft step take on this machine.

Pass times come from the cost table, corrected by recent measurements. Drafting is timed directly.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from outpace.core.policy import PassReport
from outpace.policies.controller.costs import Costs

SIZES = 10  # number of pass sizes: 1, 2, up to 4, 8, 16 ... tokens
HALF_LIFE = 256  # passes after which the measurements of a size count half
EXPOSED = 0.05  # share of host work in a pass without overlap, until it is measured
PRIOR_WEIGHT = 3.0  # weight, in passes, of the ratio of all sizes in the ratio of one size


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
    """A pass in flight, and its expected time."""

    drafting: int  # sequences whose drafter was called
    levels: int  # levels drafted by a draft model
    tokens: int  # tokens in the pass; 0: not all of its work is planned here, so its time is not used
    ahead: bool = False  # it was launched before the host read the pass before
    expected: float = 0.0  # seconds of the pass without drafting


class TimingCorrection:
    """The ratio of real to predicted pass time by pass size, because machines get busy and measurements have errors."""

    def __init__(self) -> None:
        self._all = RecentMedian(17)
        self._sizes = [RecentMedian() for _ in range(SIZES)]
        self._last = [0] * SIZES  # pass count at the last pass of each size
        self._passes = 0

    def add(self, tokens: int, ratio: float) -> None:
        self._passes += 1
        self._all.add(ratio)
        self._sizes[size(tokens)].add(ratio)
        self._last[size(tokens)] = self._passes

    def ratios(self) -> list[float]:
        """Return the ratio for each size; without recent passes of a size, it tends to the ratio of all sizes."""
        usual = self._all.get(1.0)
        found = []
        for recent, last in zip(self._sizes, self._last, strict=True):
            weight = len(recent) * 0.5 ** ((self._passes - last) / HALF_LIFE)
            found.append((recent.get(usual) * weight + usual * PRIOR_WEIGHT) / (weight + PRIOR_WEIGHT))
        return found


def size(tokens: int) -> int:
    """Return the size index of a pass; 1, 2, 4, 8 ... tokens are the upper limits of the sizes."""
    return min((tokens - 1).bit_length(), SIZES - 1)


@dataclass
class Timing:
    """The measured times behind the decisions of the controller."""

    costs: Costs
    # Seconds to call a drafter for one request, without draft models.
    call_time: RecentMedian = field(default_factory=RecentMedian)
    level: RecentMedian = field(default_factory=RecentMedian)  # seconds per level of a draft model
    drift: TimingCorrection = field(default_factory=TimingCorrection)
    # Time ratios of passes launched ahead, whose host work is hidden.
    hidden: RecentMedian = field(default_factory=lambda: RecentMedian(17))
    elapsed: float = 0.0  # seconds of all passes and drafts
    timer: PassTimer | None = None

    def pass_cost(self, batch_size: int, context: int) -> Callable[[int], float]:
        """Return a function from the number of draft tokens to the seconds of a pass with `batch_size` requests."""
        curve, last, ratios = self.costs.curve, len(self.costs.curve) - 1, self.drift.ratios()
        fixed = self.costs.seconds(batch_size, batch_size, context) - curve[min(batch_size, last)]
        each = self.costs.seconds(batch_size + 1, batch_size, context) - fixed - curve[min(batch_size + 1, last)]
        return lambda n: (curve[min(batch_size + n, last)] + fixed + each * n) * ratios[size(batch_size + n)]

    def exposed(self, plain: float, batch_size: int) -> float:
        """Return the seconds that launching ahead hides, of the `plain` seconds of a pass without draft tokens."""
        usual = self.drift.ratios()[size(batch_size)]
        return max(0.0, plain * (1 - self.hidden.get((1 - EXPOSED) * usual) / usual))

    def start(self, timer: PassTimer, batch_size: int, context: int) -> None:
        """Record a pass that begins."""
        if timer.tokens:
            timer.expected = self.costs.seconds(timer.tokens, batch_size, context)
        self.timer = timer

    def read(self, report: PassReport) -> None:
        """Learn from the times of the pass in flight."""
        timer, self.timer = self.timer, None
        if timer is None:
            return
        drafting = report.seconds.get("draft", 0.0)
        passing = sum(report.seconds.values()) - drafting - report.seconds.get("prefill", 0.0)
        self.elapsed += drafting + passing
        if timer.levels:
            self.level.add(max(0.0, drafting - timer.drafting * self.call_time.get(0.0)) / timer.levels)
        elif timer.drafting:
            self.call_time.add(drafting / timer.drafting)
        if timer.tokens and timer.ahead:
            self.hidden.add(passing / timer.expected)
        elif timer.tokens:
            self.drift.add(timer.tokens, passing / timer.expected)
