"""/v1/responses, by OpenAI's own client: whole, streamed, and continued by id."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai import OpenAI

from outpace.api.model import Model
from outpace.serve.settings import ServeLimits
from outpace.serve.surfaces.responses.store import ResponseStore, StoredResponse
from outpace.serve.web.failures import APIFailure
from tests.serving import NAME, THINKING, TOOLS, TURNS, live, scripted
from tests.tiny_tokenizers import random_model

TOOL: Any = {
    "type": "function",
    "name": "get_weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    "strict": True,
}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>'


def clients(model: Model) -> Iterator[OpenAI]:
    with live(model) as server, OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as found:
        yield found


@pytest.fixture(scope="module")
def model() -> Model:
    return random_model("tiktoken")


@pytest.fixture(scope="module")
def client(model: Model) -> Iterator[OpenAI]:
    yield from clients(model)


def test_a_reply_tells_the_settings_that_the_server_gives_by_default(model: Model) -> None:
    with live(model, sampling={"temperature": 0.25, "top_p": 0.5}) as server:
        reply = server.post("/v1/responses", {"input": "Hello", "max_output_tokens": 2, "top_p": 0.9}).json()
    assert (reply["temperature"], reply["top_p"]) == (0.25, 0.9)


def script(prompt: str) -> str:
    """Says how many turns it has seen; calls a tool if there is one and no result yet."""
    if "<tool_call>" in prompt and "tool\n" not in prompt:
        return f"Let me look.\n{CALL}"
    return f"turn {prompt.count('<|im_start|>user')}" + (" in Rome" if '"city": "Rome"' in prompt else "")


@pytest.fixture(scope="module")
def said() -> Iterator[OpenAI]:
    yield from clients(scripted(TOOLS + TURNS, script))


@pytest.fixture(scope="module")
def thinking() -> Iterator[OpenAI]:
    yield from clients(scripted(TURNS + THINKING, lambda prompt: "Hm.\n</think>\n\nHello!"))


def ask(client: OpenAI, given: Any = "Say hello.", **settings: Any) -> Any:
    usual = {"model": NAME, "input": given, "temperature": 0, "max_output_tokens": 200}
    return client.responses.create(**usual | settings)


def test_the_answer_is_that_of_the_engine(client: OpenAI, model: Model) -> None:
    chat = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Say hello."}]
    wanted = model.generate(chat, method="plain", max_tokens=20)
    found = ask(client, instructions="Be short.", max_output_tokens=20)
    assert (found.output_text, found.status, found.incomplete_details.reason) == (
        wanted.text,
        "incomplete",
        "max_output_tokens",
    )
    assert found.usage.input_tokens == wanted.prompt_tokens and found.usage.output_tokens == 20
    assert found.usage.input_tokens_details.cache_write_tokens >= 0
    given = [{"seed": 3, "speculation": wish} for wish in ("off", "auto")]
    seeded = [ask(client, temperature=1.0, extra_body=body).output_text for body in given]
    assert seeded[0] == seeded[1]


ORDER = [
    "response.created",
    "response.in_progress",
    "response.output_item.added",
    "response.content_part.added",
    "response.output_text.delta",
    "response.output_text.done",
    "response.content_part.done",
    "response.output_item.done",
    "response.completed",
]


def kinds(events: list[Any]) -> list[str]:
    """The types of events in order; repeated ones once."""
    return [event.type for i, event in enumerate(events) if i == 0 or events[i - 1].type != event.type]


def test_events_of_a_text_come_in_order(said: OpenAI) -> None:
    events = list(ask(said, stream=True))
    assert kinds(events) == ORDER
    assert [event.sequence_number for event in events] == list(range(len(events)))
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    last = events[-1].response
    assert text == last.output_text == "turn 1" and last.status == "completed"
    items = {event.item_id for event in events if hasattr(event, "item_id")}
    assert items == {last.output[0].id}
    with said.responses.stream(model=NAME, input="Say hello.", temperature=0) as stream:
        assert stream.get_final_response().output_text == "turn 1"


def test_a_call_is_streamed_as_an_item_of_its_own(said: OpenAI) -> None:
    events = list(ask(said, tools=[TOOL], stream=True))
    assert kinds(events) == [
        *ORDER[:-1],
        "response.output_item.added",
        "response.function_call_arguments.delta",
        "response.function_call_arguments.done",
        "response.output_item.done",
        "response.completed",
    ]
    message, call = events[-1].response.output
    assert (message.content[0].text, call.name, json.loads(call.arguments)) == (
        "Let me look.",
        "get_weather",
        {"city": "Rome"},
    )
    deltas = "".join(e.delta for e in events if e.type == "response.function_call_arguments.delta")
    assert deltas == call.arguments
    assert [e.output_index for e in events if e.type == "response.output_item.added"] == [0, 1]


def test_a_conversation_goes_on_by_id_and_with_results_of_tools(said: OpenAI) -> None:
    first = ask(said, tools=[TOOL])
    call = next(item for item in first.output if item.type == "function_call")
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "21 degrees"}
    second = ask(said, [result], previous_response_id=first.id, tools=[TOOL])
    assert second.output_text == "turn 1 in Rome" and second.previous_response_id == first.id
    assert ask(said, "And now?", previous_response_id=second.id).output_text == "turn 2 in Rome"
    items = [
        {"role": "user", "content": "Say hello."},
        *[i.model_dump(exclude_none=True) for i in first.output],
        result,
    ]
    assert ask(said, items, tools=[TOOL]).output_text == "turn 1 in Rome"
    parts = [{"role": "user", "content": [{"type": "input_text", "text": "Hi"}]}, {"role": "user", "content": "there"}]
    assert ask(said, parts).output_text == "turn 2"


def test_stored_replies_are_kept_and_deleted(said: OpenAI) -> None:
    first = ask(said, metadata={"topic": "x"})
    again = said.responses.retrieve(first.id)
    assert again.output_text == first.output_text and again.metadata == {"topic": "x"}
    said.responses.delete(first.id)
    for lost in (first.id, ask(said, store=False).id):
        with pytest.raises(openai.NotFoundError):
            said.responses.retrieve(lost)
        with pytest.raises(openai.NotFoundError):
            ask(said, previous_response_id=lost)


def test_reasoning_is_an_item_of_its_own(thinking: OpenAI) -> None:
    found = ask(thinking)
    assert [item.type for item in found.output] == ["reasoning", "message"]
    assert (found.output[0].content[0].text, found.output_text) == ("Hm.", "Hello!")
    assert found.usage.output_tokens_details.reasoning_tokens > 0
    events = list(ask(thinking, stream=True))
    assert kinds(events)[2:6] == [
        "response.output_item.added",
        "response.content_part.added",
        "response.reasoning_text.delta",
        "response.reasoning_text.done",
    ]
    assert events[-1].response.output_text == "Hello!"


def test_logprobs_are_included_on_request(client: OpenAI) -> None:
    given: dict[str, Any] = {"include": ["message.output_text.logprobs"], "top_logprobs": 2, "max_output_tokens": 12}
    whole = ask(client, **given).output[0].content[0]
    assert len(whole.logprobs) == 12 and all(len(entry.top_logprobs) == 2 for entry in whole.logprobs)
    events = list(ask(client, **given, stream=True))
    deltas = [entry for e in events if e.type == "response.output_text.delta" for entry in e.logprobs]
    assert [entry.logprob for entry in deltas] == [entry.logprob for entry in whole.logprobs]
    assert len(events[-1].response.output[0].content[0].logprobs) == 12
    assert ask(client, max_output_tokens=4).output[0].content[0].logprobs == []


def test_a_schema_is_followed(client: OpenAI) -> None:
    form = {"type": "json_schema", "name": "x", "schema": {"enum": ["a", "b"]}, "strict": True}
    assert json.loads(ask(client, text={"format": form}).output_text) in ("a", "b")


@pytest.mark.parametrize(
    "given",
    [
        {"background": True},
        {"truncation": "auto"},
        {"input": [{"type": "item_reference", "id": "x"}]},
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
        {"tools": [{"type": "web_search"}]},
        {"conversation": "conv_1"},
        {"max_output_tokens": 0},
    ],
    ids=str,
)
def test_what_is_not_supported_is_refused(client: OpenAI, given: dict[str, Any]) -> None:
    with pytest.raises(openai.BadRequestError):
        ask(client, **given)


def test_the_store_is_bounded_in_number_and_size() -> None:
    def reply(size: int, owner: str | None = None) -> StoredResponse:
        return StoredResponse(owner, {"text": "x" * size}, [])

    store = ResponseStore(ServeLimits(stored=2, stored_bytes=1000))
    store.add("a", reply(10))
    store.add("b", reply(10))
    store.get("a", None)
    store.add("c", reply(10))  # the one used longest ago makes room
    assert store.get("a", None) and store.get("c", None)
    store.add("d", reply(980))
    for lost in ("a", "b", "c"):
        with pytest.raises(APIFailure, match="no response"):
            store.get(lost, None)
    store.add("mine", reply(1, "me"))
    assert store.get("mine", "me").owner == "me"
    for other in (None, "you"):
        with pytest.raises(APIFailure):
            store.get("mine", other)
