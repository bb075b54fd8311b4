"""HeadFolder: the config and the tensors of a checkpoint as Transformers writes it, read on demand."""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from outpace.errors import UsageError

CONFIG = "config.json"
SAFE, PICKLED = "model.safetensors", "pytorch_model.bin"


class HeadFolder:
    """A folder with a config.json and weights: safetensors, or torch's own files, read without running any code."""

    def __init__(self, folder: Path):
        self.folder = folder

    @cached_property
    def config(self) -> dict[str, Any]:
        try:
            found = json.loads((self.folder / CONFIG).read_text())
        except (OSError, ValueError) as error:
            raise UsageError(f"{self.folder} holds no checkpoint: {error}") from error
        return found

    @cached_property
    def places(self) -> dict[str, Path]:
        """The file that holds each tensor."""
        for name in (SAFE, PICKLED):
            index, single = self.folder / f"{name}.index.json", self.folder / name
            if index.exists():
                named = json.loads(index.read_text())["weight_map"]
                return {tensor: self.folder / file for tensor, file in named.items()}
            if single.exists():
                return dict.fromkeys(_names(single), single)
        raise UsageError(f"{self.folder} has no weights: neither {SAFE} nor {PICKLED}, whole or in parts")

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Read these tensors; only the files that hold them are opened."""
        wanted, found = set(names), dict[str, Tensor]()
        for file in sorted({self.places[name] for name in wanted}):
            found |= _tensors(file, {name for name in wanted if self.places[name] == file})
        return found


def _names(file: Path) -> list[str]:
    if file.suffix != ".safetensors":
        return list(_pickled(file))
    with safe_open(file, framework="pt") as opened:
        return list(opened.keys())


def _tensors(file: Path, names: set[str]) -> dict[str, Tensor]:
    if file.suffix != ".safetensors":
        return {name: tensor for name, tensor in _pickled(file).items() if name in names}
    with safe_open(file, framework="pt") as opened:
        return {name: opened.get_tensor(name) for name in sorted(names)}


def _pickled(file: Path) -> dict[str, Tensor]:
    found: dict[str, Tensor] = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    return found
