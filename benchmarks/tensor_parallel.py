"""Tensor parallel: are the texts those of one process, and what does a pass cost?

    torchrun --nproc-per-node 2 benchmarks/tensor_parallel.py --model FOLDER           # CPUs, or a GPU for each process
    torchrun --nproc-per-node 8 benchmarks/tensor_parallel.py --model FOLDER --no-whole  # too large for one device

The first process reports. Texts of every method are compared with those of plain decoding in the same processes, and
with those of one process, whose sums are rounded differently: there a text may part where two tokens are almost equally
likely. `send` is the part of a pass in which the first process tells the others what to do.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

import outpace
import outpace.api.load_tensor_parallel
from outpace.api.model import Model
from outpace.models.tensor_parallel import torchrun
from outpace.models.tensor_parallel.channel import Channel
from outpace.prompts import tasks

METHODS = ("plain", "suffix", "auto", "layerskip")
SETTINGS: tuple[dict[str, Any], ...] = ({}, {"temperature": 1.0, "top_p": 0.9, "seed": 1})


class TimedChannel(Channel):
    """A channel that measures how long sending takes."""

    seconds = 0.0

    def send(self, message: object) -> None:
        start = time.perf_counter()
        super().send(message)
        TimedChannel.seconds += time.perf_counter() - start


def answers(model: Model, prompts: list[Any], **given: Any) -> list[list[int]]:
    return [done.tokens for done in model.generate(prompts, **given)]


def equal(found: list[list[int]], wanted: list[list[int]]) -> str:
    return f"{sum(a == b for a, b in zip(found, wanted, strict=True))} of {len(wanted)}"


def compared(model: Model, whole: Model | None, prompts: list[Any], most: int) -> dict[str, Any]:
    """Count equal texts by method and setting."""
    report: dict[str, Any] = {}
    for given in SETTINGS:
        kind = "sampled" if given else "greedy"
        plain = answers(model, prompts, method="plain", max_tokens=most, **given)
        if whole is not None:
            report[f"{kind}, as in one process"] = equal(plain, answers(whole, prompts, max_tokens=most, **given))
        for method in METHODS:
            report[f"{kind}, {method}"] = equal(answers(model, prompts, method=method, max_tokens=most, **given), plain)
    return report


def timed(model: Model, prompt: Any, most: int) -> dict[str, float]:
    """Time plain passes of one request, and what of them is sending."""
    model.generate(prompt, method="plain", max_tokens=4)
    start, TimedChannel.seconds = time.perf_counter(), 0.0
    done = model.generate(prompt, method="plain", max_tokens=most, ignore_eos=True)
    passes = done.stats.passes
    return {
        "ms a pass": (time.perf_counter() - start) / passes * 1e3,
        "ms a pass, send": TimedChannel.seconds / passes * 1e3,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--dtype")
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--no-whole", action="store_true", help="do not load the model in one process too")
    given = parser.parse_args()
    outpace.api.load_tensor_parallel.Channel = TimedChannel  # type: ignore[attr-defined,misc]
    model = outpace.load(given.model, dtype=given.dtype, tensor_parallel=torchrun.size())
    whole = None if given.no_whole else outpace.load(given.model, dtype=given.dtype, compile=False)
    prompts = [tasks.encode(prompt, model) for prompt in tasks.load(None, limit=1)][: given.prompts]
    report = {"processes": torchrun.size(), **compared(model, whole, prompts, given.tokens)}
    report |= {f"shared: {name}": value for name, value in timed(model, prompts[0], given.tokens).items()}
    if whole is not None:
        report |= {f"whole: {name}": value for name, value in timed(whole, prompts[0], given.tokens).items()}
    print(json.dumps(report, indent=2))  # noqa: T201


if __name__ == "__main__":
    main()
