"""Loads Transformers checkpoints: demo models, folders and hub ids."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from outpace.api import demo_weights
from outpace.api.load import wrap
from outpace.api.load_options import LoadOptions
from outpace.api.model import Model
from outpace.errors import OutpaceError, UsageError


def load(name: str, options: LoadOptions) -> Model:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    device = options.device if options.device is not None else "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(device)
    source = demo_weights.fetch(name) if name in demo_weights.DEMO_MODELS else name
    dtype = _dtype(options.dtype, device)
    try:
        model = AutoModelForCausalLM.from_pretrained(source, dtype=dtype, trust_remote_code=False)
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    except (OSError, ValueError) as error:
        known = ", ".join(demo_weights.DEMO_MODELS)
        raise OutpaceError(
            f"cannot load {name!r}: it is not a demo model ({known}), and as a folder or hub id it fails: {error}"
        ) from error
    if options.quantize is not None:
        model = _quantized(model, options.quantize)
    return wrap(
        model.to(device), tokenizer, name=Path(name).name, kv_cache_bytes=options.kv_cache_bytes,
        bitwise=bool(options.bitwise), compile=options.compile,
    )  # fmt: skip


def _dtype(given: str | torch.dtype | None, device: torch.device) -> Any:
    if given is None:
        return torch.float32 if device.type == "cpu" else "auto"
    if isinstance(given, torch.dtype) or given == "auto":
        return given
    if not isinstance(getattr(torch, given, None), torch.dtype):
        raise UsageError(f"{given!r} is not a torch dtype; try float32, bfloat16, float16 or float64")
    return getattr(torch, given)


def _quantized(model: Any, kind: str) -> Any:
    from outpace.models.hf.int8 import quantize

    if kind != "int8":
        raise UsageError(f"quantize={kind!r} is unknown; use int8")
    return quantize(model)
