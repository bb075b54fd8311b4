"""Gates and templates of Graft (2605.20104): where a draft stops, and which successors fill the places that it leaves.

A gate stops a draft at a depth where even its best path is unlikely. A template says which ranks of the successor
table, from the root on, are tried instead, likeliest first.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any, NamedTuple

from outpace.core.tree import ROOT, Budget, Tree
from outpace.drafting.rank_template import TemplateNode, likely_ranks
from outpace.drafting.successor_table import EMPTY, Successors
from outpace.errors import UsageError


class Gate(NamedTuple):
    """Stops a draft at `depth` if its best path is no likelier than `floor`; it then keeps a share of the nodes."""

    depth: int
    floor: float
    keep: float


# The paper's values for Qwen3-8B, where the draft keeps 8, 24 or 40 of 60 nodes.
GATES = (Gate(1, 0.14, 8 / 60), Gate(2, 0.14, 24 / 60), Gate(6, 0.48, 40 / 60))


@dataclass(frozen=True)
class Grafting:
    """The gates and ranks that a calibration finds; the defaults are the paper's."""

    gates: tuple[Gate, ...] = GATES
    # [depth][rank]: probability that the token is accepted if its parent is
    ranks: tuple[tuple[float, ...], ...] = likely_ranks()

    def __post_init__(self) -> None:
        probs = [prob for level in self.ranks for prob in level]
        shares = [share for gate in self.gates for share in (gate.floor, gate.keep)]
        if not self.ranks or not all(self.ranks) or any(not 0 <= x <= 1 for x in probs + shares):
            raise UsageError("graft needs ranks for at least one depth, and probabilities between 0 and 1")
        if any(gate.depth < 1 for gate in self.gates):
            raise UsageError("the gates of graft need a depth of at least 1")

    def stops(self, depth: int, prob: float) -> bool:
        """Whether a gate stops a draft whose best path has this probability at this depth."""
        return any(gate.depth == depth and prob <= gate.floor for gate in self.gates)

    @classmethod
    def from_section(cls, found: dict[str, Any]) -> Grafting:
        """Read the section of a calibration file."""
        return cls(tuple(Gate(**gate) for gate in found["gates"]), tuple(tuple(level) for level in found["ranks"]))

    def to_dict(self) -> dict[str, Any]:
        return {"gates": [gate._asdict() for gate in self.gates], "ranks": [list(level) for level in self.ranks]}


def reach(tree: Tree) -> list[float]:
    """The drafter's estimate of each node's path probability; a node without an estimate counts as certain."""
    found = [1.0]
    for node in range(1, len(tree)):
        known = tree.signals.get(node)
        prob = tree.probs.get(node, 1.0 if known is None else known.prob)
        found.append(found[tree.parents[node]] * min(1.0, prob))
    return found


def stopped(confidence: Seq[float], gates: Seq[Gate]) -> Gate | None:
    """The first gate that stops a draft; `confidence[d]` is the probability of its best path of depth d + 1."""
    passed = (gate for gate in sorted(gates) if gate.depth <= len(confidence))
    return next((gate for gate in passed if confidence[gate.depth - 1] <= gate.floor), None)


def confidence(tree: Tree, probs: Seq[float]) -> list[float]:
    """The probability of the best path of each depth."""
    best = [0.0] * max(tree.depths)
    for node, depth in enumerate(tree.depths):
        if node != ROOT:
            best[depth - 1] = max(best[depth - 1], probs[node])
    return best


def prune(tree: Tree, gates: Seq[Gate], nodes: int) -> Tree:
    """The draft up to the gate that stops it, likeliest nodes first: at most `nodes`, or the gate's share of them."""
    probs, depths = reach(tree), tree.depths
    gate = stopped(confidence(tree, probs), gates) if len(tree) > 1 else None
    room = nodes if gate is None else min(nodes, max(gate.depth, round(gate.keep * nodes)))
    inside = [node for node in range(1, len(tree)) if gate is None or depths[node] <= gate.depth]
    # A parent is at least as likely as its children and comes before them, so the kept nodes form a tree.
    return tree.select([ROOT, *sorted(inside, key=lambda node: (-probs[node], node))[:room]])


def fill(tree: Tree, slots: Seq[TemplateNode], known: Successors, budget: Budget, source: str) -> Tree:
    """Fill the remaining places with the template's successors of the root, beside or below the existing nodes."""
    place: list[int | None] = []
    for slot in slots:
        if len(tree) > budget.nodes:
            break
        parent = ROOT if slot.parent < 0 else place[slot.parent]
        place.append(None)
        if parent is None or slot.depth > budget.depth:
            continue
        token = known.row(tree.tokens[parent])[slot.rank]
        room = tree.child(parent, token) is not None or len(tree.children(parent)) < budget.width
        if token != EMPTY and room:
            place[-1] = tree.add(parent, token, source=source, prob=slot.prob)
    return tree


def extend(tree: Tree, known: Successors, ranks: Seq[Seq[float]], budget: Budget, source: str) -> Tree:
    """Extend a chain with first successors: a target that cannot score trees has no other place for them."""
    for depth in range(len(tree), min(budget.depth, budget.nodes) + 1):
        token = known.row(tree.tokens[-1])[0]
        if token == EMPTY:
            break
        tree.add(len(tree) - 1, token, source=source, prob=ranks[min(depth, len(ranks)) - 1][0])
    return tree
