"""What the soak asks: requests of all four APIs whose answers are known, because the Python API has computed them.

The references come from `generate` with the method `plain`, in another process than the server's and before it starts.
So an answer that differs shows an error of batching, speculation, caching, streaming or translation.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

from soak_server import KEYS, NAME, with_tools

from outpace.api.model import Model
from outpace.api.request import Request

CHAT, COMPLETIONS, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
LENGTH = {CHAT: "max_completion_tokens", RESPONSES: "max_output_tokens"}  # the name of `max_tokens`
TOPICS = ("the fox", "a dog", "rain", "the sea", "12,345 stars", "an old clock", "the café", "the city of Rome")
SPECULATION: tuple[Any, ...] = (
    None, "off", "auto", "suffix", "ngram", "recycling", "lookahead", {"method": "suffix", "options": {"depth": 8}},
)  # fmt: skip
SAMPLING: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"temperature": 1.0},
    {"temperature": 0.8, "top_p": 0.9},
    {"temperature": 0.9, "top_k": 40, "min_p": 0.02},
    {"temperature": 1.1, "repetition_penalty": 1.15},
    {"temperature": 0.7, "presence_penalty": 0.5, "frequency_penalty": 0.3},
    {"temperature": 1.0, "typical_p": 0.9},
    {"temperature": 0.9, "logit_bias": {"70": 2.0}},
    {"temperature": 0, "min_tokens": 8},
    {"temperature": 0.8, "bad_words": ["the"]},
    {"temperature": 0.6, "ignore_eos": True},
)
REGEX, CHOICES = "(fox|dog| )+", ["a red fox", "a grey dog"]
GRAMMAR = 'start: word (" " word)*\nword: "fox" | "dog" | "clock"\n'
SCHEMA = {
    "type": "object",
    "properties": {"count": {"enum": [1, 2, 3]}, "ok": {"type": "boolean"}},
    "required": ["count", "ok"],
    "additionalProperties": False,
}
# The field of a request, and what it is in Python.
RULES: tuple[tuple[dict[str, Any], dict[str, Any]], ...] = (
    ({"structured_outputs": {"regex": REGEX}}, {"regex": REGEX}),
    ({"structured_outputs": {"choice": CHOICES}}, {"regex": "|".join(map(re.escape, CHOICES))}),
    ({"structured_outputs": {"grammar": GRAMMAR}}, {"grammar": GRAMMAR}),
    ({"structured_outputs": {"json": SCHEMA}}, {"json_schema": SCHEMA}),
)
CITIES = ("Rome", "Oslo", "Lima")
TOOL = {"name": "weather", "description": "The weather.", "parameters": {
    "type": "object", "properties": {"city": {"enum": list(CITIES)}}, "required": ["city"],
    "additionalProperties": False,
}}  # fmt: skip
TOOL_FIELDS: dict[str, dict[str, Any]] = {
    CHAT: {"tools": [{"type": "function", "function": TOOL}], "tool_choice": "required", "parallel_tool_calls": False},
    RESPONSES: {"tools": [{"type": "function", **TOOL}], "tool_choice": "required", "parallel_tool_calls": False},
    MESSAGES: {
        "tools": [{"name": TOOL["name"], "description": TOOL["description"], "input_schema": TOOL["parameters"]}],
        "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
    },
}
CALL = rf'<tool_call>\n\{{"name": "weather", "arguments": (\{{"city": "(?:{"|".join(CITIES)})"\}})\}}\n</tool_call>'


@dataclass(frozen=True)
class Ask:
    """A request, and the texts of its answers. Of a tool call, the text is its name and its arguments."""

    path: str
    owner: str
    body: dict[str, Any]
    prompt: Any  # of the reference
    settings: dict[str, Any]  # of the reference
    before: Ask | None = None  # the response that it continues
    texts: tuple[str, ...] = ()


@dataclass
class Planner:
    """Draws requests."""

    model: Model
    random: Random
    tokens: int  # of an answer, about
    long: int  # words of a long prompt
    drawn: int = field(default=0)

    def draw(self) -> Ask:
        """Return the next request. Kinds take turns, so that a small plan has each; what they ask for is drawn."""
        kind, self.drawn = self.drawn, self.drawn + 1
        path = (CHAT, COMPLETIONS, RESPONSES, MESSAGES)[kind % 4]
        form = ("text", "rule", "text", "tool", "text", "prediction", "several", "long", "stop")[kind // 4 % 9]
        settings = {**self.random.choice(SAMPLING), "seed": self.random.randrange(1000)}
        settings["max_tokens"] = self.tokens // 2 + self.random.randrange(self.tokens)
        words = self.long if form == "long" else 6
        text = " ".join(f"{self.random.randrange(99)} {self.random.choice(TOPICS)}" for _ in range(words))
        if form == "tool" and path != COMPLETIONS:
            return self._tool(path, text, settings)
        fields: dict[str, Any] = {}
        if form == "rule":
            fields, rule = self.random.choice(RULES)
            settings |= rule
        elif form == "prediction":
            fields = {"prediction": {"type": "content", "content": text}}
        elif form == "several" and path in (CHAT, COMPLETIONS):
            fields = {"n": 3}
            settings |= fields
        elif form == "stop":
            stop = ["e", " f", "\n\n"]
            fields = {"stop_sequences" if path == MESSAGES else "stop": stop}
            settings |= {"stop": stop}
        return self._ask(path, text, settings, fields)

    def continued(self, first: Ask) -> Ask:
        """Return a request that continues a response."""
        settings = {"temperature": 0.8, "seed": self.random.randrange(1000), "max_tokens": self.tokens}
        ask = self._ask(RESPONSES, "Go on.", settings, {})
        prompt = [*first.prompt, {"role": "assistant", "content": first.texts[0]}, *ask.prompt]
        return replace(ask, prompt=prompt, before=first, owner=first.owner)

    def _ask(self, path: str, text: str, settings: dict[str, Any], fields: dict[str, Any]) -> Ask:
        own = {name: value for name, value in settings.items() if name not in PYTHON_ONLY}
        speculation = self.random.choice(SPECULATION)
        body = {"model": NAME, **own, **fields, **({} if speculation is None else {"speculation": speculation})}
        body[LENGTH.get(path, "max_tokens")] = body.pop("max_tokens")
        turns = [{"role": "user", "content": text}]
        body |= {"prompt": text} if path == COMPLETIONS else {"input": text} if path == RESPONSES else {}
        body |= {"messages": turns} if path in (CHAT, MESSAGES) else {}
        owner = self.random.choice(list(KEYS))
        return Ask(path, owner, body, text if path == COMPLETIONS else turns, settings)

    def _tool(self, path: str, text: str, settings: dict[str, Any]) -> Ask:
        ask = self._ask(path, text, {**settings, "max_tokens": 200, "min_tokens": 0}, TOOL_FIELDS[path])
        tokenizer: Any = self.model.tokenizer
        tools = [{"type": "function", "function": TOOL}]
        rendered = tokenizer.apply_chat_template(ask.prompt, tools=tools, add_generation_prompt=True, tokenize=False)
        tokens = tokenizer.encode(rendered, add_special_tokens=False)
        return replace(ask, prompt=tokens, settings=ask.settings | {"regex": CALL.replace("(?:", "(")})


PYTHON_ONLY = ("regex", "grammar", "json_schema", "stop", "n")  # fields name these themselves


def plan(model: Model, seed: int, count: int, tokens: int, long: int) -> list[Ask]:
    """Return requests with their answers."""
    planner = Planner(with_tools(model), Random(seed), tokens, long)
    asks = answered(model, [planner.draw() for _ in range(count)])
    responses = [ask for ask in asks if ask.path == RESPONSES and "tools" not in ask.body]
    return asks + answered(model, [planner.continued(ask) for ask in responses[: max(1, count // 12)]])


def answered(model: Model, asks: list[Ask]) -> list[Ask]:
    """Compute the answers."""
    requests = [Request.from_keywords(ask.prompt, {**ask.settings, "method": "plain"}) for ask in asks]
    done = iter(model.generate(requests))
    out = []
    for ask in asks:
        found = [next(done) for _ in range(ask.settings.get("n", 1))]
        assert all(each.error is None for each in found), found
        out.append(replace(ask, texts=tuple(_text(ask, each.text) for each in found)))
    return out


def _text(ask: Ask, text: str) -> str:
    if "tools" not in ask.body:
        return text
    call = re.fullmatch(CALL, text)
    assert call is not None, text
    return f"{TOOL['name']}{call[1]}"
