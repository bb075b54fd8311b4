"""What sampling settings cost on a CPU: tokens per second of each, as ratios to greedy plain decoding.

    python benchmarks/sampling.py smollm2-135m-instruct MODEL.gguf --rounds 3
    python benchmarks/sampling.py --vocab 262144       # small random models, in torch and as GGUF

The settings take turns within each round, after one round that only warms up, and every ratio is the median over the
rounds. A random model's logits are nearly flat, which is the worst case for filters: most tokens may be chosen.
"""

from __future__ import annotations

import itertools
import statistics
import tempfile
import time
from collections import defaultdict
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

import outpace
from outpace.api.model import Model

FILTERS = {"top_p": 0.95, "min_p": 0.01, "typical_p": 0.9}
PENALTIES = {"repetition_penalty": 1.1, "presence_penalty": 0.5, "frequency_penalty": 0.2}
BIAS, BAD_WORDS, GRAMMAR = {5: 2.0, 7: -1.0}, [[3, 4], [9]], "(.|\\n)*"
EDITS: dict[str, Any] = {**PENALTIES, "logit_bias": BIAS, "bad_words": BAD_WORDS, "regex": GRAMMAR}
SAMPLED: dict[str, dict[str, Any]] = {
    "temperature 0.8": {},
    "top_p 0.95": {"top_p": 0.95},
    "top_k 50, top_p 0.9": {"top_k": 50, "top_p": 0.9},
    "top_k 1000": {"top_k": 1000},
    "min_p 0.05": {"min_p": 0.05},
    "typical_p 0.9": {"typical_p": 0.9},
    "three filters": FILTERS,
    "penalties": PENALTIES,
    "logit_bias": {"logit_bias": BIAS},
    "bad words": {"bad_words": BAD_WORDS},
    "grammar": {"regex": GRAMMAR},
    "5 logprobs": {"logprobs": 5},
    "all edits": EDITS,
    "all, top_k 50": {"top_k": 50, **FILTERS, **EDITS, "logprobs": 5},
    "all, no top_k": {**FILTERS, **EDITS, "logprobs": 5},
}
SETTINGS: dict[str, dict[str, Any]] = {"greedy": {}} | {
    name: {"temperature": 0.8, **given} for name, given in SAMPLED.items()
}
METHODS = ("recycling", "lookahead", "auto")


def load(name: str) -> Model:
    return outpace.load(name) if name.endswith(".gguf") else outpace.load(name, dtype="float32")


def made_up_tokenizer(vocab: int) -> Any:
    """A tokenizer of bytes and made-up words, for the grammar."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = "abcdefghijklmnopqrstuvwxyz"
    made_up = ("".join(word) for size in (2, 3, 4, 5) for word in itertools.product(letters, repeat=size))
    words = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *made_up][:vocab]
    tokenizer = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(), decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def random_torch(vocab: int) -> Model:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=640, intermediate_size=1920, num_hidden_layers=12, num_attention_heads=10, num_key_value_heads=5,
        vocab_size=vocab, max_position_embeddings=4096, tie_word_embeddings=True,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    return outpace.wrap(model, tokenizer=made_up_tokenizer(vocab), name=f"random, {vocab} tokens, torch")


def random_gguf(vocab: int, folder: str) -> Model:
    import gguf

    width, wide, layers, heads = 640, 1920, 12, 10
    path, random = Path(folder) / f"random-{vocab}.gguf", np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(4096)
    writer.add_embedding_length(width)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(wide)
    writer.add_head_count(heads)
    writer.add_head_count_kv(heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(vocab)
    writer.add_tokenizer_model("none")
    block = dict.fromkeys(("attn_q", "attn_k", "attn_v", "attn_output"), (width, width))
    block |= {"ffn_gate": (wide, width), "ffn_up": (wide, width), "ffn_down": (width, wide)}
    sizes = {"token_embd.weight": (vocab, width)}
    sizes |= {f"blk.{i}.{name}.weight": size for i in range(layers) for name, size in block.items()}
    for name, size in sizes.items():
        values = random.normal(0, 0.05, size).astype(np.float32)
        kind = gguf.GGMLQuantizationType.Q4_0
        writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)
    for name in ["output_norm.weight", *(f"blk.{i}.{p}_norm.weight" for i in range(layers) for p in ("attn", "ffn"))]:
        writer.add_tensor(name, np.ones(width, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    model = outpace.load(path)
    model.tokenizer = made_up_tokenizer(vocab)
    return model


def prompt_of(turn: int) -> list[int]:
    return list(range(100 + 200 * turn, 220 + 200 * turn))


def speed(model: Model, method: str, tokens: int, turn: int, settings: dict[str, Any]) -> float:
    """Tokens per second, the prompt left out: two lengths, and the difference.

    Each round has a text of its own, since some methods remember what was generated.
    """
    prompt = prompt_of(turn)

    def seconds(count: int) -> float:
        start = time.perf_counter()
        done = model.generate(prompt, method=method, max_tokens=count, min_tokens=count, seed=turn, **settings)
        assert len(done.tokens) == count
        return time.perf_counter() - start

    few = 4
    return (tokens - few) / (seconds(tokens) - seconds(few))


def measure(model: Model, tokens: int, rounds: int) -> dict[tuple[str, str], list[float]]:
    plans = [("plain", name) for name in SETTINGS]
    plans += [(method, name) for method in METHODS for name in ("greedy", "top_p 0.95")]
    found = defaultdict[tuple[str, str], list[float]](list)
    for turn in track(range(rounds + 1), f"{model.name}"):
        model.generate(prompt_of(turn), method="plain", max_tokens=1)  # from here on the cache has the prompt
        for method, name in plans:
            rate = speed(model, method, tokens if turn else 8, turn, SETTINGS[name])
            if turn:
                found[method, name].append(rate)
    return found


def show(model: Model, found: dict[tuple[str, str], list[float]]) -> None:
    table = Table("method", "setting", "tokens/s", "x plain greedy", "x plain, same setting", title=model.name)
    for (method, name), rates in found.items():
        pairs = [(rates, found["plain", base]) for base in ("greedy", name)]
        ratios = [statistics.median(a / b for a, b in zip(*pair, strict=True)) for pair in pairs]
        table.add_row(method, name, f"{statistics.median(rates):.1f}", *(f"{ratio:.2f}" for ratio in ratios))
    Console(width=110).print(table)


def main(
    models: Annotated[list[str] | None, typer.Argument(help="Demo models, folders or GGUF files.")] = None,
    vocab: Annotated[int, typer.Option(help="Vocabulary of random models, in torch and as GGUF (0 = none).")] = 0,
    tokens: int = 64,
    rounds: int = 3,
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        makers = [partial(load, name) for name in models or ()]
        if vocab:
            makers += [partial(random_torch, vocab), partial(random_gguf, vocab, folder)]
        for make in makers:
            model = make()
            show(model, measure(model, tokens, rounds))


if __name__ == "__main__":
    typer.run(main)
