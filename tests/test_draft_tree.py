"""Trees that a draft grows by itself, a level a program, are those that are grown from outside; on CPU and GPU."""

from __future__ import annotations

from collections.abc import Iterator, Sequence as Seq
from typing import Any

import pytest
import torch

from outpace import registry
from outpace.api.model import Model
from outpace.core.lm import DraftShape, DraftToken
from outpace.core.tree import Tree
from outpace.drafting.linked_heads import LinkedLM
from outpace.drafting.model_drafter import ModelDrafter
from outpace.errors import CacheFull
from outpace.heads import store
from outpace.models.compiled.cpu import CpuRunner
from outpace.models.compiled.drafts.draft_tree import DraftTrees
from outpace.models.compiled.drafts.root_pass import RootPass
from outpace.models.compiled.runner import CompiledRunner
from outpace.models.kernels import cpu
from outpace.models.segment import Segment
from outpace.sampling.sampler import Pick
from tests.test_compiled import DEVICES, PROMPTS, fast, shared

pytestmark = pytest.mark.skipif(not cpu.available(), reason="no C++ compiler")
GREEDY = Pick(0, 0.0)


def paths(tree: Tree) -> dict[tuple[int, ...], float]:
    """What a tree holds: every path, and how likely its last token was."""
    return {tuple(tree.tokens[n] for n in tree.path(node)): tree.signals[node].prob for node in range(1, len(tree))}


@pytest.fixture
def grown(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Tree]]:
    """All trees that drafters propose."""
    trees, propose = list[Tree](), ModelDrafter.propose_batch

    def noted(self: ModelDrafter, *given: Any) -> list[Tree]:
        found = propose(self, *given)
        trees.extend(Tree(list(t.tokens), list(t.parents), signals=dict(t.signals)) for t in found)
        return found

    monkeypatch.setattr(ModelDrafter, "propose_batch", noted)
    yield trees


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "method", ["draft:width=3,depth=4,nodes=10", "eagle3:head=random,width=4,depth=6,nodes=30", "eagle3"]
)
def test_trees_are_those_that_are_grown_level_by_level(
    method: str, device: str, grown: list[Tree], monkeypatch: pytest.MonkeyPatch
) -> None:
    target = shared("llama", device)
    target.clear_cache()
    given: dict[str, Any] = {"max_tokens": 20, "method": method}
    if method.startswith("draft"):
        given["draft"] = shared("qwen2", device)
    if method == "eagle3":  # it can say some tokens only
        head = store.fresh("eagle3", target.lm, torch.arange(0, 90, 2))
        given["method"] = registry.method("eagle3", head=head, width=4, depth=6, nodes=30)
    calls: list[int] = []
    whole = DraftTrees.grow

    def counted(self: DraftTrees, segments: Seq[Segment], *given: Any) -> list[list[DraftToken]]:
        calls.append(len(segments))
        return whole(self, segments, *given)

    monkeypatch.setattr(DraftTrees, "grow", counted)
    answers = [target.generate(PROMPTS, **given), target.generate(PROMPTS[0], **given)]
    alone, count = list(grown), len(calls)
    grown.clear()
    assert {1, 3} <= set(calls)
    monkeypatch.setattr(CompiledRunner, "draft", lambda *given: None)
    target.clear_cache()
    again = [target.generate(PROMPTS, **given), target.generate(PROMPTS[0], **given)]
    assert len(calls) == count and len(grown) == len(alone)
    assert [c.tokens for c in again[0]] == [c.tokens for c in answers[0]] and again[1].tokens == answers[1].tokens
    for ours, theirs in zip(alone, grown, strict=True):
        mine, due = paths(ours), paths(theirs)
        assert mine.keys() == due.keys()
        for path, chance in due.items():
            assert mine[path] == pytest.approx(chance, rel=1e-3)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ["medusa", "block"])
def test_trees_of_linked_slots(kind: str, device: str, grown: list[Tree], monkeypatch: pytest.MonkeyPatch) -> None:
    """In batches of several sizes, which on a GPU are captured."""
    target = shared("llama", device)
    target.clear_cache()
    head, generator = store.fresh(kind, target.lm, torch.arange(0, 90, 2), linked=24), torch.Generator().manual_seed(7)
    with torch.no_grad():  # links begin with zeros
        for weight in (p for p in head.parameters() if p.requires_grad):
            weight += (0.2 * torch.randn(weight.shape, generator=generator)).to(weight)
    given: dict[str, Any] = {"method": registry.method(kind, head=head, width=3, depth=4, nodes=10), "max_tokens": 20}
    answers = [target.generate(PROMPTS, **given), [target.generate(PROMPTS[0], **given)]]
    quickly = list(grown)
    grown.clear()
    target.clear_cache()
    monkeypatch.setattr(LinkedLM, "draft", lambda *given: None)
    again = [target.generate(PROMPTS, **given), [target.generate(PROMPTS[0], **given)]]
    assert [[c.tokens for c in batch] for batch in again] == [[c.tokens for c in batch] for batch in answers]
    assert len(grown) == len(quickly) > 10
    for ours, theirs in zip(quickly, grown, strict=True):
        assert paths(ours) == pytest.approx(paths(theirs), rel=1e-3)


def test_what_a_tree_was_fed_is_kept_where_it_turns_out_right(monkeypatch: pytest.MonkeyPatch) -> None:
    """A draft that is the target itself: the next pass feeds it only what its tree did not hold."""
    target = shared("llama")
    lm = fast("llama").lm
    fed, send = list[int](), RootPass.send

    def counted(self: RootPass, jobs: Seq[Segment], numbers: Any) -> None:
        fed.extend(len(job.tokens) for job in jobs)
        send(self, jobs, numbers)

    monkeypatch.setattr(RootPass, "send", counted)
    done = target.generate(PROMPTS[0], method="draft:width=2,depth=4,nodes=8", draft=Model(lm), max_tokens=21)
    assert done.stats.matched == done.stats.offered and done.stats.passes > 2
    assert max(fed[1:]) <= 2  # the last guess, which was not fed, and the root


def test_where_trees_are_grown_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    lm = fast("llama").lm
    assert isinstance(lm.runner, CpuRunner)
    row = lm.acquire([])
    lm.feed([PROMPTS[1]], [row])

    def guess(shape: DraftShape, pick: Pick = GREEDY) -> list[list[DraftToken]] | None:
        return lm.drafts.draft([row], [4], [shape], [pick])

    assert [len(found) for shape in (DraftShape(3, 2, 5), DraftShape(1, 2, 5)) for found in guess(shape) or []] == [
        5,
        2,
    ]
    assert guess(DraftShape(3)) is None  # a chain: on a CPU one pass a token is all there is
    assert guess(DraftShape(3, 2, 5), Pick(0, 0.7)) is None  # noise orders what follows, and a program has none
    assert guess(DraftShape(40, 4, 5)) is None  # more nodes than ancestor bits
    assert guess(DraftShape(3, 65, 5)) is None  # more than a compiled pass takes

    lm.windows = [8] * len(lm.windows)
    assert guess(DraftShape(4, 2, 5)) is not None and guess(DraftShape(5, 2, 5)) is None  # the window ends within it

    def full(jobs: Seq[Segment]) -> None:
        raise CacheFull("no room", row)

    with monkeypatch.context() as patch, pytest.raises(CacheFull):  # the engine then goes on without guesses
        patch.setattr(lm, "reserve", full)
        guess(DraftShape(3, 2, 5))
    assert lm.runner.most_tokens  # and nothing was given up

    def broken(*given: Any) -> None:
        raise RuntimeError("the compiler stumbles")

    monkeypatch.setattr(DraftTrees, "grow", broken)
    assert guess(DraftShape(3, 2, 5)) is None and not lm.runner.most_tokens  # eagerly from now on
