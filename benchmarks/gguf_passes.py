"""GGUF benchmark: the cost of passes of several tokens, and how far their logits differ from those of single tokens.

    python benchmarks/gguf_passes.py MODEL.gguf --context 64 --context 800

`llama.cpp` runs with its own settings, `ours` with the settings that keep answers the same (docs/guide/gguf.md). Both
take turns. "Differs" is the largest difference in a token's logits between passes of one token and passes of several,
over all sizes.
"""

from __future__ import annotations

import statistics
import time
from array import array
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from cyllama.llama import llama_cpp as library
from gguf_contestants import usual
from torch import Tensor

from outpace.models.gguf.repack import load_faster
from outpace.models.gguf.runtime import BatchEntry, File, Runtime

SIZES = (1, 2, 3, 4, 8, 16)
CELLS = 4096


class Ours:
    """Passes over one text with our settings."""

    def __init__(self, path: Path):
        self.runtime = Runtime(load_faster(path, None), CELLS)

    def decode(self, tokens: list[int], first: int) -> None:
        self.runtime.decode([BatchEntry(token, first + i, [0], True) for i, token in enumerate(tokens)])

    def logits(self, index: int) -> Tensor:  # [vocab]
        return self.runtime.logits(index)

    def back(self, first: int) -> None:
        self.runtime.remove(0, first)


class Theirs:
    """Passes over one text with llama.cpp's settings."""

    def __init__(self, path: Path):
        self.context = usual(File(path, bitwise=False).model)
        self.batch = library.LlamaBatch(n_tokens=2048, embd=0, n_seq_max=1)

    def decode(self, tokens: list[int], first: int) -> None:
        self.batch.clear()
        for i, token in enumerate(tokens):
            self.batch.add(token, first + i, [0], True)
        self.context.decode(self.batch)

    def logits(self, index: int) -> Tensor:  # [vocab]
        return torch.frombuffer(array("f", self.context.get_logits_ith(index)), dtype=torch.float32)

    def back(self, first: int) -> None:
        self.context.memory_seq_rm(0, first, -1)


def differs(side: Any, tokens: list[int], first: int) -> float:
    """The largest difference of a logit between passes of one token and passes of several."""
    alone, found = list[Tensor](), 0.0
    for i, token in enumerate(tokens):
        side.decode([token], first + i)
        alone.append(side.logits(0).clone())
    side.back(first)
    for size in (size for size in SIZES if size > 1):
        side.decode(tokens[:size], first)
        found = max(found, *(float((side.logits(i) - alone[i]).abs().max()) for i in range(size)))
        side.back(first)
    return found


def main(
    path: Annotated[Path, typer.Argument(help="GGUF file.")],
    context: Annotated[list[int], typer.Option(help="Tokens before the pass.")] = [64, 800],  # noqa: B006
    rounds: int = 15,
) -> None:
    sides: dict[str, Any] = {"llama.cpp": Theirs(path), "ours": Ours(path)}
    text = [(7 * i + 11) % 30000 for i in range(max(context) + max(SIZES))]
    typer.echo("| context | tokens | llama.cpp, ms | of one | ours, ms | of one |\n|" + "---|" * 6)
    for length in context:
        for side in sides.values():
            side.back(0)
            side.decode(text[:length], 0)
        one = dict.fromkeys(sides, 0.0)
        for size in SIZES:
            times: dict[str, list[float]] = {name: [] for name in sides}
            for _ in range(rounds):
                for name, side in sides.items():
                    start = time.perf_counter()
                    side.decode(text[length : length + size], length)
                    times[name].append(time.perf_counter() - start)
                    side.back(length)
            took = {name: statistics.median(found) for name, found in times.items()}
            one = took if size == 1 else one
            cells = [f"{1e3 * took[name]:.1f} | {took[name] / one[name]:.2f}" for name in sides]
            typer.echo(f"| {length} | {size} | {' | '.join(cells)} |")
        after = text[length : length + max(SIZES)]
        wrong = [f"{differs(side, after, length):.2g}" for side in sides.values()]
        typer.echo(f"| {length} | differs | {wrong[0]} | | {wrong[1]} | |")


if __name__ == "__main__":
    typer.run(main)
