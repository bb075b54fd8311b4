"""Triton's interpreter, which runs the kernels where there is no GPU, without work that it does over and over.

What it computes stays the same, to the bit: it looks up the functions of the language once, not in each call of a
device function; it reduces by exclusive or, of which its sort is made, in NumPy, as it adds up, not element by element;
and it keeps which numbers of NumPy a type has. What a version of Triton does not have is left alone.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import numpy as np


def hasten() -> None:
    """From now on, in this process."""
    if importlib.util.find_spec("triton") is None:
        return
    import triton.language as tl
    from triton.runtime import interpreter

    parts = ("_patch_builtin", "_patch_attr", "_get_np_dtype", "ReduceOps")
    if not all(hasattr(interpreter, part) for part in parts) or not hasattr(tl.standard, "_xor_combine"):
        return

    names: dict[Any, list[str]] = {}

    def patch(package: Any, *given: Any) -> None:
        if package not in names:
            found = [name for name in dir(package) if tl.core.is_builtin(getattr(package, name, None))]
            if not found:  # something else has replaced them
                return
            names[package] = found
        for name in names[package]:
            member = getattr(package, name)
            if not tl.core.is_builtin(member):  # nor is any other: they are replaced together
                return
            interpreter._patch_attr(package, name, member, *given)

    reduce = interpreter.ReduceOps.apply_impl

    def apply(self: Any, given: Any) -> Any:
        if self.combine_fn is not tl.standard._xor_combine or self.axis is None:
            return reduce(self, given)
        (tensor,) = given
        found = np.bitwise_xor.reduce(tensor.handle.data, axis=self.axis, keepdims=self.keep_dims)
        return self.to_tensor(found, tensor.dtype)

    numbers, known = interpreter._get_np_dtype, dict[str, Any]()

    def kept(kind: Any) -> Any:
        if type(kind) is not tl.dtype:
            return numbers(kind)
        if kind.name not in known:
            known[kind.name] = numbers(kind)
        return known[kind.name]

    interpreter._patch_builtin = patch
    interpreter.ReduceOps.apply_impl = apply
    interpreter._get_np_dtype = kept
