"""The heads of a small Llama, grown together with it: the same drafts at the cost of a head for the large model.

A grown head reads the same hidden states and proposes the same tokens. All its matrices are dense and as large as those
of a head that was made for the large model; new rows and columns are zero, and a GPU does not skip zeros.

- A tap keeps its number, except the last one, which is the state after the final norm in both models.
- Attention has the heads of the large model, which are placed as in its own layers.
- Inner layers become wider as the model does: MLPs, links and ranks. With `narrow` they keep their width.
- The draft vocabulary stays as it is. A head that drafts all tokens drafts those of the small model.

The norms before fused states and before links have an epsilon that no head stores, so it weighs more in a wider model:
for SmolLM2 in the shape of 8B, embeddings are 0.05 % smaller after that norm, less than bfloat16 can tell.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from grown import HeadRows, norm_factor
from torch import Tensor
from transformers import LlamaForCausalLM

import outpace
from outpace.core.lm import LM, layers_of
from outpace.errors import HeadNotFound
from outpace.heads import store
from outpace.heads.base import Head, HeadSpec
from outpace.heads.recursive import layer_config

# What the rows and the columns of each matrix are made of.
UNITS = {
    "fc": ("hidden", "hidden"),
    "gate_proj": ("mlp", "hidden"),
    "up_proj": ("mlp", "hidden"),
    "down_proj": ("hidden", "mlp"),
    "enter": ("link", "hidden"),
    "leave": ("hidden", "link"),
    "output": ("token", "hidden"),
}
KINDS = tuple(store.KINDS)
MULTIPLE = 8  # of widths, for tensor cores
INPUTS = {"q_proj": "query", "k_proj": "key", "v_proj": "value"}  # lists of `HeadRows`


@dataclasses.dataclass(frozen=True)
class Change:
    """The sizes of a head before and after."""

    units: dict[str, tuple[int, int]]  # of UNITS: the small size, the large one
    heads: HeadRows
    norm: float  # factor of the weights of norms

    def places(self, count: int, unit: str) -> Tensor:
        """The new index of each row or column: several vectors side by side stay side by side."""  # [count]
        small, large = self.units[unit]
        at = torch.arange(count)
        return at // small * large + at % small

    def of(self, name: str, old: Tensor) -> tuple[list[Tensor], float]:
        """Return the new indices of a tensor's entries, for each of its dimensions, and their factor."""
        parts = name.split(".")
        module = parts[-2] if parts[-1] == "weight" else name
        if name == "mask" or (old.dim() == 1 and "norm" in name):
            return [self.places(len(old), "hidden")], 1.0 if name == "mask" else self.norm
        if module in INPUTS:
            rows = torch.tensor(getattr(self.heads, INPUTS[module]))
            return [rows, self.places(old.shape[1], "hidden")], self.heads.stretch if module == "q_proj" else 1.0
        if module == "o_proj":
            return [self.places(old.shape[0], "hidden"), torch.tensor(self.heads.out)], 1.0
        units = UNITS.get(module)
        if "shifts" in parts:  # medusa: one square matrix, or with a rank a low one and a high one
            ranks = [unit for unit, (small, _) in self.units.items() if unit == "rank" and small]
            narrow = ranks[0] if ranks else "hidden"
            units = (narrow, "hidden") if module == "0" else ("hidden", narrow)
        if units is None or old.dim() != 2:
            raise ValueError(f"{name} of this head cannot be grown")
        return [self.places(count, unit) for count, unit in zip(old.shape, units, strict=True)], 1.0


def grow_head(small: Head, old: LM, new: LM, narrow: bool = False) -> Head:
    """Build a head for the model `new` that proposes what `small` proposes for `old`, from which `new` was grown."""
    if small.spec.shape or small.spec.parts == "qwen3":
        raise ValueError("only heads with layers like those of their target can be grown")
    spec, before, after = small.spec, store.embeddings_or_error(old), store.embeddings_or_error(new)
    named = {"draft_vocab", "kind", "shape"}  # these follow from the other arguments
    settings: dict[str, Any] = {k: v for k, v in dataclasses.asdict(spec).items() if k not in named}
    last = layers_of(old).count
    settings["taps"] = tuple(layers_of(new).count if tap == last else tap for tap in spec.taps)
    ids = small.ids
    if ids is None and after.vocab > before.vocab:
        ids = torch.arange(before.vocab)
    config = layer_config(before, spec)
    settings |= _inner(spec, config.intermediate_size, None if narrow else after.hidden / before.hidden)
    device = after.embed.device
    with torch.device(device):  # random weights of this size take long on a CPU
        large = store.fresh(spec.kind, new, None if ids is None else ids.to(device), **settings)
    grown = layer_config(after, large.spec)
    units = {
        "hidden": (before.hidden, after.hidden),
        "mlp": (config.intermediate_size, grown.intermediate_size),
        "link": (spec.linked, large.spec.linked),
        "rank": (spec.rank, large.spec.rank),
        "token": (1, 1),
    }
    _fill(small, large, Change(units, HeadRows(config, grown), norm_factor(config, grown)))
    return large


def _inner(spec: HeadSpec, mlp: int, factor: float | None) -> dict[str, int]:
    """The widths of inner layers, `factor` times as wide. 0 stays the target's own width; None: nothing grows."""
    if factor is None:
        return {"feedforward": mlp, "linked": spec.linked, "rank": spec.rank}
    sizes = {"feedforward": spec.feedforward, "linked": spec.linked, "rank": spec.rank}
    return {name: math.ceil(size * factor / MULTIPLE) * MULTIPLE for name, size in sizes.items()}


@torch.no_grad()
def _fill(small: Head, large: Head, change: Change) -> None:
    """Give the large head the small one's weights in their new places, and zeros elsewhere."""
    filled = large.own_tensors()
    for name, old in small.own_tensors().items():
        if name == "ids":
            continue
        places, factor = change.of(name, old)
        target = filled[name]
        target.zero_()
        at = [place.to(target.device) for place in places]
        index = (at[0],) if len(at) == 1 else (at[0][:, None], at[1][None])
        target[index] = (old.to(target.device) * factor).to(target.dtype)


def small_heads(lm: LM, folder: Path | None, kinds: Collection[str]) -> Iterator[Head]:
    """The heads of these kinds for the small model: those in subfolders of a folder, or those that are found for it."""
    if folder is not None:
        for config in sorted(folder.glob(f"*/{store.CONFIG}")):
            if store.about(config.parent)["spec"]["kind"] in kinds:
                yield store.load(config.parent, lm)
        return
    for kind in kinds:
        with suppress(HeadNotFound):
            yield store.resolve(kind, None, lm)


def grown_heads(
    small: LlamaForCausalLM, new: LM, folder: Path | None, narrow: bool = False, kinds: Collection[str] = KINDS
) -> dict[str, Head]:
    """Grow the heads of the small model, by kind."""
    old = outpace.wrap(small, compile=False).lm
    return {head.spec.kind: grow_head(head, old, new, narrow) for head in small_heads(old, folder, kinds)}


def write(small: LlamaForCausalLM, large: LlamaForCausalLM, folder: Path | None, output: Path, narrow: bool) -> None:
    """Write the grown heads in the format of heads, each in a folder named by its kind."""
    new = outpace.wrap(large, compile=False).lm
    for kind, head in grown_heads(small, new, folder, narrow).items():
        store.save(head, output / kind, new, {"grown": "from a head of a smaller model", "narrow": narrow})
