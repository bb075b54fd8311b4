"""CPU benchmark: the cost of a pass by its tokens (eager, compiled, int8), and greedy decoding against Transformers.

python benchmarks/cpu.py
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

import outpace
from outpace.core.tree import Tree

ROWS = (1, 2, 4, 8, 16, 32)
CONTEXT = 256


def say(line: str) -> None:
    print(line, flush=True)  # noqa: T201


def spent(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def passes(models: dict[str, outpace.Model], rounds: int) -> None:
    """Print the median milliseconds of a pass, with all kinds and sizes measured in turn."""
    rows = {}
    for name, model in models.items():
        rows[name] = model.lm.acquire([])
        model.lm.feed([[(7 * i) % 1000 for i in range(CONTEXT)]], [rows[name]])
    found: dict[tuple[str, int], list[float]] = {(name, size): [] for name in models for size in ROWS}
    for turn in range(rounds + 1):
        for name, size in found:
            lm, tree = models[name].lm, Tree.chain([5] * size)
            took = [spent(partial(lm.score, [tree], [rows[name]])) for _ in range(4)]
            found[name, size] += took[1:] if turn else []
    say("| ms per pass, tokens | " + " | ".join(map(str, ROWS)) + " |")
    say("|---" * (len(ROWS) + 1) + "|")
    for name in models:
        middles = [statistics.median(found[name, size]) * 1e3 for size in ROWS]
        say(f"| {name} | " + " | ".join(f"{m:.1f} ({m / middles[0]:.2f})" for m in middles) + " |")


def decoding(models: dict[str, outpace.Model], tokens: int, rounds: int) -> None:
    """Print the tokens per second of greedy decoding, from the difference of a long and a short answer."""
    first = next(iter(models.values()))
    chat = [{"role": "user", "content": "Write a story about a lighthouse keeper and a whale."}]
    tokenizer: Any = first.tokenizer
    encoded = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"]
    ids = torch.tensor([encoded])
    transformers: Any = first.lm

    def generate(count: int) -> None:
        with torch.no_grad():
            transformers.model.generate(ids, max_new_tokens=count, min_new_tokens=count, do_sample=False)

    def plain(model: outpace.Model, count: int) -> None:
        model.clear_cache()
        model.generate(encoded, method="plain", max_tokens=count, ignore_eos=True)

    contestants: dict[str, Callable[[int], object]] = {"Transformers generate": generate}
    for name, model in models.items():
        contestants[name] = partial(plain, model)
    rates: dict[str, list[float]] = {name: [] for name in contestants}
    for turn in range(rounds + 1):
        for name, run in contestants.items():
            short, long = spent(partial(run, 8)), spent(partial(run, 8 + tokens))
            rates[name] += [tokens / (long - short)] if turn else []
    base = statistics.median(rates["Transformers generate"])
    for name, found in rates.items():
        say(f"{name}: {statistics.median(found):.1f} tokens/s, {statistics.median(found) / base:.2f} of Transformers")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    asked = parser.parse_args()
    kinds: dict[str, dict[str, Any]] = {
        "eager": {"compile": False},
        "compiled": {"compile": True},
        "int8": {"compile": True, "quantize": "int8"},
    }
    loaded = {name: outpace.load(asked.model, device="cpu", **settings) for name, settings in kinds.items()}
    for name in ("compiled", "int8"):
        say(f"{name}: compiled in {getattr(getattr(loaded[name].lm, 'runner', None), 'compile_seconds', 0.0):.1f} s")
    decoding(loaded, asked.tokens, asked.rounds)
    passes(loaded, asked.rounds)
