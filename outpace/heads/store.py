"""Heads by kind: create one for a target, save and load it, or find one that was trained for the target."""

from __future__ import annotations

import dataclasses
import json
import os
import tempfile
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from outpace.core.lm import LM, layers_of
from outpace.errors import HeadNotFound, OutpaceError, UsageError, unknown
from outpace.heads.base import Head, HeadSpec
from outpace.heads.formats import native_mtp, published
from outpace.heads.formats.published import HeadWeights
from outpace.heads.quantize import compressed, expanded
from outpace.models.embeddings import Embeddings
from outpace.storage import weights
from outpace.storage.files import cache_dir

KINDS: dict[str, str] = {
    "eagle3": "outpace.heads.eagle3:Eagle3Head",
    "mtp": "outpace.heads.mtp:MtpHead",
    "medusa": "outpace.heads.medusa:MedusaHead",
    "block": "outpace.heads.block:BlockHead",
}
RANDOM = "random"  # a head with untrained weights: it drafts badly, but everything runs
CONFIG, WEIGHTS = "head.json", "head.safetensors"


def find_class(kind: str) -> Any:
    if kind not in KINDS:
        raise unknown("kind of head", kind, KINDS)
    module, _, name = KINDS[kind].partition(":")
    return getattr(import_module(module), name)


def embeddings_or_error(lm: LM) -> Embeddings:
    if lm.embeddings is None or lm.layers is None:
        raise HeadNotFound(
            "this model cannot have heads: they need its hidden states and plain embedding and output matrices"
        )
    return lm.embeddings


def fresh(kind: str, lm: LM, ids: Tensor | None = None, **given: Any) -> Head:
    """Create a head for this target with random weights."""
    cls, embeddings = find_class(kind), embeddings_or_error(lm)
    known = {field.name for field in dataclasses.fields(HeadSpec)} - {"kind"}
    for name in given:
        if name not in known:
            raise unknown(f"setting of a {kind} head", name, known)
    defaults = {**cls.defaults(layers_of(lm).count, given), "draft_vocab": 0 if ids is None else len(ids)}
    spec = HeadSpec(kind, **{**defaults, **given})
    listed = isinstance(spec.taps, list | tuple) and len(spec.taps) > 0
    if not listed or not all(type(tap) is int and 0 <= tap <= layers_of(lm).count for tap in spec.taps):
        raise UsageError(f"taps must be a list of hidden states from 0 to {layers_of(lm).count}, got {spec.taps}")
    spec = dataclasses.replace(spec, taps=tuple(spec.taps))
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        head: Head = cls(embeddings, spec, ids)
    return _placed(head, embeddings)


def extended(head: Head, lm: LM, ids: Tensor | None, **given: Any) -> Head:
    """Return the same head for the tokens `ids`, with other settings.

    New parts change nothing at first. If it gets fewer layers, the first ones are kept.
    """
    same = ids is head.ids or (ids is not None and head.ids is not None and torch.equal(ids, head.ids))
    if head.spec.own_output and not same:
        raise UsageError("the draft vocabulary cannot change: the head has an output matrix of its own for it")
    settings = dataclasses.asdict(head.spec) | given | {"draft_vocab": 0 if ids is None else len(ids)}
    larger = fresh(settings.pop("kind"), lm, ids, **settings)
    new, old = larger.own_tensors(), {name: tensor for name, tensor in head.own_tensors().items() if name != "ids"}
    if given.get("layers", head.spec.layers) != head.spec.layers and set(new) - {"ids"} == set(old):
        raise UsageError(f"a {head.kind} head has no layers to add to")
    for name, tensor in old.items():
        if name in new and new[name].shape != tensor.shape:
            changed = ", ".join(f"{name}={value}" for name, value in given.items())
            raise UsageError(
                f"the head was trained without {changed} and cannot continue with it: {name} has another size"
            )
    with torch.no_grad():
        for name, parameter in larger.named_parameters():
            if name not in old and name.endswith(("o_proj.weight", "down_proj.weight")):
                parameter.zero_()
    larger.load_state_dict({name: tensor for name, tensor in old.items() if name in new}, strict=False)
    return larger


def save(head: Head, folder: Path, lm: LM, notes: dict[str, Any] | None = None) -> None:
    """Write a head, with weights in float16; each file appears complete or not at all."""
    embeddings = embeddings_or_error(lm)
    target = {
        "vocab": embeddings.vocab,
        "hidden": embeddings.hidden,
        "layers": layers_of(lm).count,
        "weights": embeddings.fingerprint,
    }
    made = {"spec": dataclasses.asdict(head.spec), "target": target, "notes": notes or {}}
    tensors = {n: (t.half() if t.is_floating_point() else t).contiguous().cpu() for n, t in head.own_tensors().items()}
    _write(folder, made, tensors)


def compress(folder: Path, output: Path) -> None:
    """Write a copy of a head of ours with matrices in int8."""
    if (output / CONFIG).exists():
        raise UsageError(f"{output} already holds a head: name another folder")
    _write(output, about(folder), compressed(load_file(folder / WEIGHTS)))


def _write(folder: Path, made: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as place:
        save_file(tensors, Path(place) / WEIGHTS)
        (Path(place) / CONFIG).write_text(json.dumps(made, indent=1) + "\n")
        for name in (WEIGHTS, CONFIG):
            os.replace(Path(place) / name, folder / name)


def load(folder: Path, lm: LM) -> Head:
    """Load the head in a folder: one of ours, or one in a published format (docs/training/head-formats.md)."""
    found = (
        _ours(folder, lm)
        if (folder / CONFIG).exists()
        else published.read(folder, embeddings_or_error(lm), layers_of(lm).count)
    )
    try:
        return made(found.spec, found.tensors, lm)
    except OutpaceError as error:
        raise OutpaceError(f"cannot load the head in {folder}: {error}") from error


def made(spec: HeadSpec, tensors: dict[str, Tensor], lm: LM) -> Head:
    """Build a head for this target with these weights, which are copied."""
    embeddings, ids = embeddings_or_error(lm), tensors.get("ids")
    head: Head = find_class(spec.kind)(embeddings, spec, ids if ids is None else ids.to(embeddings.embed.device))
    _check(head, tensors)
    head.load_state_dict(tensors, strict=False)
    return _placed(head, embeddings)


def _placed(head: Head, embeddings: Embeddings) -> Head:
    """Move a head to the target's device and precision, except buffers: rotations of far tokens need exact angles."""
    for parameter in head.to(embeddings.embed.device).parameters():
        parameter.data = parameter.data.to(embeddings.embed.dtype)
    return head.eval()


def _ours(folder: Path, lm: LM) -> HeadWeights:
    made = about(folder)
    if not _fits(made["target"], lm):
        raise UsageError(f"the head in {folder} was made for another model: {_named(made)}")
    spec = HeadSpec(**{**made["spec"], "taps": tuple(made["spec"]["taps"])})
    return HeadWeights(spec, expanded(load_file(folder / WEIGHTS)))


def _check(head: Head, tensors: dict[str, Tensor]) -> None:
    own = head.own_tensors()
    problems = {"missing tensors:": set(own) - set(tensors), "unexpected tensors:": set(tensors) - set(own)}
    for problem, names in problems.items():
        if names:
            raise OutpaceError(f"{problem} {', '.join(sorted(names))}")
    for name, tensor in tensors.items():
        if tensor.shape != own[name].shape:
            expected = list(own[name].shape)
            raise OutpaceError(
                f"{name} has shape {list(tensor.shape)}, but {expected} is expected from its config and this model"
            )


def resolve(kind: str, given: str | Head | None, lm: LM) -> Head:
    """Return the head that an option names: a head, a folder, "random", or None for a local or downloadable one."""
    if given == RANDOM:
        return fresh(kind, lm)
    if given is not None:
        head = given if isinstance(given, Head) else load(Path(given), lm)
        if head.spec.kind != kind:
            named = "this head" if isinstance(given, Head) else f"the head in {given}"
            raise UsageError(f"{named} is of the kind {head.spec.kind!r}, not {kind!r}")
        return head
    folder = local(kind, lm)
    if folder is None and (names := _trained(kind, lm)):
        folder = weights.fetch(names[0])
    if folder is not None:
        return load(folder, lm)
    raise HeadNotFound(
        f"No {kind} head ships for this model. Pass head=FOLDER, train one with `outpace train {kind} MODEL`, "
        f"or use head={RANDOM} (untrained) to exercise the code."
    )


def local(kind: str, lm: LM) -> Path | None:
    """Return the folder of a local head for this model: a shipped one, one in the cache folder, or the model's own."""
    embeddings = embeddings_or_error(lm)  # without them no head fits
    for name in _trained(kind, lm):
        if (folder := weights.local(name)) is not None:
            return folder
    for config in sorted((cache_dir() / "heads").glob(f"*/{CONFIG}")):
        made = about(config.parent)
        if made["spec"]["kind"] == kind and _fits(made["target"], lm):
            return config.parent
    return native_mtp.folder_of(embeddings) if kind == native_mtp.KIND else None


def _trained(kind: str, lm: LM) -> list[str]:
    """Name the shipped heads of this kind that were trained for this model, wherever their files are."""
    return [name for name, entry in weights.manifest().items() if entry.kind == kind and _fits(entry.target, lm)]


def about(folder: Path) -> dict[str, Any]:
    """Read the metadata beside the weights of a head of ours."""
    try:
        found = json.loads((folder / CONFIG).read_text())
        assert {"spec", "target"} <= set(found)
    except (OSError, ValueError, AssertionError) as error:
        raise UsageError(f"{folder} holds no head: {error or 'head.json is incomplete'}") from error
    return found


def _fits(made: dict[str, Any], lm: LM) -> bool:
    embeddings = embeddings_or_error(lm)
    if (made["vocab"], made["hidden"], made["layers"]) != (embeddings.vocab, embeddings.hidden, layers_of(lm).count):
        return False
    ours, theirs = torch.tensor(embeddings.fingerprint), torch.tensor(made["weights"])
    return bool(torch.allclose(ours, theirs, rtol=2e-2, atol=1e-3))


def _named(config: dict[str, Any]) -> str:
    made = config["target"]
    return f"one with {made['layers']} layers, width {made['hidden']} and {made['vocab']} tokens, or with other weights"
