"""What a server says of itself: health, models, metrics; and its tokenizer."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, TypeVar

from fastapi import APIRouter
from starlette.requests import Request as HTTPRequest
from starlette.responses import PlainTextResponse, Response

from outpace.serve.chat.conversation import Conversation
from outpace.serve.served import Served
from outpace.serve.service import Service
from outpace.serve.surfaces.chat import template_messages
from outpace.serve.surfaces.openai_parts import tool_specs
from outpace.serve.surfaces.token_fields import DetokenizeFields, TokenizeFields
from outpace.serve.web.failures import APIFailure, bad_field, failure_of
from outpace.serve.web.replies import JSONReply

PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"
STARTED = int(time.time())
T = TypeVar("T")
info = APIRouter()


@info.get("/health")
async def health(http: HTTPRequest) -> Response:
    """Say whether the server answers requests: 200, or 503 while it starts or drains."""
    state = http.app.state.service.state
    return JSONReply({"status": state}, 200 if state == "ready" else 503)


@info.get("/metrics")
async def metrics(http: HTTPRequest) -> Response:
    """Return the metrics, for Prometheus."""
    return PlainTextResponse(http.app.state.service.metrics.text(), media_type=PROMETHEUS)


@info.get("/v1/models")
async def models(http: HTTPRequest) -> Response:
    """List the names of the model."""
    served: Served = http.app.state.service.served
    found = [_model(served, name) for name in served.settings.names]
    page = {"has_more": False, "first_id": found[0]["id"], "last_id": found[-1]["id"]}  # Anthropic's
    return JSONReply({"object": "list", "data": found, **page})


@info.get("/v1/models/{name:path}")
async def model(name: str, http: HTTPRequest) -> Response:
    """Describe the model by one of its names."""
    served: Served = http.app.state.service.served
    served.check_name(name)
    return JSONReply(_model(served, name))


@info.post("/tokenize")
async def tokenize(fields: TokenizeFields, http: HTTPRequest) -> Response:
    """Return the tokens of a text or a conversation."""
    return JSONReply(await prepared(http, lambda: _tokenized(fields, http.app.state.service.served)))


@info.post("/detokenize")
async def detokenize(fields: DetokenizeFields, http: HTTPRequest) -> Response:
    """Return the text of tokens."""
    return JSONReply(await prepared(http, lambda: _detokenized(fields, http.app.state.service.served)))


async def prepared(http: HTTPRequest, work: Callable[[], T]) -> T:
    """Run work that needs the tokenizer on a thread."""
    service: Service = http.app.state.service
    try:
        return await service.prepared(work)
    except Exception as error:
        raise failure_of(error) from error


def _model(served: Served, name: str) -> dict[str, Any]:
    """Describe the model, for OpenAI's clients and for Anthropic's."""
    return {
        "id": name,
        "object": "model",
        "created": STARTED,
        "owned_by": "outpace",
        "root": served.settings.root,
        "parent": None,
        "max_model_len": served.model.lm.max_length,
        "type": "model",
        "display_name": name,
        "created_at": datetime.fromtimestamp(STARTED, UTC).isoformat(),
        "lifecycle": "active",
        "max_input_tokens": served.model.lm.max_length,
    }


def _tokenized(fields: TokenizeFields, served: Served) -> dict[str, Any]:
    served.check_name(fields.model)
    if (fields.prompt is None) == (fields.messages is None):
        raise bad_field("prompt", "give either prompt or messages")
    if fields.messages is not None:
        conversation = Conversation(
            template_messages(fields.messages),
            tool_specs([tool.function for tool in fields.tools or []], served.settings.limits),
            continues=bool(fields.continue_final_message),
            opens=fields.add_generation_prompt is not False,
            template_values=dict(fields.chat_template_kwargs or {}),
        )
        tokens = served.chat.prompt(conversation).tokens
    else:
        special = fields.add_special_tokens is not False
        tokens = served.tokenizer.encode(fields.prompt or "", add_special_tokens=special)
    shown = [served.token_text(token) for token in tokens] if fields.return_token_strs else None
    return {
        "count": len(tokens),
        "max_model_len": served.model.lm.max_length,
        "tokens": list(tokens),
        "token_strs": shown,
    }


def _detokenized(fields: DetokenizeFields, served: Served) -> dict[str, Any]:
    served.check_name(fields.model)
    wrong = [token for token in fields.tokens if not 0 <= token < served.model.lm.vocab]
    if wrong:
        raise APIFailure(f"the vocabulary has no token {wrong[0]}", param="tokens", code="invalid_value")
    return {"prompt": served.tokenizer.decode(fields.tokens)}
