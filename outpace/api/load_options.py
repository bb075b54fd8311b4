"""LoadOptions: the options of `load`, as every loader receives them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    import torch


@dataclass(frozen=True)
class LoadOptions:
    """The user's choices; None leaves a choice to the loader."""

    dtype: str | torch.dtype | None = None
    device: str | torch.device | None = None
    kv_cache_bytes: int | None = None
    bitwise: bool | None = None
    compile: bool | None = None
    quantize: str | None = None
    adapter: str | Path | None = None
    tensor_parallel: int | None = None
