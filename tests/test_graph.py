"""Graphs without a GPU: what a graph would replay is run anew, on the same numbers, by a compiled model on the CPU."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import outpace
from outpace.api import Model, Request
from outpace.engine import Engine, Event
from outpace.models import captured, graph
from outpace.models.ahead import Ahead
from outpace.models.captured import COLUMNS, Captured, Left, Size
from outpace.models.fast import FastLM
from outpace.models.graph import GraphLM
from outpace.models.hf import PackedLM
from outpace.models.kernels import cpu
from outpace.sample import Pick
from outpace.tree import Tree
from tests import tiny_models

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
    left: Left

    def __call__(self) -> Left:
        found = self.function()
        for there, here in zip((self.left.logits, self.left.chosen), (found.logits, found.chosen), strict=True):
            there.copy_(here)
        self.read.copy_(self.left.chosen)
        return self.left


class Graphless(GraphLM):
    """A model that believes it runs as graphs."""

    def __init__(self, fast: FastLM):
        self.__dict__.update(fast.__dict__)
        self._graphs, self._generation, self.graph_memory = OrderedDict(), self.cache.generation, None
        self._last, self._ahead, self.capture_seconds, self.most_tokens = None, Ahead(), 0.0, 512
        self.sent = 0

    @torch.no_grad()
    def _capture(self, size: Size) -> Captured:
        staging = Unpinned(size.tokens * COLUMNS + size.slots * 4, self.device)
        left = Left(torch.zeros(size.tokens, self.vocab), None, {}, torch.zeros(3, size.tokens, dtype=torch.float64))
        rerun = Rerun(
            torch.no_grad()(self._program(size, staging.given, None)), torch.zeros(3, size.tokens).double(), left
        )
        return Captured(rerun, staging, None, rerun.read, size)  # type: ignore[arg-type]

    def _send(self, *given: Any) -> bool:
        self.sent += 1
        return super()._send(*given)


@pytest.fixture(scope="module")
def fast() -> FastLM:
    found = outpace.wrap(tiny_models.MODELS["llama"]().float(), eager=False).lm
    assert isinstance(found, FastLM)
    return found


@pytest.fixture
def model(fast: FastLM, monkeypatch: pytest.MonkeyPatch) -> Model:
    monkeypatch.setattr(torch.cuda, "Event", Instant)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(graph, "Staging", Unpinned)
    fast.clear()
    return Model(Graphless(fast))


@pytest.fixture(scope="module")
def slow() -> Model:
    found = outpace.wrap(tiny_models.MODELS["llama"]().float(), eager=True)
    assert type(found.lm) is PackedLM
    return found


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("method", ["plain", "suffix", "auto"])
def test_what_is_staged_is_what_eager_passes_are_given(
    method: str, temperature: float, model: Model, slow: Model
) -> None:
    settings = [{"method": method, "max_tokens": 5 + 9 * i, "temperature": temperature, "seed": i} for i in range(5)]
    texts, seen = [], list[Event]()
    for side in (model, slow):
        engine = Engine(side.lm, max_rows=3)  # some join when others have left
        seqs = [side.sequence(Request.of(p, s)) for p, s in zip(PROMPTS, settings, strict=True)]
        for seq in seqs:
            engine.submit(seq)
        seen = list(engine.run())
        texts.append([seq.generated for seq in seqs])
    assert texts[0] == texts[1] and seen
    assert isinstance(model.lm, Graphless) and model.lm.most_tokens  # nothing made it give up
    assert method != "plain" or model.lm.sent > 30


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
