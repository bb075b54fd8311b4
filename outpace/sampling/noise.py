"""Keyed noise: random numbers that are a pure function of (seed, position, token).

The choices are therefore the same in any batch, on any device, with or without speculation. Only 32-bit integer
arithmetic is used, so that kernels can reproduce it. `mix` works on Python ints, int64 tensors and int64 arrays.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

WORD = 0xFFFFFFFF
Array = np.ndarray[Any, np.dtype[np.int64]]
Words = TypeVar("Words", int, Tensor, Array)


def mix(x: Words) -> Words:
    """The finalizer of MurmurHash3: a bijection of 32-bit words in which every input bit reaches every output bit."""
    x = ((x ^ (x >> 16)) * 0x85EBCA6B) & WORD
    x = ((x ^ (x >> 13)) * 0xC2B2AE35) & WORD
    return x ^ (x >> 16)


def keys(seed: int, *counters: int) -> tuple[int, int]:
    """Return two 32-bit words that depend on all 64 bits of `seed` and on each counter."""
    a, b = _start(seed)
    for word in counters:
        a, b = _absorb(a, b, word)
    return a, b


def _absorb(a: Words, b: Words, word: Words) -> tuple[Words, Words]:
    a = mix((a ^ (word & WORD)) + 0x9E3779B9 & WORD)
    return a, mix((b + a & WORD) ^ 0x5BD1E995)


def words(seed: int, positions: Tensor, salt: int = 0) -> Tensor:
    """Return `keys` for many positions at once."""  # int64 [n] -> [n, 2]
    a, b = keys(seed)
    pair = torch.full_like(positions, a), torch.full_like(positions, b)
    for word in (positions, torch.full_like(positions, salt)):
        pair = _absorb(*pair, word)
    return torch.stack(pair, dim=-1)


@lru_cache(maxsize=4096)  # every pass of a request needs the words of its seed
def _start(seed: int) -> tuple[int, int]:
    a, b = 0x9E3779B9, 0x7F4A7C15
    for word in (seed & WORD, (seed >> 32) & WORD):
        a, b = _absorb(a, b, word)
    return a, b


def words_of(seeds: Sequence[int], positions: Array) -> Array:
    """Compute `words` on the host, with a separate seed for each position."""  # [n] -> [n, 2]
    a, b = np.array([_start(seed) for seed in seeds], dtype=np.int64).T
    for word in (positions, np.zeros_like(positions)):
        a, b = _absorb(a, b, word)
    return np.stack([a, b], axis=-1)


def uniform(seed: int, *counters: int) -> float:
    """Return one uniform number in (0, 1)."""
    a, b = keys(seed, *counters)
    return (mix(a ^ b) + 0.5) / 2**32


def gumbel(tokens: Tensor, seed: int, position: int, salt: int = 0) -> Tensor:
    """Return standard Gumbel noise for each of `tokens`, in float64."""  # int64 [n] -> [n]
    a, b = keys(seed, position, salt)
    words = mix(mix((tokens * 0x9E3779B1 + a) & WORD) ^ b)
    return -torch.log(-torch.log((words.double() + 0.5) / 2**32))
