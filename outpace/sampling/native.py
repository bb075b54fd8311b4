"""choose.cpp: the sampler's choice on a CPU in a fraction of the time, where it is certain to be the same choice."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from outpace.sampling.edits import Edit, EditKind
from outpace.sampling.noise import keys
from outpace.sampling.settings import Sampling
from outpace.storage.native_code import compiled

SOURCE = Path(__file__).with_name("choose.cpp")
SURE = 0
MOST_K = 4096  # of `top_k`
_P, _N = ctypes.c_void_p, ctypes.c_int64
SIGNATURES = {
    "outpace_choose": (_P, _N, _P, _P),
    "outpace_largest": (_P, _N, _N, _P, _P),
    "outpace_logprobs": (_P, _N, _N, _N, _P, _P),
    "outpace_top_k": (_P, _N, _N, _N, _P),
}


class NativeEdit(ctypes.Structure):
    """The struct `Edit` of choose.cpp."""

    _fields_ = (
        ("kind", ctypes.c_int64),
        ("count", ctypes.c_int64),
        ("tokens", ctypes.c_void_p),
        ("values", ctypes.c_void_p),
    )


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
        ("edit_count", ctypes.c_int64),
        ("edits", ctypes.c_void_p),
    )


@cache
def library() -> ctypes.CDLL | None:
    """The compiled code; None where no C++ compiler is found, and the sampler does without."""
    path = compiled(SOURCE)
    if path is None:
        return None
    try:
        code = ctypes.CDLL(str(path))
    except OSError:
        return None
    for name, arguments in SIGNATURES.items():
        getattr(code, name).argtypes = arguments
    return code


def readable(logits: Tensor) -> bool:
    """Whether the compiled code can read these logits: float32 on a CPU, each row in one piece."""
    return logits.device.type == "cpu" and logits.dtype == torch.float32 and logits.is_contiguous()


def choose(logits: Tensor, sampling: Sampling, seed: int, position: int, edits: Sequence[Edit] = ()) -> int | None:
    """The token that the sampler chooses after these edits; None where the sampler must choose itself."""
    # logits: [vocab]
    code = library() if readable(logits) else None
    if code is None:
        return None
    s, token, changes = sampling, ctypes.c_int64(), (NativeEdit * len(edits))(*map(_native, edits))
    a, b = keys(seed, position, 0)
    settings = NativeSettings(
        s.temperature, s.top_k, s.top_p, s.min_p, s.typical_p, a, b, len(edits), ctypes.addressof(changes)
    )
    status = code.outpace_choose(logits.data_ptr(), len(logits), ctypes.addressof(settings), ctypes.addressof(token))
    return token.value if status == SURE else None


def _native(edit: Edit) -> NativeEdit:
    count = 8 * len(edit.tokens) if edit.kind is EditKind.KEEP else len(edit.tokens)
    tokens, values = (array.__array_interface__["data"][0] for array in (edit.tokens, edit.values))
    return NativeEdit(edit.kind, count, tokens, values)


class Best(NamedTuple):
    """The likeliest token of each row, the first of equal ones, and its logit."""

    tokens: list[int]
    logits: list[float]


def largest(logits: Tensor) -> Best | None:  # [nodes, vocab] or [vocab]
    """The likeliest tokens; None where a row is not finite, or without compiled code."""
    code = library() if readable(logits) else None
    if code is None:
        return None
    vocab = logits.shape[-1]
    nodes = logits.numel() // vocab
    tokens, values = (ctypes.c_int64 * nodes)(), (ctypes.c_float * nodes)()
    places = ctypes.addressof(tokens), ctypes.addressof(values)
    return Best([*tokens], [*values]) if code.outpace_largest(logits.data_ptr(), nodes, vocab, *places) else None


class NativeLogprobs(NamedTuple):
    """Log-probabilities of a row, in float64."""

    tokens: list[int]  # the likeliest
    entropy: float  # in nats
    own: float  # of the token that was asked for
    tops: list[float]  # of the likeliest


def logprobs(logits: Tensor, token: int, count: int) -> NativeLogprobs | None:  # [vocab]
    """The log-probabilities of a token and of the likeliest ones; None where the compiled code cannot say."""
    code = library() if readable(logits) and count <= min(MOST_K, len(logits)) else None
    if code is None:
        return None
    tokens, logs = (ctypes.c_int64 * count)(), (ctypes.c_double * (2 + count))()
    places = ctypes.addressof(tokens), ctypes.addressof(logs)
    if not code.outpace_logprobs(logits.data_ptr(), len(logits), token, count, *places):
        return None
    entropy, own, *tops = logs
    return NativeLogprobs([*tokens], entropy, own, tops)


def top_k(logits: Tensor, k: int) -> Tensor | None:  # [nodes, vocab] -> [nodes, k]
    """The k likeliest tokens of each row, in order; None where the compiled code cannot say."""
    code = library() if readable(logits) and k <= min(MOST_K, logits.shape[-1]) else None
    if code is None:
        return None
    found = torch.empty(len(logits), k, dtype=torch.int64)
    code.outpace_top_k(logits.data_ptr(), *logits.shape, k, found.data_ptr())
    return found
