"""/v1/completions and the routes about the server itself."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai import OpenAI

from outpace.api.model import Model
from outpace.sampling.settings import Sampling
from outpace.verify.servers.answers import ServerPlan
from outpace.verify.servers.client import Server
from outpace.verify.servers.suite import server_checks
from outpace.verify.suite import run_checks
from tests.fake_server import toy
from tests.serving import NAME, Live, live
from tests.tiny_tokenizers import random_model

PROMPT = "def add(a, b):"


@pytest.fixture(scope="module")
def model() -> Model:
    return random_model("tiktoken")


@pytest.fixture(scope="module")
def server(model: Model) -> Iterator[Live]:
    with live(model, names=(NAME, "other")) as found:
        yield found


@pytest.fixture(scope="module")
def client(server: Live) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as found:
        yield found


def ask(client: OpenAI, **settings: Any) -> Any:
    given = {"model": NAME, "prompt": PROMPT, "max_tokens": 24, "temperature": 0, **settings}
    return client.completions.create(**given)


def test_text_is_continued_as_by_the_engine(client: OpenAI, model: Model) -> None:
    wanted = model.generate(PROMPT, method="plain", max_tokens=24)
    found = ask(client)
    assert (found.object, found.choices[0].text) == ("text_completion", wanted.text)
    assert ask(client, prompt=model.tokenizer.encode(PROMPT)).choices[0].text == wanted.text  # type: ignore[union-attr]
    chunks = list(ask(client, stream=True, stream_options={"include_usage": True}))
    assert "".join(choice.text for chunk in chunks for choice in chunk.choices) == wanted.text
    assert chunks[-1].usage.completion_tokens == 24 and chunks[-2].choices[0].finish_reason == "length"
    assert ask(client, max_tokens=None).usage.completion_tokens == 16


def test_several_prompts_with_several_samples(client: OpenAI, model: Model) -> None:
    prompts = ["One fox", "The dog, and", PROMPT]
    given: dict[str, Any] = {"n": 2, "temperature": 1.0, "seed": 6}
    found = ask(client, prompt=prompts, **given)
    wanted = [done for p in prompts for done in model.generate(p, method="plain", max_tokens=24, **given)]
    assert [choice.text for choice in found.choices] == [done.text for done in wanted]
    assert found.usage.prompt_tokens == sum(wanted[i].prompt_tokens for i in (0, 2, 4))
    assert found.usage.completion_tokens == 6 * 24
    texts = [""] * 6
    for chunk in ask(client, prompt=prompts, stream=True, **given):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == [done.text for done in wanted]


def test_logprobs_have_the_form_of_completions(client: OpenAI, model: Model) -> None:
    wanted = model.generate(PROMPT, method="plain", max_tokens=24, logprobs=2)
    shown = ask(client, logprobs=2).choices[0].logprobs
    assert shown.token_logprobs == pytest.approx([each.logprob for each in wanted.logprobs])
    assert all(text in top for text, top in zip(shown.tokens, shown.top_logprobs, strict=True))
    assert shown.text_offset == [sum(map(len, shown.tokens[:i])) for i in range(24)]
    streamed: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "text_offset": []}
    for chunk in ask(client, logprobs=2, stream=True):
        for name, values in streamed.items():
            values += getattr(chunk.choices[0].logprobs, name) if chunk.choices[0].logprobs else []
    assert streamed == {name: getattr(shown, name) for name in streamed}


def test_the_prompt_is_echoed(client: OpenAI) -> None:
    text = ask(client).choices[0].text
    assert ask(client, echo=True).choices[0].text == PROMPT + text
    assert "".join(c.choices[0].text for c in ask(client, echo=True, stream=True) if c.choices) == PROMPT + text


@pytest.mark.parametrize(
    "given",
    [{"prompt": ""}, {"prompt": [10**6]}, {"best_of": 3}, {"echo": True, "logprobs": 1}, {"suffix": "x"}],
    ids=str,
)
def test_bad_requests_are_refused(client: OpenAI, given: dict[str, Any]) -> None:
    with pytest.raises(openai.BadRequestError):
        ask(client, **given)


def test_models_are_listed_for_clients_and_load_generators(client: OpenAI, model: Model) -> None:
    found = client.models.list().data
    assert [each.id for each in found] == [NAME, "other"]
    extra: Any = found[0].model_extra
    assert (extra["root"], extra["max_model_len"]) == (NAME, model.lm.max_length)
    assert client.models.retrieve("other").id == "other"
    assert ask(client, model="other").model == "other"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("third")


def test_texts_and_chats_are_tokenized_and_back(server: Live, model: Model) -> None:
    tokenizer: Any = model.tokenizer
    found = server.post("/tokenize", {"prompt": PROMPT, "return_token_strs": True}).json()
    assert found["tokens"] == tokenizer.encode(PROMPT) and found["count"] == len(found["tokens"])
    assert "".join(found["token_strs"]) == PROMPT and found["max_model_len"] == model.lm.max_length
    assert server.post("/detokenize", {"tokens": found["tokens"]}).json() == {"prompt": PROMPT}
    messages = [{"role": "user", "content": "Hello"}]
    chat = server.post("/tokenize", {"messages": messages}).json()
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert server.post("/detokenize", {"tokens": chat["tokens"]}).json()["prompt"] == text
    closed = server.post("/tokenize", {"messages": messages, "add_generation_prompt": False}).json()
    assert closed["count"] < chat["count"]
    assert server.post("/tokenize", {}).status_code == 400
    assert server.post("/detokenize", {"tokens": [10**9]}).json()["error"]["param"] == "tokens"


def test_metrics_have_our_names_and_those_of_vllm(server: Live, client: OpenAI) -> None:
    def read() -> dict[str, float]:
        lines = [line for line in server.get("/metrics").text.splitlines() if not line.startswith("#")]
        return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}

    labels = f'{{engine="0",model_name="{NAME}"}}'
    before = read()
    figures = [
        ask(client, extra_body={"speculation": {"method": "recycling", "options": {"price": 0}}}).model_extra["metrics"]
        for _ in range(2)
    ]
    spec = [each["speculative_decoding"] for each in figures]
    after = read()
    counted = {
        "spec_decode_num_drafts_total": sum(each["num_spec_steps"] for each in spec),
        "spec_decode_num_draft_tokens_total": sum(each["num_draft_tokens"] for each in spec),
        "spec_decode_num_accepted_tokens_total": sum(each["num_accepted_draft_tokens"] for each in spec),
        "generation_tokens_total": 48,
        "request_generation_tokens_count": 2,
        "time_to_first_token_seconds_count": 2,
    }
    for name, count in counted.items():
        for prefix in ("outpace:", "vllm:"):
            key = f"{prefix}{name}{labels}"
            assert after[key] - before[key] == count, name
    assert after[f"vllm:num_requests_running{labels}"] == after[f"vllm:num_requests_waiting{labels}"] == 0
    at = f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",model_name="{NAME}",position="0"}}'
    assert after[at] - before.get(at, 0) == sum(sum(each["acceptance_histogram"][1:]) for each in spec) > 0
    assert not any("_created" in name for name in after)


def test_outpace_verify_passes_against_it() -> None:
    """Every check of servers, with speculation off by a field of the request, and with the model as the reference."""
    plan = ServerPlan(
        ["def add(a, b):", "Once upon a time", "1 2 3 4"],
        max_tokens=16,
        sampling=Sampling(temperature=1.0, top_p=0.6),
        samples=100,
        contexts=1,
        concurrency=8,
    )
    with live(toy()) as server:
        on, off = Server(server.url), Server(server.url, extra={"speculation": "off"})
        checks = list(run_checks(server_checks(on, off, toy(), plan)))
    assert {check.name: check.summary for check in checks if check.verdict != "pass"} == {}
    assert {"greedy = off", "every token", "same seed", "sampled distribution"} <= {check.name for check in checks}
