"""GPU benchmark of long prompts, many requests and sampled text, on a random Llama with the shape of 8B in bfloat16.

    python benchmarks/gpu_load.py prompts --lengths 512 4096 15000
    python benchmarks/gpu_load.py requests --counts 64 128 256 --rounds 10
    python benchmarks/gpu_load.py sampling --sampled 1 64

The model is that of benchmarks/versions.py: it has no near ties. Prompts are compared with the rate of the matrix unit
in the same run, sampled text with greedy text, in turns. `--shape tiny` runs on a CPU, to try the script.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from typing import Any

import torch
from versions import FLAT, SHAPES, VOCAB, random_model

import outpace

PEAKED = 0.8
SETTINGS: dict[str, dict[str, Any]] = {
    "temperature": {},
    "top_k 50": {"top_k": 50},
    "top_p 0.9": {"top_p": 0.9},
    "top_k 50, top_p 0.9": {"top_k": 50, "top_p": 0.9},
    "min_p 0.05": {"min_p": 0.05},
    "typical_p 0.9": {"typical_p": 0.9},
}


def say(line: str) -> None:
    print(line, flush=True)  # noqa: T201


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def seconds(work: Any, *given: Any, **settings: Any) -> float:
    synchronize()
    start = time.perf_counter()
    work(*given, **settings)
    synchronize()
    return time.perf_counter() - start


def random_prompts(count: int, length: int) -> list[list[int]]:
    return [[random.randrange(VOCAB) for _ in range(length)] for _ in range(count)]


def matrix_rate(hidden: int, wide: int, rows: int = 8192) -> float:
    """Return the floating-point operations per second of the model's largest matrix product."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x, w = torch.randn(rows, hidden, device=device).bfloat16(), torch.randn(wide, hidden, device=device).bfloat16()
    times = [seconds(torch.nn.functional.linear, x, w) for _ in range(12)]
    return 2 * rows * hidden * wide / statistics.median(times[2:])


def operations(shape: str, tokens: int) -> float:
    """Return the floating-point operations of the layers of a prompt, attention included."""
    hidden, wide, layers, heads, kv_heads = SHAPES[shape]
    weights = hidden * hidden * (2 + 2 * kv_heads / heads) + 3 * hidden * wide
    return layers * (2 * weights * tokens + 2 * hidden * tokens * tokens)


def prompts(model: outpace.Model, asked: argparse.Namespace) -> None:
    rate = matrix_rate(*SHAPES[asked.shape][:2])
    say(f"matrix products run at {rate / 1e12:.0f} Tflop/s\n")
    say("| prompts | tokens of each | first tokens, ms | at the matrix rate, ms | share |\n|---|---|---|---|---|")
    for count, length in [*((1, length) for length in asked.lengths), (16, 512), (64, 512)]:
        times = []
        for _ in range(asked.rounds + 1):
            model.clear_cache()
            given = random_prompts(count, length)
            times.append(seconds(model.generate, given, method="plain", max_tokens=1, ignore_eos=True))
        spent, bound = statistics.median(times[1:]), count * operations(asked.shape, length) / rate
        say(f"| {count} | {length} | {spent * 1e3:.1f} | {bound * 1e3:.1f} | {bound / spent:.2f} |")


def decode_rate(model: outpace.Model, given: list[list[int]], tokens: int, **settings: Any) -> float:
    """Return the tokens per second of decoding alone, from the difference of a long and a short run."""
    short = seconds(model.generate, given, method="plain", max_tokens=8, ignore_eos=True, **settings)
    long = seconds(model.generate, given, method="plain", max_tokens=8 + tokens, ignore_eos=True, **settings)
    return len(given) * tokens / (long - short)


def requests(model: outpace.Model, asked: argparse.Namespace) -> None:
    say("| requests | tokens/s: median | lowest | highest | spread |\n|---|---|---|---|---|")
    for count in asked.counts:
        given = random_prompts(count, 128)
        rates = [decode_rate(model, given, asked.tokens) for _ in range(asked.rounds + 1)][1:]
        middle, low, high = statistics.median(rates), min(rates), max(rates)
        say(f"| {count} | {middle:.0f} | {low:.0f} | {high:.0f} | {(high - low) / middle:.1%} |")


def sampling(model: outpace.Model, asked: argparse.Namespace) -> None:
    """Take turns between greedy text and every setting, on peaked and on flat distributions."""
    say("| requests | setting | peaked: tokens/s | of greedy | flat: tokens/s | of greedy |\n|---|---|---|---|---|---|")
    for count in asked.sampled:
        given = random_prompts(count, 128)
        for name, settings in SETTINGS.items():
            line = f"| {count} | {name} |"
            for temperature in (PEAKED, FLAT):
                ratios, rates = list[float](), list[float]()
                for turn in range(asked.rounds + 1):
                    greedy = decode_rate(model, given, asked.tokens)
                    rates.append(
                        decode_rate(model, given, asked.tokens, temperature=temperature, seed=turn, **settings)
                    )
                    ratios.append(rates[-1] / greedy)
                line += f" {statistics.median(rates[1:]):.0f} | {statistics.median(ratios[1:]):.3f} |"
            say(line)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["prompts", "requests", "sampling"], nargs="+")
    parser.add_argument("--shape", choices=SHAPES, default="8b")
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 4096, 15000])
    parser.add_argument("--counts", type=int, nargs="+", default=[64, 128, 256], help="requests")
    parser.add_argument("--sampled", type=int, nargs="+", default=[1, 64], help="requests, for sampling")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    asked = parser.parse_args()
    start = time.perf_counter()
    model: Any = outpace.wrap(random_model(asked.shape, "cuda" if torch.cuda.is_available() else "cpu"))
    model.max_batch = 256
    model.warm_up()
    say(f"loaded in {time.perf_counter() - start:.0f} s, on {model.lm.runner.kind}")
    for part in asked.part:
        {"prompts": prompts, "requests": requests, "sampling": sampling}[part](model, asked)


if __name__ == "__main__":
    main()
