"""chat_job: the job of a conversation, the same for all APIs that have conversations."""

from __future__ import annotations

from typing import Any

from outpace.api.request import Request
from outpace.serve.chat.conversation import Conversation
from outpace.serve.jobs.job import Job
from outpace.serve.surfaces.engine_fields import EngineFields, request_settings
from outpace.serve.surfaces.surface import Exchange
from outpace.serve.web.failures import bad_field


def chat_job(exchange: Exchange[Any], conversation: Conversation, given: dict[str, Any]) -> Job:
    """Return the job of a conversation; `given` are further keywords of its request, where None means the default."""
    fields: EngineFields = exchange.fields
    served = exchange.served
    served.check_name(fields.model)
    if len(conversation.messages) > served.settings.limits.messages:
        raise bad_field("messages", f"more than {served.settings.limits.messages} messages")
    if conversation.tool_use.mode == "required" and not conversation.tools:
        raise bad_field("tool_choice", "there are no tools to call")
    prompt = served.chat.prompt(conversation)
    room = served.room(len(prompt.tokens))
    known = {name: value for name, value in given.items() if value is not None}
    settings = {**request_settings(fields, served), **prompt.fields, **known}
    settings["max_tokens"] = min(known.get("max_tokens", room), room)
    request = Request.from_keywords(prompt.tokens, settings)
    return Job([request], prompt.reading, bool(fields.stream), [prompt.text], conversation)
