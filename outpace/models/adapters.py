"""LoRA adapters (PEFT): load one onto a model, unwrap PEFT's own model, notice when the adapter is switched.

An adapter stays beside the weights of its model, as PEFT runs it. Merging would be faster, but it rounds the sums to
the dtype of the weights, and quantised weights cannot take them.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import nn

from outpace.errors import OutpaceError, UnsupportedModel, UsageError
from outpace.models.quantized import quantized_layers, settle

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def load(model: Any, name: str | Path) -> Any:
    """Put the adapter of this folder or hub id into the layers of a Transformers model."""
    try:
        from peft import PeftConfig, PeftModel
    except ImportError as error:
        raise OutpaceError("an adapter needs PEFT: pip install 'outpace[peft]'") from error
    folder, base = _folder(name), type(model).__name__
    if any(quantized_layers(model)):
        settle(model)  # PEFT reads the weights, which some packages unpack in the first pass
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "Found missing adapter keys")  # layers without an adapter
        try:
            _check_kind(PeftConfig.from_pretrained(str(folder)))
            adapted = PeftModel.from_pretrained(model, str(folder))
        except (ValueError, TypeError, KeyError, OSError, RuntimeError, UserWarning) as error:
            why = " ".join(str(error).split())
            raise OutpaceError(
                f"the adapter {str(name)!r} does not fit {base}; load the model that it was trained on: {why[:300]}"
            ) from error
    _check_complete(adapted, folder, name)
    return adapted


def base_of(model: Any) -> Any:
    """Return the Transformers model inside PEFT's, with the adapter in its layers; any other model as it is."""
    if not hasattr(model, "get_base_model"):
        return model
    for config in model.peft_config.values():
        _check_kind(config)
    return model.get_base_model()


def has_adapter(model: nn.Module) -> bool:
    return any(_adapted_layers(model))


class AdapterState:
    """Which adapters of a model were active when it was wrapped. A twin of the model does not see later changes."""

    def __init__(self, model: nn.Module):
        self._layers = list(_adapted_layers(model))
        self._known = list(self._now())

    def check(self) -> None:
        """Raise an error if another adapter is active by now, or if one was merged into the weights."""
        if list(self._now()) != self._known:
            raise UsageError(
                "the adapter was switched, scaled or merged after the model was wrapped: wrap the model again, "
                "or undo the change"
            )

    def _now(self) -> Iterator[tuple[Any, ...]]:
        for layer in self._layers:
            scaling = dict(getattr(layer, "scaling", {}))
            yield list(layer.active_adapters), layer.disable_adapters, list(layer.merged_adapters), scaling


def _adapted_layers(model: nn.Module) -> Iterator[Any]:
    return (layer for layer in model.modules() if hasattr(layer, "merged_adapters"))


def _check_kind(config: Any) -> None:
    kind = str(getattr(config.peft_type, "value", config.peft_type))
    if kind != "LORA" or getattr(config, "alora_invocation_tokens", None):
        kind = "aLoRA" if kind == "LORA" else kind
        raise UnsupportedModel(
            f"adapters of the kind {kind} are not supported, only LoRA: merge it into its model with PEFT "
            "(merge_and_unload), if it can be merged, and wrap the result"
        )


def _folder(name: str | Path) -> Path:
    """Return the folder with the adapter's two files; no other file is downloaded or read."""
    if Path(name).is_dir():
        folder = Path(name)
    else:
        from huggingface_hub import snapshot_download

        try:
            folder = Path(snapshot_download(str(name), allow_patterns=[CONFIG, WEIGHTS]))
        except (OSError, ValueError) as error:
            raise OutpaceError(
                f"cannot load the adapter {str(name)!r}: as a folder or hub id it fails: {error}"
            ) from error
    for file in (CONFIG, WEIGHTS):
        if not (folder / file).is_file():
            raise OutpaceError(
                f"{str(name)!r} is not an adapter: it has no {file}; save it with PEFT's save_pretrained"
            )
    return folder


def _check_complete(adapted: Any, folder: Path, name: str | Path) -> None:
    """Raise an error if the file has weights that no layer of this model has taken."""
    from peft import get_peft_model_state_dict
    from safetensors import safe_open

    with safe_open(folder / WEIGHTS, framework="pt") as file:
        left = sorted(set(file.keys()) - set(get_peft_model_state_dict(adapted)))
    if left:
        raise OutpaceError(
            f"the adapter {str(name)!r} has weights for layers that {type(adapted.get_base_model()).__name__} does not "
            f"have; load the model that it was trained on: {', '.join(left[:3])}"
        )
