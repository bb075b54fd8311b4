"""Graphs without a GPU: what a graph would replay is run anew, on the same numbers, by a compiled model on the CPU."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from itertools import product
from typing import Any

import pytest
import torch

import outpace
from outpace.api.model import Model
from outpace.api.request import Request
from outpace.core.engine import Engine
from outpace.core.tree import Tree
from outpace.models.compiled import captured, cuda_graph
from outpace.models.compiled.captured import COLUMNS, FOUND, CapturedPass, GraphKey, GraphOutputs
from outpace.models.compiled.cpu import CompiledLM
from outpace.models.compiled.cuda_graph import GraphLM
from outpace.models.compiled.run_ahead import RunAhead, RunAheadGate
from outpace.models.hf.lm import PackedLM
from outpace.models.kernels import cpu, sample_filtered
from outpace.sampling.sampler import Pick
from tests import tiny_models
from tests.callers import Way, check, generate_inside_a_stream, streams_in_turn

pytestmark = pytest.mark.skipif(not cpu.available(), reason="no C++ compiler")
PROMPTS = [[5, 9, 2, 7] * 4, [1, 2, 3], list(range(20, 60)), [8], [4, 4, 4]]


class Instant:
    """An event on a device that is always done."""

    def record(self) -> None: ...

    def synchronize(self) -> None: ...


class Unpinned(captured.Staging):
    """The same in memory of any kind."""

    def __init__(self, count: int, device: torch.device):
        self.given = torch.zeros(count, dtype=torch.int64)
        self._buffers = [torch.zeros(count, dtype=torch.int64) for _ in range(2)]
        self._views = [buffer.numpy() for buffer in self._buffers]
        self._read = [Instant(), Instant()]  # type: ignore[list-item]
        self._turn = 0


@dataclass
class Rerun:
    """Stands for a graph: its function, and memory that every run writes anew."""

    function: Any
    read: torch.Tensor
    left: GraphOutputs

    def __call__(self) -> GraphOutputs:
        found = self.function()
        for there, here in zip((self.left.logits, self.left.chosen), (found.logits, found.chosen), strict=True):
            there.copy_(here)
        self.read.copy_(self.left.chosen)
        return self.left


class Graphless(GraphLM):
    """A model that believes it runs as graphs."""

    def __init__(self, fast: CompiledLM):
        self.__dict__.update(fast.__dict__)
        self._graphs, self._generation, self.graph_memory = OrderedDict(), self.cache.generation, None
        self._last, self._ahead, self._doubt = None, RunAhead(), RunAheadGate()
        self.capture_seconds, self.most_tokens = 0.0, 512
        self.sent = 0

    @torch.no_grad()
    def _capture(self, size: GraphKey) -> CapturedPass:
        staging = Unpinned(size.tokens * COLUMNS + size.slots * 4, self.device)
        left = GraphOutputs(
            torch.zeros(size.tokens, self.vocab), None, {}, torch.zeros(FOUND, size.tokens, dtype=torch.float64)
        )
        rerun = Rerun(
            torch.no_grad()(self._program(size, staging.given, None)), torch.zeros(FOUND, size.tokens).double(), left
        )
        return CapturedPass(rerun, staging, None, rerun.read, size)  # type: ignore[arg-type]

    def _send(self, *given: Any) -> bool:
        self.sent += 1
        return super()._send(*given)


@pytest.fixture(scope="module")
def fast() -> CompiledLM:
    found = outpace.wrap(tiny_models.MODELS["llama"]().float(), eager=False).lm
    assert isinstance(found, CompiledLM)
    return found


@pytest.fixture
def model(fast: CompiledLM, monkeypatch: pytest.MonkeyPatch) -> Model:
    monkeypatch.setattr(torch.cuda, "Event", Instant)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(cuda_graph, "Staging", Unpinned)
    fast.clear()
    return Model(Graphless(fast))


@pytest.fixture(scope="module")
def slow() -> Model:
    found = outpace.wrap(tiny_models.MODELS["llama"]().float(), eager=True)
    assert type(found.lm) is PackedLM
    return found


FILTERS: list[dict[str, Any]] = [{"top_k": 5, "top_p": 0.9}, {}, {"top_p": 0.8}, {"min_p": 0.2}, {"typical_p": 0.7}]
SAMPLING: dict[str, list[dict[str, Any]]] = {
    "greedy": [{"temperature": 0.0}],
    "sampled": [{"temperature": 0.9}],
    "filtered": [{"temperature": 0.9, "top_p": 0.8}],
    "mixed": [{"temperature": 0.9, **given} for given in FILTERS],
}


def texts_of(sides: tuple[Model, Model], settings: list[dict[str, Any]]) -> list[list[list[int]]]:
    texts = []
    for side in sides:
        engine = Engine(side.lm, max_rows=3)  # some join when others have left
        seqs = [side.sequence(Request.of(p, s)) for p, s in zip(PROMPTS, settings, strict=True)]
        for seq in seqs:
            engine.submit(seq)
        assert list(engine.run())
        texts.append([seq.generated for seq in seqs])
    return texts


@pytest.mark.parametrize("way", [streams_in_turn, generate_inside_a_stream], ids=lambda way: way.__name__)
def test_callers_read_choices_before_the_next_pass_writes_over_them(way: Way, model: Model) -> None:
    """Two streams with an engine each would launch the same graph in turn, and read each other's choices."""
    check(model, PROMPTS[:3], {"method": "plain", "temperature": 0.9}, way)
    assert isinstance(model.lm, Graphless) and model.lm.sent


@pytest.mark.parametrize(
    ("method", "sampling"),
    [
        *product(("plain", "suffix", "auto"), ("greedy", "sampled")),
        *product(("plain", "suffix"), ("filtered", "mixed")),
    ],
)
def test_what_is_staged_is_what_eager_passes_are_given(method: str, sampling: str, model: Model, slow: Model) -> None:
    given = SAMPLING[sampling] * 5
    more = 9 if sampling in ("greedy", "sampled") else 4  # kernels that are interpreted take their time
    more = 3 if method == "auto" else more  # without costs it has large trees, whose nodes are all chosen at
    settings = [{"method": method, "max_tokens": 5 + more * i, "seed": i, **given[i]} for i in range(5)]
    ours, theirs = texts_of((model, slow), settings)
    assert ours == theirs
    assert isinstance(model.lm, Graphless) and model.lm.most_tokens  # nothing made it give up
    assert method != "plain" or sampling == "mixed" or model.lm.sent > (30 if more == 9 else 12)


def test_choices_that_a_graph_is_not_sure_of_are_made_again(
    model: Model, slow: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sample_filtered, "MOST", 4)  # tokens that it looks at
    again, filtered = list[int](), GraphLM._filtered
    monkeypatch.setattr(GraphLM, "_filtered", lambda *given: again.append(1) or filtered(*given))
    settings = [{"method": "plain", "max_tokens": 16, "temperature": 1.5, "top_p": 0.9, "seed": i} for i in range(5)]
    ours, theirs = texts_of((model, slow), settings)
    assert ours == theirs
    assert isinstance(model.lm, Graphless) and len(again) > 10
    assert 3 <= model.lm.sent < 12  # then it has seen that most are in vain


def test_a_pass_is_begun_only_behind_the_rows_last_one(model: Model) -> None:
    lm = model.lm
    assert isinstance(lm, Graphless)
    row = lm.acquire([])
    lm.sync([[1, 2, 3]], [row])
    pick = Pick(0, 0.0)
    lm.score([Tree([4])], [row], picks=[pick])
    assert lm.ahead([row], [pick])
    lm.sync([[1, 2, 3, 4, 5]], [row])  # the text went on without it
    assert not lm._ahead.rows and not lm.ahead([row], [pick])
