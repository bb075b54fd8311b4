"""load and wrap: make a `Model` from a demo name, a folder, a hub id, a GGUF file or a Transformers model.

`registry.LOADERS` maps names to loaders. Your own package can add a loader through the entry point group
"outpace.loaders".
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from outpace import registry
from outpace.api.load_options import LoadOptions
from outpace.api.model import Model

if TYPE_CHECKING:
    import torch


def load(
    name: str | Path,
    *,
    dtype: str | torch.dtype | None = None,
    device: str | torch.device | None = None,
    kv_cache_bytes: int | None = None,
    bitwise: bool | None = None,
    compile: bool | None = None,
    quantize: str | None = None,
    adapter: str | Path | None = None,
    tensor_parallel: int | None = None,
) -> Model:
    """Load a model by demo name, folder, hub id or GGUF file; code from a checkpoint is never run.

    `dtype` defaults to float32 on a CPU, where smaller types are slower, and to the checkpoint's own type elsewhere and
    for quantised checkpoints.
    `kv_cache_bytes` limits the key-value cache. `bitwise=True` runs all passes in one shape, so that results have the
    same bits in every dtype, with or without speculation, in any batch (docs/internals/exactness.md). GGUF files are
    bitwise unless `bitwise=False` lets llama.cpp reorder weights (docs/guide/gguf.md). `compile=False` runs the layers
    uncompiled; by default the layers of a large model are compiled (docs/internals/speed.md). `quantize="int8"` stores
    the weights of linear layers as int8: there is less to read, but the model changes slightly. `adapter` is the folder
    or hub id of a LoRA adapter, which needs `outpace[peft]` (docs/guide/checkpoints.md). `tensor_parallel=N` shares the
    model among N processes that torchrun has started; `load` returns in the first of them, and the others serve it
    until it ends (docs/guide/tensor-parallel.md).
    """
    options = LoadOptions(dtype, device, kv_cache_bytes, bitwise, compile, quantize, adapter, tensor_parallel)
    model: Model = registry.loader(str(name))(str(name), options)
    return model


def wrap(
    model: Any,
    tokenizer: Any = None,
    *,
    name: str | None = None,
    kv_cache_bytes: int | None = None,
    bitwise: bool = False,
    compile: bool | None = None,
) -> Model:
    """Wrap a Transformers model that is already in memory, or a PEFT model with a LoRA adapter, without changing it."""
    from outpace.models.adapt import adapt
    from outpace.models.adapters import AdapterState, base_of

    model = base_of(model)
    made = Model(
        adapt(model, kv_cache_bytes, bitwise, compile), tokenizer, stop_token_ids(model, tokenizer),
        name or type(model).__name__,
    )  # fmt: skip
    made.checks.append(AdapterState(model).check)
    return made


def stop_token_ids(model: Any, tokenizer: Any) -> set[int]:
    found: set[int] = set()
    for source in (getattr(model, "generation_config", None), tokenizer):
        ids = getattr(source, "eos_token_id", None)
        found.update([ids] if isinstance(ids, int) else ids or ())
    return found
