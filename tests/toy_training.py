"""A tiny target that speaks a simple language, texts for it, and a run that several processes can share.

`python -m tests.toy_training FOLDER` is one of the processes of the test of parallel training.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from outpace.api.load import wrap
from outpace.api.model import Model
from outpace.train import settings
from outpace.train.distributed import Distributed
from outpace.train.loop import Loop
from outpace.train.run import prepare
from outpace.train.settings import TrainingSettings
from tests.tiny_models import GROUPED, build

VOCAB = 64
PROMPT = 4  # tokens


def speaker(steps: int = 120) -> PreTrainedModel:
    """A Llama that has learnt which token mostly follows which."""
    model = build("llama", torch.float32, **GROUPED, vocab_size=VOCAB, initializer_range=0.2)
    draw = torch.Generator().manual_seed(0)
    mostly, sometimes = torch.randperm(VOCAB, generator=draw), torch.randperm(VOCAB, generator=draw)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(steps):
        said = [torch.randint(VOCAB, (16, 1), generator=draw)]
        for _ in range(19):
            usual = torch.rand(16, 1, generator=draw) < 0.85
            said.append(torch.where(usual, mostly[said[-1]], sometimes[said[-1]]))
        ids = torch.cat(said, dim=1)
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


def prompts(count: int) -> list[list[int]]:
    draw = random.Random(0)
    return [[draw.randrange(VOCAB) for _ in range(PROMPT)] for _ in range(count)]


def write(path: Path, texts: list[list[int]]) -> Path:
    path.write_text("".join(json.dumps({"tokens": text, "prompt": PROMPT}) + "\n" for text in texts))
    return path


def run_settings(kind: str, folder: Path, **given: Any) -> TrainingSettings:
    """A short run on the texts beside its folder."""
    usual = {
        "model": "toy", "data": [str(folder.parent / "texts.jsonl")], "output": str(folder),
        "batch": 512, "length": 64, "steps": 4, "validation": 0, "lr": 5e-3,
    }  # fmt: skip
    return settings.make(kind, {**usual, **given})


def shared_run(folder: Path, world: Distributed) -> Loop:
    """A few steps of a head on texts of one length, which any number of processes can split."""
    model: Model = wrap(build("llama", **GROUPED, vocab_size=VOCAB), name="toy")  # in float64
    draw = random.Random(1)
    path = folder / "texts.jsonl"
    if world.first:
        write(path, [[draw.randrange(VOCAB) for _ in range(16)] for _ in range(32)])
    world.broadcast(None)  # the others wait until the file is there
    loop = prepare(run_settings("mtp", folder / f"of{world.size}", batch=128, accumulate=2), model, world)
    for _ in loop.run():
        pass
    return loop


if __name__ == "__main__":
    torch.set_num_threads(1)
    ours = Distributed.join("cpu")
    ran = shared_run(Path(sys.argv[1]), ours)
    torch.save(ran.recipe.state(), Path(sys.argv[1]) / f"rank{ours.rank}.pt")
    ours.leave()
