"""Quick: arithmetic of training as few kernels instead of many, each of which would read and write all of it again.

Pieces of one layer or less are compiled, for all shapes: a whole step as one piece would take minutes to compile.
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
    """This function, compiled where there is a GPU."""
    return torch.compile(function, dynamic=True) if _worth(device) else function


def compile_modules(modules: Iterable[nn.Module], device: torch.device) -> None:
    """Modules that are alike become one piece of code; what listens to them is called as before."""
    for module in modules if _worth(device) else ():
        module.forward = compile_function(module.forward, device)  # type: ignore[method-assign]


def _worth(device: torch.device) -> bool:
    return device.type == "cuda" and triton_runtime.AVAILABLE
