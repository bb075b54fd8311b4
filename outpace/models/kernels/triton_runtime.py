"""Shared parts of the Triton kernels: Triton itself, if it is installed, GPU properties and launch options."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

DTYPES = (torch.bfloat16, torch.float16, torch.float32)  # of matrix products; sums are in float32
AVAILABLE = importlib.util.find_spec("triton") is not None  # a machine without a GPU need not have it
tl: Any = importlib.import_module("triton.language") if AVAILABLE else None

if TYPE_CHECKING:  # Triton recognizes a compile-time argument by this name in its annotation
    constexpr = Any
else:
    constexpr = tl.constexpr if AVAILABLE else None


def constant(value: int) -> Any:
    """Make a constant of a module that kernels may read."""
    return constexpr(value) if AVAILABLE else value


# Arguments that differ from call to call. One compiled kernel serves all their values.
VARYING = ["rows", "count", "all_tokens"]


def jit(function: Callable[..., Any]) -> Any:
    """Make a Triton kernel, interpreted if TRITON_INTERPRET is set; without Triton, return the function unchanged."""
    if not AVAILABLE:
        return function
    return importlib.import_module("triton").jit(function, do_not_specialize=VARYING)


class Machine(NamedTuple):
    """The GPU properties that determine the tiles."""

    processors: int  # multiprocessors
    shared: int  # bytes of shared memory that one program can have


H200 = Machine(132, 232448)


@lru_cache
def machine(device: torch.device) -> Machine:
    """Return the properties of the GPU; for interpreted kernels, which run one program at a time, a small machine."""
    if device.type != "cuda":
        return Machine(2, 2**16)
    found = torch.cuda.get_device_properties(device)
    return Machine(found.multi_processor_count, getattr(found, "shared_memory_per_block_optin", 0) or 2**16)


@lru_cache
def overlaps(device: torch.device) -> bool:
    """Return whether a kernel can start while the previous one ends, so that its first steps hide the launch."""
    cuda = device.type == "cuda" and torch.version.hip is None
    return cuda and torch.cuda.get_device_capability(device)[0] >= 9 and hasattr(tl.extra.cuda, "gdc_wait")


def early(device: torch.device) -> dict[str, bool]:
    """Return the launch arguments that let a kernel overlap with the previous one, if the GPU can."""
    return {"EARLY": True, "launch_pdl": True} if overlaps(device) else {"EARLY": False}


@jit
def begin(EARLY: constexpr):  # type: ignore[no-untyped-def]
    """Wait for the writes of all earlier kernels, then let the next kernel start, so that it can rely on them too."""
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


_COUNTERS: dict[torch.device, list[torch.Tensor]] = {}


def counters(device: torch.device, count: int) -> torch.Tensor:
    """Return at least `count` zeros, in which the programs of one launch count their arrivals and then reset them.

    One workspace per device is enough for all kernels, if launches follow each other on one stream at a time: then no
    two are in flight together. The host zeroes it once, when it allocates it. This must not happen during a capture,
    so a kernel is called once before it is captured.
    """
    made = _COUNTERS.setdefault(device, [])  # outgrown ones stay alive, because graphs write to them
    if not made or len(made[-1]) < count:
        new = torch.zeros(max(2**14, power(count)), dtype=torch.int32, device=device)
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # the next launch may be on another stream; refused in a capture
        made.append(new)
    return made[-1]


def power(n: int) -> int:
    """Return the smallest power of two that is at least `n`; the sizes of tiles are powers of two."""
    return 1 << max(0, n - 1).bit_length()
