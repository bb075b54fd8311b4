"""Rows of logits of every kind, and the sampler's own way to choose from one, which compiled code must reproduce.

`python -m tests.choices -march=x86-64-v3` compares choices of choose.cpp, built for one instruction set, and prints
what differs, one line each. It needs a process of its own, because compiled code is loaded once.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from outpace.sampling import native
from outpace.sampling.logprobs import logprob_of
from outpace.sampling.processors import Banned, CountPenalty, LogitBias, RepetitionPenalty
from outpace.sampling.sampler import LogitEdit, Sampler
from outpace.sampling.settings import Sampling
from outpace.storage import native_code

SIZES = (2, 15, 16, 17, 1023, 1024, 1025, 4099, 20011)  # around the widths of vectors and blocks
FILTERS: dict[str, tuple[Any, ...]] = {
    "temperature": (0.05, 0.3, 0.8, 1.0, 1.7, 30.0),
    "top_k": (0, 0, 0, 1, 2, 40, 257, 1000, 5000),
    "top_p": (1.0, 1.0, 0.999, 0.9, 0.5, 0.01, 1e-6),
    "min_p": (0.0, 0.0, 1e-9, 0.001, 0.3, 1.0),
    "typical_p": (1.0, 1.0, 0.999, 0.9, 0.2, 0.01),
}


def row(kind: str, vocab: int, seed: int) -> Tensor:  # [vocab]
    """Return logits in float32."""
    own = torch.Generator().manual_seed(seed)
    x, uniform = 3 * torch.randn(vocab, generator=own), torch.rand(vocab, generator=own)
    kinds = {
        "usual": lambda: x,
        "flat": lambda: x / 300,
        "equal": lambda: torch.full((vocab,), 3.7),
        "steps": lambda: (x * 2).round() / 2,
        "bfloat16": lambda: (x + 15).bfloat16().float(),
        "peaked": lambda: x + 25 * (uniform == uniform.max()),
        "skewed": lambda: (x / 3).exp() * 10,
        "far from zero": lambda: x - 1000,
        "some excluded": lambda: x.masked_fill((uniform < 0.3) & (uniform > uniform.min()), -torch.inf),
        "most excluded": lambda: x.masked_fill(uniform < 0.99 * uniform.max(), -torch.inf),
    }
    return kinds[kind]()


KINDS = (
    *("usual", "flat", "equal", "steps", "bfloat16", "peaked", "skewed", "far from zero", "some excluded"),
    "most excluded",
)


def edits(vocab: int) -> list[LogitEdit]:
    """Return edits of every kind, for texts of tokens of a vocabulary of this size."""
    biased = {0: 2.0, vocab - 1: -1.5, vocab // 2: -torch.inf}
    return [RepetitionPenalty(1.3), CountPenalty(0.5, 0.2, 1), LogitBias(biased), Banned(((1,), (0, vocab - 1)))]


def reference(sampler: Sampler, logits: Tensor, text: list[int]) -> int:
    """Choose by sorting, and by the noise of all tokens."""
    return int(sampler.noised(sampler.process(logits, text), len(text)).argmax())


def compiled(sampler: Sampler, logits: Tensor, text: list[int]) -> int | None:
    """Choose by compiled code; None where it is not certain."""
    done = [process.edit(text) for process in sampler.processors if isinstance(process, LogitEdit)]
    return native.choose(logits, sampler.sampling, sampler.seed, len(text), done)


def differences(count: int) -> Iterator[str]:
    draw, certain = random.Random(0), 0
    for turn in range(count):
        vocab, kind = draw.choice(SIZES), draw.choice(KINDS)
        given = {name: draw.choice(values) for name, values in FILTERS.items()}
        processors = draw.choice(([], [], edits(vocab) if vocab > 2 else []))
        sampler = Sampler(Sampling(seed=draw.randrange(2**40), **given), processors)
        logits, text = row(kind, vocab, turn), [draw.randrange(vocab) for _ in range(draw.randrange(1, 40))]
        found, due = compiled(sampler, logits, text), reference(sampler, logits, text)
        certain += found is not None
        if found not in (None, due):
            yield f"{kind}, {vocab} tokens, {given}, {len(processors)} edits: {found} instead of {due}"
        logs = logits.double().log_softmax(-1)
        if abs(logprob_of(due, logits, 3).logprob - logs[due].item()) > 1e-11:
            yield f"{kind}, {vocab} tokens: another log-probability"
        if native.top_k(logits[None], 2)[0, 0] != logits.argmax():  # type: ignore[index]
            yield f"{kind}, {vocab} tokens: another likeliest token"
    if certain < 0.9 * count:
        yield f"only {certain} of {count} are certain"


if __name__ == "__main__":
    native_code.NATIVE[:] = sys.argv[1:]
    torch.set_num_threads(1)
    print(f"built: {native.library() is not None}", *differences(600), sep="\n")  # noqa: T201
