"""Ways in which several callers use one model at once; each gives the texts that its callers got."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import zip_longest
from typing import Any

from outpace.api.model import Model
from outpace.api.request import Request
from outpace.api.stream import Stream

Texts = list[list[int]]
Way = Callable[[Model, list[Request]], Texts]


def read(stream: Stream) -> list[int]:
    return [token for piece in stream for token in piece.tokens]


def streams_in_turn(model: Model, requests: list[Request]) -> Texts:
    """One piece of each stream after the other."""
    texts: Texts = [[] for _ in requests]
    for pieces in zip_longest(*(model.stream(request) for request in requests)):
        for text, piece in zip(texts, pieces, strict=True):
            text += [] if piece is None else piece.tokens
    return texts


def generate_inside_a_stream(model: Model, requests: list[Request]) -> Texts:
    """All others are answered between the first pieces of one stream."""
    first, *others = requests
    stream, texts = model.stream(first), []
    begun = next(stream).tokens
    for request in others:
        texts.append(model.generate(request).tokens)
        begun += next(stream).tokens if not stream.completions[0].finish_reason else []
    return [begun + read(stream), *texts]


def threads(model: Model, requests: list[Request]) -> Texts:
    with ThreadPoolExecutor(len(requests)) as pool:
        return [done.tokens for done in pool.map(model.generate, requests)]


def tasks(model: Model, requests: list[Request]) -> Texts:
    """Every second task reads pieces as they come."""

    async def pieces(request: Request) -> list[int]:
        return [token async for piece in model.astream(request) for token in piece.tokens]

    async def whole(request: Request) -> list[int]:
        return list((await model.agenerate(request)).tokens)

    async def all_of_them() -> Texts:
        return await asyncio.gather(*(pieces(r) if i % 2 else whole(r) for i, r in enumerate(requests)))

    return asyncio.run(all_of_them())


def beside_others_that_stop(model: Model, requests: list[Request]) -> Texts:
    """Copies of the requests are cancelled, dropped, left unread, and broken by code of their own."""

    def broken(ids: Any, scores: Any) -> Any:
        raise ZeroDivisionError("in a logits processor")

    def disturb(i: int) -> None:
        request = requests[i]
        for _ in range(3):
            stream = model.stream(request)
            next(stream)
            if i % 3 == 0:
                stream.close()
            elif i % 3 == 1:
                del stream
            else:
                unread.append(stream)
            try:
                model.generate(Request(request.prompt, logits_processors=[broken], max_tokens=4))
            except ZeroDivisionError:
                failures.append(i)

    unread: list[Stream] = []
    failures: list[int] = []
    with ThreadPoolExecutor(2 * len(requests)) as pool:
        others = [pool.submit(disturb, i) for i in range(len(requests))]
        texts = [done.tokens for done in pool.map(model.generate, requests)]
        for other in others:
            other.result()
    assert len(failures) == 3 * len(requests)
    for stream in unread:
        stream.close()
    return texts


WAYS: list[Way] = [streams_in_turn, generate_inside_a_stream, threads, tasks, beside_others_that_stop]


def check(model: Model, prompts: list[Any], settings: dict[str, Any], way: Way) -> None:
    """Every request gets the text that it gets alone."""
    requests = [
        Request.from_keywords(prompt, {"max_tokens": 12 + 5 * (i % 4), **settings, "seed": i})
        for i, prompt in enumerate(prompts)
    ]
    alone = [model.generate(request).tokens for request in requests]
    assert way(model, requests) == alone
    assert not any(row.busy for row in model.lm.slots)  # type: ignore[attr-defined]
