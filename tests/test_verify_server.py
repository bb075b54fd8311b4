"""Proof from outside: a server that is right passes in all ways, and every planted bug is caught by its check."""

from __future__ import annotations

import builtins
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest

from outpace.errors import OutpaceError
from outpace.sampling.settings import Sampling
from outpace.verify.records import Check
from outpace.verify.servers.answers import ServerPlan
from outpace.verify.servers.client import Server
from outpace.verify.servers.compare import END, drift_of, first_difference_of, first_divergence
from outpace.verify.servers.distribution import PairedCounts, homogeneity
from outpace.verify.servers.reply import Reply, Token, parse
from outpace.verify.servers.suite import server_checks
from outpace.verify.suite import run_checks
from tests.fake_server import KEY, Fake, toy

PROMPTS = ["def add(a, b):", "Once upon a time", "1 2 3 4"]
OFF = {"speculative": False}
PLAN = ServerPlan(
    PROMPTS, max_tokens=16, sampling=Sampling(temperature=1.0, top_p=0.6), samples=160, contexts=1, concurrency=2
)
WAYS = ("two servers", "switch", "reference")


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def ask(stack: ExitStack, way: str, *bugs: str, only: str | None = None, crowd_after: int = 0) -> dict[str, Check]:
    """The checks, or one of them, of a server with these bugs."""
    on = Server(stack.enter_context(Fake(*bugs, crowd_after=crowd_after)).url)
    shape = [bug for bug in bugs if bug.startswith(("no ", "refuses", "ignores"))]  # not speculation's: both have it
    off = {
        "two servers": lambda: Server(stack.enter_context(Fake(*shape)).url),
        "switch": lambda: Server(on.url, extra=OFF),
    }.get(way, lambda: None)()
    questions = server_checks(on, off, toy() if way == "reference" else None, PLAN)
    return {check.name: check for check in run_checks([q for q in questions if only in (None, q.name)])}


@pytest.mark.parametrize("way", [*WAYS, "alone"])
def test_a_server_that_is_right_passes_everything(stack: ExitStack, way: str) -> None:
    checks = ask(stack, way)
    assert {check.verdict for check in checks.values()} == {"pass"}, {c.name: c.summary for c in checks.values()}
    assert ("greedy = off" in checks) == (way in ("two servers", "switch"))
    assert ("every token" in checks) == (way == "reference")
    assert ("sampled distribution" in checks) == (way != "alone")


CAUGHT = {
    "greedy": {"greedy = off": ("two servers", "switch"), "every token": ("reference",), "logprobs": ("alone",)},
    "random": {"repeatable": ("alone",)},
    "zeros": {"logprobs": WAYS},
    "zeros of guesses": {"logprobs": WAYS},
    "temperature of logprobs": {"logprobs": WAYS},
    "seed": {"same seed": WAYS},
    "temperature": {"settings: temperature": ("alone",), "sampled distribution": ("reference",)},
    "draws of guesses": {"sampled distribution": WAYS},
    "top_p": {"settings: top_p": ("alone",), "sampled distribution": WAYS},
    "top_k": {"settings: top_k": ("alone",)},
    "min_p": {"settings: min_p": ("alone",)},
    "logit_bias": {"settings: logit_bias": ("alone",)},
    "presence_penalty": {"settings: presence_penalty": ("alone", "reference")},
    "stop": {"settings: stop": ("alone",)},
    "max_tokens": {"settings: max_tokens": ("alone",)},
    "n": {"settings: n": ("alone",)},
}


@pytest.mark.parametrize(
    "bug, name, way",
    [(bug, name, way) for bug, names in CAUGHT.items() for name, ways in names.items() for way in ways],
)
def test_a_planted_bug_is_caught(stack: ExitStack, bug: str, name: str, way: str) -> None:
    check = ask(stack, way, bug, only=name)[name]
    assert check.verdict == "fail", check.summary


def test_answers_that_depend_on_others_at_the_same_time_are_caught(stack: ExitStack) -> None:
    name = "concurrent = alone"
    check = ask(stack, "alone", "concurrent", only=name, crowd_after=2 * len(PROMPTS))[name]
    assert check.verdict == "fail" and all(d.position == 2 for d in check.divergences)


def test_a_divergence_is_shown_with_its_place_tokens_and_gap(stack: ExitStack) -> None:
    check = ask(stack, "switch", "greedy", only="greedy = off")["greedy = off"]
    assert [d.prompt for d in check.divergences] == [0, 1, 2] and {d.position for d in check.divergences} == {5}
    for d in check.divergences:
        assert d.gap is not None and d.gap > 0 and d.rounding == 0 and not d.explained
        assert d.texts == (chr(d.expected), chr(d.got))


def test_a_switch_that_does_nothing_is_noticed_where_the_server_says_what_it_accepts(stack: ExitStack) -> None:
    name = "greedy = off"
    check = ask(stack, "switch", "says what it accepts", only=name)[name]
    assert check.verdict == "pass" and check.figures["accepted"] == 3 * len(PROMPTS)
    check = ask(stack, "switch", "says what it accepts", "deaf", only=name)[name]
    assert check.failed and "with speculation turned off" in check.summary


def test_a_server_that_does_not_repeat_itself_is_not_held_to_more(stack: ExitStack) -> None:
    on = Server(stack.enter_context(Fake("random")).url)
    questions = [q for q in server_checks(on, on, None, PLAN) if q.name != "sampled distribution"]
    checks = {check.name: check for check in run_checks(questions)}
    assert checks["repeatable"].failed and "not deterministic" in checks["repeatable"].summary
    assert checks["greedy = off"].verdict == "skip" and checks["concurrent = alone"].verdict == "skip"
    assert checks["settings: stop"].verdict == "skip"


def test_a_seed_that_is_never_kept_is_not_speculations_doing(stack: ExitStack) -> None:
    on = Server(stack.enter_context(Fake("seed")).url)
    check = next(run_checks([q for q in server_checks(on, on, None, PLAN) if q.name == "same seed"]))
    assert check.verdict == "skip" and check.figures["kept"] == 0


@pytest.mark.parametrize(
    "way, lack",
    [("two servers", "refuses logprobs"), ("switch", "ignores logprobs"), ("reference", "refuses logprobs")],
)
def test_without_logprobs_texts_are_compared(stack: ExitStack, way: str, lack: str) -> None:
    checks = ask(stack, way, lack, "no ids")
    assert not any(check.failed for check in checks.values()), {c.name: c.summary for c in checks.values()}
    assert checks["logprobs"].verdict == "skip"
    if way == "reference":
        assert "encoded again" in checks["every token"].summary and checks["sampled distribution"].verdict == "skip"


def test_without_logprobs_every_divergence_fails_and_says_what_would_help(stack: ExitStack) -> None:
    check = ask(stack, "switch", "greedy", "refuses logprobs", "no ids", only="greedy = off")["greedy = off"]
    assert check.failed and "logprobs" in check.summary and check.divergences[0].position == 5
    assert ask(stack, "switch", "top_p", "ignores logprobs", "no ids", only="sampled distribution")[
        "sampled distribution"
    ].failed


def test_tokens_are_found_by_their_texts_where_ids_are_not_given(stack: ExitStack) -> None:
    check = ask(stack, "reference", "no ids", only="every token")["every token"]
    assert check.verdict == "pass" and "by their texts" in check.summary
    assert ask(stack, "reference", "no ids", "greedy", only="every token")["every token"].failed


def test_the_chat_endpoint_serves_where_there_is_no_other(stack: ExitStack) -> None:
    checks = ask(stack, "two servers", "no completions")
    assert {check.verdict for check in checks.values()} == {"pass"}, {c.name: c.summary for c in checks.values()}


def test_what_is_refused_is_left_out_or_reported(stack: ExitStack) -> None:
    fake = stack.enter_context(Fake("refuses return_token_ids", "refuses logit_bias", "refuses top_k"))
    checks = {c.name: c for c in run_checks(server_checks(Server(fake.url), None, None, PLAN))}
    assert not any(check.failed for check in checks.values())
    for name in ("logit_bias", "top_k"):
        check = checks[f"settings: {name}"]
        assert check.verdict == "skip" and "refused" in check.summary and "unrecognized argument" in check.summary
    assert sum("return_token_ids" in body for body in fake.bodies) == 1


@pytest.mark.parametrize(
    "bug, message",
    [
        ("401", r"refuses the API key .*Incorrect API key.*OPENAI_API_KEY"),
        ("500", "HTTP 500: CUDA out of memory"),
        ("garbage", r"other than JSON.*hello"),
        ("other JSON", r"does not follow OpenAI's API.*words"),
        ("slow", r"did not answer within 0\.2 s"),
    ],
)
def test_errors_name_their_cause(stack: ExitStack, monkeypatch: pytest.MonkeyPatch, bug: str, message: str) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    server = Server(stack.enter_context(Fake(bug)).url, timeout=0.2 if bug == "slow" else 30)
    with pytest.raises(OutpaceError, match=message):
        next(run_checks(server_checks(server, None, None, PLAN)))


def test_wrong_urls_are_said_to_be_wrong(stack: ExitStack) -> None:
    with Fake() as gone:
        url = gone.url
    with pytest.raises(OutpaceError, match=r"cannot connect to .*is the server running"):
        Server(url).complete("a", max_tokens=1, temperature=0)
    fake = stack.enter_context(Fake())
    with pytest.raises(OutpaceError, match=r"HTTP 404.*base URL"):
        Server(f"{fake.url}/nowhere", model="toy").complete("a", max_tokens=1, temperature=0)
    with pytest.raises(OutpaceError, match="not a server URL"):
        Server("ftp://somewhere").complete("a", max_tokens=1, temperature=0)


def test_keys_come_from_the_argument_or_the_environment(stack: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = stack.enter_context(Fake("401"))
    given = Server(f"{fake.url}/v1/", api_key=KEY)
    assert given.complete("a", max_tokens=2, temperature=0).length == 2 and KEY not in repr(given)
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    assert Server(fake.url.removeprefix("http://")).complete("a", max_tokens=2, temperature=0).length == 2


def test_the_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *rest: Any, **named: Any) -> Any:
        if name == "requests":
            raise ImportError(name)
        return real(name, *rest, **named)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(OutpaceError, match=r"pip install 'outpace\[verify\]'"):
        Server("http://127.0.0.1:1", model="toy").complete("a", max_tokens=1)


def reply(*tokens: tuple[str, dict[str, float]], finish: str = "length") -> Reply:
    shown = [Token(text, top.get(text), top) for text, top in tokens]
    return Reply("".join(t.text for t in shown), shown, None, None, finish, None, chat=False)


def test_a_near_tie_is_explained_by_the_drift_that_the_server_shows() -> None:
    wanted = reply(("a", {"a": -0.10, "b": -2.4}), ("x", {"x": -0.70, "y": -0.72}))
    got = reply(("a", {"a": -0.11, "b": -2.3}), ("y", {"x": -0.72, "y": -0.70}))
    drift = drift_of([(wanted, got)])
    assert drift == pytest.approx(0.1)
    found = first_divergence((wanted, got), 0, drift)
    assert found is not None and found.explained and found.position == 1 and found.gap == pytest.approx(0.02)
    far = reply(("a", {"a": -0.11}), ("z", {"x": -0.70, "z": -3.0}))
    found = first_divergence((wanted, far), 0, drift)
    assert found is not None and not found.explained and found.gap == pytest.approx(2.3)


def test_a_large_drift_is_a_bug_and_explains_little() -> None:
    wanted, got = reply(("x", {"x": -0.1, "y": -2.0})), reply(("y", {"y": -0.1, "x": -2.0}))
    found = first_divergence((wanted, got), 0, drift=5.0)
    assert found is not None and not found.explained


def test_an_early_end_is_a_tie_only_where_the_next_token_was_uncertain() -> None:
    short = reply(("a", {"a": -0.1}), finish="stop")
    sure = reply(("a", {"a": -0.1}), ("b", {"b": -0.01, "<eos>": -5.0}))
    unsure = reply(("a", {"a": -0.1}), ("b", {"b": -0.70, "<eos>": -0.71}))
    for longer, explained in ((sure, False), (unsure, True)):
        found = first_divergence((longer, short), 0, drift=0.01)
        assert found is not None and found.texts[1] == END and found.explained == explained
    cut = reply(("a", {"a": -0.1}))
    found = first_divergence((unsure, cut), 0, drift=0.01)
    assert found is not None and not found.explained


def test_answers_are_compared_by_characters_where_no_tokens_are_shown() -> None:
    first, second = (Reply(text, None, None, None, "stop", None, False) for text in ("the cat", "the dog"))
    found = first_difference_of(first, second)
    assert found is not None and found.at == 4 and not found.by_tokens and found.texts == ("cat", "dog")


def test_answers_are_read_in_every_shape() -> None:
    chosen = {"id": 7, "token": "a", "logprob": -0.5, "top_logprobs": [{"id": 7, "token": "a", "logprob": -0.5}]}
    llama = {"choices": [{"text": "a", "logprobs": {"content": [chosen]}, "finish_reason": "length"}]}
    assert parse(llama, chat=False)[0].ids == [7]
    logprobs = {"tokens": ["token_id:9"], "token_logprobs": [-1.0], "top_logprobs": None}
    metrics = {"speculative_decoding": {"num_accepted_draft_tokens": 4}}
    vllm = {"choices": [{"text": "a", "logprobs": logprobs, "prompt_token_ids": [1, 2]}], "metrics": metrics}
    read = parse(vllm, chat=False)[0]
    assert read.ids == [9] and read.prompt_ids == [1, 2] and read.accepted == 4
    thinking = {"choices": [{"message": {"reasoning_content": "hm. ", "content": "yes"}}], "usage": None}
    assert parse(thinking, chat=True)[0].text == "hm. yes"


def test_homogeneity_keeps_its_level_and_finds_what_it_says() -> None:
    random = np.random.default_rng(0)
    distribution, other = np.array([0.5, 0.3, 0.15, 0.05]), np.array([0.3, 0.5, 0.15, 0.05])

    def test(off: Any, drift: float = 0.0) -> Any:
        draws = [random.multinomial(300, shares) for shares in (distribution, off)]
        on, off = ({i: int(n) for i, n in enumerate(drawn)} for drawn in draws)
        return homogeneity(PairedCounts(0, [], Counter(on), Counter(off)), 0.01, drift)

    p = [test(distribution).p for _ in range(400)]
    assert 0.02 < np.mean(np.array(p) < 0.05) < 0.09
    effect = test(distribution).effect
    assert 0.1 < effect < 0.5 and np.mean([test(other).p < 0.01 for _ in range(50)]) > 0.9
    assert test(distribution, drift=0.2).effect > effect
