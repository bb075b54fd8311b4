"""Replies are read the same way however their text is cut into pieces: reasoning, content, tool calls."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from outpace.serve.chat.json_reader import CallReader
from outpace.serve.chat.output import OutputReader, TextReading
from outpace.serve.chat.parts import Output
from outpace.serve.chat.reasoning import MARKS, marks_of
from outpace.serve.chat.tool_formats import TOOL_FORMATS, format_of

NAMES = frozenset({"get_weather", "add"})
ARGUMENTS = {"city": 'São "Paulo" {x}', "days": [1, {"a": "]"}], "none": None, "deep": {"b": {"c": "\\"}}}
CALL = {"name": "get_weather", "arguments": ARGUMENTS}
OTHER = {"name": "add", "arguments": {}}
Calls = list[tuple[str, Any]]


def read(reading: TextReading, pieces: list[str]) -> Output:
    reader, output = OutputReader(reading), Output()
    for piece in pieces:
        output.parts += reader.push(piece)
    output.parts += reader.finish()
    return output


def cuts(text: str, seed: int) -> list[str]:
    """The text in pieces of a few characters, differently for each seed; the first seeds are all at once and singly."""
    if seed < 2:
        return [text] if seed == 0 else list(text)
    chance, pieces = random.Random(seed), list[str]()
    while text:
        length = chance.randint(1, 12)
        pieces.append(text[:length])
        text = text[length:]
    return pieces


def calls_of(output: Output) -> Calls:
    return [(call.name, json.loads(call.arguments)) for call in output.calls]


WEATHER, ADD = ("get_weather", ARGUMENTS), ("add", {})
LLAMA = json.dumps({"name": "get_weather", "parameters": ARGUMENTS})
# Format, text, content, calls.
REPLIES: dict[str, tuple[str, str, str, Calls]] = {
    "one": ("hermes", f"<tool_call>\n{json.dumps(CALL)}\n</tool_call>", "", [WEATHER]),
    "after content": (
        "hermes",
        f"Let me see.\n<tool_call>\n{json.dumps(CALL)}\n</tool_call>",
        "Let me see.",
        [WEATHER],
    ),
    "two": (
        "hermes",
        f"<tool_call>{json.dumps(CALL)}</tool_call>\n<tool_call>\n{json.dumps(OTHER)}</tool_call>\n",
        "",
        [WEATHER, ADD],
    ),
    "arguments first": (
        "hermes",
        f'<tool_call>{{"id": 1, "arguments": {json.dumps(ARGUMENTS)} , "name":"get_weather"}}</tool_call>',
        "",
        [WEATHER],
    ),
    "arguments as a string": (
        "hermes",
        f'<tool_call>{{"name": "get_weather", "arguments": {json.dumps(json.dumps(ARGUMENTS))}}}</tool_call>',
        "",
        [WEATHER],
    ),
    "no arguments": ("hermes", '<tool_call>{"name": "add"}</tool_call>', "", [ADD]),
    "cut off": ("hermes", '<tool_call>{"name": "add", "arguments": {}}\n</tool_', "", [ADD]),
    "no call": ("hermes", "a <tool_ c < d <tool_call", "a <tool_ c < d <tool_call", []),
    "broken": ("hermes", "so <tool_call>nothing</tool_call>!", "so <tool_call>nothing</tool_call>!", []),
    "unfinished name": ("hermes", '<tool_call>{"name": "get', '<tool_call>{"name": "get', []),
    "llama": ("llama3", LLAMA, "", [WEATHER]),
    "llama with a tag": ("llama3", f"<|python_tag|>{LLAMA}", "", [WEATHER]),
    "llama, two": ("llama3", f'{LLAMA}; {{"name": "add", "parameters": {{}}}}', "", [WEATHER, ADD]),
    "llama, other JSON": ("llama3", '{"name": "Bob", "age": 3} is here', '{"name": "Bob", "age": 3} is here', []),
    "llama, text": ("llama3", "  Hello {there}", "  Hello {there}", []),
    "mistral, list": ("mistral_list", f"[TOOL_CALLS] [{json.dumps(CALL)}, {json.dumps(OTHER)}]", "", [WEATHER, ADD]),
    "mistral": (
        "mistral",
        f"Sure.[TOOL_CALLS]get_weather[ARGS]{json.dumps(ARGUMENTS)}[TOOL_CALLS]add[CALL_ID]abc[ARGS]{{}}",
        "Sure.",
        [WEATHER, ADD],
    ),
    "mistral, text": ("mistral", "[1, 2] [TOOL", "[1, 2] [TOOL", []),
}


@pytest.mark.parametrize("name", REPLIES)
def test_calls_are_found_in_any_pieces(name: str) -> None:
    form, text, content, calls = REPLIES[name]
    for seed in range(30):
        output = read(TextReading(tools=TOOL_FORMATS[form], names=NAMES), cuts(text, seed))
        assert (output.content, calls_of(output)) == (content, calls)
        assert len({call.id for call in output.calls}) == len(calls)


@pytest.mark.parametrize("marks", MARKS)
@pytest.mark.parametrize("inside", [False, True])
def test_reasoning_is_split_off_in_any_pieces(marks: Any, inside: bool) -> None:
    thought, said = "Hm, 1 < 2\n\nand </th[/TH so.", "It is <b>so</b>.\n"
    text = ("" if inside else f" {marks.open}") + f"\n{thought}\n{marks.close}\n\n{said}"
    for seed in range(30):
        output = read(TextReading(marks, inside), cuts(text, seed))
        assert (output.reasoning, output.content) == (thought, said)


def test_text_without_reasoning_is_content() -> None:
    for text in (" <thin air", "<", "", "Hello", "  "):
        for seed in range(10):
            output = read(TextReading(MARKS[0]), cuts(text, seed))
            assert (output.reasoning, output.content) == ("", text)


def test_reasoning_that_is_cut_off_is_no_content() -> None:
    for seed in range(10):
        output = read(TextReading(MARKS[0], True), cuts("so far\nand </thi", seed))
        assert (output.reasoning, output.content) == ("so far\nand </thi", "")


def test_a_call_after_reasoning() -> None:
    text = f"<think>I need\n</think>\n\nOk <tool_call>\n{json.dumps(CALL)}\n</tool_call>"
    for seed in range(30):
        reading = TextReading(MARKS[0], False, TOOL_FORMATS["hermes"], NAMES)
        output = read(reading, cuts(text, seed))
        assert (output.reasoning, output.content, calls_of(output)) == ("I need", "Ok", [WEATHER])


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=100, deadline=None)
@given(st.dictionaries(st.text(max_size=4), JSON, max_size=3), st.sampled_from([None, 2]), st.integers(1, 7))
def test_any_arguments_are_read(arguments: dict[str, Any], indent: int | None, size: int) -> None:
    text = json.dumps({"x": 1.5, "name": "f", "arguments": arguments, "y": [arguments]}, indent=indent) + " after"
    reader, rest, taken = CallReader(), "", ""
    for at in range(0, len(text), size):
        rest += reader.push(text[at : at + size])
        taken += reader.take_arguments()
    assert reader.done and not reader.broken and reader.name == "f"
    assert json.loads(taken) == arguments and rest == " after"


@pytest.mark.parametrize("text", ["[1]", '{"name" 1}', '{"name": nope}', "{1: 2}", '{"arguments": {}}', "x"])
def test_what_is_no_call_is_broken(text: str) -> None:
    reader = CallReader()
    reader.push(text)
    assert reader.broken


def test_formats_are_recognised_by_what_templates_show() -> None:
    shown = {
        "hermes": 'return a json object within <tool_call></tool_call> XML tags:\n<tool_call>\n{"name": ...',
        "llama3": 'Respond in the format {"name": function name, "parameters": dictionary of argument name',
        "mistral": "{{- '[TOOL_CALLS]' + tool_call.function.name + '[ARGS]' }}",
        "mistral_list": "{{- '[TOOL_CALLS] [' }}",
    }
    for name, template in shown.items():
        found = format_of(template)
        assert found is not None and found.name == name
    assert format_of("<tool_call>\n<function=example") is None and format_of("") is None
    assert format_of("", "hermes") is TOOL_FORMATS["hermes"]
    assert marks_of("... </think> ...") == MARKS[0] and marks_of("none") is None
    assert len(TOOL_FORMATS["mistral"].new_id()) == 9
