"""Costs: the time of a pass of the target on this machine, measured once through the `LM` interface and saved on disk.

The cost table gives seconds by the tokens in a pass, the number of requests and the context of each. A saved table is
valid only for the same model, dtype, device, threads and versions. If it does not match or cannot be read, the costs
are measured again.
"""

from __future__ import annotations

import hashlib
import json
import logging
import statistics
import time
from collections.abc import Callable, Iterator, Sequence as Seq
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from outpace.core.tree import Tree
from outpace.errors import CacheFull
from outpace.sampling.sampler import Pick
from outpace.storage.files import write_whole
from outpace.version import __version__

if TYPE_CHECKING:
    from outpace.core.lm import LM

logger = logging.getLogger(__name__)
FORMAT = 3
SIZES = (1, 4, 16, 2, 8, 32)  # tokens of a pass; if time runs out, the last ones are skipped
MORE = (64, 3, 6, 12, 24, 48)  # further sizes, if there is time
BATCHES = (4, 16)  # requests in a pass
LARGE = (8, 16)  # tokens of each request of the largest batch
SHORT, LONG = 32, 2048  # tokens of context
FEW = 6  # tokens of a pass, to measure what context costs each of them
SECONDS = 3.0  # limit for all measurements, and the same again for long contexts
ROUNDS = 5  # measurements of each size
LEAST = 3  # sizes that are measured even without time left
CURVE = 512  # costs of passes below this number of tokens are looked up, not computed

Point = tuple[int, float]


@dataclass(frozen=True)
class Costs:
    """Seconds of a pass. More tokens never cost less."""

    chain: tuple[Point, ...]  # tokens -> seconds, for one request after a short context
    batch: tuple[Point, ...] = ()  # requests -> extra seconds over one request with the same number of tokens
    context: float = 0.0  # seconds per request and per token of context beyond a short one
    each: float = 0.0  # the same per further token of the pass: on a CPU each token reads its context separately

    def seconds(self, tokens: int, requests: int = 1, context: float = 0.0) -> float:
        base = self.curve[tokens] if tokens < CURVE else between(self._rising, tokens)
        shared = between(((1, 0.0), *self.batch), requests) if requests > 1 and self.batch else 0.0
        seen = max(0.0, context - SHORT)
        return base + shared + seen * (self.context * requests + self.each * (tokens - requests))

    @cached_property
    def curve(self) -> list[float]:
        """Seconds of one request by the number of its tokens."""
        return [between(self._rising, tokens) for tokens in range(CURVE)]

    @cached_property
    def _rising(self) -> tuple[Point, ...]:
        """Cap each size at the time of any larger one: a slower smaller pass was disturbed, which only adds time."""
        points = sorted(self.chain, reverse=True)
        return tuple(zip([t for t, _ in points], accumulate((s for _, s in points), min), strict=True))[::-1]

    def save(self, path: Path, key: dict[str, str]) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps({"format": FORMAT, "key": key, **asdict(self)}))

    @classmethod
    def load(cls, path: Path, key: dict[str, str]) -> Costs | None:
        """Return the costs saved under this key, or None if the file cannot be used."""
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            if found["format"] != FORMAT or found["key"] != key:
                return None
            chain, batch = (tuple((int(n), float(s)) for n, s in found[name]) for name in ("chain", "batch"))
            costs = cls(chain, batch, float(found["context"]), float(found["each"]))
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return costs if costs.chain and all(s > 0 for _, s in chain) else None


def between(points: Seq[Point], at: float) -> float:
    """Interpolate linearly between sorted points; beyond the last one, continue the last segment."""
    if len(points) == 1 or at <= points[0][0]:
        return points[0][1]
    segments = list(pairwise(points))
    (x, y), (after, above) = next((s for s in segments if at <= s[1][0]), segments[-1])
    return y + (above - y) * (at - x) / (after - x)


def load_or_measure(lm: LM, name: str = "") -> Costs:
    """Return the costs of this model on this machine, from the cache folder or else measured in some seconds."""
    from outpace.storage.files import cache_dir

    key = identity(lm, name)
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
    path = cache_dir() / "costs" / f"{digest[:16]}.json"
    found = Costs.load(path, key)
    if found is None:
        logger.info("measuring the cost of a pass of %s (once)", name or "the model")
        found = measure(lm)
        try:
            found.save(path, key)
        except OSError as error:
            logger.warning("the measured costs could not be saved: %s", error)
    return found


def identity(lm: LM, name: str = "") -> dict[str, str]:
    """Return all properties of model and machine on which costs depend."""
    kind = lm.identity or f"{type(lm).__name__}, vocabulary {lm.vocab}, length {lm.max_length}"
    device = torch.device(getattr(lm, "device", "cpu"))
    return {
        "model": f"{name}, {kind}",
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else str(device),
        "threads": str(torch.get_num_threads()),
        "torch": torch.__version__,
        "outpace": __version__,
    }


class Clock:
    """A time limit for measuring."""

    def __init__(self, limit: float, now: Callable[[], float] = time.perf_counter):
        self.now, self.end = now, now() + limit
        self._extension = 2 * limit  # upper limit of all extensions

    def left(self) -> float:
        return self.end - self.now()

    def extend(self, seconds: float) -> None:
        """Extend the limit by the extra time of a first pass: its compilation or capture is reused later."""
        given = max(0.0, min(seconds, self._extension))
        self._extension -= given
        self.end += given


def measure(lm: LM, limit: float = SECONDS, now: Callable[[], float] = time.perf_counter) -> Costs:
    """Time passes in which all draft tokens are rejected, until `limit` seconds have passed."""
    clock = Clock(limit, now)
    try:
        with _prompted(lm, 1, SHORT) as slots:
            chain = _timed(lm, slots, SIZES, clock)
            chain |= _timed(lm, slots, MORE, clock, rounds=2, least=0)
        alone, context = Costs(tuple(sorted(chain.items()))), (0.0, 0.0)
        batch, large = dict[int, float](), dict[int, float]()
        with suppress(CacheFull, torch.OutOfMemoryError):  # then such batches or contexts cannot run either
            for requests in BATCHES:
                with _prompted(lm, requests if clock.left() > 0 else 0, SHORT) as slots:
                    batch |= _timed(lm, slots, (1,), clock, rounds=3, least=0)
                    large = _timed(lm, slots, LARGE, clock, rounds=2, least=0) if requests == BATCHES[-1] else {}
            context = _context(lm, alone, Clock(limit, now))
        extra = tuple((n, max(0.0, seconds - alone.seconds(n))) for n, seconds in batch.items())
        chain |= {n: seconds - dict(extra)[BATCHES[-1]] for n, seconds in large.items()}
        return Costs(tuple(sorted(chain.items())), extra, *context)
    finally:
        lm.clear()


def _timed(
    lm: LM, slots: list[int], sizes: Seq[int], clock: Clock, rounds: int = ROUNDS, least: int = LEAST
) -> dict[int, float]:
    """Return tokens of the whole pass -> median seconds, for a chain of each of these sizes in every slot."""
    samples: dict[int, list[float]] = {}
    able = [size for size in sizes if size < lm.max_length // 4] if slots else []
    for turn in range(rounds):
        for i, size in enumerate(able):
            if clock.left() <= 0 and (turn or i >= least):
                continue
            try:
                warmed = _pass(lm, slots, size, clock) if turn == 0 and clock.left() > 0 else 0.0
                spent = _pass(lm, slots, size, clock)
                clock.extend(warmed - spent)
                samples.setdefault(size * len(slots), []).append(spent)
            except (CacheFull, torch.OutOfMemoryError):
                if size == 1:
                    raise
                able = able[:i]  # larger sizes do not fit either
                break
    return {tokens: statistics.median_low(found) for tokens, found in samples.items()}


def _pass(lm: LM, slots: list[int], size: int, clock: Clock) -> float:
    trees = [Tree.chain([(5 * i + 3) % lm.vocab for i in range(size)]) for _ in slots]
    start = clock.now()
    for found in lm.score(trees, slots, picks=[Pick(0, 0.0)] * len(slots)):  # as for greedy requests
        # Read the choices, which waits for the pass.
        _ = found.logits.likeliest() if found.picked is None else list(found.picked.tokens)
    lm.keep([[0] for _ in slots], slots)
    return clock.now() - start


def _context(lm: LM, alone: Costs, clock: Clock) -> tuple[float, float]:
    """Return the seconds that a token of context adds to a pass and to each further token; 0 if it takes too long."""
    for length in (LONG, LONG // 4, LONG // 8):
        if length < lm.max_length // 2 and length / 64 * alone.seconds(64) < clock.left():
            with _prompted(lm, 1, SHORT) as short, _prompted(lm, 1, length) as long:
                more = {size: _further(lm, short, long, size, clock) / (length - SHORT) for size in (1, FEW)}
            return more[1], max(0.0, more[FEW] - more[1]) / (FEW - 1)
    return 0.0, 0.0


def _further(lm: LM, short: list[int], long: list[int], size: int, clock: Clock) -> float:
    """Return the extra seconds of a pass after a long context; alternate both, so that disturbances affect both."""
    pairs = [(_pass(lm, short, size, clock), _pass(lm, long, size, clock)) for _ in range(ROUNDS + 1)]
    return max(0.0, statistics.median(after - before for before, after in pairs[1:]))


@contextmanager
def _prompted(lm: LM, count: int, context: int) -> Iterator[list[int]]:
    """Acquire slots that each hold a prompt of this length."""
    prompts = [[(7 * i + 11 * n) % lm.vocab for i in range(min(context, lm.max_length // 2))] for n in range(count)]
    slots: list[int] = []
    try:
        for prompt in prompts:
            slots.append(lm.acquire(prompt))
        lm.feed(prompts, slots)
        yield slots
    finally:
        for slot in slots:
            lm.release(slot)
