"""SmolLM2 with plain and speculative decoding in two runtimes: equal texts, less time. Run it with `make demo`."""

from __future__ import annotations

import logging
import statistics
import time
from typing import NamedTuple

from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch import nn  # noqa: F401 (torch resets the levels of its loggers when it is imported)

import outpace
from outpace import registry

EDIT = """\
Fix the typo in this function and print the whole function again:

def moving_average(values, window):
    result = []
    for i in range(len(values) - window + 1):
        chunk = values[i : i + window]
        result.append(sum(chunk) / window)
    retrun result
"""
PROMPTS = {
    "chat": "Give three reasons why the sky is blue.",
    "edit": EDIT,
}
TOKENS = 96
ROUNDS = 3
METHODS = ("plain", "auto")
RUNTIMES = {
    "GGUF": "smollm2-135m-instruct.gguf",  # 4 bits, run by llama.cpp: fast on a CPU
    "torch": "smollm2-135m-instruct",  # float32, a Transformers model: for training and GPUs
}


class Result(NamedTuple):
    """The results for one prompt in one runtime."""

    runtime: str
    prompt: str
    tokens: int
    passes: dict[str, int]  # by method
    seconds: dict[str, float]  # median, by method

    @property
    def speedup(self) -> float:
        return self.seconds["plain"] / self.seconds["auto"]


def main() -> None:
    for package in ("torchao", "torch.utils._pytree"):  # Transformers imports torchao, which tells of missing GPUs
        logging.getLogger(package).setLevel(logging.ERROR)
    console, results = Console(), list[Result]()
    for runtime, model in RUNTIMES.items():
        with console.status(f"loading {model} (downloads and compiles it the first time)"):
            lm = outpace.load(model)
            lm.generate("Warm up.", max_tokens=8)  # measures, once, the cost of passes on this machine
        for name, prompt in PROMPTS.items():
            results.append(show(console, lm, runtime, name, prompt))
    console.rule("[bold]results")
    console.print("Green text was drafted from the prompt and the answer so far, and accepted by the model.")
    console.print(table_of(results))
    plain, auto = (sum(result.seconds[method] for result in results) for method in METHODS)
    gains = ", ".join(f"{r.prompt} in {r.runtime} {r.speedup:.2f}" for r in results)
    console.print(
        f"[bold]The same texts in {auto:.1f} s instead of {plain:.1f}: {plain / auto:.2f} times as fast[/] ({gains})."
    )


def show(console: Console, lm: outpace.Model, runtime: str, name: str, prompt: str) -> Result:
    """Stream one answer, then time the same answer by each method in turn."""
    console.rule(f"[bold]{name}, {runtime}")
    console.print(prompt, style="dim", markup=False)
    chat = [{"role": "user", "content": prompt}]
    for piece in lm.stream(chat, method=registry.method("auto"), max_tokens=TOKENS):
        for text, drafted in piece.spans:
            console.print(Text(text, style="green" if drafted else ""), end="", soft_wrap=True)
    console.print()
    spent: dict[str, list[float]] = {method: [] for method in METHODS}
    done: dict[str, outpace.Completion] = {}
    with console.status("measuring"):
        for _ in range(ROUNDS):
            for method in METHODS:
                lm.clear_cache()
                fresh = registry.method(method)  # a new one, which has not seen this answer
                start = time.perf_counter()
                done[method] = lm.generate(chat, method=fresh, max_tokens=TOKENS)
                spent[method].append(time.perf_counter() - start)
    if (done["auto"].tokens, done["auto"].text) != (done["plain"].tokens, done["plain"].text):
        raise SystemExit(f"{name}, {runtime}: auto differs from plain decoding, which is a bug")
    passes = {method: answer.stats.passes for method, answer in done.items()}
    seconds = {method: statistics.median(times) for method, times in spent.items()}
    return Result(runtime, name, len(done["plain"].tokens), passes, seconds)


def table_of(results: list[Result]) -> Table:
    heads = "runtime", "prompt", "tokens", "passes: plain", "auto", "seconds: plain", "auto", "times as fast", "equal"
    table = Table(*heads)
    for r in results:
        passes = [str(r.passes[method]) for method in METHODS]
        seconds = [f"{r.seconds[method]:.2f}" for method in METHODS]
        table.add_row(r.runtime, r.prompt, str(r.tokens), *passes, *seconds, f"{r.speedup:.2f}", "[green]yes[/]")
    return table


if __name__ == "__main__":
    main()
