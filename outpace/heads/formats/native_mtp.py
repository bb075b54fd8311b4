"""MTP layers that some models ship with: Qwen3-Next and Qwen3.5 as `mtp.*`, DeepSeek-V3 and GLM as one extra layer.

Transformers does not load them. The first one becomes an `mtp` head with a layer like the target's own. A further one,
which a few models have for the second token ahead, is not used: the first one is run again.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from outpace.errors import UsageError
from outpace.heads.base import HeadSpec
from outpace.heads.formats.checkpoint import CONFIG, HeadFolder
from outpace.heads.layers import TARGET
from outpace.models.embeddings import Embeddings

KIND = "mtp"
# DeepSeek's names -> ours.
RENAMED = {
    "enorm.": "pre_fc_norm_embedding.", "hnorm.": "pre_fc_norm_hidden.", "eh_proj.": "fc.",
    "shared_head.norm.": "norm.",
}  # fmt: skip
SHARED = {"embed_tokens.weight": "embed_tokens.weight", "shared_head.head.weight": "output.weight"}
OWN_PLACE = ("fc.", "norm.", "pre_fc_norm_")  # outside the layer
EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")


def prefix(checkpoint: HeadFolder) -> str | None:
    """Return the prefix of the tensor names of a checkpoint's first MTP layer; None: it has none."""
    if any(name.startswith("mtp.") for name in checkpoint.places):
        return "mtp."
    found = sorted(
        (int(match[2]), match[1])
        for name in checkpoint.places
        if (match := re.fullmatch(r"(.*layers\.(\d+)\.)eh_proj\.weight", name))
    )
    return found[0][1] if found else None


def read(checkpoint: HeadFolder, layer_count: int) -> tuple[HeadSpec, dict[str, Tensor]]:
    """Read the head; copies of the target's matrices are named `embed_tokens.weight` and `output.weight`."""
    start = prefix(checkpoint)
    assert start is not None
    names = [name for name in checkpoint.places if name.startswith(start)]
    later = re.compile(r"mtp\.layers\.[1-9]")
    given = {n.removeprefix(start): t for n, t in checkpoint.read(n for n in names if not later.match(n)).items()}
    tensors = {_ours(name): tensor for name, tensor in _fused(given).items()}
    scaled = sorted(name for name in given if "scale" in name.rsplit(".", 1)[-1])
    if scaled:
        raise UsageError(
            f"the MTP layer in {checkpoint.folder} is quantised ({scaled[0]}); only plain weights can be read"
        )
    # In `mtp.*` the norm is part of the layer's result, so the normed state is fed back; DeepSeek's is for the output.
    spec = HeadSpec(KIND, (layer_count,), normed=start == "mtp.", parts=TARGET)
    return spec, tensors


def _ours(name: str) -> str:
    if name in SHARED:
        return SHARED[name]
    for theirs, ours in RENAMED.items():
        if name.startswith(theirs):
            name = ours + name.removeprefix(theirs)
    if name.startswith((*OWN_PLACE, "layers.")):
        return f"model.{name}"
    return f"model.layers.0.{name}"


def _fused(given: dict[str, Tensor]) -> dict[str, Tensor]:
    """Stack experts as Transformers stores them: all in one tensor, with gate and up as one matrix."""
    experts: dict[str, dict[int, dict[str, Tensor]]] = {}
    rest = {}
    for name, tensor in given.items():
        match = EXPERT.fullmatch(name)
        if match is None:
            rest[name] = tensor
        else:
            experts.setdefault(match[1], {}).setdefault(int(match[2]), {})[match[3]] = tensor
    for name, found in experts.items():
        ordered: Iterable[dict[str, Tensor]] = [found[i] for i in sorted(found)]
        rest[f"{name}.gate_up_proj"] = torch.stack([torch.cat([e["gate"], e["up"]]) for e in ordered])
        rest[f"{name}.down_proj"] = torch.stack([e["down"] for e in ordered])
    return rest


def folder_of(embeddings: Embeddings) -> Path | None:
    """Return the folder that the target was loaded from, if its checkpoint has MTP layers."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    name = getattr(embeddings.config, "_name_or_path", "") if embeddings.config is not None else ""
    if not name:
        return None
    folder = Path(name)
    if not folder.is_dir():
        try:
            folder = Path(snapshot_download(name, local_files_only=True))
        except (LocalEntryNotFoundError, HFValidationError, HfHubHTTPError, OSError):
            return None
    if not (folder / CONFIG).is_file():
        return None
    try:
        return folder if prefix(HeadFolder(folder)) is not None else None
    except UsageError:  # no weights in a format that we read
        return None
