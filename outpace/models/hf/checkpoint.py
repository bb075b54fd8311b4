"""Checkpoints of a Transformers model without some of its layers, for `outpace prune` and training.

Before the folder appears, the written checkpoint is loaded again and compared with the model's own layers. A model
whose config cannot describe it without those layers is refused.
"""

from __future__ import annotations

import copy
import os
import tempfile
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from outpace.errors import OutpaceError, UnsupportedModel, UsageError
from outpace.models.adapters import has_adapter
from outpace.models.hf.module import decoder_layers, view
from outpace.models.hf.tolerance import apart
from outpace.models.quantized import quantized_layers

PROBE = 16  # tokens on which the written copy is compared


def check_output(folder: Path) -> None:
    """Raise a `UsageError` if the folder exists: nothing is ever overwritten."""
    if folder.exists():
        raise UsageError(f"{str(folder)!r} already exists: name another folder, or delete it")


def stack_of(model: PreTrainedModel) -> int:
    return len(getattr(*decoder_layers(model)))


def save(model: PreTrainedModel, layers: Seq[int], tokenizer: Any, folder: Path, note: str) -> None:
    """Write a model of these layers; the folder appears complete or not at all."""
    check_output(folder)
    if any(quantized_layers(model)) or has_adapter(model):
        raise UnsupportedModel(
            f"a quantised {type(model).__name__}, or one with an adapter, cannot be written without some of its "
            "layers: write the plain model first, merged with its adapter, then quantise the result"
        )
    part = part_of(model, layers)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        scratch = tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent)
    except OSError as error:
        raise OutpaceError(f"cannot write to {str(folder.parent)!r}: {error}") from error
    with scratch as path:
        written = Path(path) / "checkpoint"
        converted(part, smallest_dtype(part)).save_pretrained(written)
        if tokenizer is not None:
            tokenizer.save_pretrained(written)
        (written / "README.md").write_text(note, encoding="utf-8")
        _compare(part, written)
        try:
            os.rename(written, folder)
        except OSError as error:
            raise OutpaceError(f"cannot put the checkpoint in place: {error}") from error


def part_of(model: PreTrainedModel, layers: Seq[int]) -> PreTrainedModel:
    """Return a model of these layers on the same tensors, with a config that describes it."""
    stack = stack_of(model)
    try:
        part = view(model, layers)
    except AttributeError as error:  # its config derives the layers from other settings
        raise UnsupportedModel(f"{type(model).__name__} has no plain stack of layers: {error}") from error
    config = part.config.get_text_config()
    for name, value in config.to_dict().items():  # settings with one entry per layer
        if isinstance(value, list) and len(value) == stack and name != "layer_types":
            setattr(config, name, [value[i] for i in layers])
    return part


def smallest_dtype(model: PreTrainedModel) -> torch.dtype:
    """Return a 16-bit dtype if that loses nothing: a checkpoint loaded as float32 often holds only 16 bits."""
    given = list(model.parameters())
    for dtype in (torch.bfloat16, torch.float16) if model.dtype.itemsize > 2 else ():
        if all(torch.equal(p.to(dtype).to(p.dtype), p) for p in given):
            return dtype
    return model.dtype


def converted(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """Convert the model to this dtype; parameters that already have it are shared."""
    given = {id(p): nn.Parameter(p.detach().to(dtype), requires_grad=False) for p in model.parameters()}
    return copy.deepcopy(model, given)  # type: ignore[arg-type]


@torch.no_grad()
def _compare(part: PreTrainedModel, folder: Path) -> None:
    device, vocab = part.get_input_embeddings().weight.device, part.config.get_text_config().vocab_size
    ids = torch.tensor([[(11 + 7 * i) % vocab for i in range(PROBE)]], device=device)
    name = type(part).__name__
    try:
        again = AutoModelForCausalLM.from_pretrained(folder, dtype=part.dtype, trust_remote_code=False).to(device)
        found = again(input_ids=ids, use_cache=False).logits
    except (OSError, ValueError, RuntimeError, TypeError, LookupError) as error:
        raise UnsupportedModel(f"{name} cannot be written without some of its layers: {error}") from error
    off = apart(found, part(input_ids=ids, use_cache=False).logits)
    if off > max(0.01, 8 * torch.finfo(part.dtype).eps):
        raise UnsupportedModel(
            f"{name} cannot be written without some of its layers: its config does not reproduce the remaining ones"
        )
