"""Traces: what is read back is what ran, also from a run that broke off; other files are refused in words."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from outpace.api.model import Model
from outpace.core.sequence import Step
from outpace.core.stats import Stats
from outpace.core.tree import ROOT
from outpace.errors import OutpaceError
from outpace.policies.judged import examples
from outpace.policies.learned import Learned
from outpace.testing import ByteTokenizer, ToyLM
from outpace.tracing.trace import PassRecord, TraceWriter, read, reason
from outpace.version import __version__

PROMPTS = ["ab ab ab ab", "the cat, the cat"]
METHODS = ["plain", "ngram", "suffix", "recycling", "lookahead", "draft"]


@pytest.fixture(scope="module")
def model() -> Model:
    return Model(ToyLM(vocab=257), ByteTokenizer(), name="toy")


def settings_of(method: str) -> dict[str, Any]:
    return {"method": method} | ({"draft": ToyLM(layers=1, vocab=257), "width": 2} if method == "draft" else {})


def run(model: Model, path: Path, probs: bool = False, **settings: Any) -> list[list[Step]]:
    """The steps of each prompt, as the stream had them."""
    steps: list[list[Step]] = [[] for _ in PROMPTS]
    with TraceWriter(path, model.tokenizer, model.name, probs) as writer:
        for piece in model.stream(PROMPTS, trace=writer, **settings):
            if piece.step is not None:
                steps[piece.index].append(piece.step)
    return steps


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("method", METHODS)
def test_a_batch_is_read_back_as_it_ran(method: str, temperature: float, model: Model, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    steps = run(model, path, max_tokens=20, temperature=temperature, seed=5, **settings_of(method))
    trace = read(path)
    assert [request.prompt for request in trace.requests] == [list(prompt.encode()) for prompt in PROMPTS]
    for request, ran in zip(trace.requests, steps, strict=True):
        assert request.method == method and request.verifier == "match" and request.lossless
        assert request.sampling["temperature"] == temperature and request.sampling["seed"] == 5
        assert request.finish_reason == "length" and request.error is None
        assert len(request.tokens) == 20
        assert len(request.steps) == len(ran)
        for found, step in zip(request.steps, ran, strict=True):
            assert found.tree.tokens == step.tree.tokens and found.tree.parents == step.tree.parents
            assert found.tree.signals == step.tree.signals
            assert (found.path, found.tokens, found.kept) == (step.path, step.tokens, step.kept)


def test_counts_of_a_trace_are_those_of_the_completion(model: Model, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    done = model.generate(PROMPTS[0], method="recycling", max_tokens=24, trace=path)
    stats = Stats()
    for step in read(path).requests[0].steps:
        stats.add(step)
    for name in ("passes", "tokens", "drafted", "accepted", "offered", "matched"):
        assert getattr(stats, name) == getattr(done.stats, name), name


def test_the_header_pieces_and_sources(model: Model, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    run(model, path, method="lookahead", max_tokens=12)
    trace = read(path)
    assert trace.header["model"] == "toy" and trace.header["probs"] is False
    assert trace.header["versions"]["outpace"] == __version__
    assert trace.pieces[ord("a")] == "a"
    for request in trace.requests:
        assert request.passes[0].rows == 2
        for record in request.passes:
            assert record.by[ROOT] == "" and set(record.by[1:]) <= {"lookahead", "lookahead: window"}
            assert record.rows in (1, 2) and record.at > 0
            assert set(record.seconds) == {"prefill", "draft", "score", "verify", "keep"}
            assert {*record.tokens, *record.committed, *request.prompt} <= set(trace.pieces)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_probabilities_are_those_of_the_distribution(temperature: float, model: Model, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    run(model, path, probs=True, method="recycling", max_tokens=12, temperature=temperature, seed=1)
    request = read(path).requests[0]
    prefix, lm = list(request.prompt), model.lm
    assert isinstance(lm, ToyLM)
    for record in request.passes:
        assert [judged.node for judged in record.judged] == record.path[: len(record.committed)]
        for judged, token in zip(record.judged, record.committed, strict=True):
            distribution = (lm.run(prefix)[0][-1] / (temperature or 1.0)).softmax(-1)
            assert judged.choice == pytest.approx(float(distribution[token]), abs=1e-9)
            assert list(judged.children) == record.step.tree.children(judged.node)
            for child, prob in judged.children.items():
                assert prob == pytest.approx(float(distribution[record.tokens[child]]), abs=1e-9)
            prefix.append(token)


def test_reasons_in_words() -> None:
    judged = {"node": 1, "choice": 0.75, "children": {"3": 0.25}}
    common = {"request": 0, "at": 1.0, "rows": 1, "seconds": {}, "by": ["", *["x"] * 5]}
    shape = {"tokens": [0, 1, 2, 3, 4, 5], "parents": [-1, 0, 0, 1, 2, 3]}
    record = PassRecord.from_line({**common, **shape, "path": [0, 1], "committed": [1, 9], "judged": [judged]})
    pieces = {1: "one", 9: " nine"}
    assert reason(record, 0, pieces) == "the root: committed by the previous pass"
    assert reason(record, 1, pieces) == "accepted: the target chose it"
    assert reason(record, 2, pieces) == "rejected: the target chose 'one'"
    assert reason(record, 3, pieces) == "rejected: the target chose ' nine' (probability 0.250 against 0.750)"
    assert reason(record, 4, pieces) == reason(record, 5, pieces) == "never judged: a token before it was rejected"
    assert reason(record, 2, {}) == "rejected: the target chose 'token 1'"
    ended = PassRecord.from_line({**common, **shape, "path": [0, 1], "committed": [1]})
    assert reason(ended, 3, pieces) == "never judged: the request had ended"


def test_a_cancelled_request_says_so(model: Model, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    with TraceWriter(path, model.tokenizer) as writer:
        stream = model.stream(PROMPTS, trace=writer, method="ngram", max_tokens=30)
        first = [next(stream), next(stream)]
        stream.close()
    trace = read(path)
    assert [request.finish_reason for request in trace.requests] == ["cancelled", "cancelled"]
    for request, piece in zip(trace.requests, first, strict=True):  # passes go on until the stream is closed
        assert request.tokens[: len(piece.tokens)] == piece.tokens


def test_a_failed_request_carries_its_error(model: Model, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"

    def broken(ids: Any, scores: Any) -> Any:
        return scores * float("nan") if ids.shape[-1] > 15 else scores

    with TraceWriter(path, model.tokenizer) as writer:
        done = list(model.stream(PROMPTS, trace=writer, logits_processors=[broken], max_tokens=30))[-1].completion
    assert done is not None and done.error is not None
    ended = read(path).requests
    assert [request.finish_reason for request in ended] == ["error", "error"]
    assert all(request.error is not None and "non-finite" in request.error for request in ended)


def test_one_writer_serves_several_calls(model: Model, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    with TraceWriter(path, model.tokenizer) as writer:
        wanted = [model.generate(p, trace=writer, method=m, max_tokens=8).tokens for p in PROMPTS for m in METHODS[:3]]
    trace = read(path)
    assert [request.id for request in trace.requests] == list(range(len(wanted)))
    assert [request.tokens for request in trace.requests] == wanted


def test_without_a_tokenizer_there_is_no_text(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    Model(ToyLM()).generate([1, 2, 1, 2], method="ngram", max_tokens=6, trace=path)
    trace = read(path)
    assert trace.pieces == {} and len(trace.requests[0].tokens) == 6


def test_a_cut_off_last_line_is_left_out(model: Model, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    run(model, path, method="ngram", max_tokens=10)
    lines = path.read_text().splitlines(keepends=True)
    whole = read(path)
    path.write_text("".join(lines[:-2]) + lines[-2][:25])
    cut = read(path)
    assert cut.requests[1].finish_reason is None
    assert sum(len(r.passes) for r in whole.requests) - sum(len(r.passes) for r in cut.requests) <= 1
    path.write_text("".join([*lines[:3], lines[3][:25] + "\n", *lines[4:]]))
    with pytest.raises(OutpaceError, match="line 4 is not JSON"):
        read(path)


def test_lines_of_a_kind_that_is_not_known_are_passed_over(model: Model, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    run(model, path, method="ngram", max_tokens=10)
    wanted = read(path)
    path.write_text(path.read_text() + json.dumps({"type": "weather", "sun": True}) + "\n")
    assert read(path) == wanted


def test_a_token_may_be_a_separator_of_lines(tmp_path: Path) -> None:
    class Separators(ByteTokenizer):
        def decode(self, tokens: Sequence[int], skip_special_tokens: bool = False) -> str:
            return "".join("\u2028\u2029\x85\n"[token % 4] for token in tokens)

    path = tmp_path / "trace.jsonl"
    Model(ToyLM(vocab=257), Separators()).generate("abcd", max_tokens=4, trace=path)
    assert read(path).pieces[ord("d")] == "\u2028"


HEADER = {"type": "header", "format": "outpace-trace", "version": 1}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "is not an Outpace trace; make one with `outpace generate --trace FILE`"),
        ('{"prompt": "hello"}\n', "is not an Outpace trace"),
        ("hello\n", "line 1 is not JSON"),
        ("[1, 2]\n", "line 1 is not a JSON object"),
        (json.dumps({**HEADER, "version": 2}) + "\n", "has version 2, but this Outpace reads up to 1: update Outpace"),
        (json.dumps(HEADER) + '\n{"type": "request", "id": 0}\n', "line 2 is not a valid trace record"),
        (json.dumps(HEADER) + '\n{"type": "pass", "request": 0}\n', "line 2 is not a valid trace record"),
        (json.dumps(HEADER) + '\n{"id": 0}\n', "line 2 is not a valid trace record"),
    ],
)
def test_other_files_are_refused(content: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(content)
    with pytest.raises(OutpaceError) as caught:
        read(path)
    assert message in str(caught.value) and str(path) in str(caught.value)


def test_files_that_cannot_be_opened(tmp_path: Path, model: Model) -> None:
    with pytest.raises(OutpaceError, match="cannot read"):
        read(tmp_path / "nothing.jsonl")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(OutpaceError, match="cannot read"):
        read(tmp_path / "binary")
    with pytest.raises(OutpaceError, match="cannot write the trace"):
        model.generate("a", max_tokens=1, trace=tmp_path / "no" / "folder.jsonl")


def test_a_policy_learns_from_a_trace(model: Model, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    run(model, path, max_tokens=20, **settings_of("draft"))
    seen = [e for r in read(path).requests for s in r.steps for e in examples(s)]
    assert {example.accepted for example in seen} == {True, False}
    policy = Learned.trained(seen)
    again = model.generate(PROMPTS[0], policy=policy, max_tokens=20, **settings_of("draft"))
    assert again.tokens == model.generate(PROMPTS[0], method="plain", max_tokens=20).tokens


def test_the_examples_of_the_documentation_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (Path(__file__).parent.parent / "docs" / "guide" / "traces.md").read_text()
    monkeypatch.chdir(tmp_path)
    model = Model(ToyLM(vocab=257, max_length=48), ByteTokenizer())  # the examples set no length
    scope: dict[str, Any] = {"lm": model, "prompt": PROMPTS[0], "small": ToyLM(layers=1, vocab=257)}
    for block in re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL):
        exec(block, scope)
    assert len(scope["trace"].requests) == 3 and (tmp_path / "policy.safetensors").exists()
    assert scope["out"].tokens == model.generate(PROMPTS[0], method="plain").tokens
