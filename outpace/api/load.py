"""load and wrap: a demo name, a folder, a hub id, a GGUF file or a Transformers model becomes a `Model`.

`registry.LOADERS` says which loader takes which name. A package of your own adds one through the entry point group
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
) -> Model:
    """A model by demo name, folder, hub id or GGUF file; no code of a checkpoint is ever run.

    `dtype` defaults to float32 on a CPU, where smaller ones are slower, and to the checkpoint's own elsewhere.
    `kv_cache_bytes` bounds the key-value cache. `bitwise=True` makes all passes of one shape, so that results have the
    same bits in every dtype, with or without speculation, in any batch (docs/internals/exactness.md); GGUF files are
    bitwise unless `bitwise=False` lets llama.cpp reorder weights (docs/guide/gguf.md). `compile=False` runs the layers
    as they are; by default the layers of a large model are compiled (docs/internals/speed.md). `quantize="int8"` keeps
    the weights of linear layers as int8: less to read, and slightly another model.
    """
    options = LoadOptions(dtype, device, kv_cache_bytes, bitwise, compile, quantize)
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
    """A Transformers model that is already in memory; it is not changed."""
    from outpace.models.adapt import adapt

    lm = adapt(model, kv_cache_bytes, bitwise, compile)
    return Model(lm, tokenizer, _stop_token_ids(model, tokenizer), name or type(model).__name__)


def _stop_token_ids(model: Any, tokenizer: Any) -> set[int]:
    found: set[int] = set()
    for source in (getattr(model, "generation_config", None), tokenizer):
        ids = getattr(source, "eos_token_id", None)
        found.update([ids] if isinstance(ids, int) else ids or ())
    return found
