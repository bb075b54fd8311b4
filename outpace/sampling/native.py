"""choose.cpp: the sampler's choice on a CPU in a fraction of the time, where it is certain to be the same choice."""

from __future__ import annotations

import ctypes
import math
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from outpace.sampling.noise import keys
from outpace.sampling.settings import Sampling
from outpace.storage.native_code import compiled

SOURCE = Path(__file__).with_name("choose.cpp")
SURE = 0
MOST_K = 256  # of `top_k`, which keeps the largest in order while it reads


class NativeSettings(ctypes.Structure):
    """The struct `Settings` of choose.cpp."""

    _fields_ = (
        ("temperature", ctypes.c_float),
        ("top_k", ctypes.c_int64),
        ("top_p", ctypes.c_double),
        ("min_p", ctypes.c_double),
        ("typical_p", ctypes.c_double),
        ("a", ctypes.c_uint32),
        ("b", ctypes.c_uint32),
    )


@cache
def library() -> ctypes.CDLL | None:
    """The compiled code; None where no C++ compiler is found, and the sampler does without."""
    path = compiled(SOURCE)
    if path is None:
        return None
    try:
        return ctypes.CDLL(str(path))
    except OSError:
        return None


def readable(logits: Tensor) -> bool:
    """Whether the compiled code can read these logits: float32 on a CPU, each row in one piece."""
    return logits.device.type == "cpu" and logits.dtype == torch.float32 and logits.is_contiguous()


def choose(logits: Tensor, sampling: Sampling, seed: int, position: int) -> int | None:
    """The token that the sampler chooses after its processors; None where the sampler must choose itself."""
    # logits: [vocab]
    code = library() if readable(logits) else None
    if code is None:
        return None
    s, token = sampling, ctypes.c_int64()
    settings = NativeSettings(s.temperature, s.top_k, s.top_p, s.min_p, s.typical_p, *keys(seed, position, 0))
    count, place = ctypes.c_int64(len(logits)), ctypes.c_void_p(logits.data_ptr())
    status = code.outpace_choose(place, count, ctypes.byref(settings), ctypes.byref(token))
    return token.value if status == SURE else None


class LogSum(NamedTuple):
    """What the log-probabilities of a row need: the logarithm of token i is `logit[i] - largest - log_sum`."""

    largest: float
    log_sum: float
    entropy: float  # in nats


def log_sum(logits: Tensor) -> LogSum | None:  # [vocab]
    """Sum the row in float64, in one pass; None where the compiled code cannot."""
    code = library() if readable(logits) else None
    if code is None:
        return None
    found = (ctypes.c_double * 3)()
    code.outpace_log_sum(ctypes.c_void_p(logits.data_ptr()), ctypes.c_int64(len(logits)), found)
    return LogSum(*found) if all(map(math.isfinite, found)) else None


def top_k(logits: Tensor, k: int) -> Tensor | None:  # [nodes, vocab] -> [nodes, k]
    """The k likeliest tokens of each row, in order; None where the compiled code cannot say."""
    code = library() if readable(logits) and k <= min(MOST_K, logits.shape[-1]) else None
    if code is None:
        return None
    nodes, vocab = logits.shape
    found = torch.empty(nodes, k, dtype=torch.int64)
    for node in range(nodes):
        place, out = logits.data_ptr() + 4 * vocab * node, found.data_ptr() + 8 * k * node
        code.outpace_top_k(ctypes.c_void_p(place), ctypes.c_int64(vocab), ctypes.c_int64(k), ctypes.c_void_p(out))
    return found
