"""Requests that are made up from the OpenAPI document never break a server, and errors have the shape of the API."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode

from outpace.serve.settings import ServeLimits
from tests.serving import NAME, PATIENCE, Live, live, until
from tests.tiny_tokenizers import random_model

READ = ("/health", "/metrics", "/v1/models", "/v1/models/{name}", "/v1/responses/{id}")
SENT = (
    "/detokenize",
    "/tokenize",
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/responses",
)
LIKE, UNLIKE = GenerationMode.POSITIVE, GenerationMode.NEGATIVE  # as the document says, or not
EXAMPLES = int(os.environ.get("OUTPACE_FUZZ_EXAMPLES", "6"))  # of each


@pytest.fixture(scope="module")
def server() -> Iterator[Live]:
    with live(random_model("tiktoken"), limits=ServeLimits(max_tokens=3, seconds=5.0)) as found:
        yield found
        until(lambda: found.idle)
        chat = {"messages": [{"role": "user", "content": "Hello"}], "model": NAME}
        assert found.post("/v1/chat/completions", chat).status_code == 200


@pytest.fixture(scope="module")
def api(server: Live) -> Any:
    return schemathesis.openapi.from_url(f"{server.url}/openapi.json")


def test_every_path_is_documented(api: Any) -> None:
    assert {found.ok().path for found in api.get_all_operations()} == {*READ, *SENT}


@pytest.mark.parametrize(
    ("path", "mode"), [*((path, LIKE) for path in READ + SENT), *((path, UNLIKE) for path in SENT)], ids=str
)
def test_no_request_breaks_the_server(api: Any, path: str, mode: GenerationMode) -> None:
    for operation in (found.ok() for found in api.get_all_operations() if found.ok().path == path):

        @settings(
            max_examples=EXAMPLES,
            deadline=None,
            derandomize=True,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(case=operation.as_strategy(generation_mode=mode))
        def check(case: Any) -> None:
            reply = case.call(timeout=PATIENCE)
            assert reply.status_code in (*range(200, 500), 504), reply.text  # its own `timeout` may be short
            if reply.status_code >= 400:
                error = reply.json()["error"]
                assert error["message"] and error["type"]
                assert "Traceback" not in reply.text and 'File "' not in reply.text

        check()
