"""Linear layers that another package has quantised, inside a Transformers model.

Such a layer looks like torch's own in part: it may be an `nn.Linear` whose weight is a tensor subclass (torchao), or
one whose `forward` was replaced (compressed-tensors). It runs as it is. Only plain layers get our kernels.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

ROWS = 8  # of the input that a layer is tested on
LOUD = 1000.0  # factor of half of the rows: beyond every threshold, and larger than all scales of the others
COARSE = 1e-4  # relative error of a layer that rounds its input; float32 alone stays below 1e-5
NESTED = 3  # levels of objects in which a layer may keep tensors


def is_plain(layer: nn.Module) -> TypeGuard[nn.Linear]:
    """Return whether this is torch's linear layer with a dense weight, and computes what its class says."""
    if type(layer) is not nn.Linear or "forward" in vars(layer) or layer._forward_hooks or layer._forward_pre_hooks:
        return False
    weight: Any = getattr(layer, "weight", None)
    return type(weight) in (nn.Parameter, Tensor) and weight.is_floating_point() and weight.dtype.itemsize > 1


def quantized_layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield every linear layer that is not plain, with its name; of a layer around others, only the inner ones."""
    for name, layer in model.named_modules():
        if _is_linear(layer) and not is_plain(layer) and not any(map(_is_linear, list(layer.modules())[1:])):
            yield name, layer


def kinds(model: nn.Module) -> list[str]:
    """Return the names of the classes that hold this model's quantised weights."""
    return sorted({_kind(layer) for _, layer in quantized_layers(model)})


def tensors(model: nn.Module) -> Iterator[Tensor]:
    """Yield all tensors of a model, also those that quantised layers keep in objects beside their parameters."""
    yield from model.parameters()
    yield from model.buffers()
    for _, layer in quantized_layers(model):
        for value in vars(layer).values():
            yield from _held(value, NESTED)


def parts(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the plain tensors that a tensor consists of: a quantised one holds integers, scales and the like."""
    if is_traceable_wrapper_subclass(tensor):  # it has no storage of its own
        for name in tensor.__tensor_flatten__()[0]:
            yield from parts(getattr(tensor, name))
        return
    yield tensor
    for value in vars(tensor).values():
        yield from _held(value, NESTED)


@torch.no_grad()
def settle(model: nn.Module) -> None:
    """Run one token through a model with quantised layers, before its layers are copied or tested.

    Some packages move or unpack a layer's weights in its first pass. Copies made before would each do so on their own.
    """
    device = model.get_input_embeddings().weight.device  # type: ignore[operator]
    model(input_ids=torch.zeros(1, 1, dtype=torch.long, device=device), use_cache=False)


@torch.no_grad()
def mixing_layer(model: nn.Module) -> str | None:
    """Return the first layer whose result for a token depends on the other tokens of the pass, or None.

    The same rows are run beside quiet and beside loud rows. All shapes are equal, so the same kernels run, and the bits
    may differ only if one scale or one set of columns is chosen for all rows together.
    """
    for name, layer in quantized_layers(model):
        if (quiet := _noise(model, layer)) is None:
            continue
        loud = quiet.clone()
        loud[:, ROWS // 2 :] *= LOUD
        first, beside_loud = _first_half(layer, quiet), _first_half(layer, loud)
        # A kernel that sums in random order differs from itself, which says nothing.
        if not torch.equal(first, beside_loud) and torch.equal(first, _first_half(layer, quiet)):
            return f"{name} ({_kind(layer)})"
    return None


@torch.no_grad()
def rounding_layer(model: nn.Module) -> str | None:
    """Return the first layer of a float32 model that rounds its input far more coarsely than float32, or None.

    A plain layer's result for a sum is the sum of the results. One that quantises its input, or converts it to 16 bits,
    is off by its own rounding.
    """
    if getattr(model, "dtype", torch.float32).itemsize < 4:
        return None
    for name, layer in quantized_layers(model):
        if (both := _noise(model, layer)) is None:
            continue
        first, second = both.chunk(2, dim=1)  # [1, rows / 2, in] each
        found, expected = layer(first + second), layer(first) + layer(second) - layer(torch.zeros_like(first))
        if (found - expected).norm() > COARSE * expected.norm():
            return f"{name} ({_kind(layer)})"
    return None


def layout(tensor: Tensor) -> tuple[object, ...]:
    """Return everything of a tensor but its values: code compiled for one fits all tensors of the same layout."""
    beside = [settings(value, NESTED) for value in vars(tensor).values() if hasattr(value, "__dict__")]
    about = type(tensor), tuple(tensor.shape), tensor.dtype, *beside
    if not is_traceable_wrapper_subclass(tensor):
        return about
    names, context = tensor.__tensor_flatten__()
    return *about, repr(context), tuple((name, layout(getattr(tensor, name))) for name in names)


def settings(value: object, levels: int = 0) -> object:
    """Return the plain data in a value, such as numbers and dicts of numbers: compiled code may contain it."""
    if isinstance(value, bool | int | float | str | None | torch.dtype):
        return repr(value)
    if isinstance(value, dict):
        return tuple((settings(name), settings(inner, levels)) for name, inner in value.items())
    if isinstance(value, list | tuple):
        return tuple(settings(inner, levels) for inner in value)
    if levels and hasattr(value, "__dict__") and not isinstance(value, Tensor | nn.Module | type):
        return type(value).__name__, settings(vars(value), levels - 1)
    return type(value).__name__


def _is_linear(module: nn.Module) -> bool:
    return isinstance(getattr(module, "in_features", None), int)


def _kind(layer: nn.Module) -> str:
    weight = getattr(layer, "weight", None)
    wrapped = isinstance(weight, Tensor) and is_traceable_wrapper_subclass(weight)
    return type(weight if wrapped else layer).__name__


def _noise(model: nn.Module, layer: Any) -> Tensor | None:  # [1, rows, in]
    """Return the same random input every time, or None if the layer has no tensors that say where it runs."""
    weight = next(iter((*layer.parameters(), *layer.buffers())), None)
    if weight is None:
        return None
    noise = torch.randn(1, ROWS, layer.in_features, generator=torch.Generator().manual_seed(0))
    return noise.to(weight.device, getattr(model, "dtype", torch.float32))


def _first_half(layer: nn.Module, x: Tensor) -> Tensor:  # [rows / 2, out]
    return layer(x)[0, : ROWS // 2]


def _held(value: object, levels: int) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif levels and hasattr(value, "__dict__") and not isinstance(value, nn.Module | type):
        for inner in vars(value).values():
            yield from _held(inner, levels - 1)
