"""Describe a head by the files in its folder, without its target model, for `outpace head show`."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from safetensors import safe_open

from outpace.heads import store
from outpace.heads.base import HeadSpec
from outpace.heads.formats import native_mtp, published
from outpace.heads.formats.checkpoint import HeadFolder
from outpace.heads.quantize import SCALE

SETTINGS = ("draft_vocab_size", "norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", published.LAYER_IDS)


def describe(folder: Path) -> dict[str, Any]:
    """Return the head's kind and layout, what it reads and drafts, its size and its target."""
    if (folder / store.CONFIG).exists() or not published.published(folder):
        return _ours(folder)
    checkpoint = HeadFolder(folder)
    layout, config = published.layout(checkpoint), checkpoint.config
    if layout == "mtp":
        start = native_mtp.prefix(checkpoint)
        names = [name for name in checkpoint.places if name.startswith(str(start))]
        return {"kind": "mtp", "layout": f"layers of the model itself, {start}*", "tensors": len(names)}
    tensors = checkpoint.read(checkpoint.places)
    verifier = (config.get("speculators_config") or {}).get("verifier") or {}
    nested = config.get("eagle_config") or {}
    settings = {name: config.get(name, nested.get(name)) for name in SETTINGS}
    return {
        "kind": config.get("speculators_model_type", "eagle3"),
        "layout": layout,
        "parameters": sum(t.numel() for name, t in tensors.items() if t.is_floating_point() and "embed_" not in name),
        **{name: value for name, value in settings.items() if value is not None},
        **({"made_for": verifier["name_or_path"]} if "name_or_path" in verifier else {}),
    }


def _ours(folder: Path) -> dict[str, Any]:
    about = store.about(folder)
    plain = HeadSpec(about["spec"]["kind"], ())
    changed = {n: v for n, v in about["spec"].items() if n in ("taps", "steps") or v != getattr(plain, n, None)}
    with safe_open(folder / store.WEIGHTS, framework="pt") as opened:
        names = [name for name in list(opened.keys()) if not name.endswith(("ids", SCALE))]
        count = sum(math.prod(opened.get_slice(name).get_shape()) for name in names)
    target = {name: value for name, value in about["target"].items() if name != "weights"}
    return {**changed, "layout": "outpace", "parameters": count, "made_for": target, **about.get("notes", {})}
