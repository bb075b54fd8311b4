"""Graphs without a GPU: what a graph would replay is run anew, on the same numbers, by a compiled model on the CPU."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import chain, product
from typing import Any

import pytest
import torch

import outpace
from outpace.api.model import Model
from outpace.api.request import Request
from outpace.core.engine import Engine
from outpace.core.lm import DraftShape
from outpace.core.tree import Tree
from outpace.models.cache import group
from outpace.models.compiled import cuda_graph, graph_pass
from outpace.models.compiled.choices import Choices
from outpace.models.compiled.cpu import CpuRunner
from outpace.models.compiled.cuda_graph import GraphRunner
from outpace.models.compiled.drafts import draft_chain
from outpace.models.compiled.drafts.draft_chain import DraftChains
from outpace.models.compiled.drafts.early_exit_graph import EarlyExitGraphLM
from outpace.models.compiled.graph_pass import (
    FOUND,
    CapturedChoice,
    CapturedPass,
    ChoiceKey,
    GraphKey,
    GraphOutputs,
    PassInputs,
)
from outpace.models.compiled.packing import CompiledAttention
from outpace.models.compiled.picks import PendingPicks
from outpace.models.compiled.run_ahead import GraphsAhead
from outpace.models.hf.attention import NAME
from outpace.models.hf.lm import TransformersLM
from outpace.models.hf.module import view
from outpace.models.kernels import cpu, sample_filtered
from outpace.models.segment import Segment, SegmentOutput
from outpace.sampling.sampler import Pick, Sampler
from tests import tiny_models
from tests.callers import Way, check, generate_inside_a_stream, streams_in_turn

pytestmark = [
    pytest.mark.skipif(not cpu.available(), reason="no C++ compiler"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="kernels run on tensors of a CPU only where there is no GPU"),
]
PROMPTS = [[5, 9, 2, 7] * 4, [1, 2, 3], list(range(20, 60)), [8], [4, 4, 4]]


class Instant:
    """An event on a device that is always done."""

    def record(self) -> None: ...

    def synchronize(self) -> None: ...


class Unpinned(graph_pass.Staging):
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
    left: Any

    def __call__(self) -> Any:
        found = self.function()
        if isinstance(found, GraphOutputs):
            self.left.logits.copy_(found.logits)
        else:
            self.left.copy_(found)
        return self.left


class UncapturedChoices(Choices):
    """Chooses by the functions that a graph would replay."""

    def _capture(self, captured: CapturedPass, key: ChoiceKey) -> CapturedChoice:
        edited = self._edited_logits(captured) if key.edited else None
        host, left = (torch.zeros(FOUND, captured.key.tokens).double() for _ in range(2))
        program = torch.no_grad()(self._program(captured, key, edited, host))
        return CapturedChoice(Rerun(program, left), host, edited)  # type: ignore[arg-type]


class Graphless(GraphRunner):
    """A runner that believes it has graphs, on the compiled layers of a runner for a CPU."""

    def __init__(self, lm: TransformersLM):
        self.__dict__.update(lm.runner.__dict__)
        self._graphs, self._generation, self.graph_memory = OrderedDict(), self.cache.generation, None
        self.choices, self._ahead = UncapturedChoices(lm, lambda: None), GraphsAhead(self)
        self.drafts, self.run_ahead = self, self._ahead
        self.capture_seconds, self.most_tokens, self._chunk = 0.0, 512, 512
        self.sent = 0

    def prompt_pass(self, segments: Seq[Segment], taps: tuple[int, ...]) -> list[SegmentOutput]:
        return self.lm.eager.forward(segments, taps)  # the compiled layers of a CPU take no prompts

    @torch.no_grad()
    def _capture(self, key: GraphKey) -> CapturedPass:
        staging = Unpinned(PassInputs.size(key, len(self.cache.groups)), self.lm.device)
        program = torch.no_grad()(self._program(key, staging.given, None))
        rerun = Rerun(program, GraphOutputs(torch.zeros(key.tokens, self.lm.vocab), None, {}))
        return CapturedPass(rerun, staging, None, key)  # type: ignore[arg-type]

    def launch_after(self, *given: Any) -> CapturedPass:
        self.sent += 1
        return super().launch_after(*given)


class PromptRunner(Graphless):
    """The same with prompts of its own: through uncompiled layers, and the kernel of a GPU."""

    def __init__(self, lm: TransformersLM):
        super().__init__(lm)
        self.module = view(lm.model)
        self.module.config._attn_implementation = NAME

    def prompt_pass(self, segments: Seq[Segment], taps: tuple[int, ...]) -> list[SegmentOutput]:
        return GraphRunner.prompt_pass(self, segments, taps)

    def attention(self, *given: Any) -> Any:
        return KernelAttention(super().attention(*given))


class KernelAttention(tuple[CompiledAttention, ...]):
    """Calls the kernel of a GPU, interpreted, for layers that know their number."""

    def attend(self, module: Any, *given: Any) -> torch.Tensor:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.ops.outpace_cpu, "attend", torch.ops.outpace.attend)
            return self[module.layer_idx].attend(module, *given)


def runner_of(model: Model) -> Graphless:
    assert isinstance(model.lm, TransformersLM) and isinstance(model.lm.runner, Graphless)
    return model.lm.runner


@pytest.fixture(scope="module")
def fast() -> TransformersLM:
    found = outpace.wrap(tiny_models.MODELS["llama"]().float(), compile=True).lm
    assert isinstance(found, TransformersLM) and isinstance(found.runner, CpuRunner)
    return found


@pytest.fixture
def model(fast: TransformersLM, monkeypatch: pytest.MonkeyPatch) -> Model:
    monkeypatch.setattr(torch.cuda, "Event", Instant)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(cuda_graph, "Staging", Unpinned)
    fast.clear()
    monkeypatch.setattr(fast, "runner", Graphless(fast))
    return Model(fast)


@pytest.fixture(scope="module")
def slow() -> Model:
    found = outpace.wrap(tiny_models.MODELS["llama"]().float(), compile=False)
    assert isinstance(found.lm, TransformersLM) and found.lm.runner is found.lm.eager
    return found


FILTERS: list[dict[str, Any]] = [{"top_k": 5, "top_p": 0.9}, {}, {"top_p": 0.8}, {"min_p": 0.2}, {"typical_p": 0.7}]
EDITS: list[dict[str, Any]] = [
    {"repetition_penalty": 1.3, "logit_bias": {3: 2.0, 9: -1.5}, "logprobs": 2},
    {"presence_penalty": 0.4, "frequency_penalty": 0.2, "repetition_penalty": 0.8, "top_p": 0.9, "temperature": 0.9},
    {"bad_words": [[4], [1, 2], [9]], "min_tokens": 6, "stop_token_ids": [7, 11], "temperature": 0.9},
    {"logprobs": 0, "temperature": 0.9},
    {},
]
SAMPLING: dict[str, list[dict[str, Any]]] = {
    "greedy": [{"temperature": 0.0}],
    "sampled": [{"temperature": 0.9}],
    "filtered": [{"temperature": 0.9, "top_p": 0.8}],
    "mixed": [{"temperature": 0.9, **given} for given in FILTERS],
}


def texts_of(sides: tuple[Model, Model], settings: list[dict[str, Any]]) -> list[list[list[int]]]:
    texts, logprobs = [], []
    for side in sides:
        engine = Engine(side.lm, max_batch=3)  # some join when others have left
        seqs = [side.sequence(Request.from_keywords(p, s)) for p, s in zip(PROMPTS, settings, strict=True)]
        for seq in seqs:
            engine.submit(seq)
        assert list(engine.run())
        texts.append([seq.generated for seq in seqs])
        logprobs.append([seq.logprobs for seq in seqs])
    for ours, theirs in zip(*(chain.from_iterable(side) for side in logprobs), strict=True):
        assert (ours.token, list(ours.top)) == (theirs.token, list(theirs.top))
        assert [ours.logprob, *ours.top.values()] == pytest.approx([theirs.logprob, *theirs.top.values()], abs=1e-4)
        assert ours.entropy == pytest.approx(theirs.entropy, abs=1e-4)
    return texts


@pytest.mark.parametrize("way", [streams_in_turn, generate_inside_a_stream], ids=lambda way: way.__name__)
def test_callers_read_choices_before_the_next_pass_writes_over_them(way: Way, model: Model) -> None:
    """Two streams with an engine each would launch the same graph in turn, and read each other's choices."""
    check(model, PROMPTS[:3], {"method": "plain", "temperature": 0.9}, way)
    assert runner_of(model).sent


@pytest.mark.parametrize(
    ("method", "sampling"),
    [
        *product(("plain", "suffix", "auto"), ("greedy", "sampled")),
        *product(("plain", "suffix"), ("filtered", "mixed")),
    ],
)
def test_what_is_staged_is_what_eager_passes_are_given(method: str, sampling: str, model: Model, slow: Model) -> None:
    given = SAMPLING[sampling] * 5
    more = 9 if sampling in ("greedy", "sampled") else 2  # kernels that are interpreted take their time
    more = 3 if method == "auto" else more  # without costs it has large trees, whose nodes are all chosen at
    settings = [{"method": method, "max_tokens": 5 + more * i, "seed": i, **given[i]} for i in range(5)]
    ours, theirs = texts_of((model, slow), settings)
    assert ours == theirs
    assert runner_of(model).most_tokens  # nothing made it give up
    assert method != "plain" or sampling == "mixed" or runner_of(model).sent > (30 if more == 9 else 6)


@pytest.mark.parametrize("method", ["plain", "ngram"])
def test_edits_are_worked_out_while_their_pass_runs(method: str, model: Model, slow: Model) -> None:
    settings = [{"method": method, "max_tokens": 6 + 2 * i, "seed": i, **given} for i, given in enumerate(EDITS)]
    ours, theirs = texts_of((model, slow), settings)
    assert ours == theirs
    runner = runner_of(model)
    assert runner.most_tokens and (method != "plain" or runner.sent > 8)
    assert {key.edited for captured in runner._graphs.values() for key in captured.choices} >= {True}


def test_a_request_without_allowed_tokens_fails_alone(model: Model) -> None:
    settings = [{"method": "plain", "max_tokens": 8}, {"bad_words": [[i] for i in range(model.lm.vocab)]}]
    first, second = (
        model.sequence(Request.from_keywords([1, 2, 3], {"method": "plain", **given})) for given in settings
    )
    engine = Engine(model.lm)
    for seq in (first, second):
        engine.submit(seq)
    assert list(engine.run())
    assert len(first.generated) == 8
    assert second.error is not None and "the constraints exclude all of them" in second.error


def test_choices_that_a_graph_is_not_sure_of_are_made_again(
    model: Model, slow: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch, again = sample_filtered.launch, PendingPicks._again
    counted = list[int]()

    def unsure(*given: Any) -> torch.Tensor:
        found = launch(*given)
        found[0] = found[3] = 0
        return found

    monkeypatch.setattr(sample_filtered, "launch", unsure)
    monkeypatch.setattr(PendingPicks, "_again", lambda *given: counted.append(1) or again(*given))
    settings = [{"method": "plain", "max_tokens": 16, "temperature": 1.5, "top_p": 0.9, "seed": i} for i in range(5)]
    ours, theirs = texts_of((model, slow), settings)
    assert ours == theirs
    assert len(counted) > 10
    assert 3 <= runner_of(model).sent < 12  # then it has seen that most are in vain


def test_a_pass_is_begun_only_behind_the_rows_last_one(model: Model) -> None:
    lm, runner = model.lm, runner_of(model)
    slot = lm.acquire([])
    lm.feed([[1, 2, 3]], [slot])
    pick = Pick(0, 0.0)
    lm.score([Tree([4])], [slot], picks=[pick])
    assert lm.run_ahead is not None and lm.run_ahead.begin([slot], [pick])
    lm.feed([[1, 2, 3, 4, 5]], [slot])  # the text went on without it
    assert not runner._ahead.sent.slots and not lm.run_ahead.begin([slot], [pick])


def test_a_rule_that_kernels_do_not_know_is_left_to_the_host(model: Model, slow: Model) -> None:
    texts = []
    for side in (model, slow):
        seq = side.sequence(Request.from_keywords([1, 2, 3], {"method": "plain", "temperature": 0.9, "max_tokens": 12}))
        seq.sampler = Sampler(seq.sampler.sampling, rule="inverse_cdf")
        engine = Engine(side.lm)
        engine.submit(seq)
        assert list(engine.run())
        texts.append(seq.generated)
    assert texts[0] == texts[1] and not runner_of(model).sent


LONG = [[(7 * i + j * i) % 60 for i in range(count)] for j, count in enumerate((130, 40, 90))]


@pytest.mark.parametrize("kind", ["llama", "gemma2"])
def test_prompts_share_passes_through_the_kernel(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gemma2 has sliding windows, which end within its prompts."""
    lm = outpace.wrap(tiny_models.MODELS[kind]().float(), compile=True).lm
    other = outpace.wrap(tiny_models.MODELS[kind]().float(), compile=False).lm
    assert isinstance(lm, TransformersLM) and isinstance(other, TransformersLM)
    runner = PromptRunner(lm)
    for side in (lm, other):
        slots = [side.acquire(prompt) for prompt in LONG]
        side.reserve([Segment(slot, 0, prompt, Tree([1])) for slot, prompt in zip(slots, LONG, strict=True)])
    for parts in ((slice(0, 50), slice(0, 33), slice(0, 60)), (slice(50, 130), slice(33, 40), slice(60, 90))):
        prompts = [Segment(i, part.start, LONG[i][part]) for i, part in enumerate(parts)]
        states = [side(prompts, (1, -1)) for side in (runner.prompt_pass, other.eager.forward)]
        for ours, theirs in zip(*states, strict=True):
            assert ours.logits is None
            for tap in (1, -1):
                torch.testing.assert_close(ours.hidden[tap], theirs.hidden[tap], atol=1e-4, rtol=1e-4)
    roots = [Segment(i, len(LONG[i]), [], Tree([5])) for i in range(3)]
    logits = [torch.cat([out.logits for out in side.eager.forward(roots, ())]) for side in (lm, other)]  # type: ignore[misc]
    torch.testing.assert_close(*logits, atol=1e-4, rtol=1e-4)
    assert runner._check_prompts() is None


@pytest.mark.parametrize("edited", [False, True])
def test_first_tokens_are_chosen_in_the_pass_of_their_prompts(
    edited: bool, model: Model, slow: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three prompts fit into the first chunk; a longer one takes two, and two share most of their text."""
    runner = PromptRunner(model.lm)  # type: ignore[arg-type]
    monkeypatch.setattr(model.lm, "runner", runner)
    runner._chunk = 300
    prompts = [*LONG, LONG[0] * 3, LONG[0] * 3 + [5], [7]]
    given = EDITS[:4] if edited else [{}, {"temperature": 0.9}, {"temperature": 0.9, "top_p": 0.8}, {}]
    sizes, run = list[tuple[int, int]](), runner.prompt_pass

    def prompt_pass(segments: Seq[Segment], taps: tuple[int, ...]) -> list[SegmentOutput]:
        ends = sum(segment.layout is not None for segment in segments)
        sizes.append((sum(segment.count for segment in segments), ends))
        return run(segments, taps)

    monkeypatch.setattr(runner, "prompt_pass", prompt_pass)
    texts = []
    for side in (model, slow):
        requests = [
            Request.from_keywords(prompt, {"method": "plain", "max_tokens": 3, "seed": i, **given[i % 4]})
            for i, prompt in enumerate(prompts)
        ]
        engine, seqs = Engine(side.lm, max_batch=8), [side.sequence(request) for request in requests]
        for seq in seqs:
            engine.submit(seq)
        assert list(engine.run())
        texts.append([(seq.generated, [found.token for found in seq.logprobs]) for seq in seqs])
    assert texts[0] == texts[1]
    assert runner.most_tokens
    assert sizes[0] == (sum(map(len, LONG)), 3) and sum(ends for _, ends in sizes) == 4
    assert all(tokens <= 301 for tokens, _ in sizes)  # a chunk and a root


def test_graphs_are_captured_before_they_are_needed(model: Model) -> None:
    """A cache that grew later would make graphs be captured again, so it becomes large enough first."""
    runner = runner_of(model)
    model.max_batch = 6
    model.warm_up()
    known, size = set(runner._graphs), runner.cache.groups[0].size
    assert size >= 6 * cuda_graph.USUAL_TEXT and {key.tokens for key in known} == {2, 4, 8}
    for given in ({}, {"temperature": 0.9, "top_p": 0.8}, {"temperature": 0.9, "top_p": 0.8, "top_k": 5}):
        prompts = [[1 + (i + j) % 50 for j in range(40)] for i in range(6)]
        model.generate(prompts, method="plain", max_tokens=4, **given)
    assert set(runner._graphs) == known and runner.cache.groups[0].size == size


@pytest.fixture
def windowed(monkeypatch: pytest.MonkeyPatch) -> tuple[TransformersLM, Model]:
    """A model with windows that move on every few passes, with graphs and without."""
    for name, value in {"LEAST_ROOM": 1, "ROOM": 10**6, "BEHIND": 0}.items():
        monkeypatch.setattr(group, name, value)
    for name, stand_in in {"Event": Instant, "synchronize": lambda: None, "graph_pool_handle": lambda: None}.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    monkeypatch.setattr(cuda_graph, "Staging", Unpinned)
    made = tiny_models.build("gemma3_text", torch.float32, **tiny_models.GROUPED, **WINDOWS)
    graphs = outpace.wrap(made, compile=True).lm
    assert isinstance(graphs, TransformersLM) and isinstance(graphs.runner, CpuRunner)
    return graphs, outpace.wrap(made, compile=False)


WINDOWS: dict[str, Any] = dict(
    sliding_window=40, query_pre_attn_scalar=8, layer_types=[tiny_models.SLIDING, tiny_models.FULL, tiny_models.SLIDING]
)


@pytest.mark.parametrize("method", ["plain", "recycling:nodes=12", "suffix"])
def test_windows_move_on_between_graphs(
    method: str, windowed: tuple[TransformersLM, Model], monkeypatch: pytest.MonkeyPatch
) -> None:
    lm, slow = windowed
    runner = Graphless(lm)
    monkeypatch.setattr(lm, "runner", runner)
    prompts = [[(7 * i + j * i) % 60 for i in range(count)] for j, count in enumerate((200, 3, 90))]
    given = [{"method": method, "max_tokens": 20 + 20 * i} for i in range(3)]
    texts = []
    for side in (Model(lm), slow):
        requests = [Request.from_keywords(p, s) for p, s in zip(prompts, given, strict=True)]
        texts.append([done.tokens for done in side.generate(requests)])
    assert texts[0] == texts[1] and runner.most_tokens
    assert method != "plain" or runner.sent > 30
    assert runner.cache.groups[0].spans[0].first > 0  # the first entries of its text are in no pool


def test_prompts_whose_windows_move_on_through_the_kernel(
    windowed: tuple[TransformersLM, Model], monkeypatch: pytest.MonkeyPatch
) -> None:
    lm, slow = windowed
    runner = PromptRunner(lm)
    runner._chunk = 150
    monkeypatch.setattr(lm, "runner", runner)
    prompts = [[(7 * i + j * i) % 60 for i in range(count)] for j, count in enumerate((420, 200))]
    texts = []
    for side in (lm, slow.lm):
        slots = [side.acquire(prompt) for prompt in prompts]
        assert side.feed(prompts, slots) == [True, True]
        scores = side.score([Tree.chain([1, 2, 3]) for _ in slots], slots)
        texts.append(torch.cat([found.logits.all() for found in scores]))
    torch.testing.assert_close(*texts, atol=1e-4, rtol=1e-4)
    assert runner.cache.groups[0].spans[0].first > 200


def test_chains_of_a_draft_whose_windows_move_on(
    windowed: tuple[TransformersLM, Model], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the whole model, and of its first layer, each step of which is captured."""
    lm, slow = windowed
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *sizes, pin_memory=False, **given: zeros(*sizes, **given))
    monkeypatch.setattr(draft_chain, "capture", lambda function, memory: function)
    runner = Graphless(lm)
    monkeypatch.setattr(runner, "compiled_span", lm.runner.compiled_span)  # type: ignore[attr-defined]
    monkeypatch.setattr(lm, "runner", runner)
    prompts = [[(7 * i + j * i) % 60 for i in range(count)] for j, count in enumerate((230, 3, 90))]
    drafts = {lm: DraftChains(runner), slow.lm.layers.slice([0]): EarlyExitGraphLM(runner, 1)}  # type: ignore[union-attr]
    for other, chains in drafts.items():
        reference = slow if other is lm else Model(other)
        slots = [lm.acquire(prompt) for prompt in prompts]
        for text, slot in zip(prompts, slots, strict=True):
            lm.feed([text[:-1]], [slot])
        for _ in range(2):
            found = chains.draft(slots, [text[-1] for text in prompts], [DraftShape(8)] * 3, [Pick(0, 0.0)] * 3)
            assert found is not None
            for text, drafted in zip(prompts, found, strict=True):
                assert [t.token for t in drafted] == reference.generate(text, method="plain", max_tokens=8).tokens
        for slot in slots:
            lm.release(slot)
