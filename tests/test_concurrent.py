"""Several callers of one model: every one of them gets the text that it gets alone."""

from __future__ import annotations

import asyncio
import copy
import gc
import os
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings as hypothesis_settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

import outpace
from outpace import registry
from outpace.api.model import Model
from outpace.api.request import Request
from outpace.core.drafter import Drafter
from outpace.core.engine import Engine
from outpace.core.lm import LM
from outpace.core.sequence import Sequence
from outpace.core.tree import Budget, Tree
from outpace.errors import OutpaceError, UsageError
from outpace.testing import ToyLM
from outpace.threads import compute_threads
from outpace.threads.collector import RARE
from outpace.threads.worker import IDLE
from tests.callers import WAYS, Way, check, streams_in_turn, threads
from tests.conftest import settings_of
from tests.test_engine import Overlapping
from tests.test_run_ahead import Device

METHODS = ["plain", "suffix", "auto", "draft", "eagle3"]
PROMPTS = [[1, 2, 3, 1, 2], [5], [9, 8, 7, 6] * 5, [4, 4], list(range(30)), [7, 7, 7], [60, 2], [11, 12] * 4]
TEXTS = ["Once upon a time", "def add(a, b):", "One, two, three, one, two, three,", "The capital of France is"]


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_toy(way: Way, method: str, temperature: float, toy: Model, toy_draft: LM) -> None:
    check(toy, PROMPTS, {**settings_of(method, toy_draft), "temperature": temperature}, way)


@pytest.mark.parametrize("kind", [Overlapping, Device])
@pytest.mark.parametrize("method", ["plain", "suffix", "auto"])
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_passes_that_overlap(way: Way, method: str, kind: type[ToyLM]) -> None:
    check(Model(kind()), PROMPTS[:4], {"method": method, "temperature": 0.9}, way)


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("method", METHODS)
def test_smollm2(method: str, temperature: float, smollm2: Model, smollm2_draft: LM) -> None:
    given = settings_of(method, smollm2_draft) | ({"head": None} if method == "eagle3" else {})
    given["temperature"] = temperature
    if method in ("draft", "eagle3"):  # which take their time: one way each, and all ways on the toy
        check(smollm2, TEXTS, given, threads if temperature else streams_in_turn)
        return
    check(smollm2, TEXTS, given, streams_in_turn)
    check(smollm2, TEXTS * 2, given, threads)


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("method", ["plain", "auto"])
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_gguf(way: Way, method: str, temperature: float, smollm2_gguf: Model) -> None:
    check(smollm2_gguf, TEXTS, {"method": method, "temperature": temperature}, way)


def test_a_model_that_answers_is_the_draft_of_another_one() -> None:
    """Both run on one thread from then on, also where each was busy on its own before."""
    draft = Model(ToyLM(layers=1))
    targets = [Model(ToyLM(layers=2)), Model(ToyLM(layers=2, seed=3))]
    alone = [[m.generate(p, method="plain", max_tokens=30).tokens for p in PROMPTS[:4]] for m in (draft, *targets)]
    running = [m.stream(PROMPTS[0], method="plain", max_tokens=300) for m in (draft, *targets)]
    with ThreadPoolExecutor(12) as pool:
        found = [
            [pool.submit(m.generate, p, method=name, max_tokens=30, **given) for p in PROMPTS[:4]]
            for m, name, given in [(draft, "plain", {}), *((m, "draft", {"draft": draft}) for m in targets)]
        ]
        assert [[f.result().tokens for f in some] for some in found] == alone
    for stream, (first, *_) in zip(running, alone, strict=True):
        assert stream.completions[0].tokens == []
        assert [t for piece in stream for t in piece.tokens][:30] == first
    assert len({model.worker.current for model in (draft, *targets)}) == 1


def test_a_drafter_that_two_models_share_learns_on_one_thread() -> None:
    drafter = registry.method("suffix")
    models = [Model(ToyLM()), Model(ToyLM(seed=1))]
    assert models[0].worker.current is not models[1].worker.current
    for model in models:
        model.generate([1, 2], method=drafter, max_tokens=4)
    assert models[0].worker.current is models[1].worker.current


def test_a_drafter_that_was_used_can_be_copied(toy: Model) -> None:
    drafter = registry.method("suffix")
    expected = toy.generate(PROMPTS[0], method=drafter, max_tokens=12).tokens
    for copied in (copy.deepcopy(drafter), pickle.loads(pickle.dumps(drafter))):
        assert vars(copied)["_worker"] is not toy.worker.current
        assert toy.generate(PROMPTS[0], method=copied, max_tokens=12).tokens == expected


def test_a_stream_that_is_not_read_goes_on_and_stops_nobody(toy: Model) -> None:
    unread = [toy.stream(p, method="plain", max_tokens=20) for p in PROMPTS * 3]  # more than run at a time
    expected = toy.generate(PROMPTS[0], method="plain", max_tokens=20).tokens
    deadline = time.monotonic() + 60
    while not toy.engine.idle and time.monotonic() < deadline:
        time.sleep(0.01)
    assert toy.engine.idle
    assert unread[0].completions[0].tokens == [] and unread[0].completions[0].finish_reason is None
    assert [t for piece in unread[0] for t in piece.tokens] == expected


def test_what_was_read_is_what_a_closed_stream_says(toy: Model) -> None:
    stream = toy.stream(PROMPTS[0], method="plain", max_tokens=200, logprobs=1)
    seen = [next(stream).tokens[0] for _ in range(5)]
    stream.close()
    (done,) = stream.completions
    assert (done.tokens, len(done.logprobs or []), done.finish_reason) == (seen, 5, "cancelled")


def test_a_dropped_stream_is_cancelled(toy: Model) -> None:
    stream = toy.stream(PROMPTS[0], method="plain", max_tokens=4000)
    next(stream)
    assert not toy.engine.idle
    del stream
    gc.collect()
    toy.worker.call(lambda: None)
    assert toy.engine.idle and not any(row.busy for row in toy.lm.slots)  # type: ignore[attr-defined]


def test_closing_from_another_thread_ends_the_reader(toy: Model) -> None:
    stream = toy.stream(PROMPTS[0], method="plain", max_tokens=4000)
    next(stream)
    with ThreadPoolExecutor(1) as pool:
        reader = pool.submit(lambda: len(list(stream)))
        stream.close()
        assert reader.result(timeout=60) < 4000


def test_a_cancelled_task_cancels_its_requests(toy: Model) -> None:
    async def run() -> None:
        task = asyncio.create_task(toy.agenerate(PROMPTS[0], method="plain", max_tokens=4000))
        await asyncio.sleep(0.2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        async for _ in toy.astream(PROMPTS[1], method="plain", max_tokens=4000):
            break

    asyncio.run(run())
    toy.worker.call(lambda: None)
    gc.collect()
    toy.worker.call(lambda: None)
    assert toy.engine.idle


@dataclass(eq=False)
class Broken(Drafter):
    """Raises an error of its own where it is told to."""

    where: str = "propose"

    def _maybe(self, where: str) -> None:
        if where == self.where:
            raise ZeroDivisionError(where)

    def open(self, seq: Sequence) -> None:
        self._maybe("open")

    def propose(self, seq: Sequence, budget: Budget) -> Tree:
        self._maybe("propose")
        return Tree.chain([seq.tokens[-1], 9999]) if self.where == "token" else Tree([seq.tokens[-1]])

    def observe(self, *_: object) -> None:
        self._maybe("observe")

    def close(self, seq: Sequence) -> None:
        self._maybe("close")


@pytest.mark.parametrize("where", ["open", "propose", "token", "observe", "close"])
def test_an_error_in_one_callers_drafter_is_that_callers(where: str, toy: Model) -> None:
    expected = [toy.generate(p, method="plain", max_tokens=40).tokens for p in PROMPTS]
    with ThreadPoolExecutor(9) as pool:
        good = [pool.submit(toy.generate, p, method="suffix", max_tokens=40) for p in PROMPTS]
        bad = pool.submit(toy.generate, [1, 2], method=Broken(where), max_tokens=40)
        with pytest.raises(IndexError if where == "token" else ZeroDivisionError):
            bad.result()
        assert [f.result().tokens for f in good] == expected
    assert toy.engine.idle and not any(row.busy for row in toy.lm.slots)  # type: ignore[attr-defined]


def test_a_target_that_breaks_fails_who_was_in_the_pass_and_goes_on() -> None:
    class Breaking(ToyLM):
        broken = False

        def forward(self, *given: Any) -> Any:
            if self.broken:
                raise RuntimeError("no device")
            return super().forward(*given)

    lm = Breaking()
    model = Model(lm)
    lm.broken = True
    with ThreadPoolExecutor(3) as pool:
        for found in [pool.submit(model.generate, p, method="plain", max_tokens=9) for p in PROMPTS[:3]]:
            with pytest.raises(RuntimeError, match="no device"):
                found.result()
    lm.broken = False
    assert len(model.generate(PROMPTS[0], method="plain", max_tokens=9).tokens) == 9


def test_a_model_cannot_be_used_by_the_code_that_it_calls(toy: Model) -> None:
    def again(ids: Any, scores: Any) -> Any:
        toy.generate([1], max_tokens=1)

    with pytest.raises(UsageError, match="in the middle of a pass"):
        toy.generate([1, 2], logits_processors=[again], max_tokens=4)


def test_a_trace_that_cannot_be_written_is_its_readers_error(toy: Model, tmp_path: Any) -> None:
    writer = outpace.tracing.trace.TraceWriter(tmp_path / "t.jsonl")
    stream = toy.stream([1, 2], method="plain", max_tokens=4000, trace=writer)
    next(stream)
    writer.close()
    with pytest.raises((OutpaceError, ValueError)):
        list(stream)
    toy.worker.call(lambda: None)
    assert toy.engine.idle


def test_threads_end_when_there_is_nothing_to_do() -> None:
    model = Model(ToyLM())
    model.generate([1, 2], max_tokens=2)
    ours = model.worker._thread
    assert ours is not None and ours.daemon
    ours.join(IDLE + 10)
    assert not ours.is_alive() and model.worker._thread is None
    assert model.generate([1, 2], max_tokens=2).tokens


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_has_a_thread_of_its_own(toy: Model) -> None:
    expected = toy.generate([1, 2], max_tokens=8).tokens
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        torch.set_num_threads(1)
        os.write(write, bytes(toy.generate([1, 2], max_tokens=8).tokens))
        os._exit(0)
    os.waitpid(child, 0)
    assert list(os.read(read, 99)) == expected


def test_as_many_compute_threads_as_the_caller_set(toy: Model) -> None:
    usual = torch.get_num_threads()
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            assert toy.worker.call(torch.get_num_threads) == count
    finally:
        torch.set_num_threads(usual)


def test_the_callers_device_and_what_it_began_there(toy: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread has a device of its own; and work on a stream of the caller's is done before a pass reads it."""
    done: list[Any] = []

    class Stream:
        def synchronize(self) -> None:
            done.append("synchronized")

    main = threading.current_thread()
    own, default = Stream(), Stream()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "default_stream", lambda: default)
    monkeypatch.setattr(torch.cuda, "set_device", lambda i: done.append((i, threading.current_thread() is main)))
    for stream, expected in ((own, ["synchronized", (3, False)]), (default, [(3, False)])):
        monkeypatch.setattr(torch.cuda, "current_stream", lambda stream=stream: stream)
        done.clear()
        toy.worker.call(lambda: None)
        assert done == expected


@pytest.mark.skipif(compute_threads._pause() is None or not Path("/proc/self/task").is_dir(), reason="needs OpenMP")
def test_a_caller_gives_its_compute_threads_back(toy: Model) -> None:
    """Two sets of them on the same cores would sleep between two pieces of work, and passes take four times as long."""
    program = """
import os, torch
from outpace.threads.worker import Worker
torch.set_num_threads(2)
worker, count = Worker(), lambda: len(os.listdir("/proc/self/task"))
worker.call(lambda: None)
before = count()
torch.randn(600, 600) @ torch.randn(600, 600)
assert count() > before
worker.call(lambda: None)
assert count() <= before and torch.get_num_threads() == 2
"""
    given = os.environ | {"OMP_NUM_THREADS": "2"}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=given)
    assert done.returncode == 0, done.stderr


KNOWN: dict[tuple[int, float], list[int]] = {}
LENGTH = 24


def text_of(prompt: int, temperature: float) -> list[int]:
    if (prompt, temperature) not in KNOWN:
        given = {"method": "plain", "temperature": temperature, "seed": prompt, "max_tokens": LENGTH}
        KNOWN[prompt, temperature] = Model(ToyLM()).generate(PROMPTS[prompt], **given).tokens
    return KNOWN[prompt, temperature]


class Anything(RuleBasedStateMachine):
    """Requests come, run, are cancelled and end in any order: no slot is lost, and no text changes."""

    lm: type[ToyLM] = ToyLM

    def __init__(self) -> None:
        super().__init__()
        self.target = self.lm()
        self.model = Model(self.target)
        self.engine = Engine(self.target, max_batch=3)
        self.draft = ToyLM(layers=1)
        self.requests: list[tuple[Sequence, int, float]] = []

    @rule(prompt=st.integers(0, 7), heat=st.sampled_from([0.0, 0.9]), method=st.sampled_from(METHODS[:4]))
    def submit(self, prompt: int, heat: float, method: str) -> None:
        given = {**settings_of(method, self.draft), "temperature": heat, "seed": prompt, "max_tokens": LENGTH}
        seq = self.model.sequence(Request.from_keywords(PROMPTS[prompt], given))
        self.engine.submit(seq)
        self.requests.append((seq, prompt, heat))

    @rule()
    def step(self) -> None:
        self.engine.turn(lambda event: None)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        self.engine.cancel(data.draw(st.sampled_from(self.requests))[0])

    @rule()
    def clear(self) -> None:
        self.target.clear()

    @rule()
    def close(self) -> None:
        running = self.engine.run()
        next(running, None)
        running.close()
        assert self.engine.idle

    @invariant()
    def no_slot_is_lost(self) -> None:
        busy = [i for i, row in enumerate(self.target.slots) if row.busy]
        assert busy == sorted(seq.slot for seq in self.engine.running if seq.slot is not None)
        drafting = sum(bool(seq.drafter.models()) for seq in self.engine.running)
        assert sum(row.busy for row in self.draft.slots) <= drafting

    @invariant()
    def every_text_is_its_own(self) -> None:
        for seq, prompt, heat in self.requests:
            expected = text_of(prompt, heat)
            assert seq.generated == expected[: len(seq.generated)]
            assert seq.finish_reason in (None, "cancelled") or seq.generated == expected

    def teardown(self) -> None:
        for _ in self.engine.run():
            pass
        self.every_text_is_its_own()
        assert not any(row.busy for row in [*self.target.slots, *self.draft.slots])


class AnythingOverlapping(Anything):
    """The same where passes begin before the last one was read."""

    lm = Device


few = hypothesis_settings(max_examples=25, stateful_step_count=40, deadline=None)
TestAnything = Anything.TestCase
TestAnything.settings = few
TestAnythingOverlapping = AnythingOverlapping.TestCase
TestAnythingOverlapping.settings = few


def test_collections_are_rare_while_a_model_runs_passes(toy: Model) -> None:
    before = gc.get_threshold()
    stream = toy.stream(PROMPTS[0], method="plain", max_tokens=4000)
    next(stream)
    assert gc.get_threshold()[0] == RARE and gc.get_threshold()[1:] == before[1:]
    stream.close()
    wait_until(lambda: gc.get_threshold() == before)


def test_a_threshold_that_a_user_sets_stays(toy: Model) -> None:
    before = gc.get_threshold()
    try:
        stream = toy.stream(PROMPTS[0], method="plain", max_tokens=4000)
        next(stream)
        gc.set_threshold(1234)
        stream.close()
        wait_until(lambda: toy.engine.idle)
        toy.worker.call(lambda: None)
        assert gc.get_threshold()[0] == 1234
        gc.set_threshold(0)  # off: it stays off
        toy.generate(PROMPTS[0], method="plain", max_tokens=4)
        assert gc.get_threshold()[0] == 0
    finally:
        gc.set_threshold(*before)


def wait_until(condition: Callable[[], bool]) -> None:
    for _ in range(1000):
        if condition():
            return
        time.sleep(0.01)
    raise AssertionError("it never happened")
