"""Graft: gates, templates, what takes the freed places, how both are calibrated, and the command that does it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from typer.testing import CliRunner

from outpace import Drafter, Model, Sequence, registry
from outpace.advise.tune_graft import LEAST, calibrate
from outpace.cli.common import app
from outpace.core.lm import LM
from outpace.core.policy import Policy
from outpace.core.sequence import Limits
from outpace.core.tree import Budget, Tree
from outpace.core.verifier import Match
from outpace.drafting import graft_gates, tuning_file
from outpace.drafting.graft_gates import Gate, Grafting
from outpace.drafting.rank_template import likely_ranks, template
from outpace.drafting.successor_table import EMPTY, Successors
from outpace.errors import UsageError
from outpace.methods.draft import Draft
from outpace.methods.graft import Graft
from outpace.sampling.sampler import Sampler
from outpace.sampling.settings import Sampling
from outpace.testing import ToyLM
from outpace.tracing.trace import Trace, TraceWriter, read

runner = CliRunner()
steady = settings(derandomize=True, deadline=None, max_examples=100)
PROMPTS = [[1, 2, 3, 1, 2], [9, 8, 7, 6] * 3, list(range(20))]


def successors(rows: dict[int, list[int]], vocab: int = 64, k: int = 3) -> Successors:
    found = Successors(k)
    found.sized(vocab)
    for token, row in rows.items():
        found.table[token] = torch.tensor(row)
    return found


def spelled(tree: Tree) -> set[tuple[int, ...]]:
    return {tuple(tree.tokens[n] for n in tree.path(node)[1:]) for node in range(1, len(tree))}


def tree_of(paths: dict[tuple[int, ...], float]) -> Tree:
    """A tree of these paths, with the chance of each last token."""
    tree = Tree([0])
    for path, chance in paths.items():
        node = tree.walk([0, *path[:-1]])[-1]
        tree.add(node, path[-1], prob=chance)
    return tree


# Gates and templates


def test_a_draft_is_cut_at_the_first_gate_it_does_not_pass() -> None:
    tree = tree_of({(1,): 0.6, (2,): 0.3, (1, 3): 0.5, (1, 4): 0.2, (2, 5): 0.9, (1, 3, 6): 0.9})
    assert graft_gates.reach(tree) == pytest.approx([1, 0.6, 0.3, 0.3, 0.12, 0.27, 0.27])
    sure = graft_gates.prune(tree, [Gate(1, 0.5, 0.1), Gate(2, 0.2, 0.1)], 10)
    assert spelled(sure) == spelled(tree)
    cut = graft_gates.prune(tree, [Gate(1, 0.5, 0.1), Gate(2, 0.3, 0.3)], 10)
    assert spelled(cut) == {(1,), (2,), (1, 3)}  # of depth 2 at most, the three likeliest
    first = graft_gates.prune(tree, [Gate(1, 0.6, 0.1), Gate(2, 0.3, 0.3)], 10)
    assert spelled(first) == {(1,)}
    assert spelled(graft_gates.prune(tree, [], 2)) == {(1,), (2,)}
    assert len(graft_gates.prune(Tree([0]), [Gate(1, 1.0, 0.1)], 5)) == 1


def test_a_node_without_a_chance_is_not_doubted() -> None:
    tree = Tree.chain([0, 1, 2])
    assert graft_gates.reach(tree) == [1, 1, 1]
    assert spelled(graft_gates.prune(tree, [Gate(1, 0.99, 0.1)], 4)) == {(1,), (1, 2)}


@steady
@given(st.lists(st.lists(st.floats(0.01, 1), min_size=1, max_size=4), min_size=1, max_size=4), st.integers(1, 30))
def test_a_template_holds_the_likeliest_paths_with_their_parents(ranks: list[list[float]], count: int) -> None:
    ranks = [sorted(level, reverse=True) for level in ranks]
    slots = template(ranks, count, len(ranks))
    reach, paths = list[float](), list[tuple[int, ...]]()
    for slot in slots:
        above = (1.0, ()) if slot.parent < 0 else (reach[slot.parent], paths[slot.parent])
        assert slot.depth == len(above[1]) + 1 <= len(ranks)
        reach.append(above[0] * slot.prob)
        paths.append((*above[1], slot.rank))
    assert len(set(paths)) == len(paths)
    assert all(a >= b - 1e-12 for a, b in pairwise(reach))
    if count < sum(1 for _ in _all(ranks)):
        assert len(slots) == count
        assert reach[-1] >= max(r for p, r in _all(ranks) if p not in paths) - 1e-12


def _all(ranks: list[list[float]]) -> Any:
    level = [((), 1.0)]
    for chances in ranks:
        level = [((*path, rank), reach * c) for path, reach in level for rank, c in enumerate(chances)]
        yield from level


def test_the_template_fills_what_is_left_and_no_more() -> None:
    known = successors({0: [1, 2, 3], 1: [4, 5, EMPTY], 2: [6, 7, 8], 4: [9, 9, 9]})
    slots = template(likely_ranks(3, 3), 30, 3)
    tree = tree_of({(1,): 0.9, (1, 4): 0.9, (7,): 0.2})
    filled = graft_gates.fill(tree, slots, known, Budget(3, 8, 6), "table")
    assert len(filled) == 9
    assert {(1,), (1, 4), (7,)} <= spelled(filled)  # what was there stays, and is not there twice
    assert [filled.sources.get(node) for node in range(1, 9)] == [None] * 3 + ["table"] * 5
    assert (1, 4, 9) in spelled(filled)  # successors of a node that the draft had already
    narrow = graft_gates.fill(tree_of({(1,): 0.9}), slots, known, Budget(2, 20, 2), "table")
    assert max(narrow.depths) == 2 and all(len(narrow.children(node)) <= 2 for node in range(len(narrow)))
    assert len(graft_gates.fill(Tree([50]), slots, known, Budget(3, 8, 6), "table")) == 1  # nothing is known of it


def test_a_chain_goes_on_with_first_successors() -> None:
    known = successors({5: [6, 1, 2], 6: [7, 1, 2], 7: [EMPTY] * 3})
    chain = graft_gates.extend(Tree.chain([4, 5]), known, likely_ranks(), Budget(6, 6), "table")
    assert chain.tokens == [4, 5, 6, 7] and chain.is_chain
    assert len(graft_gates.extend(Tree.chain([4, 5]), known, likely_ranks(), Budget(2, 2), "table")) == 3


@pytest.mark.parametrize(
    "wrong",
    [dict(gates=(Gate(0, 0.1, 0.1),)), dict(gates=(Gate(1, 1.1, 0.1),)), dict(ranks=()), dict(ranks=((1.5,),))],
)
def test_a_grafting_out_of_range_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        Grafting(**wrong)


# The method


def sequence(tokens: list[int], drafter: Drafter) -> Sequence:
    return Sequence(list(tokens), Limits(100), Sampler(Sampling()), drafter, Match(), Policy(), vocab=64)


def test_the_budget_is_kept_and_both_sides_are_named(toy: Model, toy_draft: LM) -> None:
    drafter = registry.method("graft", inner="draft:width=4,depth=4,nodes=16", draft=toy_draft, nodes=24)
    list(toy.generate(PROMPTS, method=drafter, max_tokens=30))
    seq = sequence(PROMPTS[1], drafter)
    tree = drafter.propose(seq, drafter.limit)
    drafter.close(seq)
    assert len(tree) == 25
    assert set(tree.sources.values()) == {"draft", "graft: retrieved"} and drafter.model_source == "draft"
    assert all(node in tree.probs or node in tree.signals for node in range(1, 25))
    assert len(drafter.propose(sequence(PROMPTS[1], drafter), Budget(3, 7, 3))) == 8


def test_a_draft_stops_drafting_at_a_gate() -> None:
    """Where the best path falls under a floor no deeper level is scored, and the chain does not run on unseen."""
    lm = ToyLM(layers=1)
    levels: list[int] = []
    score = lm.score

    def counted(*args: Any, **kwargs: Any) -> Any:
        levels.append(1)
        return score(*args, **kwargs)

    lm.score = counted  # type: ignore[method-assign]
    drafter = Draft(lm, depth=6, width=2)
    stops: list[tuple[Callable[[int, float], bool] | None, int]] = [
        (None, 6),
        (lambda depth, prob: depth == 2, 2),
        (lambda depth, prob: False, 6),
        (lambda depth, prob: depth == 1, 1),
    ]
    for stop, most in stops:
        levels.clear()
        seq = sequence([1, 2, 3], drafter)
        tree = drafter.propose(seq, Budget(6, 12, 2, stop=stop))
        drafter.close(seq)
        assert len(levels) == most and max(tree.depths) <= most
    grafting = graft_gates.Grafting(gates=(graft_gates.Gate(2, 0.5, 0.4),))
    assert grafting.stops(2, 0.5) and not grafting.stops(2, 0.51) and not grafting.stops(1, 0.1)
    assert Budget(6, 12, 2, stop=grafting.stops).within(3, True).stop == grafting.stops


class Drawn(Drafter):
    """A chain that says from which distribution it was drawn."""

    name = "drawn"

    def propose(self, seq: Sequence, budget: Budget) -> Tree:
        tree = tree_of({(1,): 0.01, (1, 2): 0.01})
        tree.proposals[0] = torch.full((64,), 1 / 64)
        return tree


def test_drawn_guesses_are_neither_dropped_nor_joined(toy: Model, toy_draft: LM) -> None:
    drafter = registry.method("graft", inner=Drawn())
    tree = drafter.propose(sequence([3, 4, 0], drafter), drafter.limit)
    assert tree.tokens == [0, 1, 2] and list(tree.proposals) == [0]
    given = dict(verifier="residual", temperature=1.0, max_tokens=30, seed=4)
    found = toy.generate(PROMPTS, method="graft", inner="draft:width=2,depth=3", draft=toy_draft, **given)
    assert all(done.lossless and done.stats.accepted for done in found)


@pytest.mark.parametrize("inner", ["plain", "ngram", "suffix", "recycling", "lookahead", "auto", "graft:nodes=8"])
def test_any_method_can_be_wrapped(inner: str, toy: Model) -> None:
    plain = [done.tokens for done in toy.generate(PROMPTS, method="plain", max_tokens=30)]
    found = toy.generate(PROMPTS, method="graft", inner=inner, nodes=16, max_tokens=30)
    assert [done.tokens for done in found] == plain
    assert sum(done.stats.accepted for done in found) > 0


def test_options_of_the_inner_method() -> None:
    assert registry.parse("graft:nodes=8,inner=draft:width=3,depth=2") == (
        "graft", {"nodes": 8, "inner": "draft:width=3,depth=2"},
    )  # fmt: skip
    assert registry.parse("graft:inner=ngram,nodes=8") == ("graft", {"inner": "ngram", "nodes": 8})
    assert registry.parse("learned:weights=C:\\p,threshold=0.5")[1]["threshold"] == 0.5
    outer = registry.method("graft", inner="graft:nodes=8,inner=ngram:max_n=2,depth=3")
    assert isinstance(outer, Graft) and isinstance(outer._inner, Graft)
    assert outer._inner.nodes == 8 and outer._inner._inner.max_n == 2  # type: ignore[attr-defined]
    given = registry.method("ngram", depth=3)
    assert registry.inner(given, None) is given and registry.inner(None, None).name == "suffix"
    for wrong, message in {
        "ngrm": "did you mean 'ngram'", "ngram:maxn=3": "did you mean 'max_n'", "draft": "needs draft",
    }.items():  # fmt: skip
        with pytest.raises(UsageError, match=message):
            registry.method("graft", inner=wrong)
    with pytest.raises(UsageError, match="nodes >= 1"):
        registry.method("graft", nodes=0)


# Calibration


@dataclass(frozen=True)
class Traced:
    path: Path
    trace: Trace


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> Traced:
    """A draft, and the table, on the same prompts."""
    path, model, draft = tmp_path_factory.mktemp("traces") / "run.jsonl", Model(ToyLM(3), name="toy"), ToyLM(2)
    with TraceWriter(path, None, "toy") as writer:
        for prompt in ([1, 2, 3, i] for i in range(6)):
            model.generate(prompt, method="draft", draft=draft, width=3, depth=6, nodes=18, max_tokens=40, trace=writer)
            model.generate(prompt, method="recycling", nodes=24, max_tokens=40, trace=writer)
    return Traced(path, read(path))


def test_gates_follow_the_price_of_a_level(traced: Traced) -> None:
    free = calibrate([traced.trace], nodes=24, level=0.0)
    dear = calibrate([traced.trace], nodes=24, level=0.5)
    assert free.speedup >= 1 and dear.speedup > 1.1
    assert dear.grafting.gates and 0 < sum(dear.stops) <= 1
    assert dear.tokens[1] <= free.tokens[1]  # tokens are given up where drafting them costs more
    assert calibrate([traced.trace], nodes=24, level=0.5) == dear


def test_ranks_are_what_was_right(traced: Traced) -> None:
    found = calibrate([traced.trace], nodes=24, level=0.1)
    assert found.table_passes == sum(len(r.passes) for r in traced.trace.requests if r.method == "recycling")
    assert found.grafting.ranks != likely_ranks() and sum(found.template) == 24
    first = [level[0] for level in found.grafting.ranks]
    assert all(0 < chance < 1 for chance in first)
    drafts = Trace(traced.trace.header, [r for r in traced.trace.requests if r.method == "draft"], {})
    assert calibrate([drafts], nodes=24, level=0.1).grafting.ranks == tuple(
        tuple(round(c, 4) for c in level) for level in likely_ranks()
    )


def test_traces_that_do_not_tell_are_refused(traced: Traced, tmp_path: Path) -> None:
    def only(*methods: str) -> Trace:
        return Trace(traced.trace.header, [r for r in traced.trace.requests if r.method in methods], {})

    with pytest.raises(UsageError, match=f"have 0 passes .* and {LEAST} are needed"):
        calibrate([only("recycling")])
    with pytest.raises(UsageError, match="nodes >= 1"):
        calibrate([traced.trace], nodes=0)
    for record in (p for r in only("draft").requests for p in r.passes):
        assert record.seconds["score"] > 0
    silent = read(traced.path)
    for request in silent.requests:
        for record in request.passes:
            record.seconds.clear()
    with pytest.raises(UsageError, match="give --level-cost"):
        calibrate([silent])
    assert calibrate([silent], level=0.1).passes > LEAST


def test_a_calibrated_graft_is_lossless_and_stops(traced: Traced, tmp_path: Path) -> None:
    path, model, draft = tmp_path / "c.json", Model(ToyLM(3)), ToyLM(2)
    found = calibrate([traced.trace], nodes=24, level=0.5)
    tuning_file.write(path, {"graft": found.grafting.to_dict()})
    assert Grafting.from_section(tuning_file.section(path, "graft")) == found.grafting
    given = dict(method="graft", inner="draft:width=3,depth=6,nodes=18", draft=draft, nodes=24, max_tokens=40)
    plain = [model.generate(prompt, method="plain", max_tokens=40).tokens for prompt in PROMPTS]
    deepest = {}
    for name, calibration in {"file": str(path), "paper": None}.items():
        trace = tmp_path / f"{name}.jsonl"
        done = model.generate(PROMPTS, calibration=calibration, trace=trace, **given)
        assert [one.tokens for one in done] == plain
        steps = [step for request in read(trace).requests for step in request.steps]
        depths = [step.tree.depths[node] for step in steps for node in step.tree.signals]
        deepest[name] = sum(depths) / len(depths)
    assert deepest["file"] < deepest["paper"]


def test_the_command(traced: Traced, tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    done = runner.invoke(
        app, ["calibrate", str(traced.path), "--output", str(path), "--nodes", "24", "--level-cost", "0.5"]
    )
    assert done.exit_code == 0, done.output
    assert "stop at depth" in done.output and "passes of recycling" in done.output
    held = json.loads(path.read_text())
    assert held["format"] == "outpace-calibration" and held["made"]["models"] == ["toy"]
    before = path.read_text()
    again = runner.invoke(
        app, ["calibrate", str(traced.path), "--output", str(path), "--nodes", "24", "--level-cost", "0.5", "--json"]
    )
    assert json.loads(again.stdout)["graft"]["gates"] == held["graft"]["gates"] and path.read_text() == before
    assert [file.name for file in tmp_path.iterdir()] == ["c.json"]  # nothing half written is left
    registry.method("graft", calibration=str(path))


def test_wrong_files_are_one_line(traced: Traced, tmp_path: Path) -> None:
    notes, other = tmp_path / "notes.txt", tmp_path / "other.json"
    notes.write_text("hello")
    other.write_text('{"format": "outpace-calibration", "version": 1, "graft": {"gates": 3}}')
    for arguments, message in [
        (["calibrate", str(notes), "--output", "c.json"], "is not JSON"),
        (["calibrate", str(tmp_path / "none"), "--output", "c.json"], "cannot read"),
        (["calibrate", str(traced.path), "--output", str(tmp_path / "no" / "c.json")], "cannot write the calibration"),
    ]:
        done = runner.invoke(app, arguments)
        assert done.exit_code in (1, 2)
        assert message in done.stderr.replace("\n", " ") and "Traceback" not in done.output
    for path, message in {
        notes: "cannot read the calibration", tmp_path / "none": "cannot read", other: "invalid section",
        traced.path: "cannot read the calibration",
    }.items():  # fmt: skip
        with pytest.raises(UsageError, match=message):
            registry.method("graft", calibration=str(path))
    tuning_file.write(other, {"via_sd": {"layers": [0]}})
    with pytest.raises(UsageError, match="has no section for 'graft', only for via_sd"):
        registry.method("graft", calibration=str(other))
    other.write_text('{"format": "outpace-calibration", "version": 9}')
    with pytest.raises(UsageError, match="reads up to 1"):
        registry.method("graft", calibration=str(other))
