"""load and wrap: a shelf name, a folder, a hub id or a Transformers model becomes a `Model`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from outpace.api.model import Model
from outpace.errors import OutpaceError, UsageError


def load(
    name: str | Path,
    *,
    dtype: str | torch.dtype | None = None,
    device: str | torch.device | None = None,
    cache_limit: int | None = None,
    exact: bool | None = None,
    eager: bool | None = None,
    quantize: str | None = None,
) -> Model:
    """A model by shelf name, folder, hub id or GGUF file; no code of a checkpoint is ever run.

    `dtype` defaults to float32 on a CPU, where smaller ones are slower, and to the checkpoint's own elsewhere;
    `cache_limit` bounds the key-value cache, in bytes; `exact` makes all passes of one shape, so that results are
    bit-identical in every dtype, with or without speculation, in any batch (docs/internals/exactness.md): not by
    default, but for GGUF files, where `exact=False` lets llama.cpp reorder weights (docs/guide/gguf.md). `eager` runs
    the layers as they are; by default those of a model that is large enough are compiled (docs/internals/speed.md).
    `quantize="int8"` keeps the weights of linear layers as int8: less to read, and another model, slightly.
    """
    from outpace.api import demo_weights

    if str(name).endswith(".gguf"):
        if dtype is not None or quantize is not None or eager:
            raise UsageError(
                "a GGUF file is run as it is: dtype, quantize, eager and training are for Transformers models"
            )
        from outpace.api.load_gguf import load as load_gguf

        path = demo_weights.gguf(str(name)) if str(name).removesuffix(".gguf") in demo_weights.SHELF else Path(name)
        return load_gguf(path, None if device is None else str(device), cache_limit, exact is not False)
    from transformers import AutoModelForCausalLM, AutoTokenizer

    device = torch.device(device if device is not None else "cuda" if torch.cuda.is_available() else "cpu")
    if dtype is None:
        dtype = torch.float32 if device.type == "cpu" else "auto"
    elif isinstance(dtype, str) and dtype != "auto":
        if not isinstance(getattr(torch, dtype, None), torch.dtype):
            raise UsageError(f"{dtype!r} is not a torch dtype; try float32, bfloat16, float16 or float64")
        dtype = getattr(torch, dtype)
    source = demo_weights.fetch(str(name)) if str(name) in demo_weights.SHELF else name
    try:
        model = AutoModelForCausalLM.from_pretrained(source, dtype=dtype, trust_remote_code=False)
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    except (OSError, ValueError) as error:
        known = ", ".join(demo_weights.SHELF)
        raise OutpaceError(
            f"cannot load {str(name)!r}: it is no shelf name ({known}), and as a folder or hub id: {error}"
        ) from error
    if quantize is not None:
        model = _quantized(model, quantize)
    model, name = model.to(device), Path(name).name
    return wrap(model, tokenizer, name=name, cache_limit=cache_limit, exact=bool(exact), eager=eager)


def _quantized(model: Any, kind: str) -> Any:
    from outpace.models.hf.int8 import quantize

    if kind != "int8":
        raise UsageError(f"quantize={kind!r} is not known; int8 is")
    return quantize(model)


def wrap(
    model: Any,
    tokenizer: Any = None,
    *,
    name: str | None = None,
    cache_limit: int | None = None,
    exact: bool = False,
    eager: bool | None = None,
) -> Model:
    """A Transformers model that is already in memory; it is not changed."""
    from outpace.models.adapt import adapt

    lm = adapt(model, cache_limit, exact, eager)
    return Model(lm, tokenizer, _stop_tokens(model, tokenizer), name or type(model).__name__)


def _stop_tokens(model: Any, tokenizer: Any) -> set[int]:
    found: set[int] = set()
    for source in (getattr(model, "generation_config", None), tokenizer):
        ids = getattr(source, "eos_token_id", None)
        found.update([ids] if isinstance(ids, int) else ids or ())
    return found
