"""torch.compile for training: a few fused kernels instead of many, each of which would read and write all data again.

Pieces of at most one layer are compiled, for all shapes: a whole training step would take minutes to compile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import ParamSpec, TypeVar

import torch
from torch import nn

from outpace.models.kernels import triton_runtime

Given = ParamSpec("Given")
Made = TypeVar("Made")


def compile_function(function: Callable[Given, Made], device: torch.device) -> Callable[Given, Made]:
    """Compile this function if the device is a GPU and Triton is available."""
    return torch.compile(function, dynamic=True) if _worth(device) else function


def compile_modules(modules: Iterable[nn.Module], device: torch.device) -> None:
    """Compile each module's forward on a GPU. Modules that are alike share one piece of code, and hooks still run."""
    for module in modules if _worth(device) else ():
        module.forward = compile_function(module.forward, device)  # type: ignore[method-assign]


def _worth(device: torch.device) -> bool:
    return device.type == "cuda" and triton_runtime.AVAILABLE
