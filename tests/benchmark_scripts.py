"""The scripts in benchmarks/ as modules, for tests."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import outpace
from tests.tiny_models import GROUPED, VOCAB, build

FOLDER = Path(__file__).parent.parent / "benchmarks"


def script(name: str) -> ModuleType:
    """Import a script by name; scripts import each other."""
    if str(FOLDER) not in sys.path:
        sys.path.append(str(FOLDER))
    return importlib.import_module(name)


def small_llama(folder: Path) -> outpace.Model:
    """Write a tiny Llama and a tokenizer of numbers, and load it."""
    build("llama", torch.float32, **GROUPED).save_pretrained(folder)
    numbers(folder)
    return outpace.load(str(folder), dtype="float32", device="cpu")


def numbers(folder: Path) -> None:
    """Write a tokenizer of numbers."""
    words = Tokenizer(models.WordLevel({str(i): i for i in range(VOCAB)}, unk_token="0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="0").save_pretrained(folder)
