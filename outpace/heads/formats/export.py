"""Export a head of ours in the layouts of other projects, so that vLLM and SGLang can serve it."""

from __future__ import annotations

import json
import shlex
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedConfig

from outpace.core.lm import LM
from outpace.errors import UsageError, unknown
from outpace.heads.base import Head
from outpace.heads.formats.checkpoint import CONFIG, SAFE
from outpace.heads.formats.published import LAYER_IDS
from outpace.heads.recursive import Recursive
from outpace.version import __version__

LAYOUTS = ("speculators", "eagle")  # vLLM reads both; SGLang and EAGLE's own code read the second


def export(head: Head, folder: Path, lm: LM, model: str, layout: str = LAYOUTS[0]) -> None:
    """Write the head into a new folder, in its own precision, for the target `lm`, which servers know as `model`."""
    if layout not in LAYOUTS:
        raise unknown("layout", layout, LAYOUTS)
    if not isinstance(head, Recursive) or head.kind != "eagle3":
        raise UsageError(
            f"a head of the kind {head.kind!r} cannot be exported: other servers run eagle3 heads for any model, but "
            "MTP layers only for model families that were trained with them"
        )
    if head.spec.layers != 1:
        raise UsageError(
            "a head of several layers cannot be exported: each of our layers reads the token, servers' do not"
        )
    if layout == "eagle" and head.spec.taps[0] == 1:
        raise UsageError("in this layout a first state of 1 would be read as 2; export to speculators instead")
    if folder.exists():
        raise UsageError(f"{folder} already exists: name another folder")
    tensors, config = _tensors(head), _config(head, lm)
    if layout == "eagle":
        tensors = {name.replace("layers.0.", "midlayer.", 1): tensor for name, tensor in tensors.items()}
        eagle = {"use_aux_hidden_state": True, LAYER_IDS: config[LAYER_IDS]}
        config = {**_layer(head.config, lm.max_length), **config, "eagle_config": eagle}
        config["architectures"] = ["LlamaForCausalLMEagle3"]
    else:
        config |= _speculators(head, lm, model)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as place:  # the folder appears complete or not at all
        made = Path(place) / folder.name
        made.mkdir()
        save_file(tensors, made / SAFE, metadata={"format": "pt"})
        (made / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
        made.rename(folder)


def serving_commands(folder: Path, model: str, steps: int, layout: str = LAYOUTS[0]) -> list[str]:
    """Return the commands that serve a model with an exported head that drafts this number of tokens."""
    speculation = {"method": "eagle3", "model": str(folder), "num_speculative_tokens": steps}
    commands = [["vllm", "serve", model, "--speculative-config", json.dumps(speculation)]]
    if layout == "eagle":
        chain = {"num-steps": steps, "eagle-topk": 1, "num-draft-tokens": steps + 1}
        flags = [part for name, value in chain.items() for part in (f"--speculative-{name}", str(value))]
        drafting = ["--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path", str(folder)]
        commands.append(["python", "-m", "sglang.launch_server", "--model-path", model, *drafting, *flags])
    return [shlex.join(command) for command in commands]


def _tensors(head: Recursive) -> dict[str, Tensor]:
    own = {name.removeprefix("model."): tensor for name, tensor in head.own_tensors().items()}
    own.pop("output.weight", None)
    output, ids = _output(head), own.pop("ids", None)
    if ids is not None:  # servers select the target's rows with a mask, so in the order of its ids
        order = ids.argsort()
        ids, output = ids[order], output[order]
        own["d2t"] = ids - torch.arange(len(ids), device=ids.device)
        own["t2d"] = torch.zeros(head.config.vocab_size, dtype=torch.bool).index_fill(0, ids.cpu(), True)
    return {name: tensor.contiguous().cpu() for name, tensor in {**own, "lm_head.weight": output}.items()}


def _output(head: Recursive) -> Tensor:  # [draft vocab, hidden]
    weight: Any = head.get_output_embeddings().weight
    return weight.detach()


def _config(head: Recursive, lm: LM) -> dict[str, Any]:
    """Return the settings that both layouts share."""
    spec = head.spec
    return {
        "dtype": str(_output(head).dtype).removeprefix("torch."),
        "draft_vocab_size": spec.draft_vocab or head.config.vocab_size,
        "tie_word_embeddings": False,
        LAYER_IDS: list(spec.taps),
        "norm_before_residual": spec.residual_norm,
        "norm_before_fc": head.model.entry == "joined",
        "fc_norm": head.model.entry == "each",
        "norm_output": spec.normed,
        "exported_by": f"outpace {__version__}",
    }


def _speculators(head: Recursive, lm: LM, model: str) -> dict[str, Any]:
    target = lm.embeddings.config if lm.embeddings is not None else None
    return {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "transformer_layer_config": _layer(head.config, lm.max_length),
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": head.spec.steps}],
            "verifier": {"name_or_path": model, "architectures": list(getattr(target, "architectures", None) or [])},
        },
    }


def _layer(config: PreTrainedConfig, context: int) -> dict[str, Any]:
    """Return the config of the layer, with its rotation also under the names that older readers expect."""
    layer: dict[str, Any] = {**config.to_diff_dict(), "max_position_embeddings": context}
    rope = layer.get("rope_parameters") or {}
    layer["rope_theta"] = rope.get("rope_theta", 10000.0)
    if rope.get("rope_type", "default") != "default":
        layer["rope_scaling"] = {name: value for name, value in rope.items() if name != "rope_theta"}
    return layer
