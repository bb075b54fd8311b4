"""The routes of all APIs."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request as HTTPRequest
from starlette.responses import Response

from outpace.serve.settings import ServeLimits
from outpace.serve.surfaces.chat import ChatSurface
from outpace.serve.surfaces.chat_fields import ChatFields
from outpace.serve.surfaces.completion_fields import CompletionFields
from outpace.serve.surfaces.completions import CompletionSurface
from outpace.serve.surfaces.info import prepared
from outpace.serve.surfaces.messages.fields import CountFields, MessageFields
from outpace.serve.surfaces.messages.surface import MessageSurface, conversation_of
from outpace.serve.surfaces.responses.fields import ResponseFields
from outpace.serve.surfaces.responses.surface import ResponseSurface
from outpace.serve.surfaces.surface import answer
from outpace.serve.web.replies import JSONReply


def routes(limits: ServeLimits) -> APIRouter:
    """Return the routes of one server."""
    router = APIRouter()
    chat, completions, messages = ChatSurface(), CompletionSurface(), MessageSurface()
    responses = ResponseSurface(limits)

    @router.post("/v1/chat/completions")
    async def chat_completions(fields: ChatFields, http: HTTPRequest) -> Response:
        """Answer a chat, in OpenAI's shape."""
        return await answer(chat, fields, http)

    @router.post("/v1/completions")
    async def text_completions(fields: CompletionFields, http: HTTPRequest) -> Response:
        """Continue plain text, in OpenAI's shape."""
        return await answer(completions, fields, http)

    @router.post("/v1/responses")
    async def create_response(fields: ResponseFields, http: HTTPRequest) -> Response:
        """Answer a conversation that may be continued by the id of the reply, in OpenAI's shape."""
        return await answer(responses, fields, http)

    @router.get("/v1/responses/{id}")
    async def get_response(id: str, http: HTTPRequest) -> Response:
        """Return a stored reply."""
        return JSONReply(responses.store.get(id, http.scope.get("owner")).body)

    @router.delete("/v1/responses/{id}")
    async def delete_response(id: str, http: HTTPRequest) -> Response:
        """Forget a stored reply."""
        responses.store.remove(id, http.scope.get("owner"))
        return JSONReply({"id": id, "object": "response", "deleted": True})

    @router.post("/v1/messages")
    async def create_message(fields: MessageFields, http: HTTPRequest) -> Response:
        """Answer a conversation, in Anthropic's shape."""
        return await answer(messages, fields, http)

    @router.post("/v1/messages/count_tokens")
    async def count_tokens(fields: CountFields, http: HTTPRequest) -> Response:
        """Count the tokens of a conversation's prompt."""

        def count() -> int:
            served = http.app.state.service.served
            served.check_name(fields.model)
            return len(served.chat.prompt(conversation_of(fields, limits)).tokens)

        return JSONReply({"input_tokens": await prepared(http, count)})

    return router
