"""The second process of a tensor-parallel model in tests. It runs what the first process runs, which is pytest."""

from __future__ import annotations

import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import transformers
from packaging.version import Version
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

import outpace
from outpace.api.model import Model
from outpace.models.tensor_parallel import processes
from outpace.models.tensor_parallel.shards import settle
from tests.tiny_models import EXPERTS, GROUPED, build

PATIENCE = timedelta(seconds=90)
CACHE = 96_000  # bytes: 250 tokens of the model with grouped heads, in each process
EVEN = 102  # tokens: an old Transformers can only split a vocabulary evenly
ODD = 103 if Version(transformers.__version__) >= Version("5.22") else EVEN
PROBE = torch.tensor([[5, 17, 33, 2, 99, 50]])
# One for each way in which Transformers shares a layer; the first one is for the engine.
KINDS: dict[str, dict[str, Any]] = {
    "llama": {**GROUPED, "vocab_size": EVEN, "tie_word_embeddings": True},  # two key-value heads, one for each process
    "phi3": {"num_key_value_heads": 2, "vocab_size": ODD},
    "qwen3_moe": {**GROUPED, **EXPERTS, "vocab_size": EVEN},
}


def save(kind: str, folder: Path) -> None:
    """Write a tiny checkpoint; experts run in float32 alone."""
    build(kind, torch.float32 if "moe" in kind else torch.float64, **KINDS[kind]).save_pretrained(folder / kind)


@torch.no_grad()
def shared_logits(folder: Path) -> Tensor:
    """Return the logits of a checkpoint that both processes share."""
    model = AutoModelForCausalLM.from_pretrained(folder, distributed_config=DistributedConfig(tp_size=2))
    settle(model)
    return model(PROBE).logits


def shared_model(folder: Path) -> Model:
    return outpace.load(folder / "llama", dtype="float64", tensor_parallel=2, kv_cache_bytes=CACHE)


if __name__ == "__main__":
    torch.set_num_threads(1)
    where = Path(sys.argv[1])
    processes.join(False, PATIENCE)
    for each in KINDS:
        shared_logits(where / each)
    shared_model(where)
