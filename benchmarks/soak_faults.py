"""Requests of the soak that must be refused, and requests that must fail."""

from __future__ import annotations

import json
from random import Random
from typing import Any, NamedTuple

from soak_plan import CHAT, COMPLETIONS, MESSAGES, Ask
from soak_server import BROKEN_DRAFTER, BROKEN_PROCESSOR, NAME

TYPE = {"Content-Type": "application/json"}
HUGE = bytes(9 * 2**20)  # a body may have 8 MiB
OTHER_THING = {"a": 1}
# Fields that no request may have so.
WRONG_FIELDS: tuple[dict[str, Any], ...] = (
    {"no_such_field": 1},
    {"temperature": "hot"},
    {"temperature": -1},
    {"top_p": 7},
    {"seed": 1.5},
    {"seed": 10**30},
    {"stream": "maybe"},
    {"logit_bias": [1, 2]},
    {"logit_bias": {"fox": 1}},
    {"logit_bias": {"99999999": 1}},
    {"stop_token_ids": [-5]},
    {"bad_words": [OTHER_THING]},
    {"speculation": "telepathy"},
    {"speculation": {"method": "suffix", "options": {"depth": 10**6}}},
    {"structured_outputs": {"regex": "("}},
    {"structured_outputs": {"grammar": "start: nothing"}},
    {"structured_outputs": {"regex": "a", "json_object": True}},
    {"timeout": 0},
    {"model": OTHER_THING},
)


class BadRequest(NamedTuple):
    """A request, and the status that it must get."""

    name: str
    status: int
    content: bytes
    path: str = CHAT
    headers: dict[str, str] = TYPE
    verb: str = "POST"


def bad_request(random: Random, ask: Ask) -> BadRequest:
    """Draw a request that cannot be answered."""
    sound = json.dumps(ask.body).encode()
    cut = random.randrange(1, len(sound))
    wrong = random.choice(WRONG_FIELDS)
    chat = {"model": NAME, "messages": [{"role": "user", "content": "x"}]}
    return random.choice(
        (
            BadRequest("broken JSON", 400, sound[:cut], ask.path),
            BadRequest("no JSON", 400, random.randbytes(40), ask.path),
            BadRequest("invalid UTF-8", 400, sound.replace(b'"model"', b'"mod\xffl"'), ask.path),
            BadRequest("half a surrogate pair", 400, json.dumps({**chat, "user": "\ud800"}).encode()),
            BadRequest("deep", 400, b"[" * 50_000, ask.path),
            BadRequest("huge", 413, HUGE, ask.path),
            BadRequest("long number", 400, b'{"seed": ' + b"9" * 5000 + b"}", ask.path),
            BadRequest(f"wrong field {wrong}", 400, json.dumps({**ask.body, **wrong}).encode(), ask.path),
            BadRequest("too many answers", 400, json.dumps({**chat, "n": 99}).encode()),
            BadRequest("no messages", 400, json.dumps({**chat, "messages": []}).encode()),
            BadRequest("unknown model", 404, json.dumps({**ask.body, "model": "gpt-9"}).encode(), ask.path),
            BadRequest("token that is not there", 400, b'{"prompt": [99999999]}', COMPLETIONS),
            BadRequest("too long a prompt", 400, b'{"prompt": [%s1]}' % (b"1," * 200_000), COMPLETIONS),
            BadRequest("no length", 400, b'{"messages": [{"role": "user", "content": "x"}]}', MESSAGES),
            BadRequest("unknown path", 404, b"{}", "/v1/embeddings"),
            BadRequest("wrong verb", 405, b"", ask.path, verb="PUT"),
            BadRequest("wrong key", 401, sound, ask.path, TYPE | {"Authorization": "Bearer nobody"}),
            BadRequest("wrong host", 403, sound, ask.path, TYPE | {"Host": "evil.example"}),
            BadRequest("unknown response", 404, b'{"input": "x", "previous_response_id": "resp_0"}', "/v1/responses"),
        )
    )


def failing_body(random: Random, stream: bool) -> dict[str, Any]:
    """Draw a chat that fails in the middle of its answer."""
    seed = random.choice((BROKEN_PROCESSOR, BROKEN_DRAFTER))
    return {
        "model": NAME, "messages": [{"role": "user", "content": "Fail."}], "seed": seed, "stream": stream,
        "ignore_eos": True, "max_completion_tokens": 40,
    }  # fmt: skip
