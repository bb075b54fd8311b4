"""Choose the fastest runtime that a Transformers model supports. Only this file knows all of these runtimes."""

from __future__ import annotations

import logging

import torch
from transformers import PreTrainedModel

from outpace.core.lm import LM
from outpace.errors import UnsupportedModel
from outpace.models.hf.bitwise import make_bitwise
from outpace.models.hf.lm import TransformersLM
from outpace.models.hf.module import twin
from outpace.models.hf.snapshot import SnapshotLM
from outpace.models.quantized import mixing_layer, quantized_layers, rounding_layer, settle

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
    _examine(model, bitwise)
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


def _examine(model: PreTrainedModel, bitwise: bool) -> None:
    """Refuse a quantised model whose tokens depend on each other; warn if its texts depend on rounding."""
    if next(quantized_layers(model), None) is None:
        return
    name = type(model).__name__
    try:
        settle(model)
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, ValueError, TypeError, AssertionError, NotImplementedError) as error:
        raise UnsupportedModel(
            f"{name} cannot run a single token ({type(error).__name__}: {error}); if it was loaded in another dtype "
            "than it was quantised in, leave dtype out"
        ) from error
    ours = twin(model)
    if (mixing := mixing_layer(ours)) is not None:
        raise UnsupportedModel(
            f"{name} mixes tokens: {mixing} quantises all tokens of a pass together, so a rejected draft would change "
            "the text. Quantise activations per token (torchao: granularity=PerRow(); bitsandbytes: "
            "llm_int8_threshold=0.0), or the weights only"
        )
    if not bitwise and (rounding := rounding_layer(ours)) is not None:
        logger.warning(
            "%s rounds activations in %s, so a text may differ from plain decoding where two tokens are almost equally "
            "likely; bitwise=True makes it exact", name, rounding,
        )  # fmt: skip


def _compile(lm: TransformersLM) -> None:
    if lm.device.type == "cuda":
        from outpace.models.compiled.cuda_graph import GraphRunner as Compiled
    else:
        from outpace.models.compiled.cpu import CpuRunner as Compiled  # type: ignore[assignment]
    Compiled.install(lm)


def _worth_compiling(model: PreTrainedModel) -> bool:
    return sum(parameter.numel() for parameter in model.parameters()) >= LARGE
