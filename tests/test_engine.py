"""The loop over ragged batches: rows join, leave, fail and are cancelled without touching each other."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from outpace.api.model import Model
from outpace.api.request import Request
from outpace.core.engine import Engine
from outpace.core.lm import LM, Scores
from outpace.core.tree import Tree
from outpace.errors import RequestFailed, UsageError
from outpace.models.segment import Segment, SegmentOutput
from outpace.testing import ToyLM
from outpace.tracing.trace import TraceWriter, read
from tests.conftest import settings_of

PROMPTS = [[1, 2, 3, 1, 2], [5], [9, 8, 7, 6] * 5]


class Poisoned(ToyLM):
    """Gives NaN for every position of a request that begins with 3, 13."""

    def forward(self, jobs: Seq[Segment], taps: tuple[int, ...]) -> list[SegmentOutput]:
        outputs = super().forward(jobs, taps)
        for job, output in zip(jobs, outputs, strict=True):
            if (self.slots[job.slot].tokens + job.pending)[:2] == [3, 13] and output.logits is not None:
                output.logits[:] = torch.nan
        return outputs


class Cramped(ToyLM):
    """Runs out of memory when a pass has more than `most` nodes."""

    most = 3

    def score(self, trees: Seq[Tree], rows: Seq[int], since: Seq[int] | None = None, picks: Any = None) -> list[Scores]:
        if sum(map(len, trees)) > self.most:
            raise torch.OutOfMemoryError("a pass too large")
        return super().score(trees, rows, since)


class Overlapping(ToyLM):
    """Returns its scores in memory that the next pass will write, as a graph on a device does."""

    asynchronous = True

    def __init__(self) -> None:
        super().__init__()
        self.memory_of_scores = torch.zeros(512, self.vocab, dtype=torch.float64)

    def forward(self, jobs: Seq[Segment], taps: tuple[int, ...]) -> list[SegmentOutput]:
        outputs, end = list[SegmentOutput](), 0
        for output in super().forward(jobs, taps):
            if output.logits is not None:
                start, end = end, end + len(output.logits)
                output = replace(output, logits=self.memory_of_scores[start:end].copy_(output.logits))
            outputs.append(output)
        return outputs


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("method", ["plain", "draft", "recycling", "suffix", "auto"])
def test_work_on_the_last_pass_while_the_next_one_runs(
    method: str, temperature: float, toy: Model, toy_draft: LM, tmp_path: Path
) -> None:
    late = Model(Overlapping())
    late.max_batch = 2
    settings = {**settings_of(method, toy_draft), "temperature": temperature, "max_tokens": 20}
    expected = [c.tokens for c in toy.generate(PROMPTS, method="plain", temperature=temperature, max_tokens=20)]
    pieces = list(late.stream(PROMPTS, **settings))
    assert [[t for p in pieces if p.index == i for t in p.tokens] for i in range(3)] == expected
    assert sorted(p.index for p in pieces if p.completion is not None) == [0, 1, 2]

    engine = Engine(late.lm)
    seqs = [late.sequence(Request.from_keywords(prompt, settings)) for prompt in PROMPTS]
    for seq in seqs:
        engine.submit(seq)
    after = 0
    for event in engine.run():  # while the next pass is on its way
        assert event.scores is None
        if event.seq is seqs[0] and len(event.seq.generated) >= 5:
            after += 1
            engine.cancel(seqs[0])
    assert [seq.generated for seq in seqs[1:]] == expected[1:]
    assert after == 1, "a request that was cancelled says nothing more"
    assert seqs[0].generated == expected[0][: len(seqs[0].generated)]
    assert not any(row.busy for row in late.lm.slots)  # type: ignore[attr-defined]

    probabilities = []
    for model in (late, toy):
        path = tmp_path / f"{model is toy}.jsonl"
        with TraceWriter(path, probs=True) as writer:
            model.generate(PROMPTS[0], trace=writer, **settings)
        probabilities.append([judged.choice for p in read(path).requests[0].passes for judged in p.judged])
    assert probabilities[0] == probabilities[1]


def test_rows_join_and_leave(toy: Model, toy_draft: LM) -> None:
    alone = [toy.generate(p, method="plain", max_tokens=10 + 5 * i).tokens for i, p in enumerate(PROMPTS)]
    engine = Engine(toy.lm)
    seqs = [
        toy.sequence(Request.from_keywords(p, {**settings_of("draft", toy_draft), "max_tokens": 10 + 5 * i}))
        for i, p in enumerate(PROMPTS)
    ]
    for seq in seqs:  # one joins every second step
        engine.submit(seq)
        engine.step()
        engine.step()
    for _ in engine.run():
        pass
    assert [seq.generated for seq in seqs] == alone
    assert not any(row.busy for row in toy.lm.slots)  # type: ignore[attr-defined]


def test_more_requests_than_rows(toy: Model) -> None:
    engine = Engine(toy.lm, max_batch=2)
    seqs = [toy.sequence(Request.from_keywords([i + 1], {"method": "recycling", "max_tokens": 8})) for i in range(7)]
    for seq in seqs:
        engine.submit(seq)
    most = 0
    while not engine.idle:
        engine.step()
        most = max(most, len(engine.running))
    assert most <= 2
    assert [s.generated for s in seqs] == [toy.generate([i + 1], method="plain", max_tokens=8).tokens for i in range(7)]


@pytest.mark.parametrize("method", ["plain", "recycling"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_non_finite_logits_fail_one_request(method: str, temperature: float, toy: Model) -> None:
    poisoned = Model(Poisoned())
    good, bad, other = poisoned.generate(
        [[1, 2], [3, 13, 4], [5]], method=method, temperature=temperature, max_tokens=12
    )
    assert bad.finish_reason == "error"
    assert "non-finite" in bad.error and "position 3" in bad.error
    plain = [toy.generate(p, method="plain", temperature=temperature, max_tokens=12).tokens for p in ([1, 2], [5])]
    assert [good.tokens, other.tokens] == plain
    with pytest.raises(RequestFailed, match="non-finite"):
        poisoned.generate([3, 13, 4], method=method, temperature=temperature)
    assert poisoned.generate([1, 2], method=method, temperature=temperature, max_tokens=12).tokens == plain[0]


def test_out_of_memory_drops_drafts_then_lets_the_newest_wait(toy: Model) -> None:
    cramped = Model(Cramped())
    for prompts in ([[1, 2], [5], [7]], [[1, 2], [5], [7], [8]]):
        done = cramped.generate(prompts, method="recycling", max_tokens=10)
        assert [c.finish_reason for c in done] == ["length"] * len(prompts)
        assert [c.tokens for c in done] == [toy.generate(p, method="plain", max_tokens=10).tokens for p in prompts]
    cramped.lm.most = 0  # type: ignore[attr-defined]
    with pytest.raises(RequestFailed, match="too large"):
        cramped.generate([1, 2])


def test_cancel_frees_rows_and_keeps_text(toy: Model) -> None:
    stream = toy.stream([[1, 2], [3]], method="ngram", max_tokens=50)
    seen = [next(stream) for _ in range(6)]
    stream.close()
    assert not any(row.busy for row in toy.lm.slots)  # type: ignore[attr-defined]
    done = stream.completions
    assert [c.finish_reason for c in done] == ["cancelled"] * 2
    assert done[0].tokens == [t for piece in seen if piece.index == 0 for t in piece.tokens]
    assert done[0].tokens == toy.generate([1, 2], method="plain", max_tokens=50).tokens[: len(done[0].tokens)]
    with pytest.raises(StopIteration):
        next(stream)


def test_context_is_never_exceeded() -> None:
    small = Model(ToyLM(max_length=20))
    for name in ("plain", "recycling", "ngram"):
        done = small.generate([1, 2, 3] * 5, method=name, max_tokens=100)
        assert done.finish_reason == "length"
        assert done.prompt_tokens + len(done.tokens) == 20
    with pytest.raises(UsageError, match="the model holds at most 20"):
        small.generate(list(range(20)))


def test_samples_of_one_prompt(toy: Model) -> None:
    given: dict[str, Any] = {"temperature": 1.0, "seed": 4, "max_tokens": 20}
    plain = toy.generate([1, 2, 3], method="plain", n=4, **given)
    drafted = toy.generate([1, 2, 3], method="recycling", n=4, **given)
    assert [c.tokens for c in plain] == [c.tokens for c in drafted]
    assert len({tuple(c.tokens) for c in plain}) == 4
    assert toy.generate([1, 2, 3], method="plain", **given).tokens == plain[0].tokens


def test_logprobs(toy: Model, toy_draft: LM) -> None:
    lm = toy.lm
    assert isinstance(lm, ToyLM)
    done = toy.generate([1, 2, 3], **settings_of("draft", toy_draft), logprobs=5, temperature=1.0, max_tokens=12)
    prefix = [1, 2, 3]
    for entry in done.logprobs:
        distribution = lm.run(prefix)[0][-1].log_softmax(-1)
        assert entry.logprob == pytest.approx(distribution[entry.token].item(), abs=1e-12)
        assert list(entry.top) == distribution.topk(5).indices.tolist()
        assert list(entry.top.values()) == pytest.approx(distribution.topk(5).values.tolist(), abs=1e-12)
        prefix.append(entry.token)
    assert prefix[3:] == done.tokens


def contrastive_search(lm: ToyLM, prompt: list[int], count: int, alpha: float, k: int) -> list[int]:
    """The rule as the paper states it, from scratch for every token."""
    tokens = list(prompt)
    for _ in range(count):
        logits, states = lm.run(tokens)
        distribution = logits[-1].softmax(-1)
        past = torch.nn.functional.normalize(states[-1], dim=-1)
        best = []
        for token in distribution.topk(k).indices.tolist():
            state = torch.nn.functional.normalize(lm.run([*tokens, token])[1][-1][-1], dim=-1)
            best.append(((1 - alpha) * distribution[token].item() - alpha * (past @ state).max().item(), token))
        tokens.append(max(best)[1])
    return tokens[len(prompt) :]


@pytest.mark.parametrize("method", ["plain", "ngram", "recycling", "lookahead"])
def test_contrastive_search(method: str, toy: Model) -> None:
    assert isinstance(toy.lm, ToyLM)
    for prompt in PROMPTS:
        want = contrastive_search(toy.lm, prompt, 15, 0.6, 4)
        assert toy.generate(prompt, method=method, verifier="contrastive:alpha=0.6,k=4", max_tokens=15).tokens == want
    batch = toy.generate(PROMPTS, method=method, verifier="contrastive", max_tokens=15)
    assert [c.tokens for c in batch] == [contrastive_search(toy.lm, p, 15, 0.6, 4) for p in PROMPTS]


def test_residual_is_reproducible_and_greedy_exact(toy: Model, toy_draft: LM) -> None:
    method = settings_of("draft", toy_draft) | {"verifier": "residual", "width": 2, "max_tokens": 30}
    assert toy.generate([1, 2], **method).tokens == toy.generate([1, 2], method="plain", max_tokens=30).tokens
    once, again = (toy.generate([1, 2], **method, temperature=1.0, seed=9).tokens for _ in range(2))
    assert once == again


def test_lossy_is_labelled(toy: Model, toy_draft: LM) -> None:
    method = settings_of("draft", toy_draft)
    assert toy.generate([1, 2], **method, max_tokens=4).lossless
    assert not toy.generate([1, 2], **method, verifier="typical", max_tokens=4).lossless
