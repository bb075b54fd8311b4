"""What the kernels share: Triton, where it is installed, and the size of the GPU."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

DTYPES = (torch.bfloat16, torch.float16, torch.float32)  # of matrix products, which are summed up in float32
AVAILABLE = importlib.util.find_spec("triton") is not None  # a machine without a GPU need not have it
tl: Any = importlib.import_module("triton.language") if AVAILABLE else None

if TYPE_CHECKING:  # Triton knows a compile-time argument by this word in its annotation
    constexpr = Any
else:
    constexpr = tl.constexpr if AVAILABLE else None


VARYING = [
    "rows",
    "count",
    "all_tokens",
]  # arguments that differ from call to call: one compiled kernel serves all their values


def jit(function: Callable[..., Any]) -> Any:
    """A kernel, which is interpreted where TRITON_INTERPRET is set; without Triton it only has a name."""
    if not AVAILABLE:
        return function
    return importlib.import_module("triton").jit(function, do_not_specialize=VARYING)


class Machine(NamedTuple):
    """What the cut of the work depends on."""

    processors: int  # multiprocessors
    shared: int  # bytes of fast memory that one program can have


H200 = Machine(132, 232448)


@lru_cache
def machine(device: torch.device) -> Machine:
    """The GPU; where kernels are interpreted, one program at a time, a small one."""
    if device.type != "cuda":
        return Machine(2, 2**16)
    found = torch.cuda.get_device_properties(device)
    return Machine(found.multi_processor_count, getattr(found, "shared_memory_per_block_optin", 0) or 2**16)


@lru_cache
def overlaps(device: torch.device) -> bool:
    """Whether a kernel can be started while the one before it ends: what it does first hides its start."""
    cuda = device.type == "cuda" and torch.version.hip is None
    return cuda and torch.cuda.get_device_capability(device)[0] >= 9 and hasattr(tl.extra.cuda, "gdc_wait")


def early(device: torch.device) -> dict[str, bool]:
    """Arguments of a launch that may overlap the one before it."""
    return {"EARLY": True, "launch_pdl": True} if overlaps(device) else {"EARLY": False}


@jit
def begin(EARLY: constexpr):  # type: ignore[no-untyped-def]
    """Wait for what the kernels before this one wrote; only then may the next one start: so it can rely on them too."""
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


_COUNTERS: dict[torch.device, list[torch.Tensor]] = {}


def counters(device: torch.device, count: int) -> torch.Tensor:
    """At least `count` zeros, which programs of one launch count their arrivals in, and which they leave as zeros.

    One workspace per device is enough for all kernels, as long as their launches follow each other on one stream at a
    time: then no two are in flight together. The host zeroes it once, when it is made; that must not be in a capture,
    which is why a kernel is called once before it is captured.
    """
    made = _COUNTERS.setdefault(device, [])  # outgrown ones stay: graphs write to them
    if not made or len(made[-1]) < count:
        new = torch.zeros(max(2**14, power(count)), dtype=torch.int32, device=device)
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # the next launch may be on another stream; refused in a capture
        made.append(new)
    return made[-1]


def power(n: int) -> int:
    """The least power of two that is not below `n`: the sizes of a kernel's tiles."""
    return 1 << max(0, n - 1).bit_length()
