"""SmolLM2 answers plainly and speculatively, in two runtimes: the texts are equal, and one is faster. Run: make demo"""

from __future__ import annotations

import statistics
import time
from typing import NamedTuple

from rich.console import Console
from rich.table import Table
from rich.text import Text

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
    "GGUF": "smollm2-135m-instruct.gguf",  # 4 bits, run by llama.cpp: what is fast on a CPU
    "torch": "smollm2-135m-instruct",  # float32, a Transformers model: what trains, and what GPUs run
}


class Result(NamedTuple):
    """One prompt in one runtime."""

    runtime: str
    prompt: str
    tokens: int
    passes: dict[str, int]  # by method
    seconds: dict[str, float]  # median, by method

    @property
    def speedup(self) -> float:
        return self.seconds["plain"] / self.seconds["auto"]


def main() -> None:
    console, results = Console(), list[Result]()
    for runtime, model in RUNTIMES.items():
        with console.status(f"loading {model}; the first time it is downloaded and compiled"):
            lm = outpace.load(model)
            lm.generate("Warm up.", max_tokens=8)  # measures, once, what passes cost here
        for name, prompt in PROMPTS.items():
            results.append(show(console, lm, runtime, name, prompt))
    console.rule("[bold]what happened")
    console.print("Green text was guessed from the prompt and the answer so far, and accepted by the model.")
    console.print(table_of(results))
    plain, auto = (sum(result.seconds[method] for result in results) for method in METHODS)
    gains = ", ".join(f"{r.prompt} in {r.runtime} {r.speedup:.2f}" for r in results)
    console.print(
        f"[bold]The same texts in {auto:.1f} s instead of {plain:.1f}: {plain / auto:.2f} times as fast[/] ({gains})."
    )


def show(console: Console, lm: outpace.Model, runtime: str, name: str, prompt: str) -> Result:
    """One answer as it comes, then the same by each method in turn, for the clock."""
    console.rule(f"[bold]{name}, {runtime}")
    console.print(prompt, style="dim", markup=False)
    chat = [{"role": "user", "content": prompt}]
    for piece in lm.stream(chat, method=registry.method("auto"), max_tokens=TOKENS):
        for text, drafted in piece.spans:
            console.print(Text(text, style="green" if drafted else ""), end="", soft_wrap=True)
    console.print()
    spent: dict[str, list[float]] = {method: [] for method in METHODS}
    done: dict[str, outpace.Completion] = {}
    with console.status("timing it"):
        for _ in range(ROUNDS):
            for method in METHODS:
                lm.clear_cache()
                fresh = registry.method(method)  # one that has not seen this answer before
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
