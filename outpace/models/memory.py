"""Memory accounting before a run: the bytes that a model takes, the bytes that are available, and what fits."""

from __future__ import annotations

import os
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn

from outpace.models.quantized import parts, tensors


def weights(model: nn.Module) -> int:
    """Return the bytes of all tensors of a model, counting shared storage once."""
    plain = [part for tensor in tensors(model) for part in parts(tensor)]
    held = {part.untyped_storage().data_ptr(): part for part in plain}
    return sum(part.untyped_storage().nbytes() for part in held.values())


def free(device: torch.device) -> int:
    """Return the bytes that can still be allocated on this device."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused
    try:
        with open("/proc/meminfo") as lines:
            found = {name: int(value.split()[0]) * 1024 for name, value in (line.split(":") for line in lines)}
        return found["MemAvailable"]
    except (OSError, KeyError, ValueError):  # not Linux: take the total memory of the machine
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


class CacheKind(NamedTuple):
    """Layers that keep the same part of a text."""

    token: int  # bytes of a token in all of them
    most: int | None = None  # tokens of a text that they keep; None: all

    def bytes(self, tokens: int) -> int:
        return self.token * (tokens if self.most is None else min(tokens, self.most))


UNLIMITED = 1 << 40  # tokens; where all layers have windows, a text of any length fits


def bytes_of(kinds: Seq[CacheKind], tokens: int) -> int:
    """Return the bytes of a text of this length in the cache."""
    return sum(kind.bytes(tokens) for kind in kinds)


def tokens_within(kinds: Seq[CacheKind], room: int) -> int:
    """Return the most tokens of a text that take at most `room` bytes, or `UNLIMITED`."""
    rate = sum(kind.token for kind in kinds)
    for kind in sorted(kinds, key=lambda kind: UNLIMITED if kind.most is None else kind.most):
        tokens = room // rate if rate else UNLIMITED
        if kind.most is None or tokens < kind.most:
            return tokens
        room, rate = room - kind.bytes(kind.most), rate - kind.token
    return UNLIMITED


@dataclass(frozen=True)
class MemoryNeed:
    """The memory of a model's weights and of its cache for requests of some length, and what would fit."""

    weights: int  # bytes
    kinds: Seq[CacheKind]
    tokens: int  # of each request, prompt included
    requests: int
    available: int  # bytes for the whole cache: its current memory plus free memory
    limit: int | None = None  # bytes that the cache may take

    @property
    def cache(self) -> int:
        """Bytes of the cache of these requests."""
        return self.requests * bytes_of(self.kinds, self.tokens)

    @property
    def room(self) -> int:
        """Bytes that the cache may take."""
        return self.available if self.limit is None else min(self.available, self.limit)

    @property
    def fits(self) -> bool:
        return self.cache <= self.room

    @property
    def most_tokens(self) -> int:
        """The most tokens that each of the requests may have, or `UNLIMITED`."""
        return tokens_within(self.kinds, self.room // self.requests)

    @property
    def most_requests(self) -> int:
        """The most requests of this length that fit at a time."""
        return self.room // max(1, bytes_of(self.kinds, self.tokens))

    def advice(self, prompt: int) -> str:
        """Say how a request that does not fit could."""
        most = self.most_tokens - prompt
        return f"lower max_tokens to {most}" if most > 0 else f"the prompt alone has {prompt} tokens"

    def __str__(self) -> str:
        weights, cache, room = map(spell_bytes, (self.weights, self.cache, self.room))
        requests, each = (f"{self.requests} requests of ", " each") if self.requests > 1 else ("", "")
        most = "any number of" if self.most_tokens == UNLIMITED else self.most_tokens
        return (
            f"{weights} of weights and {cache} of cache for {requests}{self.tokens} tokens ({room} available for the "
            f"cache: {most} tokens{each}, or {self.most_requests} requests of {self.tokens})"
        )


def spell_bytes(count: int) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"
