"""Loads Transformers checkpoints: demo models, folders and hub ids."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from outpace.api import demo_weights
from outpace.api.load import wrap
from outpace.api.load_options import LoadOptions
from outpace.api.model import Model
from outpace.errors import OutpaceError, UsageError
from outpace.models import adapters


def load(name: str, options: LoadOptions) -> Model:
    if options.tensor_parallel is not None and options.tensor_parallel != 1:
        from outpace.api import load_tensor_parallel

        return load_tensor_parallel.load(name, options)
    if options.adapter is not None and options.quantize is not None:
        raise UsageError("an adapter cannot be put on int8 weights: leave quantize out, or merge the adapter with PEFT")
    device = options.device if options.device is not None else "cuda" if torch.cuda.is_available() else "cpu"
    model, tokenizer = _read(name, options, torch.device(device))
    if options.quantize is not None:
        model = _quantized(model, options.quantize)
    if options.adapter is not None:
        model = adapters.load(model, options.adapter)
    return wrap(
        model, tokenizer, name=Path(name).name, kv_cache_bytes=options.kv_cache_bytes,
        bitwise=bool(options.bitwise), compile=options.compile,
    )  # fmt: skip


def _read(name: str, options: LoadOptions, device: torch.device) -> tuple[Any, Any]:
    """Read a checkpoint; return the model on its device, and the tokenizer."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    source = demo_weights.fetch(name) if name in demo_weights.DEMO_MODELS else name
    with explained(name):
        config = AutoConfig.from_pretrained(source, trust_remote_code=False)
        if (kind := quantization(config)) is not None:
            if options.quantize is not None:
                raise UsageError(f"{name!r} is quantised already ({kind}): leave quantize out")
            # Such weights keep the dtype that they were quantised for, and are read to where they run.
            dtype = dtype_of(options.dtype or "auto", device)
            model = AutoModelForCausalLM.from_pretrained(
                source, dtype=dtype, device_map={"": device}, trust_remote_code=False
            )
        else:
            dtype = dtype_of(options.dtype, device)
            model = AutoModelForCausalLM.from_pretrained(source, dtype=dtype, trust_remote_code=False).to(device)
        return model, AutoTokenizer.from_pretrained(source, trust_remote_code=False)


@contextmanager
def explained(name: str) -> Iterator[None]:
    """Explain the errors of reading this checkpoint."""
    try:
        yield
    except ImportError as error:  # of the package that has quantised it
        raise OutpaceError(f"cannot load {name!r}: {error}") from error
    except UsageError:
        raise
    except (OSError, ValueError) as error:
        known = ", ".join(demo_weights.DEMO_MODELS)
        raise OutpaceError(
            f"cannot load {name!r}: it is not a demo model ({known}), and as a folder or hub id it fails: {error}"
        ) from error


def quantization(config: Any) -> str | None:
    """Return the method by which a checkpoint was quantised, or None."""
    found = getattr(config, "quantization_config", None)
    if found is None:
        return None
    method = found.get("quant_method") if isinstance(found, dict) else found.quant_method
    return str(getattr(method, "value", method))


def dtype_of(given: str | torch.dtype | None, device: torch.device) -> Any:
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
