"""VIA-SD: the three tiers, the slim verifier and its layers, and that the exact form decides nothing."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from outpace import Drafter, Model, Sequence, registry
from outpace.api.load import wrap
from outpace.api.request import Request
from outpace.cli import calibrate as command, display
from outpace.cli.common import app
from outpace.core.lm import LM, Logits, Scores
from outpace.core.sequence import Step
from outpace.core.tree import Budget, Tree
from outpace.drafting import layer_search as layers, slim_search as slim_layers, tuning_file
from outpace.errors import UnsupportedModel, UsageError
from outpace.methods.via_sd import LEAST, ViaSD
from outpace.models.cacheless import CachelessLM
from outpace.models.segment import Segment, SegmentOutput
from outpace.testing import VOCAB, ToyLM
from outpace.tracing.trace import read, reason
from outpace.verify.plan import Subject, VerifyPlan
from outpace.verify.suite import planned_checks, run_checks
from tests.tiny_models import build

runner = CliRunner()
PROMPTS = [[1, 2, 3, 1, 2], [5], [9, 8, 7, 6] * 3]


class Says(CachelessLM):
    """A model whose distribution after a token is given; what follows from nothing else."""

    trees, max_length, vocab = True, 4096, VOCAB

    def __init__(self, distributions: dict[int, dict[int, float]], slim: dict[int, dict[int, float]] | None = None):
        super().__init__()
        self.distributions, self.slim, self.passes = distributions, slim, 0
        self.layers = SlimLayers(self)

    def forward(self, jobs: Any, taps: tuple[int, ...]) -> list[SegmentOutput]:
        self.passes += 1
        return [self._forward(job) for job in jobs]

    def _forward(self, job: Segment) -> SegmentOutput:
        nodes = [] if job.layout is None else job.tree.tokens[job.since :]
        rows = torch.full((len(nodes), VOCAB), 1e-9, dtype=torch.float64)
        for i, token in enumerate(nodes):
            for after, chance in self.distributions.get(token, {63: 1.0}).items():
                rows[i, after] = chance
        return SegmentOutput(rows.log() if nodes else None, {})


class SlimLayers:
    """Its layers, some of which are the slim model."""

    count = 4

    def __init__(self, lm: Says):
        self.lm = lm

    def slice(self, layers: Any, compile: bool = True) -> Says:
        assert self.lm.slim is not None
        return Says(self.lm.slim)

    def early_exit(self, count: int) -> None:
        """There is none."""

    def cost_share(self, count: int) -> float:
        return count / self.count

    def reference(self, layers: Any) -> Any:
        raise NotImplementedError


def chain(*tokens: int) -> dict[int, dict[int, float]]:
    """A model that is sure of one text."""
    return {token: {after: 1.0} for token, after in pairwise(tokens)}


class Fixed(Drafter):
    """Guesses the same text, from wherever the request stands in it."""

    name, model_source = "fixed", ""
    limit = Budget(5, 5)

    def __init__(self, *text: int):
        self.text = text

    def propose(self, seq: Sequence, budget: Budget) -> Tree:
        at = self.text.index(seq.tokens[-1]) if seq.tokens[-1] in self.text else len(self.text)
        return Tree.chain([seq.tokens[-1], *self.text[at + 1 : at + 1 + budget.depth]])


def run(target: Says, drafter: Drafter, count: int = 8, **given: Any) -> tuple[list[int], Step]:
    """All tokens, and the first pass."""
    pieces = list(Model(target).stream([0], method=drafter, max_tokens=count, **given))
    assert pieces[0].step is not None and pieces[-1].completion is not None
    return pieces[-1].completion.tokens, pieces[0].step


# The tiers

TEXT = list(range(12))


def test_what_the_slim_verifier_is_sure_of_is_taken_unasked() -> None:
    """The target disagrees with every token, and is asked for the one after the block."""
    target = Says({token: {40: 1.0} for token in [*range(41)]}, slim=chain(*TEXT, 0))
    tokens, step = run(target, ViaSD(inner=Fixed(*TEXT), depth=8), 9)
    assert tokens == [1, 2, 3, 4, 5, 6, 7, 8, 40]
    assert step.tree.trusted == set(range(1, 9)) and target.passes == 1


def test_a_doubted_guess_is_replaced_by_the_slim_verifiers_choice() -> None:
    """5 follows 4 with half the probability of 20: doubted, so 20 is taken, and drafting goes on behind it."""
    slim = chain(*TEXT, 0) | {4: {5: 0.3, 20: 0.6}} | chain(20, 7)
    target = Says({token: {40: 1.0} for token in range(41)}, slim=slim)
    tokens, step = run(target, ViaSD(inner=Fixed(0, 1, 2, 3, 4, 5, 6, 20, 7, 8), depth=7), 8)
    assert tokens == [1, 2, 3, 4, 20, 7, 8, 40] and target.passes == 1
    assert step.tree.sources[5] == ": slim"


def test_the_target_is_asked_about_what_is_unlikely() -> None:
    slim = chain(*TEXT, 0) | {3: {4: 0.1, 20: 0.9}}
    agrees = Says(chain(*TEXT, 0), slim=slim)
    _, step = run(agrees, ViaSD(inner=Fixed(*TEXT), depth=20, block=5))
    assert step.tree.trusted == {1, 2, 3, 5} and step.tokens == [1, 2, 3, 4, 5, 6]
    differs = Says(chain(*TEXT, 0) | {3: {30: 1.0}, 30: {31: 1.0}, 31: {31: 1.0}}, slim=slim)
    _, step = run(differs, ViaSD(inner=Fixed(*TEXT), depth=20, block=5))
    assert step.tokens == [1, 2, 3, 30]  # what was drafted behind it is not taken, though it was vouched for


def test_a_guess_that_is_not_allowed_ends_the_block() -> None:
    target = Says({token: {40: 1.0} for token in range(41)}, slim=chain(*TEXT, 0))
    tokens, step = run(target, ViaSD(inner=Fixed(*TEXT)), 6, bad_words=[[3]])
    assert step.tree.tokens == [0, 1, 2] and 3 not in tokens


def test_nothing_is_drafted_behind_a_stop_token() -> None:
    target = Says({token: {40: 1.0} for token in range(41)}, slim=chain(*TEXT, 0))
    tokens, step = run(target, ViaSD(inner=Fixed(*TEXT)), 9, stop_token_ids=[3])
    assert tokens == [1, 2, 3] and step.tree.tokens == [0, 1, 2, 3]


def test_a_method_that_remembers_the_request_guesses_once_a_pass() -> None:
    model = Model(Says(chain(*TEXT, 0), slim=chain(*TEXT, 0)))
    done = model.generate([*TEXT, *TEXT[:3]], method="via_sd", inner="ngram", max_tokens=8)
    assert done.tokens == [3, 4, 5, 6, 7, 8, 9, 10] and done.stats.passes == 2


# The exact form


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_exact_prunes_and_orders_only(temperature: float) -> None:
    model, draft = Model(ToyLM(4)), ToyLM(2)
    given = dict(temperature=temperature, seed=3, max_tokens=40)
    plain = [done.tokens for done in model.generate(PROMPTS, method="plain", **given)]
    drafter = registry.method("via_sd", exact=True, draft=draft, inner="draft:width=3,depth=4", skip=0.25)
    alone = model.generate(PROMPTS, method="draft", draft=draft, width=3, depth=4, **given)
    for _ in range(2):
        found = model.generate(PROMPTS, method=drafter, **given)
        assert [done.tokens for done in found] == plain and all(done.lossless for done in found)
    assert sum(done.stats.drafted / done.stats.passes for done in found) < sum(
        done.stats.drafted / done.stats.passes for done in alone
    )


def test_a_slim_verifier_that_is_often_wrong_drops_nothing() -> None:
    drafter = ViaSD(inner=Fixed(*TEXT), exact=True)
    assert drafter._floor == 0.0
    drafter._held.extend([0.9] * LEAST)
    assert drafter._floor == 0.3
    drafter._held.extend([0.001] * LEAST)
    assert drafter._floor == 0.001
    target = Says(
        chain(*TEXT, 0), slim={token: {50: 1.0, **distribution} for token, distribution in chain(*TEXT, 0).items()}
    )
    drafter.open(replace(_asked(drafter), target=target))
    tree = drafter.propose(_asked(drafter), Budget(5, 5))
    assert tree.tokens == [0, 1, 2, 3, 4, 5]


def test_likelier_paths_come_first() -> None:
    slim = {0: {1: 0.2, 2: 0.8}, 1: {3: 1.0}, 2: {4: 1.0}}
    drafter = ViaSD(inner=Wide(), exact=True)
    drafter.open(replace(_asked(drafter), target=Says(slim, slim=slim)))
    tree = drafter.propose(_asked(drafter), Budget(2, 4, 2))
    assert [tree.tokens[n] for n in range(len(tree))] == [0, 2, 4, 1, 3]
    drafter._held.extend([0.5] * LEAST)
    cut = drafter.propose(_asked(drafter), Budget(2, 4, 2))
    assert cut.tokens == [0, 2, 4] and cut.probs[1] == pytest.approx(0.8)


class Wide(Drafter):
    name = "wide"

    def propose(self, seq: Sequence, budget: Budget) -> Tree:
        return Tree([0, 1, 3, 2, 4], [-1, 0, 1, 0, 3])


def _asked(drafter: Drafter) -> Sequence:
    return Model(ToyLM()).sequence(Request([0], drafter))


# Honesty


def test_it_is_called_lossy_unless_exact(toy: Model, toy_draft: LM, tmp_path: Path) -> None:
    entry = display.catalogue()["methods"]["via_sd"]
    assert not entry["lossless"] and entry["lossless_if"] == {"exact": True}
    assert registry.lossless_options("via_sd") == {"exact": True} and registry.lossless_options("graft") == {}
    assert "**no**; yes with exact=True" in display.methods_markdown()
    given = dict(method="via_sd", draft=toy_draft, max_tokens=12)
    assert not toy.generate([1, 2], **given, trace=tmp_path / "t.jsonl").lossless
    assert toy.generate([1, 2], **given, exact=True).lossless
    assert not toy.generate([1, 2], method="via_sd:exact=false", draft=toy_draft, max_tokens=3).lossless
    request = read(tmp_path / "t.jsonl").requests[0]
    assert not request.lossless and request.verifier == "tiered"
    said = {reason(p, node, {}) for p in request.passes for node in p.path[1:]}
    assert "accepted without the target: the method vouched for it" in said


def test_its_price_is_stated_and_its_exact_form_is_proven(toy: Model, toy_draft: LM) -> None:
    plan = VerifyPlan(toy, [[1, 2, 3], [4, 5, 6, 4, 5]], max_tokens=12, samples=60, contexts=1, batches=(2,))
    lossy, exact = (Subject(name, {"method": "via_sd", "draft": toy_draft, **given})
                    for name, given in (("lossy", {}), ("exact", {"exact": True})))  # fmt: skip
    found = {f"{check.subject}: {check.name}": check for check in run_checks(planned_checks(plan, [lossy, exact]))}
    paid = found["lossy: price"]
    assert paid.verdict == "price" and paid.figures["kl"] > 0.01
    assert found["exact: same seed = plain"].verdict == "pass" and not any(c.failed for c in found.values())


def test_a_model_with_a_state_of_its_own_is_its_own_slim_verifier() -> None:
    mamba = wrap(build("mamba", state_size=8, num_hidden_layers=4))
    plain = mamba.generate([1, 2, 3, 1, 2, 3, 1], method="plain", max_tokens=16).tokens
    assert mamba.generate([1, 2, 3, 1, 2, 3, 1], method="via_sd", exact=True, max_tokens=16).tokens == plain


def test_a_model_that_cannot_be_cut_is_refused(toy_draft: LM) -> None:
    whole = Model(ToyLM())
    whole.lm.layers = None
    with pytest.raises(UnsupportedModel, match="cannot run a subset of its layers"):
        whole.generate([1, 2, 3], method="via_sd", max_tokens=3)
    checks = list(
        run_checks(
            planned_checks(VerifyPlan(whole, [[1, 2]], max_tokens=3), [Subject("via_sd", {"method": "via_sd"})])[-1:]
        )
    )
    assert checks[0].verdict == "skip" and "a subset of its layers" in checks[0].summary
    drafter = registry.method("via_sd")
    Model(ToyLM()).generate([1, 2], method=drafter, max_tokens=2)
    with pytest.raises(UsageError, match="make one for each model"):
        Model(ToyLM()).generate([1, 2], method=drafter, max_tokens=2)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"accept": 0.2}, "ask <= accept"),
        ({"ask": -0.1}, "0 <= ask"),
        ({"block": 0}, "block >= 1"),
        ({"skip": 1.0}, "skip < 1"),
        ({"layers": "0-1", "calibration": "c.json"}, "not from both"),
        ({"layers": "0-x"}, "is not a list of layers"),
        ({"calibration": "none.json"}, "cannot read the calibration"),
    ],
)
def test_options_out_of_range_are_refused(wrong: dict[str, Any], message: str, toy: Model) -> None:
    with pytest.raises(UsageError, match=message):
        toy.generate([1, 2], method="via_sd", max_tokens=2, **wrong)


# Layers


def test_layers_are_left_out_evenly() -> None:
    gone = [layer for layer in range(30) if layer not in slim_layers.spread(30, 0.45)]
    steps = {after - before for before, after in pairwise(gone)}
    assert len(gone) == 14 and max(steps) - min(steps) <= 1
    for count in range(1, 40):
        for skip in (0.0, 0.2, 0.45, 0.9):
            kept = slim_layers.spread(count, skip)
            assert len(kept) == count - min(round(skip * count), max(0, count - 2))
            assert kept[0] == 0 and kept[-1] == count - 1
    with pytest.raises(UsageError, match="at least 0 and less than 1"):
        slim_layers.spread(4, 1.5)


def test_layers_are_read() -> None:
    assert layers.parse("0-2+5+7-8") == [0, 1, 2, 5, 7, 8]
    for wrong in ("a", "1-", "-3", "1,2"):
        with pytest.raises(UsageError, match="is not a list of layers"):
            layers.parse(wrong)


def test_the_cost_is_nothing_for_the_same_distribution_and_counts_what_is_held_too_likely() -> None:
    whole = torch.tensor([[0.7, 0.2, 0.1], [0.1, 0.1, 0.8]]).double().log()
    assert slim_layers.tiered_cost(whole, whole) == slim_layers.divergence(whole, whole) == 0.0
    slim = torch.tensor([[0.1, 0.8, 0.1], [0.1, 0.1, 0.8]]).double().log()
    over = 0.8 * max(0.0, float(torch.tensor(0.5 * 4).log())) + 0.2 * max(0.0, float(torch.tensor(0.3 * 4).log()))
    assert slim_layers.tiered_cost(slim, whole) == pytest.approx(over / 2)
    barred = torch.tensor([[1.0, 0.0, 0.0]]).double().log()
    assert slim_layers.tiered_cost(barred, torch.tensor([[0.5, 0.5, 0.0]]).double().log()) < float("inf")


@pytest.mark.parametrize("cost", [slim_layers.tiered_cost, slim_layers.divergence])
def test_a_search_finds_the_layers_that_do_nothing(cost: slim_layers.Cost) -> None:
    """Two of six layers add nothing: without them the model says what it said."""
    lm = ToyLM(6)
    for idle in (1, 4):
        lm.qkvo[idle][:, 32:48] = 0.0
    texts = [[(7 * i + k) % VOCAB for i in range(20)] for k in range(3)]
    found = slim_layers.search(lm.layers, texts, skip=1 / 3, cost=cost)
    assert found.layers == [0, 2, 3, 5] and found.cost == pytest.approx(0.0, abs=1e-9)
    assert found.agreement == 1.0
    assert found.even > 0 and slim_layers.search(lm.layers, texts, skip=1 / 3, cost=cost) == found
    with pytest.raises(UsageError, match="texts of at least two tokens"):
        slim_layers.search(lm.layers, [[1]])


def test_the_same_slice_is_made_once_and_cleared_with_its_model() -> None:
    lm = wrap(build("llama", num_key_value_heads=2)).lm
    part = lm.layers.slice([0, 2])  # type: ignore[attr-defined]
    assert lm.layers.slice((0, 2)) is part and lm.layers.slice([0, 1]) is not part  # type: ignore[attr-defined]
    row = part.acquire([])
    part.feed([[1] * 30], [row])
    part.release(row)
    lm.clear()
    assert part.slots[row].tokens == []
    whole = lm.layers.reference(range(3)).native([1, 2, 3], 3)  # type: ignore[attr-defined]
    assert torch.equal(whole, lm.reference().native([1, 2, 3], 3))


def test_layers_go_through_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A trace without a single chance says nothing to graft, and its texts are enough for layers."""
    model, trace, path = Model(ToyLM(6), name="toy"), tmp_path / "t.jsonl", tmp_path / "c.json"
    model.generate([[1, 2, 3], [4, 5]], method="plain", max_tokens=20, trace=trace)
    monkeypatch.setattr(command, "load_model", lambda name, how: model)
    asked = ["calibrate", str(trace), "--output", str(path), "--layers-of", "toy", "--skip", "0.3", "--steps", "12"]
    done = runner.invoke(app, asked)
    assert done.exit_code == 0, done.output
    assert "no calibration for graft" in done.stderr and "layers kept" in done.stdout
    kept = json.loads(path.read_text())["via_sd"]["layers"]
    drafter = registry.method("via_sd", calibration=str(path))
    model.generate([1, 2], method=drafter, max_tokens=4)
    slim = drafter._slim  # type: ignore[attr-defined]
    assert len(kept) == 4 and all(a is model.lm.qkvo[i] for a, i in zip(slim.qkvo, kept, strict=True))  # type: ignore[attr-defined]
    small = Model(ToyLM(6, vocab=4))
    monkeypatch.setattr(command, "load_model", lambda name, how: small)
    wrong = runner.invoke(app, asked)
    assert wrong.exit_code == 2 and "use traces of that model" in wrong.stderr.replace("\n", " ")
    tuning_file.write(path, {"via_sd": {}})
    with pytest.raises(UsageError, match="has no list of layers"):
        model.generate([1, 2], method="via_sd", calibration=str(path), max_tokens=2)


def test_scores_are_not_needed_to_observe(toy: Model) -> None:
    """What is learned comes from the tokens: no pass of the slim verifier, nothing to learn."""
    drafter = ViaSD(inner=Fixed(*TEXT), exact=True)
    seq = _asked(drafter)
    drafter.observe(seq, Step(Tree([0]), [0], [5], [0]), Scores(Logits(torch.zeros(1, VOCAB))))
    assert not drafter._held
