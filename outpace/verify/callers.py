"""Ways to use one model concurrently: each caller should get the answer that it gets alone."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import zip_longest

from outpace.api.model import Model
from outpace.api.request import Request
from outpace.api.stream import Completion


def in_threads(model: Model, requests: Seq[Request]) -> list[Completion]:
    """Answer each request in its own thread."""
    with ThreadPoolExecutor(len(requests)) as pool:
        return list(pool.map(model.generate, requests))


def in_turn(model: Model, requests: Seq[Request]) -> list[Completion]:
    """Read one stream per request piece by piece, in turn; the first request is answered whole between two pieces."""
    first, *others = requests
    streams = [model.stream(request) for request in others]
    read: list[list[int]] = [[] for _ in others]
    answer: Completion | None = None
    for pieces in zip_longest(*streams):
        for tokens, piece in zip(read, pieces, strict=True):
            tokens += [] if piece is None else piece.tokens
        answer = answer or model.generate(first)
    found = [replace(s.completions[0], tokens=tokens) for s, tokens in zip(streams, read, strict=True)]
    return [answer or model.generate(first), *found]


WAYS = {"threads": in_threads, "streams in turn": in_turn}
