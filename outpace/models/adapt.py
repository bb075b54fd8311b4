"""Choose the fastest runtime that a Transformers model supports. Only this file knows all of these runtimes."""

from __future__ import annotations

import logging

from transformers import PreTrainedModel

from outpace.core.lm import LM
from outpace.errors import UnsupportedModel
from outpace.models.hf.bitwise import make_bitwise
from outpace.models.hf.lm import TransformersLM
from outpace.models.hf.snapshot import SnapshotLM

logger = logging.getLogger(__name__)
LARGE = 50_000_000  # parameters; a smaller model spends its time elsewhere, so compiling it hardly pays


def adapt(
    model: PreTrainedModel, cache_limit: int | None = None, bitwise: bool = False, compile: bool | None = None
) -> LM:
    """Return the fastest runtime for this model; raise `UnsupportedModel` if no runtime can run it.

    `compile` says whether to compile its layers; None compiles them where that is likely to pay.
    """
    if model.config.is_encoder_decoder or not model.can_generate():
        raise UnsupportedModel(f"{type(model).__name__} is not a causal language model")
    lm = TransformersLM.fitting(model, cache_limit)
    if lm is None:
        if bitwise:
            raise UnsupportedModel(
                f"bitwise=True needs packed passes, but {type(model).__name__} runs with its own cache; "
                "leave bitwise=True out"
            )
        logger.info("%s runs with its own cache: it scores chains only, one slot at a time", type(model).__name__)
        return SnapshotLM(model)
    if bitwise:
        make_bitwise(lm)
    elif compile or (compile is None and _worth_compiling(model)):
        _compile(lm)
    return lm


def _compile(lm: TransformersLM) -> None:
    if lm.device.type == "cuda":
        from outpace.models.compiled.cuda_graph import GraphRunner as Compiled
    else:
        from outpace.models.compiled.cpu import CpuRunner as Compiled  # type: ignore[assignment]
    Compiled.install(lm)


def _worth_compiling(model: PreTrainedModel) -> bool:
    return sum(parameter.numel() for parameter in model.parameters()) >= LARGE
