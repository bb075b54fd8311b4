"""Concurrent callers: eight threads, streams or tasks on one model, against one `generate` call for the same prompts.

    python benchmarks/callers.py                                     # SmolLM2 in float32, on a CPU
    python benchmarks/callers.py --model smollm2-135m-instruct.gguf
    python benchmarks/callers.py --random                            # a Llama with the shape of 8B, on a GPU

The random model is that of versions.py: it has no near ties, so every text that differs is an error. All ways run in
turn, in one process, each after a warm-up; a ratio is the median over the rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import typer
from versions import random_model

import outpace
from outpace.api.model import Model
from outpace.prompts import tasks

CALLERS = 8
Tokens = list[list[int]]


def one_call(model: Model, prompts: list[Any], given: dict[str, Any]) -> Tokens:
    return [done.tokens for done in model.generate(prompts, **given)]


def threads(model: Model, prompts: list[Any], given: dict[str, Any]) -> Tokens:
    with ThreadPoolExecutor(len(prompts)) as pool:
        return [done.tokens for done in pool.map(lambda prompt: model.generate(prompt, **given), prompts)]


def thread_streams(model: Model, prompts: list[Any], given: dict[str, Any]) -> Tokens:
    def read(prompt: Any) -> list[int]:
        return [token for piece in model.stream(prompt, **given) for token in piece.tokens]

    with ThreadPoolExecutor(len(prompts)) as pool:
        return list(pool.map(read, prompts))


def tasks_of_a_loop(model: Model, prompts: list[Any], given: dict[str, Any]) -> Tokens:
    async def all_of_them() -> Tokens:
        done = await asyncio.gather(*(model.agenerate(prompt, **given) for prompt in prompts))
        return [each.tokens for each in done]

    return asyncio.run(all_of_them())


WAYS: dict[str, Callable[[Model, list[Any], dict[str, Any]], Tokens]] = {
    "one call": one_call,
    "threads": threads,
    "streams in threads": thread_streams,
    "tasks": tasks_of_a_loop,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--random", action="store_true", help="use a random Llama with the shape of 8B, on a GPU")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    if given.random:
        model = outpace.wrap(random_model("8b", "cuda"))
        prompts: list[Any] = [[(7 * i + 31 * row) % 1000 for i in range(64 + 8 * row)] for row in range(CALLERS)]
    else:
        model = outpace.load(given.model)
        prompts = [tasks.encode(prompt, model) for prompt in tasks.load(None, limit=1)][:CALLERS]
    typer.echo("| method | temperature | way | tokens/s | of one call | texts that differ |\n|---|---|---|---|---|---|")
    for method in ("plain", "suffix", "auto"):
        for temperature in (0.0, 0.8):
            settings = {"method": method, "temperature": temperature, "max_tokens": given.max_tokens}
            measure(model, prompts, {**settings, "ignore_eos": True}, given.rounds)


def measure(model: Model, prompts: list[Any], settings: dict[str, Any], rounds: int) -> None:
    spent: dict[str, list[float]] = {name: [] for name in WAYS}
    texts: dict[str, Tokens] = {}
    for turn in range(rounds + 1):
        for name, way in WAYS.items():
            model.clear_cache()
            start = time.perf_counter()
            texts[name] = way(model, prompts, settings)
            if turn:
                spent[name].append(time.perf_counter() - start)
    tokens = sum(map(len, texts["one call"]))
    for name, seconds in spent.items():
        ratio = statistics.median(one / s for one, s in zip(spent["one call"], seconds, strict=True))
        differ = sum(a != b for a, b in zip(texts[name], texts["one call"], strict=True))
        rate = tokens / statistics.median(seconds)
        typer.echo(
            f"| {settings['method']} | {settings['temperature']} | {name} | {rate:.1f} | {ratio:.2f} | {differ} |"
        )


if __name__ == "__main__":
    main()
