"""Published heads: EAGLE-3 as EAGLE, SpecForge and vLLM's speculators write it, and models' own MTP layers.

Tensors get our names, and the settings become a `HeadSpec`. Whatever our heads do not support is refused by name: a
head that ran without one of its parts would only draft badly, and the cause would go unnoticed.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig

from outpace.errors import OutpaceError, UsageError
from outpace.heads.base import HeadSpec
from outpace.heads.formats import native_mtp
from outpace.heads.formats.checkpoint import CONFIG, HeadFolder
from outpace.heads.recursive import COPIED
from outpace.models.embeddings import Embeddings
from outpace.models.hf.tolerance import apart

LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
ROPES = ("default", "llama3", "linear", "yarn")  # rotations that depend on nothing but the distance
SAME = 0.01  # largest distance between the target's matrix and a copy of it: rounding to 16 bits is far less
EMBED, OUTPUT = "embed_tokens.weight", "output.weight"
ASIDE = re.compile(r"t2d|d2t|.*rotary_emb\..*|verifier_.*")  # handled elsewhere, or not needed


@dataclass(frozen=True)
class HeadWeights:
    """A head as we would have saved it."""

    spec: HeadSpec
    tensors: dict[str, Tensor]  # in our names


def published(folder: Path) -> bool:
    return (folder / CONFIG).is_file()


def layout(checkpoint: HeadFolder) -> str:
    """Return the layout of a published head, by its config and the names of its tensors."""
    config, names = checkpoint.config, checkpoint.places
    if "speculators_config" in config or "speculators_model_type" in config:
        return "speculators"
    if any(name.removeprefix("model.").startswith("midlayer.") for name in names):
        return "eagle"
    if native_mtp.prefix(checkpoint) is not None:
        return "mtp"
    if "draft_vocab_size" in config and "fc.weight" in {name.removeprefix("model.") for name in names}:
        return "eagle"
    raise UsageError(
        f"{checkpoint.folder} has no known head format: neither EAGLE-3 (midlayer.*, or layers.0.* with a "
        "draft_vocab_size), nor speculators, nor MTP layers of a model (mtp.*, or *.eh_proj after its last layer)"
    )


def read(folder: Path, embeddings: Embeddings, layer_count: int) -> HeadWeights:
    """Read the head in this folder, for a target with `layer_count` layers."""
    checkpoint = HeadFolder(folder)
    kind = layout(checkpoint)
    if kind == "mtp":
        spec, tensors = native_mtp.read(checkpoint, layer_count)
        tensors = _borrowing(tensors, embeddings, folder)
        return HeadWeights(replace(spec, own_output=OUTPUT in tensors), tensors)
    named = checkpoint.config.get("speculators_model_type", "eagle3")
    if named != "eagle3":
        raise UsageError(f"{folder} is a speculators model of the type {named!r}; only eagle3 can be read")
    return _eagle3(checkpoint, kind == "speculators", embeddings, layer_count)


def _eagle3(checkpoint: HeadFolder, speculators: bool, embeddings: Embeddings, layer_count: int) -> HeadWeights:
    config, folder = checkpoint.config, checkpoint.folder
    given = {_renamed(name): tensor for name, tensor in checkpoint.read(checkpoint.places).items()}
    layer = config.get("transformer_layer_config", {}) if speculators else config
    _check(layer, config, embeddings, folder)
    ids = _ids(given, embeddings.vocab, folder)
    named = {_ours(name): tensor for name, tensor in given.items() if not ASIDE.fullmatch(name)}
    tensors = _borrowing(named, embeddings, folder)
    if "model.fc.weight" not in tensors:
        raise OutpaceError(f"the head in {folder} lacks the tensor fc.weight")
    normed = {name for name in tensors if name.startswith(("model.fc_norm.", "model.input_norm."))}
    if bool(normed) != (_flag(config, "norm_before_fc") or _flag(config, "fc_norm")):
        raise OutpaceError(f"the head in {folder} has norms before fc that its config does not name, or the reverse")
    if ids is not None:
        tensors["ids"] = ids
    state_count = tensors["model.fc.weight"].shape[1] // embeddings.hidden
    spec = HeadSpec(
        "eagle3", _taps(config, speculators, layer_count, state_count, folder),
        steps=_steps(config), draft_vocab=0 if ids is None else len(ids), own_output=OUTPUT in tensors,
        normed=_flag(config, "norm_output"), residual_norm=_flag(config, "norm_before_residual"),
        entry_norm="none" if not normed else "joined" if any("input_norm" in name for name in normed) else "each",
        feedforward=layer.get("intermediate_size", 0), shape=_shape(layer, tensors, embeddings, folder),
        parts="qwen3" if any("q_norm" in name for name in tensors) else "llama",
    )  # fmt: skip
    return HeadWeights(spec, tensors)


def _renamed(name: str) -> str:
    """Return the name of a tensor in the layout of speculators."""
    return name.removeprefix("model.").replace("midlayer.", "layers.0.", 1)


def _ours(name: str) -> str:
    return {EMBED: EMBED, "lm_head.weight": OUTPUT}.get(name, f"model.{name}")


def _flag(config: dict[str, Any], name: str) -> bool:
    """Return a setting of the head; some projects put it into `eagle_config`."""
    return bool(config.get(name) or (config.get("eagle_config") or {}).get(name))


def _check(layer: dict[str, Any], config: dict[str, Any], embeddings: Embeddings, folder: Path) -> None:
    """Refuse what our heads do not support."""
    width = config.get("target_hidden_size") or layer.get("hidden_size", embeddings.hidden)
    if layer.get("hidden_size", embeddings.hidden) != embeddings.hidden or width != embeddings.hidden:
        raise UsageError(
            f"the head in {folder} is {layer.get('hidden_size')} wide, for a target of width {width}; "
            f"this target has width {embeddings.hidden}"
        )
    if layer.get("num_hidden_layers", 1) != 1:
        raise UsageError(f"the head in {folder} has {layer['num_hidden_layers']} layers; only one can be read")
    if set(layer.get("layer_types") or ["full_attention"]) != {"full_attention"}:
        raise UsageError(f"the head in {folder} has layers of {layer['layer_types']}; only full attention can be read")


def _ids(given: dict[str, Tensor], vocab: int, folder: Path) -> Tensor | None:
    """Return the target's id of each token that the head can draft; None: all, in order."""  # [draft vocab]
    if "d2t" not in given:
        return None
    ids = torch.arange(len(given["d2t"])) + given["d2t"].long()  # offsets, not ids
    if int(ids.min()) < 0 or int(ids.max()) >= vocab or len(ids.unique()) < len(ids):
        raise UsageError(
            f"d2t of the head in {folder} leads outside the {vocab} tokens of this target, or twice to the same one; "
            "its entries are offsets: target id = i + d2t[i]"
        )
    if "t2d" in given:
        mask = given["t2d"].bool()
        if len(mask) != vocab or int(mask.sum()) != len(ids) or not bool(mask[ids].all()):
            raise UsageError(f"t2d of the head in {folder} does not match its d2t, or does not have {vocab} tokens")
    return None if len(ids) == vocab and bool((ids == torch.arange(vocab)).all()) else ids


def _borrowing(given: dict[str, Tensor], embeddings: Embeddings, folder: Path) -> dict[str, Tensor]:
    """Drop copies of the target's matrices, and refuse embeddings of the head's own."""
    embed = given.pop(EMBED, None)
    if embed is not None and not _copy_of(embed, embeddings.embed):
        raise UsageError(
            f"the head in {folder} has embeddings that are not those of this target: it is for another model, or its "
            "embeddings were trained with it, which is not supported"
        )
    if OUTPUT in given and _copy_of(given[OUTPUT], embeddings.unembed):
        given.pop(OUTPUT)
    return given


def _copy_of(theirs: Tensor, ours: Tensor) -> bool:
    return theirs.shape == ours.shape and apart(theirs.to(ours.device), ours) <= SAME


def _taps(config: dict[str, Any], speculators: bool, layer_count: int, count: int, folder: Path) -> tuple[int, ...]:
    """Return the states of the target that the head reads, numbered as in Transformers: i is the input of layer i.

    vLLM and speculators use the same numbers. SpecForge and SGLang number layers by their output, and are recognised by
    a first id of 1: the output of layer 1 is the input of layer 2, and no other head reads the input of layer 1.
    """
    named = config.get(LAYER_IDS) or (config.get("eagle_config") or {}).get(LAYER_IDS)
    taps = tuple(named or (2, layer_count // 2, layer_count - 3))
    if named and not speculators and taps[0] == 1:
        taps = tuple(tap + 1 for tap in taps)
    if layer_count in taps:
        raise UsageError(f"the head in {folder} reads the last layer before the final norm, which is not recorded")
    if len(taps) != count or any(not 0 <= tap < layer_count for tap in taps):
        raise UsageError(
            f"the head in {folder} reads {count} states of its target, {list(taps)}, "
            f"but this target has {layer_count} layers"
        )
    return taps


def _steps(config: dict[str, Any]) -> int:
    methods = (config.get("speculators_config") or {}).get("proposal_methods") or [{}]
    return int(methods[0].get("speculative_tokens") or HeadSpec("", ()).steps)


def _shape(layer: dict[str, Any], tensors: dict[str, Tensor], embeddings: Embeddings, folder: Path) -> dict[str, Any]:
    """Return the settings of the layer, after Transformers has converted old names."""
    names = {*COPIED, "rope_theta", "rope_scaling", "max_position_embeddings"}
    read = LlamaConfig(**{n: layer[n] for n in names if layer.get(n) is not None}, hidden_size=embeddings.hidden)
    rope = read.rope_parameters
    if rope.get("rope_type", "default") not in ROPES:
        raise UsageError(
            f"the head in {folder} uses rotations of type {rope['rope_type']}; only {', '.join(ROPES)} can be read"
        )
    if rope.get("rope_type") == "yarn":  # it stretches from the length that the head was made for, not from ours
        rope.setdefault("original_max_position_embeddings", read.max_position_embeddings)
    biased = {"attention_bias": True} if any("q_proj.bias" in name for name in tensors) else {}
    return {name: getattr(read, name) for name in COPIED} | biased
