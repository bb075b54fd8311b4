"""Heads: trees from distributions that were guessed at once, and that drafting says what training was told."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import outpace
from outpace import registry
from outpace.api.model import Model
from outpace.api.request import Request
from outpace.core.sequence import Sequence
from outpace.core.tree import Budget, Tree
from outpace.drafting import head_drafter, model_drafter, parallel_trees
from outpace.drafting.candidates import ranked_candidates
from outpace.drafting.head_drafter import ParallelDrafter
from outpace.drafting.linked_heads import LinkedLM
from outpace.errors import HeadNotFound, UsageError
from outpace.heads import store
from outpace.heads.base import Head
from outpace.heads.block import BlockHead
from outpace.heads.parallel import Parallel, Text
from outpace.models.compiled.cpu import CpuRunner
from outpace.models.embeddings import Embeddings
from outpace.models.hf.head_lm import HeadLM
from outpace.sampling.settings import Sampling
from outpace.testing import ToyLM
from outpace.verify.distribution import sampled_distribution
from outpace.verify.plan import Subject, VerifyPlan
from tests.test_draft_tree import paths
from tests.tiny_models import GROUPED, build

KINDS = ["eagle3", "mtp", "medusa", "block"]
LINKED = ["medusa-linked", "block-linked"]
TOKENS = [3, 1, 4, 1, 5]
WARM = {"temperature": 0.9, "seed": 3}


def sequence(**given: Any) -> Sequence:
    return Model(ToyLM()).sequence(Request.from_keywords(TOKENS, {"method": "plain", **given}))


def distributions(count: int, vocab: int = 64, seed: int = 0) -> Tensor:  # [slots, vocab]
    return 2 * torch.randn(count, vocab, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def spelled(tree: Tree) -> set[tuple[int, ...]]:
    """Every node as the tokens on the way to it."""
    return {tuple(tree.tokens[n] for n in tree.path(node)[1:]) for node in range(1, len(tree))}


# Trees from slots


def chances(seq: Sequence, logits: Tensor, width: int) -> list[dict[int, float]]:
    """Of each slot, what its first tokens are worth."""
    found = []
    for slot, row in enumerate(logits):
        (seen,) = ranked_candidates(seq, row[None], [seq.tokens + [0] * slot], width)
        found.append(dict(zip(seen.tokens, seen.probs, strict=True)))
    return found


@pytest.mark.parametrize("given", [{}, WARM], ids=["greedy", "sampled"])
def test_best_first_is_the_best_of_all_trees(given: dict[str, Any]) -> None:
    """Of all sets of nodes that hang together, for every size: brute force."""
    for seed in range(3):
        seq, logits = sequence(**given), distributions(3, seed=seed)
        worth: dict[tuple[int, ...], float] = {(): 1.0}
        for depth, _ in enumerate(logits, 1):
            for path in product(*chances(seq, logits, 2)[:depth]):
                worth[path] = worth[path[:-1]] * chances(seq, logits, 2)[depth - 1][path[-1]]
        nodes = [path for path in worth if path]
        best = [0.0] * (len(nodes) + 1)
        for chosen in range(1 << len(nodes)):
            some = {path for i, path in enumerate(nodes) if chosen >> i & 1}
            if all(len(path) == 1 or path[:-1] in some for path in some):
                best[len(some)] = max(best[len(some)], sum(worth[path] for path in some))
        for count in range(1, len(nodes) + 1):
            tree = parallel_trees.tree_from_logits(seq, logits, Budget(3, count, 2))
            assert len(tree) == count + 1
            assert sum(worth[path] for path in spelled(tree)) == pytest.approx(best[count])


def test_a_budget_is_kept_and_nodes_say_how_sure_they_are() -> None:
    seq, logits = sequence(), distributions(4)
    tree = parallel_trees.tree_from_logits(seq, logits, Budget(2, 9, 3))
    assert len(tree) == 10 and max(tree.depths) == 2
    assert max(len(tree.children(node)) for node in range(len(tree))) <= 3
    distribution = logits.softmax(-1)
    for node in range(1, len(tree)):
        slot = tree.depths[node] - 1
        signal = tree.signals[node]
        assert signal.prob == pytest.approx(float(distribution[slot, tree.tokens[node]]))
        assert signal.entropy == pytest.approx(float(torch.special.entr(distribution[slot]).sum()))
        assert signal.top == pytest.approx(distribution[slot].topk(10).values.tolist())
    assert parallel_trees.tree_from_logits(seq, logits, Budget(4, 4, 1)).tokens[1:] == logits.argmax(-1).tolist()


def test_a_slot_that_knows_the_distribution_guesses_what_the_target_draws() -> None:
    seq, logits = sequence(**WARM, top_k=20), distributions(5)
    chain, prefix = parallel_trees.tree_from_logits(seq, logits, Budget(5, 5, 1)), list(TOKENS)
    for row, guess in zip(logits, chain.tokens[1:], strict=True):
        assert guess == seq.sampler.choose(row, prefix)
        prefix.append(guess)


def test_with_processors_a_slot_depends_on_its_path() -> None:
    logits = torch.zeros(2, 64, dtype=torch.float64)
    logits[0, [7, 8]], logits[1, 9] = torch.tensor([6.0, 5.9], dtype=torch.float64), 9.0
    assert {(7, 9), (8, 9)} <= spelled(parallel_trees.tree_from_logits(sequence(), logits, Budget(2, 6, 2)))
    found = spelled(parallel_trees.tree_from_logits(sequence(bad_words=[[7, 9]]), logits, Budget(2, 6, 2)))
    assert (7, 9) not in found and (8, 9) in found
    everything = [[token] for token in range(64)]
    assert len(parallel_trees.tree_from_logits(sequence(bad_words=everything), logits, Budget(2, 6, 2))) == 1


def test_without_shared_noise_a_chain_is_drawn_and_says_from_what() -> None:
    seq, logits = sequence(**WARM, verifier="residual"), distributions(4)
    seen = []
    for passes in range(20):
        seq.stats.passes = passes
        tree = parallel_trees.tree_from_logits(seq, logits, Budget(4, 24, 6), ranks=[(0,), (1,)])
        assert tree.is_chain and len(tree) == 5
        for node in range(4):
            path = [tree.tokens[n] for n in tree.path(node)[1:]]
            assert torch.equal(tree.proposals[node], seq.sampler.distribution(logits[node], TOKENS + path))
        seen.append(tree.tokens)
    assert len(set(map(tuple, seen))) > 10
    unsure = sequence(**WARM, verifier="residual", policy="confidence:threshold=1.0,refit=false")
    # Stopped behind the draw, which stays.
    assert len(parallel_trees.tree_from_logits(unsure, logits, Budget(4, 24, 6))) == 2
    # Nothing is drawn.
    assert not parallel_trees.tree_from_logits(sequence(verifier="residual"), logits, Budget(4, 9, 3)).proposals


@pytest.mark.parametrize("kind", ["medusa", "block"])
def test_the_distribution_is_kept_under_residual(kind: str) -> None:
    model = Model(ToyLM(vocab=12))
    plan = VerifyPlan(model, [[1, 2, 3]], max_tokens=5, sampling=Sampling(temperature=1.0), samples=300, contexts=1)
    check = sampled_distribution(plan, Subject(kind, {"method": kind, "head": "random", "verifier": "residual"}))
    assert check.verdict == "pass", check.summary


# Static trees


def test_a_template_is_the_same_in_every_tree() -> None:
    seq, logits = sequence(), distributions(3)
    ranks = parallel_trees.parse("0+1+0-0+0-2+1-0+0-0-1+0")
    assert ranks == [(0,), (1,), (0, 0), (0, 2), (1, 0), (0, 0, 1)]
    order = logits.argsort(-1, descending=True)
    tree = parallel_trees.tree_from_logits(seq, logits, Budget(3, 9, 3), ranks)
    assert [tree.tokens[n] for n in range(1, len(tree))] == [int(order[len(path) - 1, path[-1]]) for path in ranks]
    assert spelled(tree) == {tuple(int(order[i, rank]) for i, rank in enumerate(path)) for path in ranks}
    # Nothing deeper, no third child.
    assert len(parallel_trees.tree_from_logits(seq, logits, Budget(2, 9, 2), ranks)) == 5
    assert len(parallel_trees.tree_from_logits(seq, logits, Budget(3, 2, 3), ranks)) == 3
    drafter = registry.method("medusa", template="0+1+0-0+0-2")
    assert drafter.limit == Budget(2, 4, 3)


def test_a_template_from_how_often_ranks_were_right() -> None:
    text = parallel_trees.spell([[0.6, 0.2], [0.5, 0.1]], nodes=4)
    assert parallel_trees.parse(text) == [(0,), (0, 0), (1,), (1, 0)]
    for wrong, message in {
        "0+1-0": "not its parent",
        "0-0+0": "before",
        "0+x": "no template",
        "0--1": "no template",
    }.items():
        with pytest.raises(UsageError, match=message):
            registry.method("medusa", template=wrong)


# Heads


def stirred(head: Head) -> Head:
    """Medusa's layers begin with zeros: with those much could be wrong and not be seen."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, weight in head.named_parameters():
            if "unembed" not in name and "embed" not in name:
                weight += 0.2 * torch.randn(weight.shape, generator=generator, dtype=weight.dtype)
    return head


@cache
def target() -> Model:
    return outpace.wrap(build("llama", **GROUPED, num_hidden_layers=6))


@cache
def head_of(kind: str) -> Head:
    """Of a kind, or of one whose slots are linked."""
    name, _, linked = kind.partition("-")
    return stirred(store.fresh(name, target().lm, **({"linked": 24} if linked else {})))


def hidden_of(tokens: list[int], taps: tuple[int, ...]) -> Tensor:  # [1, tokens, taps * hidden]
    model: Any = target().lm.model  # type: ignore[attr-defined]
    with torch.no_grad():
        states = model(torch.tensor([tokens]), output_hidden_states=True, use_cache=False).hidden_states
    return torch.cat([states[tap] for tap in taps], dim=-1)


def test_settings_of_heads() -> None:
    lm = target().lm
    assert store.fresh("block", lm).spec.taps == (1, 2, 3)
    assert store.fresh("block", lm, layers=2).spec.taps == (1, 3)
    assert store.fresh("medusa", lm, rank=4, steps=3).spec.taps == (6,)
    with pytest.raises(HeadNotFound, match="No medusa head"):
        target().generate([1, 2, 3], method="medusa")
    with pytest.raises(UsageError, match="is of the kind 'medusa', not 'block'"):
        target().generate([1, 2, 3], method="block", head=head_of("medusa"))
    with pytest.raises(UsageError, match="drafts 4 tokens, not 5"):
        head_of("medusa").unroll(torch.tensor([[1, 2]]), torch.zeros(1, 2, 32), 5)
    with pytest.raises(UsageError, match="block needs depth"):
        registry.method("block", depth=-1)


def test_angles_keep_their_precision_in_a_smaller_one() -> None:
    lm = ToyLM()
    lm.states.embeddings = Embeddings(lm.embed.bfloat16(), lm.head.T.bfloat16())
    for kind in KINDS:
        head = store.fresh(kind, lm)
        assert {weight.dtype for weight in head.parameters()} == {torch.bfloat16}
        assert all(b.dtype != torch.bfloat16 for b in head.buffers())


@pytest.mark.parametrize("own_output", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_head_comes_back_from_its_folder(kind: str, own_output: bool, tmp_path: Path) -> None:
    lm, ids = target().lm, torch.arange(3, 90, 2)
    head = stirred(store.fresh(kind, lm, ids, own_output=own_output))
    store.save(head, tmp_path, lm)
    found = store.load(tmp_path, lm)
    assert found.spec == head.spec and not any({"embed", "unembed"} & set(n.split(".")) for n in head.own_tensors())
    tokens, hidden = torch.tensor([[5, 6, 7, 8]]), hidden_of([5, 6, 7, 8], head.spec.taps)
    with torch.no_grad():
        ours, theirs = (h.unroll(tokens, hidden, 2)[1].logits for h in (head, found))
    assert ours.shape == (1, theirs.shape[1], len(ids))
    torch.testing.assert_close(ours, theirs, atol=2e-2 * float(ours.abs().max()), rtol=0)  # written as float16
    store.compress(tmp_path, tmp_path / "small")
    with torch.no_grad():
        small = store.load(tmp_path / "small", lm).unroll(tokens, hidden, 2)[1].logits
    torch.testing.assert_close(ours, small, atol=3e-2 * float(ours.abs().max()), rtol=0)
    sizes = [(place / store.WEIGHTS).stat().st_size for place in (tmp_path, tmp_path / "small")]
    assert sizes[1] < 0.75 * sizes[0] and store.about(tmp_path / "small") == store.about(tmp_path)
    given: dict[str, Any] = {"max_tokens": 16, **WARM}
    drafted = target().generate([[1, 2, 3], [4] * 9], method=kind, head=str(tmp_path), **given)
    plain = target().generate([[1, 2, 3], [4] * 9], method="plain", **given)
    assert [d.tokens for d in drafted] == [p.tokens for p in plain]


class Heard:
    """What a head said while it drafted: for each pass of each request, the text and the logits behind it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.said: list[tuple[list[int], list[int], Tensor]] = []  # text, guesses after it, [vocab]
        grow, add = parallel_trees.tree_from_logits, model_drafter.ModelDrafter._grow

        def grown(seq: Sequence, logits: Tensor, budget: Budget, ranks: Any = ()) -> Tree:
            self.said += [(list(seq.tokens), [None] * i, row.clone()) for i, row in enumerate(logits)]  # type: ignore[list-item]
            return grow(seq, logits, budget, ranks)

        def added(this: Any, growing: Any, logits: Tensor) -> bool:
            path = growing.path(len(growing.scored) - 1)
            self.said.append((list(growing.seq.tokens), path, logits[-1].clone()))
            return add(this, growing, logits)

        monkeypatch.setattr(head_drafter.parallel_trees, "tree_from_logits", grown)
        monkeypatch.setattr(model_drafter.ModelDrafter, "_grow", added)


@pytest.mark.parametrize("kind", [*KINDS, *LINKED])
def test_drafting_says_what_unroll_says(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a ragged batch, whatever was accepted in between: the same logits as training would see at that place."""
    head, heard = head_of(kind), Heard(monkeypatch)
    drafter = registry.method(head.kind, head=head, depth=2, width=1, nodes=2)
    monkeypatch.setattr(LinkedLM, "draft", lambda *given: None)  # levels that nobody looks at are compared below
    target().generate([[1, 2, 3, 4, 5], [9] * 20, [7, 8]], method=drafter, max_tokens=10)
    assert {len(path) for _, path, _ in heard.said} == {0, 1} and len(heard.said) > 30
    for text, path, logits in heard.said:
        guesses = [0 if guess is None else guess for guess in path]  # a slot does not see them
        tokens = torch.tensor([[*text, *guesses]])
        with torch.no_grad():
            guessed = head.unroll(tokens, hidden_of(tokens[0].tolist(), head.spec.taps), len(path) + 1)[len(path)]
            column = len(text) - 2  # whose newest token is the last of the text
            wanted = head.spread(guessed.logits[0, column], logits.shape[-1])
        assert int(guessed.at[0, column]) == len(text) - 1 + len(path)
        torch.testing.assert_close(logits, wanted, atol=1e-4 * float(wanted.abs().max()), rtol=0)


def test_a_context_that_was_kept_is_one_that_was_read_anew() -> None:
    head = head_of("block")
    assert isinstance(head, Parallel)
    hidden = [hidden_of([7 * i % 97 + k for i in range(30)], head.spec.taps)[0] for k in range(3)]
    kept = [Text() for _ in hidden]
    with torch.no_grad():
        for lengths in [(4, 9, 1), (5, 9, 2), (9, 12, 3), (10, 29, 30)]:
            fresh = [Text(10 + n, states[:n]) for n, states in zip(lengths, hidden, strict=True)]
            for text, new in zip(kept, fresh, strict=True):
                text.token, text.hidden = new.token, new.hidden
            together, anew = head.slots(kept, 9), torch.cat([head.slots([text], 9) for text in fresh])
            torch.testing.assert_close(together, anew)
            assert [text.cached["context"].length for text in kept] == list(lengths)


def test_blocks_start_at_columns_that_are_drawn() -> None:
    head = head_of("block")
    assert isinstance(head, BlockHead)
    text = [i * 5 % 97 for i in range(40)]
    tokens, hidden = (
        torch.tensor([text, text[::-1]]),
        torch.cat([hidden_of(t, head.spec.taps) for t in (text, text[::-1])]),
    )
    with torch.no_grad():
        everywhere = head.unroll(tokens, hidden, 3)
        head.anchors = 8
        try:
            torch.manual_seed(1)
            some = head.unroll(tokens, hidden, 3)
            torch.manual_seed(1)
            again = head.unroll(tokens, hidden, 3)
        finally:
            del head.anchors
    for step, (few, same, every) in enumerate(zip(some, again, everywhere, strict=True)):
        assert few.at.shape == (2, 8) and torch.equal(few.at, same.at) and torch.equal(few.logits, same.logits)
        columns = few.at - 1 - step
        wanted = every.logits.gather(1, columns[..., None].expand_as(few.logits))
        torch.testing.assert_close(few.logits, wanted)


@pytest.mark.parametrize("kind", [*KINDS, *LINKED])
def test_all_of_a_head_learns_and_nothing_of_the_target(kind: str) -> None:
    head, text = copy.deepcopy(head_of(kind)), [1, 2, 3, 4, 5, 6]
    guessed = head.unroll(torch.tensor([text]), hidden_of(text, head.spec.taps), head.spec.steps)
    torch.stack([g.logits.square().mean() for g in guessed]).sum().backward()
    learning = {name for name, weight in head.named_parameters() if weight.grad is not None and weight.grad.any()}
    assert learning == set(head.own_tensors())


@pytest.mark.parametrize("shape", [{"width": 3, "depth": 4, "nodes": 11}, {"width": 1, "depth": 3, "nodes": 3}])
@pytest.mark.parametrize("kind", LINKED)
def test_levels_that_nobody_looks_at(kind: str, shape: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Trees that grow without the host are those that are asked for level by level."""
    head, grown, propose = head_of(kind), list[list[Tree]](), ParallelDrafter.propose_batch

    def noted(self: ParallelDrafter, *given: Any) -> list[Tree]:
        grown[-1].extend(trees := propose(self, *given))
        return trees

    monkeypatch.setattr(ParallelDrafter, "propose_batch", noted)
    for quickly in (True, False):
        grown.append([])
        if not quickly:
            monkeypatch.setattr(LinkedLM, "draft", lambda *given: None)
        drafter = registry.method(head.kind, head=head, **shape)
        target().clear_cache()
        target().generate([[1, 2, 3, 4, 5], [9] * 20, [7, 8]], method=drafter, max_tokens=12)
    assert len(grown[0]) == len(grown[1]) > 12 and max(map(len, grown[0])) == shape["nodes"] + 1
    for ours, theirs in zip(*grown, strict=True):
        assert paths(ours) == pytest.approx(paths(theirs), rel=1e-4)


@pytest.mark.parametrize("kind", LINKED)
def test_linked_slots_under_all_that_looks_at_guesses(kind: str) -> None:
    """Sampled, drawn from a distribution of the head's own, by a static tree, under processors and a policy, in a
    batch."""
    head, prompts = head_of(kind), [[1, 2, 3], [4] * 9]
    static = {"template": "0+1+0-0+0-1+0-0-0"} if head.kind == "medusa" else {}
    cases: list[dict[str, Any]] = [
        WARM, {**WARM, "verifier": "residual"}, static, {**WARM, **static}, {**WARM, "top_k": 5},
        {"bad_words": [[7]], "repetition_penalty": 1.3}, {"policy": "confidence"},
    ]  # fmt: skip
    for given in cases:
        found = target().generate(prompts, method=head.kind, **{"head": head, "max_tokens": 16, **given})
        assert all(c.error is None for c in found)
        if given.get("verifier") != "residual":
            settings = {name: value for name, value in given.items() if name not in ("template", "policy")}
            plain = target().generate(prompts, method="plain", max_tokens=16, **settings)
            assert [c.tokens for c in found] == [c.tokens for c in plain]


def test_linked_static_trees_hold_the_ranks_of_their_template() -> None:
    head, seen = head_of("medusa-linked"), list[Tree]()
    drafter = registry.method("medusa", head=head, template="0+1+0-0+1-1")
    for piece in target().stream([1, 2, 3, 4], method=drafter, max_tokens=8):
        seen += [piece.step.tree] if piece.step is not None and len(piece.step.tree) > 1 else []
    assert max(map(len, seen)) == 5  # near the end of an answer they are cut
    assert all(list(tree.parents[1:]) == [0, 0, 1, 2][: len(tree) - 1] for tree in seen)


def test_medusa_begins_as_the_target_itself() -> None:
    head = store.fresh("medusa", target().lm)
    text = [1, 2, 3, 4]
    with torch.no_grad():
        logits = target().lm.model(torch.tensor([text])).logits  # type: ignore[attr-defined]
        for guessed in head.unroll(torch.tensor([text]), hidden_of(text, head.spec.taps), 4):
            torch.testing.assert_close(guessed.logits, logits)


@pytest.mark.parametrize("kind", ["eagle3", "mtp"])
def test_recursive_heads_run_compiled(kind: str) -> None:
    model = outpace.wrap(build("llama", torch.float32, **GROUPED), compile=True)
    head: Any = store.fresh(kind, model.lm, torch.arange(3, 90, 2))  # it can say some tokens only
    served = model.lm.states.attach(head)
    assert isinstance(served, HeadLM) and isinstance(served.runner, CpuRunner)


# Wrapped by other methods


def sources(model: Model, **given: Any) -> Iterator[str]:
    for piece in model.stream([[1, 2, 3, 4], [5] * 20], max_tokens=16, **given):
        if piece.step is not None:
            yield from piece.step.tree.sources.values()


@pytest.mark.parametrize("kind", KINDS)
def test_graft_over_a_head(kind: str, toy: Model) -> None:
    method = f"graft:nodes=12,inner={kind}:head=random"
    assert kind in set(sources(toy, method=method))
    for given in ({}, WARM):
        found = toy.generate([[1, 2, 3], [4] * 20], method=method, max_tokens=24, **given)
        plain = toy.generate([[1, 2, 3], [4] * 20], method="plain", max_tokens=24, **given)
        assert [c.tokens for c in found] == [c.tokens for c in plain]


@pytest.mark.parametrize("kind", KINDS)
def test_a_head_among_the_candidates_of_auto(kind: str, toy: Model) -> None:
    method = f"auto:candidates=suffix+{kind}:head=random"
    assert kind in set(sources(toy, method=method, policy="fixed"))
    for verifier in ("match", "residual"):
        given: dict[str, Any] = {"method": method, "verifier": verifier, "max_tokens": 24}
        found = toy.generate([[1, 2, 3], [4] * 20], **given)
        plain = toy.generate([[1, 2, 3], [4] * 20], method="plain", max_tokens=24)
        assert [c.tokens for c in found] == [c.tokens for c in plain]
    with pytest.raises(UsageError, match="read different hidden states"):
        toy.generate([1, 2, 3], method="auto:candidates=block:head=random+medusa:head=random")
    with pytest.raises(UsageError, match="not with both eagle3 and mtp"):
        toy.generate([1, 2, 3], method="auto:candidates=eagle3:head=random+mtp:head=random")
