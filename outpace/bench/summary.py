"""Summary of the runs: every condition has its own figures, and ratios are paired by group and have an interval."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Sequence as Seq
from dataclasses import dataclass, field
from functools import reduce

import numpy as np

from outpace.bench.record import BenchRecord
from outpace.bench.run import Condition, Run
from outpace.bench.specs import PLAIN, TRANSFORMERS
from outpace.core.stats import Stats
from outpace.errors import UsageError
from outpace.text import first_difference

RESAMPLES, SEED = 2000, 0


@dataclass(frozen=True)
class Interval:
    """A ratio and its 95 % confidence interval; a single group gives no interval."""

    value: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class DifferentAnswer:
    """An answer that differs from plain decoding's."""

    prompt: str
    batch: int
    temperature: float
    position: int  # of the first token that differs


@dataclass(frozen=True)
class Slice:
    """A subset of the conditions: those that match the values given here."""

    label: str
    task: str | None = None
    batch: int | None = None
    context: int | None = None
    temperature: float | None = None

    def holds(self, condition: Condition) -> bool:
        wanted = {name: getattr(self, name) for name in ("task", "batch", "context", "temperature")}
        return all(value is None or getattr(condition, name) == value for name, value in wanted.items())


@dataclass(frozen=True)
class SliceFigures:
    """One contestant's figures in one slice; counts are of one round."""

    contestant: str
    part: Slice
    answers: int
    tokens: int
    tokens_per_second: float  # median over rounds
    tokens_per_pass: float | None
    accepted: int | None
    drafted: int | None
    acceptance_by_depth: list[float]
    draft_share: float | None  # share of the time that the engine loop counts
    memory: int | None  # peak, in bytes
    compared: int  # answers that should equal plain decoding's
    divergences: list[DifferentAnswer]
    speedups: dict[str, Interval] = field(default_factory=dict)  # over each baseline


@dataclass(frozen=True)
class Summary:
    """The figures of all contestants, in total and by slice."""

    contestants: list[str]
    baselines: list[str]
    total: list[SliceFigures]
    parts: list[list[SliceFigures]]  # each list is a slice


def speedup(runs: Iterable[Run], of: str, over: str) -> Interval:
    """Return one contestant's tokens per second over another's, on the groups that both answered.

    Times of a group are medians over rounds; if both give the same tokens, this is the ratio of their summed times.
    """
    mine, other = _medians(runs, of), _medians(runs, over)
    shared = sorted(mine.keys() & other.keys())
    if not shared:
        raise UsageError(f"{of} and {over} answered no group in common")
    table = np.array([[*mine[group], *other[group]] for group in shared])  # [groups, seconds and tokens of each]
    drawn = np.random.default_rng(SEED).integers(len(shared), size=(RESAMPLES, len(shared)))
    value = float(_ratio(table.sum(axis=0)))
    if len(shared) == 1:
        return Interval(value)
    low, high = np.percentile(_ratio(table[drawn].sum(axis=1)), [2.5, 97.5])
    return Interval(value, float(low), float(high))


def _ratio(sums: np.ndarray) -> np.ndarray:
    seconds, tokens, other_seconds, other_tokens = np.moveaxis(sums, -1, 0)
    return (tokens / seconds) / (other_tokens / other_seconds)


def _medians(runs: Iterable[Run], contestant: str) -> dict[int, tuple[float, float]]:
    """Return seconds and tokens by group, as medians over rounds."""
    found: dict[int, list[Run]] = {}
    for run in runs:
        if run.contestant == contestant:
            found.setdefault(run.group, []).append(run)
    return {
        group: (statistics.median(r.seconds for r in same), statistics.median(r.count for r in same))
        for group, same in found.items()
    }


def divergences(record: BenchRecord, runs: Iterable[Run], contestant: str) -> list[DifferentAnswer]:
    """Return the answers that differ from plain decoding's in any round, each once."""
    runs = list(runs)
    plain = {(run.group, run.round): run for run in runs if run.contestant == PLAIN}
    groups = {group.number: group for group in record.groups}
    found: dict[tuple[int, int], DifferentAnswer] = {}
    for run in runs:
        base = plain.get((run.group, run.round))
        if run.contestant != contestant or not run.compared or base is None:
            continue
        for index, (mine, wanted) in enumerate(zip(run.tokens, base.tokens, strict=True)):
            position = first_difference(mine, wanted)
            if position is not None:
                where = run.condition
                name = f"{where.task} {groups[run.group].names[index]}"
                found.setdefault((run.group, index), DifferentAnswer(name, where.batch, where.temperature, position))
    return list(found.values())


def summarize(record: BenchRecord) -> Summary:
    present = {run.contestant for run in record.runs}
    contestants = [name for name in record.header["contestants"] if name in present]
    baselines = [name for name in contestants if name == PLAIN or name.startswith(TRANSFORMERS)]
    parts = [[_figures(record, name, part, baselines) for name in contestants] for part in _slices(record)]
    found = [[figures for figures in part if figures is not None] for part in parts]
    return Summary(contestants, baselines, found[0], found[1:])


def _slices(record: BenchRecord) -> Iterator[Slice]:
    """Yield the total, then each batch size and temperature if there are several, then each condition."""
    conditions = list(dict.fromkeys(run.condition for run in record.runs))
    sweeps = list(dict.fromkeys((c.batch, c.temperature) for c in conditions))
    batches, temperatures = {batch for batch, _ in sweeps}, {temperature for _, temperature in sweeps}

    def where(batch: int, temperature: float) -> str:
        return (f", batch {batch}" if len(batches) > 1 else "") + (
            f", temperature {temperature:g}" if len(temperatures) > 1 else ""
        )

    yield Slice("all")
    if len(sweeps) > 1:
        for batch, temperature in sweeps:
            yield Slice(f"all{where(batch, temperature)}", None, batch, None, temperature)
    for c in conditions:
        label = c.task if c.context is None else f"{c.task} {c.context}"
        yield Slice(label + where(c.batch, c.temperature), c.task, c.batch, c.context, c.temperature)


def _figures(record: BenchRecord, contestant: str, part: Slice, baselines: Seq[str]) -> SliceFigures | None:
    """Compute the figures of a slice; None if the run was interrupted before it got there."""
    inside = [run for run in record.runs if part.holds(run.condition)]
    own = [run for run in inside if run.contestant == contestant]
    if not own:
        return None
    once = list({run.group: run for run in reversed(own)}.values())  # each group's first run
    counted = [run.stats for run in once if run.stats is not None]
    stats = reduce(Stats.merge, counted) if counted else None
    groups = {run.group for run in own}
    shared = [b for b in baselines if any(run.contestant == b and run.group in groups for run in inside)]
    return SliceFigures(
        contestant=contestant,
        part=part,
        answers=sum(len(run.tokens) for run in once),
        tokens=sum(run.count for run in once),
        tokens_per_second=_rate(own),
        tokens_per_pass=None if stats is None else stats.tokens_per_pass,
        accepted=None if stats is None else stats.accepted,
        drafted=None if stats is None else stats.drafted,
        acceptance_by_depth=[] if stats is None else stats.acceptance_by_depth,
        draft_share=_draft_share(own),
        memory=max((run.memory for run in own if run.memory is not None), default=None),
        compared=sum(len(run.tokens) for run in once if run.compared),
        divergences=divergences(record, inside, contestant),
        speedups={base: speedup(inside, contestant, base) for base in shared},
    )


def _rate(runs: Seq[Run]) -> float:
    """Return the median tokens per second over rounds; an interrupted round does not count beside a complete one."""
    rounds: dict[int, list[Run]] = {}
    for run in runs:
        rounds.setdefault(run.round, []).append(run)
    most = max(map(len, rounds.values()))
    return statistics.median(
        sum(run.count for run in same) / sum(run.seconds for run in same)
        for same in rounds.values()
        if len(same) == most
    )


def _draft_share(runs: Seq[Run]) -> float | None:
    spent = [run.stats.seconds for run in runs if run.stats is not None]
    whole = sum(sum(seconds.values()) for seconds in spent)
    return sum(seconds.get("draft", 0.0) for seconds in spent) / whole if whole else None
