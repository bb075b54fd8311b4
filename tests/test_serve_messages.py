"""/v1/messages, by Anthropic's own client: whole, streamed, with tools and reasoning."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import pytest
from anthropic import Anthropic

from outpace.api.model import Model
from tests.serving import NAME, THINKING, TOOLS, TURNS, live, scripted
from tests.tiny_tokenizers import random_model

HELLO: Any = [{"role": "user", "content": "Say hello."}]
TOOL: Any = {
    "name": "get_weather",
    "description": "The weather of a city",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"enum": ["Rome"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "cache_control": {"type": "ephemeral"},
}
GREEDY = {"temperature": 0}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>'


def clients(model: Model) -> Iterator[Anthropic]:
    with live(model) as server, Anthropic(base_url=server.url, api_key="none", max_retries=0) as found:
        yield found


@pytest.fixture(scope="module")
def model() -> Model:
    return random_model("tiktoken")


@pytest.fixture(scope="module")
def client(model: Model) -> Iterator[Anthropic]:
    yield from clients(model)


def script(prompt: str) -> str:
    if "tool\n21" in prompt:
        return "It has 21 degrees."
    return f"Let me look.\n{CALL}" if "<tool_call>" in prompt else "Hello, END of it"


@pytest.fixture(scope="module")
def said() -> Iterator[Anthropic]:
    yield from clients(scripted(TOOLS + TURNS, script))


@pytest.fixture(scope="module")
def thinking() -> Iterator[Anthropic]:
    yield from clients(scripted(TURNS + THINKING, lambda prompt: "Hm.\n</think>\n\nHello!"))


def ask(client: Anthropic, **settings: Any) -> Any:
    given: dict[str, Any] = {"model": NAME, "messages": HELLO, "max_tokens": 200, **settings}
    given["extra_body"] = {"temperature": 0, **given.get("extra_body", {})}
    return client.messages.create(**given)


def test_the_answer_is_that_of_the_engine(client: Anthropic, model: Model) -> None:
    chat = [{"role": "system", "content": "Be short."}, *HELLO]
    wanted = model.generate(chat, method="plain", max_tokens=20)
    system: Any = [{"type": "text", "text": "Be short.", "cache_control": {"type": "ephemeral"}}]
    found = ask(client, system=system, max_tokens=20)
    assert found.content[0].text == wanted.text and found.stop_reason == "max_tokens"
    usage = found.usage
    assert usage.input_tokens + usage.cache_read_input_tokens == wanted.prompt_tokens and usage.output_tokens == 20
    seeded = [
        ask(client, max_tokens=20, extra_body={"temperature": 1.0, "seed": 3, "speculation": wish}).content[0].text
        for wish in ("off", "auto", "recycling")
    ]
    assert len(set(seeded)) == 1


def test_events_of_a_text_come_in_order(said: Anthropic) -> None:
    events = list(ask(said, stream=True))
    kinds = [event.type for i, event in enumerate(events) if i == 0 or events[i - 1].type != event.type]
    assert [kind for kind in kinds if kind != "ping"] == [
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    with said.messages.stream(model=NAME, messages=HELLO, max_tokens=50, extra_body=GREEDY) as stream:
        assert "".join(stream.text_stream) == "Hello, END of it"
        final = stream.get_final_message()
    assert (final.stop_reason, final.content[0].text) == ("end_turn", "Hello, END of it")  # type: ignore[union-attr]
    assert final.usage.output_tokens > 4


def test_a_stop_sequence_is_named(said: Anthropic) -> None:
    for found in (
        ask(said, stop_sequences=["NOT", "END"]),
        next(e for e in ask(said, stop_sequences=["END"], stream=True) if e.type == "message_delta").delta,
    ):
        assert (found.stop_reason, found.stop_sequence) == ("stop_sequence", "END")


def test_tools_are_used_and_their_results_read(said: Anthropic) -> None:
    first = ask(said, tools=[TOOL])
    text, call = first.content
    assert (text.text, call.name, call.input, first.stop_reason) == (
        "Let me look.",
        "get_weather",
        {"city": "Rome"},
        "tool_use",
    )
    result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "21"}]}
    messages = [*HELLO, {"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
    assert ask(said, messages=messages, tools=[TOOL]).content[0].text == "It has 21 degrees."
    with said.messages.stream(model=NAME, messages=HELLO, max_tokens=200, tools=[TOOL], extra_body=GREEDY) as stream:
        final: Any = stream.get_final_message()
    assert (final.content[1].input, final.stop_reason) == ({"city": "Rome"}, "tool_use")
    assert ask(said, tools=[TOOL], tool_choice={"type": "none"}).content[0].text.startswith("Hello")
    forced = ask(said, tools=[TOOL], tool_choice={"type": "tool", "name": "get_weather"})
    assert [block.type for block in forced.content] == ["tool_use"] and forced.content[0].input == {"city": "Rome"}


def test_reasoning_is_a_block_of_its_own(thinking: Anthropic) -> None:
    found = ask(thinking)
    assert (found.content[0].thinking, found.content[1].text) == ("Hm.", "Hello!")
    with thinking.messages.stream(model=NAME, messages=HELLO, max_tokens=200, extra_body=GREEDY) as stream:
        final: Any = stream.get_final_message()
    assert (final.content[0].thinking, final.content[1].text) == ("Hm.", "Hello!")
    again = ask(thinking, messages=[*HELLO, {"role": "assistant", "content": found.content}, *HELLO])
    assert again.content[1].text == "Hello!"


def test_a_prefilled_answer_is_continued(client: Anthropic, model: Model) -> None:
    messages: Any = [*HELLO, {"role": "assistant", "content": "Hello, the"}]
    tokenizer: Any = model.tokenizer
    start = tokenizer.apply_chat_template(messages, continue_final_message=True, tokenize=False)
    prompt = tokenizer.encode(start, add_special_tokens=False)
    assert ask(client, messages=messages, max_tokens=20).content[0].text == model.generate(prompt, max_tokens=20).text


def test_tokens_are_counted_without_an_answer(client: Anthropic) -> None:
    counted = client.messages.count_tokens(model=NAME, messages=HELLO, system="Be short.").input_tokens
    usage = ask(client, system="Be short.", max_tokens=1).usage
    assert counted == usage.input_tokens + usage.cache_read_input_tokens


def test_errors_have_the_shape_of_this_api(client: Anthropic) -> None:
    image: Any = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "x"}}
    with pytest.raises(anthropic.BadRequestError, match="not supported") as caught:
        ask(client, messages=[{"role": "user", "content": [image]}])
    assert caught.value.body["error"]["type"] == "invalid_request_error"  # type: ignore[index,call-overload]
    with pytest.raises(anthropic.BadRequestError, match="unknown field 'colour'"):
        ask(client, extra_body={"colour": 1})
    with pytest.raises(anthropic.NotFoundError):
        ask(client, model="claude-6")
    with pytest.raises(anthropic.BadRequestError, match="tools"):
        ask(client, tools=[{"type": "web_search_20250305", "name": "web_search"}])
