"""SmolLM2 answers twice, plainly and speculatively, in two runtimes; the two texts must be equal. Run: make demo"""

from __future__ import annotations

import time

from rich.console import Console
from rich.table import Table
from rich.text import Text

import outpace

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
CHAT_TOKENS = 96
RUNTIMES = {
    "GGUF": "smollm2-135m-instruct.gguf",  # 4 bits, run by llama.cpp: what is fast on a CPU
    "torch": "smollm2-135m-instruct",  # float32, a Transformers model: what trains, and what GPUs run
}


def main() -> None:
    console = Console()
    table = Table("runtime", "prompt", "method", "tokens", "passes", "tokens per pass", "seconds", "equal to plain")
    for runtime, model in RUNTIMES.items():
        lm = outpace.load(model)
        lm.generate("Warm up.", method="recycling", max_tokens=8)
        show(console, table, runtime, lm)
    console.rule("[bold]what happened")
    console.print("Green text was guessed from the prompt and the answer so far, and accepted by the model.")
    console.print(table)


def show(console: Console, table: Table, runtime: str, lm: outpace.Model) -> None:
    """Both prompts, plainly and with guesses."""
    for name, prompt in PROMPTS.items():
        console.rule(f"[bold]{name}, {runtime}")
        console.print(prompt, style="dim", markup=False)
        plain = None
        for method in ("plain", "suffix"):
            start = time.perf_counter()
            stream = lm.stream([{"role": "user", "content": prompt}], method=method, max_tokens=CHAT_TOKENS)
            for piece in stream:
                for text, drafted in piece.drafted if method != "plain" else ():
                    console.print(Text(text, style="green" if drafted else ""), end="", soft_wrap=True)
            done, seconds = stream.completions[0], time.perf_counter() - start
            plain = plain or done
            equal = done.tokens == plain.tokens and done.text == plain.text
            row = [str(len(done.tokens)), str(done.stats.passes), f"{done.stats.tokens_per_pass:.2f}", f"{seconds:.2f}"]
            table.add_row(runtime, name, method, *row, "[green]yes[/]" if equal else "[red]NO[/]")
            if not equal:
                raise SystemExit(f"{name}: {method} differs from plain decoding, which is a bug")
        console.print()


if __name__ == "__main__":
    main()
