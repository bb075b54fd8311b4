"""Costs: what a pass of the target takes on this machine, measured once through the `LM` protocol and kept on disk.

Seconds over the tokens in a pass, the requests that share it and the context of each. A file is only good for the
model, dtype, device, threads and versions it was measured with; one that does not fit or cannot be read is made anew.
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
SIZES = (1, 4, 16, 2, 8, 32)  # tokens of a pass; if time runs out the last ones are left out
MORE = (64, 3, 6, 12, 24, 48)  # if there is time
BATCHES = (4, 16)  # requests
LARGE = (8, 16)  # tokens of each request of the largest batch
SHORT, LONG = 32, 2048  # tokens of context
FEW = 6  # tokens of a pass, to see what context costs each of them
SECONDS = 3.0  # for all of it, and as much for long contexts
ROUNDS = 5
LEAST = 3  # sizes that are measured however long they take
CURVE = 512  # tokens up to which costs are looked up, not computed

Point = tuple[int, float]


@dataclass(frozen=True)
class Costs:
    """Seconds of a pass. More tokens never cost less."""

    chain: tuple[Point, ...]  # tokens -> seconds of one request after a short context
    batch: tuple[Point, ...] = ()  # requests -> seconds beyond those of one request with as many tokens
    context: float = 0.0  # seconds per request and token of context beyond a short one
    each: float = 0.0  # the same, per further token of the pass: on a CPU every token reads all that it sees by itself

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
        """A pass that took longer than a larger one was disturbed: what disturbs adds time, and never takes any."""
        points = sorted(self.chain, reverse=True)
        return tuple(zip([t for t, _ in points], accumulate((s for _, s in points), min), strict=True))[::-1]

    def save(self, path: Path, key: dict[str, str]) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps({"format": FORMAT, "key": key, **asdict(self)}))

    @classmethod
    def load(cls, path: Path, key: dict[str, str]) -> Costs | None:
        """What was saved under this key; None if there is nothing that can be used."""
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
    """Linear between points in order, and beyond the last as steep as before it."""
    if len(points) == 1 or at <= points[0][0]:
        return points[0][1]
    segments = list(pairwise(points))
    (x, y), (after, above) = next((s for s in segments if at <= s[1][0]), segments[-1])
    return y + (above - y) * (at - x) / (after - x)


def load_or_measure(lm: LM, name: str = "") -> Costs:
    """The costs of this model here: from the cache folder, else measured, which takes some seconds."""
    from outpace.storage.files import cache_dir

    key = identity(lm, name)
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
    path = cache_dir() / "costs" / f"{digest[:16]}.json"
    found = Costs.load(path, key)
    if found is None:
        logger.info("measuring what a pass of %s costs, once", name or "the model")
        found = measure(lm)
        try:
            found.save(path, key)
        except OSError as error:
            logger.warning("the measured costs could not be kept: %s", error)
    return found


def identity(lm: LM, name: str = "") -> dict[str, str]:
    """What costs depend on."""
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
    """Time left for measuring."""

    def __init__(self, limit: float, now: Callable[[], float] = time.perf_counter):
        self.now, self.end = now, now() + limit
        self._forgiven = 2 * limit  # at most

    def left(self) -> float:
        return self.end - self.now()

    def forgive(self, seconds: float) -> None:
        """What the first pass of a size took longer, to compile or capture it, is kept by the model and not lost."""
        given = max(0.0, min(seconds, self._forgiven))
        self._forgiven -= given
        self.end += given


def measure(lm: LM, limit: float = SECONDS, now: Callable[[], float] = time.perf_counter) -> Costs:
    """Time passes whose guesses are all rejected, until `limit` seconds are spent."""
    clock = Clock(limit, now)
    try:
        with _rows(lm, 1, SHORT) as rows:
            chain = _timed(lm, rows, SIZES, clock)
            chain |= _timed(lm, rows, MORE, clock, rounds=2, least=0)
        alone, context = Costs(tuple(sorted(chain.items()))), (0.0, 0.0)
        batch, large = dict[int, float](), dict[int, float]()
        with suppress(CacheFull, torch.OutOfMemoryError):  # then there will be no such batches, or contexts
            for requests in BATCHES:
                with _rows(lm, requests if clock.left() > 0 else 0, SHORT) as rows:
                    batch |= _timed(lm, rows, (1,), clock, rounds=3, least=0)
                    large = _timed(lm, rows, LARGE, clock, rounds=2, least=0) if requests == BATCHES[-1] else {}
            context = _context(lm, alone, Clock(limit, now))
        extra = tuple((n, max(0.0, seconds - alone.seconds(n))) for n, seconds in batch.items())
        chain |= {n: seconds - dict(extra)[BATCHES[-1]] for n, seconds in large.items()}
        return Costs(tuple(sorted(chain.items())), extra, *context)
    finally:
        lm.clear()


def _timed(
    lm: LM, rows: list[int], sizes: Seq[int], clock: Clock, rounds: int = ROUNDS, least: int = LEAST
) -> dict[int, float]:
    """Tokens of the whole pass -> median seconds, for chains of each of these sizes in every row."""
    samples: dict[int, list[float]] = {}
    able = [size for size in sizes if size < lm.max_length // 4] if rows else []
    for turn in range(rounds):
        for i, size in enumerate(able):
            if clock.left() <= 0 and (turn or i >= least):
                continue
            try:
                warmed = _pass(lm, rows, size, clock) if turn == 0 and clock.left() > 0 else 0.0
                spent = _pass(lm, rows, size, clock)
                clock.forgive(warmed - spent)
                samples.setdefault(size * len(rows), []).append(spent)
            except (CacheFull, torch.OutOfMemoryError):
                if size == 1:
                    raise
                able = able[:i]  # larger ones will not fit either
                break
    return {tokens: statistics.median_low(found) for tokens, found in samples.items()}


def _pass(lm: LM, rows: list[int], size: int, clock: Clock) -> float:
    trees = [Tree.chain([(5 * i + 3) % lm.vocab for i in range(size)]) for _ in rows]
    start = clock.now()
    for found in lm.score(trees, rows, picks=[Pick(0, 0.0)] * len(rows)):  # as a greedy request does
        _ = found.logits.all().max(-1).indices.tolist() if found.picked is None else list(found.picked.tokens)  # waits
    lm.keep([[0] for _ in rows], rows)
    return clock.now() - start


def _context(lm: LM, alone: Costs, clock: Clock) -> tuple[float, float]:
    """Seconds that a token of context adds to a pass, and to every further token in it; 0 if it takes too long."""
    for length in (LONG, LONG // 4, LONG // 8):
        if length < lm.max_length // 2 and length / 64 * alone.seconds(64) < clock.left():
            with _rows(lm, 1, SHORT) as short, _rows(lm, 1, length) as long:
                more = {size: _further(lm, short, long, size, clock) / (length - SHORT) for size in (1, FEW)}
            return more[1], max(0.0, more[FEW] - more[1]) / (FEW - 1)
    return 0.0, 0.0


def _further(lm: LM, short: list[int], long: list[int], size: int, clock: Clock) -> float:
    """Seconds that a pass takes longer behind a long context; in turns, so that what disturbs one disturbs both."""
    pairs = [(_pass(lm, short, size, clock), _pass(lm, long, size, clock)) for _ in range(ROUNDS + 1)]
    return max(0.0, statistics.median(after - before for before, after in pairs[1:]))


@contextmanager
def _rows(lm: LM, count: int, context: int) -> Iterator[list[int]]:
    """Rows that hold a prompt of this length."""
    prompts = [[(7 * i + 11 * row) % lm.vocab for i in range(min(context, lm.max_length // 2))] for row in range(count)]
    rows: list[int] = []
    try:
        for prompt in prompts:
            rows.append(lm.acquire(prompt))
        lm.feed(prompts, rows)
        yield rows
    finally:
        for row in rows:
            lm.release(row)
