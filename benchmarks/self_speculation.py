"""How well a model's own layers draft for it: by early exit, by block of layers left out, and by search.

    python benchmarks/self_speculation.py --output docs/images/self-speculation.png

The model answers some prompts with plain decoding; then every draft predicts each token of those answers. That
determines how many tokens a pass of greedy decoding commits (`outpace/drafting/layer_search.py`), so nothing is timed.
The cost of a draft token is the share of the model's weights that it reads. Drafting pays if the acceptance rate is
higher than that cost. The layers to leave out are chosen on the first prompt of every task, and all drafts are measured
on the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress

import outpace
from outpace.core.lm import layers_of
from outpace.drafting.layer_search import (
    LayerProbe,
    Matches,
    ProbeText,
    agreement,
    gain,
    spell,
    tokens_per_pass,
    without,
)
from outpace.prompts import tasks

TASKS = ["qa", "math", "code", "chat"]
DEPTHS = range(1, 9)
KINDS = {"exit": "first layers (layerskip)", "block": "without a block (pruned)", "search": "without layers by search"}


@dataclass(frozen=True)
class Point:
    """The results of one draft."""

    kind: str
    layers: str  # that the draft has
    count: int
    share: float  # cost of a draft token, in passes
    matches: Matches

    @property
    def agreement(self) -> float:
        return agreement(self.matches)

    @property
    def best(self) -> tuple[float, int]:
        """Tokens per cost of one pass at the best depth, and that depth."""
        return max((gain(self.matches, self.share, depth), depth) for depth in DEPTHS)


def main(
    model: Annotated[str, typer.Option(help="Demo model, folder or Hugging Face id.")] = "smollm2-135m-instruct",
    exits: Annotated[int, typer.Option(help="Number of exits to try, evenly spaced.")] = 10,
    remove: Annotated[list[int], typer.Option(help="Layers in a block to leave out; repeatable.")] = [1, 2, 3, 4, 6, 8],  # noqa: B006
    search: Annotated[list[int], typer.Option(help="Layers to leave out by search; repeatable.")] = [2, 4, 6],  # noqa: B006
    tries: Annotated[int, typer.Option(help="Number of layer sets that each search tries.")] = 16,
    task: Annotated[list[str], typer.Option(help="Task of `outpace bench`; repeatable.")] = TASKS,
    limit: Annotated[int, typer.Option(help="Number of prompts per task to measure on.")] = 2,
    tokens: Annotated[int, typer.Option(help="Tokens per answer.")] = 24,
    context: Annotated[int, typer.Option(help="Number of tokens to keep at the end of each prompt.")] = 64,
    output: Annotated[Path | None, typer.Option(help="File for the plot, .png or .svg.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, ...")] = None,
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16, ...")] = None,
) -> None:
    lm = outpace.load(model, device=device, dtype=dtype, compile=False)
    asked = tasks.load(tasks=task, limit=limit + 1)
    firsts = {prompt.task: prompt for prompt in reversed(asked)}.values()

    def probe(some: Iterable[tasks.Prompt]) -> LayerProbe:
        prompts = [tasks.encode(prompt, lm)[-context:] for prompt in some]
        answers = lm.generate(prompts, method="plain", max_tokens=tokens, ignore_eos=True)
        return LayerProbe(
            lm.lm, [ProbeText(p + a.tokens[:-1], len(p) - 1) for p, a in zip(prompts, answers, strict=True)]
        )

    chosen, judged = probe(firsts), probe(prompt for prompt in asked if prompt not in firsts)
    stack = layers_of(lm.lm).count
    layers = sorted({max(1, round(stack * i / (exits + 1))) for i in range(1, exits + 1)} | {stack - 1})
    with Progress(console=Console(stderr=True)) as progress:
        bar = progress.add_task("drafts", total=len(layers) + len(remove) + len(search))
        probes, fewer = Probes(chosen, judged, tries), [count for count in remove if count < stack]
        found = list(points(probes, layers, fewer, search, lambda: progress.advance(bar)))
    places = sum(map(len, found[0].matches))
    print(f"{lm.name}: {stack} layers, {len(judged.samples)} answers of {tokens} tokens, {places} tokens\n")  # noqa: T201
    print(table(found))  # noqa: T201
    if output is not None:
        plot(found, output, f"{lm.name}, {places} tokens of its own greedy answers")


@dataclass(frozen=True)
class Probes:
    """Texts on which layers are chosen, and others on which drafts are measured."""

    chosen: LayerProbe
    judged: LayerProbe
    tries: int


def points(
    probes: Probes, exits: list[int], remove: list[int], search: list[int], done: Callable[[], object]
) -> Iterator[Point]:
    chosen, judged = probes.chosen, probes.judged
    layers = layers_of(judged.target)
    stack, share = layers.count, layers.cost_share
    for count in exits:
        yield Point("exit", spell(range(count)), count, share(count), judged.exit(count))
        done()
    for kind, counts in (("block", remove), ("search", search)):
        for count in counts:
            gone = chosen.block(count) if kind == "block" else chosen.search(count, probes.tries)
            kept = without(stack, gone)
            yield Point(kind, spell(kept), len(kept), share(len(kept)), judged.kept(kept))
            done()


def table(found: list[Point]) -> str:
    lines = [
        "| draft | layers | cost of a draft token | accepted | tokens per pass, depth 4 | tokens per cost, best depth |"
    ]
    lines.append("|---|---|---|---|---|---|")
    for p in found:
        worth, depth = p.best
        figures = f"{p.share:.2f} | {p.agreement:.0%} | {tokens_per_pass(p.matches, 4):.2f} | {worth:.2f}, {depth}"
        lines.append(f"| {KINDS[p.kind]} | {p.layers} | {figures} |")
    return "\n".join(lines)


def plot(found: list[Point], path: Path, title: str) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.2, 4.2), layout="constrained")
    axes = figure.add_subplot()
    axes.fill_between([0, 1], [0, 1], [1, 1], color="#2f6fdb", alpha=0.07, linewidth=0)
    axes.plot([0, 1], [0, 1], color="#777777", linewidth=1, linestyle="--")
    axes.text(0.03, 0.95, "pays: acceptance exceeds the cost", fontsize=9, color="#555555", va="top")
    for (kind, label), marker, color in zip(KINDS.items(), "oD^", ("#2f6fdb", "#d9822b", "#2b8a3e"), strict=True):
        own = [p for p in found if p.kind == kind]
        axes.plot([p.share for p in own], [p.agreement for p in own], marker=marker, label=label, color=color)
        aside = (-12, 5) if kind == "search" else (4, -10)
        for p in own:
            axes.annotate(str(p.count), (p.share, p.agreement), textcoords="offset points", xytext=aside, fontsize=7)
    axes.set(xlim=(0, 1.02), ylim=(0, 1.02), xlabel="cost of a draft token, in passes", ylabel="acceptance rate")
    axes.set_title(f"{title}; numbers are layers", fontsize=9)
    axes.grid(linewidth=0.4)
    axes.legend(fontsize=8, loc="center left")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)


if __name__ == "__main__":
    typer.run(main)
