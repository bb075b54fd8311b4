"""Calibration of Graft: gates and ranks from traces (docs/methods/graft.md).

A trace shows how confident a draft was and how much of it was accepted. If it also has passes of `recycling` on the
same texts, it shows how many tokens the successor table would have contributed there. So the speed with a gate can be
computed from traces, and gates are added one by one, where they help most.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence as Seq
from dataclasses import dataclass, field
from itertools import product

import numpy as np

from outpace.drafting.graft_gates import Gate, Grafting, confidence, reach, stopped
from outpace.drafting.rank_template import DEPTH, RANKS, likely_ranks, template
from outpace.errors import UsageError
from outpace.tracing.trace import PassRecord, RequestTrace, Trace

TABLE = "recycling"  # its draft tokens show what the successor table is worth
WRAPPER = "graft"  # its drafts were already cut, so they say nothing about what was cut off
LEAST, MOST = 20, 2000  # passes: fewer say nothing, more would only take longer
PRIOR = 8.0  # draft tokens of each rank that count as seen before
MOST_GATES = 3
KEEPS = (1 / 8, 1 / 4, 2 / 5, 2 / 3)  # shares of the nodes that a draft may keep at a gate
FLOORS = 12  # thresholds to try at each depth
WORTH = 1.002  # a gate that gains less is not worth the complication
Text = tuple[tuple[int, ...], str]  # prompt and sampling, which determine an answer


@dataclass(frozen=True)
class PassSample:
    """One pass of a draft: how confident it was, and which of its nodes were accepted."""

    size: int  # nodes
    confidence: list[float]  # probability of its best path, by depth
    order: list[list[int]]  # for each accepted node: its rank by probability, among the nodes down to each depth
    retrieved: list[int]  # indices in the table's tree of the nodes that would have been accepted, in order

    def tokens(self, gate: Gate | None, nodes: int) -> int:
        """Return the tokens committed by a pass of `nodes` nodes, if this gate stopped the draft (None: no gate)."""
        depth = len(self.confidence) if gate is None else gate.depth
        room = nodes if gate is None else min(nodes, max(depth, round(gate.keep * nodes)))
        own = _leading([places[depth - 1] for places in self.order[:depth]], room)
        return 1 + max(own, _leading(self.retrieved, nodes - min(room, self.size)))


def _leading(places: Seq[int], room: int) -> int:
    """Count how many of these, from the first on, fit into `room`."""
    return next((i for i, place in enumerate(places) if place > room), len(places))


@dataclass(frozen=True)
class DraftCosts:
    """The seconds of a target pass, and of a level of the draft."""

    target: float
    level: float


@dataclass(frozen=True)
class Calibration:
    """The gates and ranks that were found, and their expected effect."""

    grafting: Grafting
    nodes: int
    passes: int  # traced passes of a draft
    table_passes: int  # traced passes of `recycling`
    level: float  # cost of a level of the draft, in passes of the target
    stops: list[float]  # share of the passes that each gate stops
    tokens: tuple[float, float]  # per pass, without gates and with them
    speedup: float  # by the gates
    template: list[int] = field(default_factory=list)  # nodes at each depth of a tree from the table alone


def calibrate(traces: Seq[Trace], nodes: int = 60, level: float | None = None) -> Calibration:
    """Find gates and ranks for trees of `nodes` nodes. `level` is the cost of a draft level in passes of the target;
    None takes it from the traces."""
    if nodes < 1 or (level is not None and level < 0):
        raise UsageError("a calibration needs nodes >= 1 and a level cost of 0 or more")
    requests = [request for trace in traces for request in trace.requests]
    table = [request for request in requests if request.method == TABLE and request.policy == "fixed"]
    known = {key: places for request in table for key, places in _retrieved(request)}
    drafted = [(r, p) for r in requests if r.method not in (TABLE, WRAPPER) for p in r.passes if _scored(p)]
    if len(drafted) < LEAST:
        raise UsageError(
            f"these traces have {len(drafted)} passes with probabilities for all draft tokens, and {LEAST} are needed: "
            "trace a method that knows these probabilities, such as draft or suffix"
        )
    costs = _costs([p for _, p in drafted], level)
    samples = list(_samples(drafted[:: -(-len(drafted) // MOST)], known))
    gates, chosen = _search(samples, nodes, costs)
    ranks = _ranks(table)
    counts = np.bincount([slot.depth for slot in template(ranks, nodes, len(ranks))], minlength=1)[1:]
    without, with_gates = _outcome(samples, nodes, []), _outcome(samples, nodes, gates)
    return Calibration(
        Grafting(tuple(gates), ranks), nodes, len(drafted), sum(len(r.passes) for r in table),
        costs.level / costs.target,
        [sum(c is not None and c == g for c in chosen) / len(samples) for g in gates],
        (float(without[0].mean()), float(with_gates[0].mean())),
        _speed(with_gates, costs) / _speed(without, costs), counts.tolist(),
    )  # fmt: skip


def _scored(record: PassRecord) -> bool:
    known = record.signals.keys() | record.chances.keys()
    return len(record.tokens) > 1 and all(node in known for node in range(1, len(record.tokens)))


def _retrieved(request: RequestTrace) -> Iterator[tuple[tuple[Text, int], list[int]]]:
    """Yield, for every position of an answer, the nodes of the table's tree that were accepted from there on."""
    at, text = 0, _text(request)
    for record in request.passes:
        accepted = [node for node in record.path[1:] if node < len(record.tokens)]
        for start in range(len(record.committed)):
            yield (text, at + start), accepted[start:]
        at += len(record.committed)


def _text(request: RequestTrace) -> Text:
    return tuple(request.prompt), json.dumps(request.sampling, sort_keys=True)


def _samples(
    drafted: Seq[tuple[RequestTrace, PassRecord]], known: dict[tuple[Text, int], list[int]]
) -> Iterator[PassSample]:
    starts: dict[int, int] = {}
    for request in {id(r): r for r, _ in drafted}.values():
        at = 0
        for record in request.passes:
            starts[id(record)] = at
            at += len(record.committed)
    for request, record in drafted:
        tree = record.step.tree
        probs, depths = reach(tree), tree.depths
        order = []
        for node in record.path[1:]:
            better = [d for n, d in enumerate(depths) if n and (-probs[n], n) <= (-probs[node], node)]
            order.append([sum(d <= depth for d in better) for depth in range(1, max(depths) + 1)])
        yield PassSample(
            len(tree) - 1, confidence(tree, probs), order, known.get((_text(request), starts[id(record)]), [])
        )


def _costs(records: Seq[PassRecord], level: float | None) -> DraftCosts:
    """Average the costs from sums, not from ratios of single passes, so that a long pass counts for its time."""
    target = sum(p.seconds.get("score", 0.0) for p in records) / len(records)
    if level is not None:
        return DraftCosts(1.0, level)
    if target <= 0:
        raise UsageError("these traces have no pass times: give --level-cost")
    levels = sum(max(p.step.tree.depths) for p in records)
    return DraftCosts(target, sum(p.seconds.get("draft", 0.0) for p in records) / levels)


def _search(samples: Seq[PassSample], nodes: int, costs: DraftCosts) -> tuple[list[Gate], list[Gate | None]]:
    """Add the gate that gains the most speed, until no gate gains enough or there are MOST_GATES."""
    gates: list[Gate] = []
    best = _speed(_outcome(samples, nodes, gates), costs)
    while len(gates) < MOST_GATES:
        free = [d for d in range(1, DEPTH + 1) if all(gate.depth != d for gate in gates)]
        tried = [(_speed(_outcome(samples, nodes, [*gates, gate]), costs), gate) for gate in _candidates(samples, free)]
        speed, gate = max(tried, default=(0.0, None), key=lambda pair: pair[0])
        if gate is None or speed < WORTH * best:
            break
        best, gates = speed, sorted([*gates, gate])
    return gates, [stopped(sample.confidence, gates) for sample in samples]


def _candidates(samples: Seq[PassSample], depths: Seq[int]) -> Iterator[Gate]:
    for depth in depths:
        seen = [sample.confidence[depth - 1] for sample in samples if len(sample.confidence) >= depth]
        if len(seen) < LEAST:
            continue
        floors = {round(float(q), 4) for q in np.quantile(seen, np.linspace(0, 1, FLOORS + 1)[1:])}
        yield from (Gate(depth, min(floor, 1.0), keep) for floor, keep in product(sorted(floors), KEEPS))


def _outcome(samples: Seq[PassSample], nodes: int, gates: Seq[Gate]) -> tuple[np.ndarray, np.ndarray]:
    """Return the tokens and the draft levels of every pass."""
    tokens, levels = [], []
    for sample in samples:
        gate = stopped(sample.confidence, gates)
        tokens.append(sample.tokens(gate, nodes))
        levels.append(len(sample.confidence) if gate is None else gate.depth)
    return np.array(tokens), np.array(levels)


def _speed(outcome: tuple[np.ndarray, np.ndarray], costs: DraftCosts) -> float:
    tokens, levels = outcome
    return float(tokens.sum() / (len(tokens) * costs.target + levels.sum() * costs.level))


def _ranks(table: Seq[RequestTrace]) -> tuple[tuple[float, ...], ...]:
    """Estimate how often each rank is accepted at each depth under an accepted node; the prior counts a little."""
    before = likely_ranks()
    offered = np.full((DEPTH, RANKS), PRIOR)
    matched = PRIOR * np.array(before)
    for record in (p for request in table for p in request.passes):
        tree = record.step.tree
        for depth, node in enumerate(record.path[: len(record.committed)]):
            for rank, child in enumerate(tree.children(node)[:RANKS] if depth < DEPTH else ()):
                offered[depth, rank] += 1
                matched[depth, rank] += child in record.path
    return tuple(tuple(round(float(rate), 4) for rate in level) for level in matched / offered)
