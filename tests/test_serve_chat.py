"""/v1/chat/completions, by OpenAI's own client against a real server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai import OpenAI
from openai.types.chat import ChatCompletionChunk

from outpace.api.model import Model
from tests.serving import NAME, THINKING, TOOLS, TURNS, Live, live, scripted
from tests.tiny_tokenizers import random_model

HELLO: list[Any] = [{"role": "user", "content": "Say hello to the quick brown fox."}]
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Rome", "Oslo"]}, "days": {"type": "integer", "minimum": 0, "maximum": 9}},
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}
ADD: Any = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "maxProperties": 0}}}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome", "days": 3}}\n</tool_call>'


@pytest.fixture(scope="module")
def model() -> Model:
    return random_model("tiktoken")


@pytest.fixture(scope="module")
def server(model: Model) -> Iterator[Live]:
    with live(model) as found:
        yield found


@pytest.fixture(scope="module")
def client(server: Live) -> Iterator[OpenAI]:
    with client_of(server) as found:
        yield found


def client_of(server: Live) -> OpenAI:
    return OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def ask(client: OpenAI, **settings: Any) -> Any:
    given = {"model": NAME, "messages": HELLO, "max_completion_tokens": 24, "temperature": 0, **settings}
    return client.chat.completions.create(**given)


def joined(stream: Any) -> dict[str, Any]:
    """The message, finish reason and logprobs of a stream, and its chunks."""
    chunks: list[ChatCompletionChunk] = list(stream)
    out: dict[str, Any] = {"content": "", "reasoning": "", "calls": {}, "tokens": [], "reason": None, "chunks": chunks}
    for choice in (choice for chunk in chunks for choice in chunk.choices):
        assert out["reason"] is None, "nothing comes after the finish reason"
        out["content"] += choice.delta.content or ""
        out["reasoning"] += getattr(choice.delta, "reasoning_content", None) or ""
        for call in choice.delta.tool_calls or []:
            entry = out["calls"].setdefault(call.index, {"name": "", "arguments": ""})
            if call.function.name:
                assert call.id and not entry["name"]
                entry["name"] = call.function.name
            entry["arguments"] += call.function.arguments or ""
        out["tokens"] += (choice.logprobs.content or []) if choice.logprobs else []
        out["reason"] = choice.finish_reason
    return out


def test_the_answer_is_that_of_the_engine(client: OpenAI, model: Model) -> None:
    wanted = model.generate(HELLO, method="plain", max_tokens=24)
    found = ask(client)
    assert found.choices[0].message.content == wanted.text
    assert found.choices[0].finish_reason == "length"
    assert found.usage.prompt_tokens == wanted.prompt_tokens and found.usage.completion_tokens == 24
    assert found.usage.prompt_tokens_details.cached_tokens > 0
    assert (found.object, found.model) == ("chat.completion", NAME)


SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 1.0, "seed": 5},
    "filters": {
        "temperature": 0.9,
        "top_p": 0.8,
        "extra_body": {"top_k": 20, "min_p": 0.02, "typical_p": 0.9},
        "seed": 1,
    },
    "penalties": {"presence_penalty": 0.5, "frequency_penalty": 0.3, "extra_body": {"repetition_penalty": 1.2}},
    "bias": {"logit_bias": {"70": 4.0, "71": -100}, "seed": 2, "temperature": 0.7},
    "stop": {"stop": ["the"], "temperature": 1.0, "seed": 5},
    "schema": {
        "response_format": {
            "type": "json_schema",
            "json_schema": {
                "name": "x",
                "schema": {**WEATHER["function"]["parameters"], "x-guidance": {"whitespace_flexible": False}},
            },
        },
        "max_completion_tokens": 60,
    },
    "regex": {"extra_body": {"structured_outputs": {"regex": "(ab|c){3,5}"}}, "temperature": 1.0, "seed": 3},
    "choice": {"extra_body": {"structured_outputs": {"choice": ["yes, indeed", "no"]}}},
    "min_tokens": {"extra_body": {"min_tokens": 20, "stop_token_ids": list(range(60, 120))}},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_every_setting_gives_the_same_text_with_speculation_on_off_and_streamed(client: OpenAI, name: str) -> None:
    given = SETTINGS[name]
    body = given.get("extra_body", {})
    found = ask(client, **given)
    off = ask(client, **given | {"extra_body": {**body, "speculation": "off"}})
    assert off.choices[0].message.content == found.choices[0].message.content
    assert off.model_extra["metrics"]["speculative_decoding"] is None
    for wish in ({"method": "suffix", "options": {"depth": 4}}, {"method": "recycling"}, "ngram"):
        other = ask(client, **given | {"extra_body": {**body, "speculation": wish}})
        assert other.choices[0].message.content == found.choices[0].message.content
    stream = joined(ask(client, **given, stream=True))
    assert (stream["content"], stream["reason"]) == (found.choices[0].message.content, found.choices[0].finish_reason)


def test_a_schema_is_followed(client: OpenAI) -> None:
    said = json.loads(ask(client, **SETTINGS["schema"]).choices[0].message.content)
    assert said.keys() == {"city", "days"} and said["city"] in ("Rome", "Oslo")
    said = ask(client, response_format={"type": "json_object"}, max_completion_tokens=4).choices[0].message.content
    assert said.lstrip().startswith("{")


def test_samples_differ_and_are_those_of_the_engine(client: OpenAI, model: Model) -> None:
    found = ask(client, n=3, temperature=1.0, seed=9)
    wanted = model.generate(HELLO, method="plain", n=3, temperature=1.0, seed=9, max_tokens=24)
    assert [choice.message.content for choice in found.choices] == [done.text for done in wanted]
    assert [choice.index for choice in found.choices] == [0, 1, 2]
    assert found.usage.completion_tokens == 72 and found.usage.prompt_tokens == wanted[0].prompt_tokens
    assert found.model_extra["metrics"] is None


def test_without_a_seed_answers_differ(client: OpenAI) -> None:
    texts = {ask(client, temperature=1.5).choices[0].message.content for _ in range(3)}
    assert len(texts) == 3


def test_logprobs_are_those_of_the_model_itself(client: OpenAI, model: Model) -> None:
    given: dict[str, Any] = {"temperature": 0.8, "seed": 4}
    found = ask(client, **given, logprobs=True, top_logprobs=3)
    wanted = model.generate(HELLO, method="plain", max_tokens=24, logprobs=3, **given)
    shown = found.choices[0].logprobs.content
    assert [entry.logprob for entry in shown] == pytest.approx([each.logprob for each in wanted.logprobs])
    assert all(len(entry.top_logprobs) == 3 for entry in shown)
    spelled = b"".join(bytes(entry.bytes or []) for entry in shown)
    assert spelled.decode(errors="replace") == found.choices[0].message.content
    stream = joined(ask(client, **given, logprobs=True, top_logprobs=3, stream=True))
    assert [entry.model_dump() for entry in stream["tokens"]] == [entry.model_dump() for entry in shown]


def test_usage_and_figures_ride_on_the_last_chunk(client: OpenAI) -> None:
    chunks = list(ask(client, stream=True, stream_options={"include_usage": True}))
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == 24
    figures = chunks[-1].model_extra["metrics"]
    assert figures["time_to_first_token_ms"] > 0 and figures["tokens_per_second"] > 0
    each = list(ask(client, stream=True, stream_options={"include_usage": True, "continuous_usage_stats": True}))
    counts = [chunk.usage.completion_tokens for chunk in each]
    assert counts == sorted(counts) and counts[-1] == 24


def test_figures_of_speculation_agree_with_each_other(client: OpenAI) -> None:
    wish = {"speculation": {"method": "recycling", "options": {"nodes": 6, "price": 0}}}
    figures = ask(client, extra_body=wish).model_extra["metrics"]["speculative_decoding"]
    histogram, steps = figures["acceptance_histogram"], figures["num_spec_steps"]
    assert sum(histogram) == steps > 0
    assert sum(i * count for i, count in enumerate(histogram)) == figures["num_accepted_draft_tokens"]
    assert figures["mean_acceptance_length"] == pytest.approx(1 + figures["num_accepted_draft_tokens"] / steps)
    rate = figures["num_accepted_draft_tokens"] / figures["num_draft_tokens"]
    assert figures["draft_acceptance_rate"] == pytest.approx(rate, abs=1e-6)
    assert len(histogram) == figures["num_spec_tokens"] + 1


def test_a_prediction_is_drafted_from_and_counted(client: OpenAI) -> None:
    said = ask(client).choices[0].message.content
    for given in ({}, {"extra_body": {"speculation": "prediction"}}):
        found = ask(client, prediction={"type": "content", "content": [{"type": "text", "text": said}]}, **given)
        details = found.usage.completion_tokens_details
        assert found.choices[0].message.content == said
        assert details.accepted_prediction_tokens > 0 or given == {}  # the tiny model has tokens that are no text
    wrong = ask(client, prediction={"type": "content", "content": "zzz zzz zzz"})
    assert wrong.choices[0].message.content == said
    details = wrong.usage.completion_tokens_details
    assert details.accepted_prediction_tokens == 0 and details.rejected_prediction_tokens >= 0


def test_token_ids_are_returned_on_request(client: OpenAI, model: Model) -> None:
    found = ask(client, extra_body={"return_token_ids": True})
    wanted = model.generate(HELLO, method="plain", max_tokens=24)
    assert found.choices[0].model_extra["token_ids"] == wanted.tokens
    assert len(found.model_extra["prompt_token_ids"]) == wanted.prompt_tokens
    chunks = list(ask(client, stream=True, extra_body={"return_token_ids": True}))
    streamed = [t for chunk in chunks for c in chunk.choices for t in (c.model_extra or {}).get("token_ids") or []]
    assert streamed == wanted.tokens


def test_a_message_may_be_continued(client: OpenAI, model: Model) -> None:
    messages = [*HELLO, {"role": "assistant", "content": "Hello, the"}]
    found = ask(client, messages=messages, extra_body={"continue_final_message": True})
    start = model.tokenizer.apply_chat_template(messages, continue_final_message=True, tokenize=False)  # type: ignore[union-attr]
    prompt = model.tokenizer.encode(start, add_special_tokens=False)  # type: ignore[union-attr]
    assert found.choices[0].message.content == model.generate(prompt, method="plain", max_tokens=24).text


BAD: dict[str, tuple[dict[str, Any], str, str]] = {
    "unknown field": ({"extra_body": {"colour": 1}}, "unknown_field", "colour"),
    "template": ({"extra_body": {"chat_template": "{{ 1 }}"}}, "unknown_field", "chat_template"),
    "template in values": (
        {"extra_body": {"chat_template_kwargs": {"chat_template": "x"}}},
        "invalid_value",
        "chat_template_kwargs",
    ),
    "temperature": ({"temperature": -1}, "invalid_value", "temperature"),
    "top_p": ({"top_p": 0}, "invalid_value", "top_p"),
    "n": ({"n": 1000}, "invalid_value", "n"),
    "none": ({"n": 0}, "invalid_value", "n"),
    "stop": ({"stop": ["x"] * 100}, "invalid_value", "stop"),
    "empty stop": ({"stop": ""}, "invalid_value", "stop"),
    "bias": ({"logit_bias": {"100000": 1}}, "invalid_value", "logit_bias"),
    "bias of a word": ({"logit_bias": {"word": 1}}, "invalid_value", "logit_bias"),
    "top_logprobs": ({"logprobs": True, "top_logprobs": 21}, "invalid_value", "top_logprobs"),
    "no logprobs": ({"top_logprobs": 2}, "invalid_value", "top_logprobs"),
    "image": (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "invalid_value",
        "messages[0].content",
    ),
    "role": ({"messages": [{"role": "king", "content": "x"}]}, "invalid_value", "messages.0.role"),
    "no messages": ({"messages": []}, "invalid_value", "messages"),
    "method": ({"extra_body": {"speculation": "eagle3"}}, "invalid_value", "speculation"),
    "option": ({"extra_body": {"speculation": {"method": "suffix", "options": {"dept": 1}}}}, "invalid_value", ""),
    "large option": (
        {"extra_body": {"speculation": {"method": "recycling", "options": {"nodes": 10**6}}}},
        "invalid_value",
        "speculation",
    ),
    "path in an option": (
        {"extra_body": {"speculation": {"method": "auto", "options": {"candidates": "graft:calibration=/etc/passwd"}}}},
        "invalid_value",
        "",
    ),
    "schema": (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nothing"}}}},
        "invalid_value",
        "",
    ),
    "no schema": ({"response_format": {"type": "json_schema"}}, "invalid_value", "response_format"),
    "regex": ({"extra_body": {"structured_outputs": {"regex": "(("}}}, "invalid_value", ""),
    "two constraints": (
        {"extra_body": {"structured_outputs": {"regex": "a"}}, "response_format": {"type": "json_object"}},
        "invalid_value",
        "response_format",
    ),
    "tools": ({"tools": [WEATHER]}, "invalid_value", "tools"),
    "no tools": ({"tool_choice": "required"}, "invalid_value", "tool_choice"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_requests_are_refused_by_name(client: OpenAI, name: str) -> None:
    given, code, param = BAD[name]
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, **given)
    error: Any = caught.value.body
    assert error["code"] == code and error["type"] == "invalid_request_error"
    assert error["param"] == param or param == ""
    assert "Traceback" not in error["message"]


def test_another_model_is_not_found(client: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="not served here"):
        ask(client, model="gpt-5")


def test_a_prompt_that_is_too_long_is_refused(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="tokens, but the model holds"):
        ask(client, messages=[{"role": "user", "content": "fox " * 5000}])


# Tools and reasoning, on models that say what a script tells them.


def script(prompt: str) -> str:
    if "tool\n21" in prompt:
        return "It has 21 degrees."
    return f"Let me look.\n{CALL}" if "<tool_call>" in prompt else "I have no tools."


@pytest.fixture(scope="module")
def tools() -> Iterator[OpenAI]:
    with live(scripted(TOOLS + TURNS, script)) as server, client_of(server) as client:
        yield client


@pytest.fixture(scope="module")
def random_tools() -> Iterator[OpenAI]:
    model = random_model("tiktoken", padding=0)
    model.tokenizer = scripted(TOOLS + TURNS, str).tokenizer
    model.stop_token_ids = frozenset([model.tokenizer.eos_token_id])  # type: ignore[union-attr]
    with live(model) as server, client_of(server) as client:
        yield client


def test_tools_are_called_and_their_results_read(tools: OpenAI) -> None:
    first = ask(tools, tools=[WEATHER, ADD], max_completion_tokens=200).choices[0]
    (call,) = first.message.tool_calls
    assert (first.message.content, first.finish_reason) == ("Let me look.", "tool_calls")
    assert (call.function.name, json.loads(call.function.arguments)) == ("get_weather", {"city": "Rome", "days": 3})
    messages = [*HELLO, first.message, {"role": "tool", "tool_call_id": call.id, "content": "21"}]
    after = ask(tools, messages=messages, tools=[WEATHER], max_completion_tokens=200).choices[0]
    assert (after.message.content, after.finish_reason) == ("It has 21 degrees.", "stop")


def test_tool_calls_are_streamed(tools: OpenAI) -> None:
    found = joined(ask(tools, tools=[WEATHER], max_completion_tokens=200, stream=True))
    assert (found["content"], found["reason"]) == ("Let me look.", "tool_calls")
    assert found["calls"] == {0: {"name": "get_weather", "arguments": '{"city": "Rome", "days": 3}'}}


def test_without_tools_none_are_shown(tools: OpenAI) -> None:
    for given in ({}, {"tools": [WEATHER], "tool_choice": "none"}):
        assert ask(tools, max_completion_tokens=200, **given).choices[0].message.content == "I have no tools."


def test_tools_can_be_required(random_tools: OpenAI) -> None:
    """A model that says anything must call, and only as the schema allows; speculation changes nothing."""
    given: dict[str, Any] = {"tools": [WEATHER, ADD], "max_completion_tokens": 300, "temperature": 1.0, "seed": 3}
    named = {"type": "function", "function": {"name": "get_weather"}}
    for choice in ("required", named):
        found = ask(random_tools, tool_choice=choice, **given).choices[0]
        off = ask(random_tools, tool_choice=choice, **given, extra_body={"speculation": "off"}).choices[0]
        calls = [(call.function.name, json.loads(call.function.arguments)) for call in found.message.tool_calls]
        assert calls == [(c.function.name, json.loads(c.function.arguments)) for c in off.message.tool_calls]
        assert {name for name, _ in calls} <= ({"get_weather"} if choice == named else {"get_weather", "add"})
        assert all(given.keys() == {"city", "days"} for name, given in calls if name == "get_weather")
        stream = joined(ask(random_tools, tool_choice=choice, **given, stream=True))
        assert [(c["name"], json.loads(c["arguments"])) for c in stream["calls"].values()] == calls
    with pytest.raises(openai.BadRequestError, match="there is no tool"):
        ask(random_tools, **given, tool_choice={"type": "function", "function": {"name": "nothing"}})


def thinks(prompt: str) -> str:
    return "The fox, hm.\n</think>\n\nHello, fox!"


@pytest.fixture(scope="module")
def thinking() -> Iterator[OpenAI]:
    with live(scripted(TURNS + THINKING, thinks)) as server, client_of(server) as client:
        yield client


def test_reasoning_is_kept_apart_and_counted(thinking: OpenAI) -> None:
    found = ask(thinking, max_completion_tokens=200)
    message = found.choices[0].message
    assert (message.content, message.model_extra["reasoning_content"]) == ("Hello, fox!", "The fox, hm.")
    stream = joined(ask(thinking, max_completion_tokens=200, stream=True))
    assert (stream["content"], stream["reasoning"]) == ("Hello, fox!", "The fox, hm.")
    counted = found.usage.completion_tokens_details.reasoning_tokens
    assert 0 < counted < found.usage.completion_tokens
    cut = ask(thinking, max_completion_tokens=4)
    assert cut.choices[0].message.content == "" and cut.usage.completion_tokens_details.reasoning_tokens == 4


def test_a_schema_holds_after_the_reasoning(thinking: OpenAI) -> None:
    """The script's content breaks the schema, so the grammar takes over where the reasoning ends, and not before."""
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": [17]}}}
    found = ask(thinking, max_completion_tokens=200, response_format=form).choices[0]
    assert found.message.content == "17" and found.message.model_extra["reasoning_content"] == "The fox, hm."
