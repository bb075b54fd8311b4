"""load: a GGUF file becomes a `Model`; its tokenizer and its chat template come with it."""

from __future__ import annotations

from pathlib import Path

from outpace.api.model import Model
from outpace.models.gguf import repack
from outpace.models.gguf.lm import LlamaLM
from outpace.models.gguf.runtime import File
from outpace.models.gguf.tokenizer import tokenizer


def load(path: Path, device: str | None = None, cache_limit: int | None = None, exact: bool = True) -> Model:
    """`device`: cpu, or any other name for all layers on the GPU that this build of llama.cpp has."""
    offload = None if device is None else not device.startswith("cpu")
    file = repack.faster(path, offload) if exact else File(path, offload, exact=False)
    ends = {token for token in range(file.vocab) if file.tokens.is_eog(token)}
    return Model(LlamaLM(file, cache_limit), tokenizer(file), ends, path.stem)
