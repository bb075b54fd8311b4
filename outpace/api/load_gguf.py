"""Loads GGUF files, with the tokenizer and the chat template that they contain."""

from __future__ import annotations

from pathlib import Path

from outpace.api import demo_weights
from outpace.api.load_options import LoadOptions
from outpace.api.model import Model
from outpace.errors import UsageError
from outpace.models.gguf import repack
from outpace.models.gguf.lm import LlamaLM
from outpace.models.gguf.runtime import File
from outpace.models.gguf.tokenizer import tokenizer


def load(name: str, options: LoadOptions) -> Model:
    """Load a GGUF file. The device is cpu, or any other name to put all layers on the GPU of this llama.cpp build."""
    if any(given is not None for given in (options.dtype, options.quantize, options.compile, options.adapter)):
        raise UsageError(
            "a GGUF file is run as it is: dtype, quantize, compile, adapter and training are for Transformers models"
        )
    if options.tensor_parallel not in (None, 1):
        raise UsageError("a GGUF file runs in one process: tensor_parallel is for Transformers models")
    path = demo_weights.gguf(name) if name.removesuffix(".gguf") in demo_weights.DEMO_MODELS else Path(name)
    offload = None if options.device is None else not str(options.device).startswith("cpu")
    bitwise = options.bitwise is not False
    file = repack.load_faster(path, offload) if bitwise else File(path, offload, bitwise=False)
    stops = {token for token in range(file.vocab) if file.tokens.is_eog(token)}
    return Model(LlamaLM(file, options.kv_cache_bytes), tokenizer(file), stops, path.stem)
