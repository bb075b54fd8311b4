"""Heads on a GPU, simulated: captured drafts are those of heads that are not captured, and the host waits once."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from outpace import registry
from outpace.api.model import Model
from outpace.api.request import Request
from outpace.core.engine import Engine
from outpace.core.policy import Policy
from outpace.core.sequence import Sequence
from outpace.core.tree import Budget, Tree
from outpace.drafting.head_drafter import HeadDrafter, ParallelDrafter
from outpace.drafting.linked_heads import LinkedLM
from outpace.drafting.model_drafter import ModelDrafter
from outpace.drafting.slot_graphs import SlotGraphs, SlotProgram
from outpace.heads import store
from outpace.models.compiled.cuda_graph import GraphRunner
from outpace.models.compiled.drafts.draft_chain import DraftChains
from outpace.models.compiled.drafts.draft_tree import TreeProgram
from outpace.models.compiled.drafts.early_exit_graph import EarlyExitGraphLM
from outpace.models.kernels import cpu
from tests import simulated_gpu
from tests.test_draft_tree import paths
from tests.test_heads import stirred
from tests.tiny_models import GROUPED, build

pytestmark = [
    pytest.mark.skipif(not cpu.available(), reason="no C++ compiler"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="kernels run on tensors of a CPU only where there is no GPU"),
]
PROMPTS = [[5, 9, 2, 7] * 4, [1, 2, 3], list(range(20, 60)), [8, 8]]
SAMPLING: dict[str, dict[str, Any]] = {"greedy": {}, "sampled": {"temperature": 0.9}}


@pytest.fixture(scope="module")
def shared() -> Model:
    return simulated_gpu.compiled(build("llama", torch.float32, **GROUPED, num_hidden_layers=6))


@pytest.fixture
def model(shared: Model, monkeypatch: pytest.MonkeyPatch) -> Model:
    return simulated_gpu.simulate(shared, monkeypatch)


def drafter(kind: str, model: Model, small: bool, **options: Any) -> Any:
    """A method with a head of its own, which can say some tokens only if it is `small`."""
    name, _, linked = kind.partition("-")
    ids = torch.arange(0, 90, 2) if small else None
    head = stirred(store.fresh(name, model.lm, ids, **({"linked": 24} if linked else {})))
    return registry.method(name, head=head, **options)


class Noted:
    """Runs methods, and notes all that they draft."""

    def __init__(self, model: Model, patch: pytest.MonkeyPatch):
        self.model, self.trees = model, list[Tree]()
        for kind in (ModelDrafter, ParallelDrafter):
            patch.setattr(kind, "propose_batch", self.noting(kind.propose_batch))

    def noting(self, propose: Any) -> Any:
        def noted(drafter: ModelDrafter, *given: Any) -> list[Tree]:
            before, found = len(self.trees), propose(drafter, *given)
            del self.trees[before:]  # a method of one class may call that of the other
            self.trees.extend(found)
            return found

        return noted

    def run(self, **given: Any) -> tuple[list[list[int]], list[Tree]]:
        """Return the texts, in a batch and alone, and the drafts."""
        self.model.clear_cache()
        self.trees.clear()
        done = [*self.model.generate(PROMPTS, max_tokens=12, **given)]
        done.append(self.model.generate(PROMPTS[0], max_tokens=8, **{"seed": 7, **given}))
        return [one.tokens for one in done], list(self.trees)


@pytest.mark.parametrize("shape", [{"width": 3, "depth": 4, "nodes": 10}, {"width": 1, "depth": 5, "nodes": 0}])
@pytest.mark.parametrize("kind", ["eagle3", "mtp"])
def test_recursive_heads(kind: str, shape: dict[str, int], model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    noted, small = Noted(model, monkeypatch), kind == "eagle3"
    head = drafter(kind, model, small, **shape).head
    for sampling in SAMPLING.values():
        plain, _ = noted.run(method="plain", **sampling)
        texts, trees = noted.run(method=registry.method(kind, head=head, **shape), **sampling)
        with monkeypatch.context() as patch:
            patch.setattr(GraphRunner, "draft", lambda *given: None)
            again, others = noted.run(method=registry.method(kind, head=head, **shape), **sampling)
        assert texts == again == plain
        for ours, theirs in zip(trees, others, strict=True):
            mine, due = paths(ours), paths(theirs)
            assert mine.keys() == due.keys()
            if not sampling or shape["width"] > 1:  # a sampled chain tells what a token's share is without noise
                assert mine == pytest.approx(due, rel=1e-3, abs=1e-6)


def test_chains_of_the_first_layers(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    noted = Noted(model, monkeypatch)
    for sampling in SAMPLING.values():
        plain, _ = noted.run(method="plain", **sampling)
        texts, trees = noted.run(method="layerskip:exit=4,depth=3", **sampling)
        with monkeypatch.context() as patch:
            patch.setattr(EarlyExitGraphLM, "draft", lambda *given: None)
            again, others = noted.run(method="layerskip:exit=4,depth=3", **sampling)
        assert texts == again == plain
        assert [(tree.tokens, tree.parents) for tree in trees] == [(tree.tokens, tree.parents) for tree in others]


@pytest.mark.parametrize("small", [False, True])
@pytest.mark.parametrize("kind", ["medusa", "block", "medusa-linked", "block-linked"])
def test_parallel_heads(kind: str, small: bool, model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    noted, shape = Noted(model, monkeypatch), {"width": 3, "depth": 4, "nodes": 12}
    head = drafter(kind, model, small, **shape).head
    for sampling in SAMPLING.values():
        plain, _ = noted.run(method="plain", **sampling)
        method = registry.method(head.kind, head=head, **shape)
        texts, trees = noted.run(method=method, **sampling)
        assert method._graphs.on and method._graphs._programs
        with monkeypatch.context() as patch:
            patch.setattr(SlotGraphs, "draft", lambda *given: None)
            patch.setattr(LinkedLM, "draft", lambda *given: None)
            again, others = noted.run(method=registry.method(head.kind, head=head, **shape), **sampling)
        assert texts == again == plain
        for ours, theirs in zip(trees, others, strict=True):
            assert paths(ours) == pytest.approx(paths(theirs), rel=1e-3, abs=1e-6)


KINDS = ["eagle3", "mtp", "medusa", "block", "medusa-linked", "block-linked"]


@pytest.mark.parametrize("kind", KINDS)
def test_the_host_waits_once_a_draft(kind: str, model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    logs = list[simulated_gpu.HostLog]()
    method = drafter(kind, model, False, width=1 if kind == "mtp" else 3, depth=4, nodes=12)
    propose = method.propose_batch

    def logged(*given: Any) -> list[Tree]:
        with simulated_gpu.host_log() as log:
            logs.append(log)
            return propose(*given)

    monkeypatch.setattr(method, "propose_batch", logged)
    for sampling in SAMPLING.values():
        for _ in range(3):  # the first times, graphs are captured
            logs.clear()
            model.clear_cache()
            model.generate(PROMPTS, method=method, max_tokens=24, **sampling)
        waits = [dict(+log.waits) for log in logs if sum(log.waits.values()) > 1]
        launches = [sum(log.launches.values()) for log in logs]
        assert len(logs) > 8 and not waits
        assert max(launches[len(logs) // 2 :]) < 12, "kernels are launched outside of graphs"


class Uneven(Policy):
    """Gives each request another budget, and sometimes none."""

    def budget(self, seq: Sequence) -> Budget:
        turn = seq.id + len(seq.tokens)
        return Budget(turn % 5, 3 + 5 * (turn % 3), 3 if isinstance(seq.drafter, HeadDrafter) else 1 + turn % 3)


@pytest.mark.parametrize("kind", ["eagle3", "medusa", "block", "block-linked"])
def test_budgets_that_differ(kind: str, model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests join and leave, some of them sampled, some with a say of their own in what is drafted."""
    noted, head = Noted(model, monkeypatch), drafter(kind, model, True, width=3).head
    more: list[dict[str, Any]] = [{}, {"temperature": 0.9}, {"bad_words": [[7]]}]
    asked = [{"max_tokens": 5 + i % 5, "seed": i, **more[i % 3]} for i in range(11)]
    asked[9] = {"max_tokens": 4, "temperature": 0.8, "top_k": 9}
    found = []
    for captured in (True, False):
        model.clear_cache()
        noted.trees.clear()
        with monkeypatch.context() as patch:
            if not captured:
                for place in (SlotGraphs, LinkedLM, GraphRunner):
                    patch.setattr(place, "draft", lambda *given: None)
            engine, policy = Engine(model.lm, max_batch=6), Uneven()
            method = registry.method(head.kind, head=head, width=3, depth=4, nodes=13)
            seqs = []
            for i, given in enumerate(asked):
                seqs.append(model.sequence(Request.from_keywords([1 + i, 2, 3 + i], {"method": method, **given})))
                seqs[-1].id, seqs[-1].policy = i, policy
                engine.submit(seqs[-1])
            assert list(engine.run()) and not [seq.error for seq in seqs if seq.error]
            found.append(([seq.generated for seq in seqs], [paths(tree) for tree in noted.trees]))
    plain = [model.generate([1 + i, 2, 3 + i], method="plain", **given).tokens for i, given in enumerate(asked)]
    assert found[0][0] == found[1][0] == plain
    for ours, theirs in zip(found[0][1], found[1][1], strict=True):
        assert ours == pytest.approx(theirs, rel=1e-3, abs=1e-6)


@pytest.mark.parametrize("count", [16, 40])
def test_many_requests_and_long_prompts(count: int, model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = [[(i * i + 7 * j) % 90 for j in range(3 + i % 5 + 120 * (i % 9 == 4))] for i in range(count)]
    model.max_batch = count
    for kind in ("eagle3", "block", "medusa-linked"):
        method = drafter(kind, model, False, width=2, depth=3, nodes=5)
        done = model.generate(prompts, method=method, max_tokens=6)
        plain = model.generate(prompts, method="plain", max_tokens=6)
        assert [one.tokens for one in done] == [one.tokens for one in plain]
        graphs = getattr(method, "_graphs", None)
        assert graphs is None or (graphs.on and not graphs.read)  # every slot was given back


def test_a_head_that_cannot_be_captured(
    model: Model, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*given: Any) -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    for kind in ("block", "eagle3", "mtp"):
        caplog.clear()
        model.clear_cache()
        width = 1 if kind == "mtp" else 2
        with monkeypatch.context() as patch:
            for place in (SlotProgram, TreeProgram, DraftChains):
                patch.setattr(place, "_whole" if place is not TreeProgram else "_level", fails)
            done = model.generate(PROMPTS, method=drafter(kind, model, False, width=width, depth=3), max_tokens=12)
        assert [one.tokens for one in done] == [
            one.tokens for one in model.generate(PROMPTS, method="plain", max_tokens=12)
        ]
        assert len([record for record in caplog.records if "from now on" in record.message]) == 1
        assert sum(one.stats.drafted for one in done) > 20  # it drafts all the same
