"""adapt: the fastest adapter that a Transformers model allows."""

from __future__ import annotations

import logging

from transformers import PreTrainedModel

from outpace.core.lm import LM
from outpace.errors import UnsupportedModel
from outpace.models.hf.lm import PackedLM
from outpace.models.hf.snapshot import SnapshotLM

logger = logging.getLogger(__name__)
LARGE = 50_000_000  # parameters: a smaller model spends its time elsewhere


def adapt(model: PreTrainedModel, cache_limit: int | None = None, exact: bool = False, eager: bool | None = None) -> LM:
    """The fastest adapter that this model allows; `UnsupportedModel` names one that none of them can run.

    `eager` runs the model's layers as they are; None compiles them where that is likely to pay.
    """
    if model.config.is_encoder_decoder or not model.can_generate():
        raise UnsupportedModel(f"{type(model).__name__} is not a causal language model")
    packed = _kind(exact).fitting(model, cache_limit)
    if packed is not None and (exact or (eager is None and not _worth_compiling(model)) or eager):
        return packed
    if packed is not None:
        return _compiled(packed)
    if exact:
        raise UnsupportedModel(f"exact=True needs packed passes, and {type(model).__name__} runs with its own cache")
    logger.info("%s runs with its own cache: chains only, one row at a time", type(model).__name__)
    return SnapshotLM(model)


def _worth_compiling(model: PreTrainedModel) -> bool:
    return sum(parameter.numel() for parameter in model.parameters()) >= LARGE


def _compiled(packed: PackedLM) -> PackedLM:
    from outpace.models.compiled.cpu import CompiledLM
    from outpace.models.compiled.cuda_graph import GraphLM

    return (GraphLM if packed.device.type == "cuda" else CompiledLM).of(packed)


def _kind(exact: bool) -> type[PackedLM]:
    from outpace.models.hf.bitwise import BitwiseLM

    return BitwiseLM if exact else PackedLM
