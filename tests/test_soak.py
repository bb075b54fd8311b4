"""The soak of benchmarks/soak.py, on a tiny model and for a short time; OUTPACE_SOAK_SECONDS makes it longer."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

import outpace
from outpace.api.model import Model
from tests.benchmark_scripts import FOLDER, script
from tests.serving import free_port
from tests.tiny_models import GROUPED, build
from tests.tiny_tokenizers import tiktoken

SECONDS = float(os.environ.get("OUTPACE_SOAK_SECONDS", "20"))
PROGRAM = f"""
import sys
sys.path.append({str(FOLDER)!r})
from soak_server import run
from tests.test_soak import tiny
run(tiny(), int(sys.argv[1]), int(sys.argv[2]))
"""


def tiny() -> Model:
    """A model with a cache of keys and values, which says anything."""
    torch.set_num_threads(1)
    tokenizer = tiktoken()
    model = build("llama", **GROUPED, vocab_size=len(tokenizer))
    return outpace.wrap(model, tokenizer, name="tiny", compile=False)


def test_nothing_leaks_and_every_answer_is_right(tmp_path: Path) -> None:
    soak = script("soak")
    given = soak.SoakSettings(
        minutes=SECONDS / 60, clients=6, asks=40, tokens=10, long=30, think=0.15, slots=4, log=tmp_path / "server.log"
    )
    report = soak.soak(tiny(), [sys.executable, "-c", PROGRAM], free_port(), given)
    assert report.sound, f"{report.table()}\n{given.log.read_text()[-3000:]}"
