"""Graft against the method that it wraps, at the same number of nodes: tokens per pass, and draft levels per pass.

    .venv/bin/python benchmarks/graft.py --nodes 24 --max-tokens 40 --update docs/results/graft.md

The draft is the target without a few layers: its tokens are like those of a draft model, but it costs far more, so
nothing is timed here. On the first half of the prompts every method fills its table and `calibrated` is fitted, for a
draft whose level costs `--level-cost` passes; figures are from the other half. Every answer is compared with plain
decoding's.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

import outpace
from outpace import registry
from outpace.advise.tune_graft import Calibration, calibrate
from outpace.api.model import Model
from outpace.bench.markers import update
from outpace.core.drafter import Drafter
from outpace.core.lm import LM, layers_of
from outpace.drafting import layer_search, tuning_file
from outpace.prompts import tasks
from outpace.tracing.trace import TraceWriter, read

TASKS = ("qa", "math", "code", "summarization", "chat", "rag")
PLACE = "graft"  # name of the table's markers in the document


@dataclass(frozen=True)
class Line:
    """The results of one method."""

    name: str
    passes: int
    tokens: int
    nodes: int
    levels: int  # levels that the draft model ran
    same: bool  # whether the answers equal plain decoding's

    def row(self, level_cost: float) -> str:
        per_pass, levels = self.tokens / self.passes, self.levels / self.passes
        speed = per_pass / (1 + level_cost * levels)
        figures = f"{per_pass:.2f} | {self.nodes / self.passes:.1f} | {levels:.2f} | {speed:.2f}"
        return f"| {self.name} | {figures} | {'yes' if self.same else '**no**'} |"


def specs(nodes: int, calibration: Path) -> dict[str, str]:
    """Specs of all methods, with the same number of nodes; the draft makes a tree."""
    draft, table = f"draft:depth=6,width=4,nodes={nodes}", f"recycling:nodes={nodes},price=0"
    return {
        "`draft`": draft,
        "`graft` over `draft`, the paper's gates": f"graft:nodes={nodes},inner={draft}",
        "`graft` over `draft`, calibrated": f"graft:nodes={nodes},calibration={calibration},inner={draft}",
        "`recycling`": table,
        "`graft` over `recycling`, the paper's gates": f"graft:nodes={nodes},inner={table}",
    }


@dataclass(frozen=True)
class Texts:
    """Prompts to learn from, prompts to measure on, and plain decoding's answers to the latter."""

    learned: list[list[int]]
    counted: list[list[int]]
    answers: list[list[int]]

    @classmethod
    def of(cls, model: Model, prompts: Seq[list[int]], **settings: Any) -> Texts:
        half = (len(prompts) + 1) // 2
        answers = [model.generate(prompt, method="plain", **settings).tokens for prompt in prompts[half:]]
        return cls(list(prompts[:half]), list(prompts[half:]), answers)


def method(spec: str, draft: LM) -> Drafter:
    name, options = registry.parse(spec)
    if "draft" in registry.options(registry.find(name)):
        options["draft"] = draft
    return registry.method(name, **options)


def run(model: Model, name: str, drafter: Drafter, texts: Texts, **settings: Any) -> Line:
    """Run the prompts one after another, as what a method learns serves the next prompt."""
    for prompt in texts.learned:
        model.generate(prompt, method=drafter, **settings)
    steps, same = [], True
    for prompt, answer in zip(texts.counted, texts.answers, strict=True):
        pieces = list(model.stream(prompt, method=drafter, **settings))
        done = pieces[-1].completion
        steps += [piece.step for piece in pieces if piece.step is not None]
        same = same and done is not None and done.tokens == answer
    levels = sum(max((step.tree.depths[node] for node in step.tree.signals), default=0) for step in steps)
    tokens = sum(len(step.tokens) for step in steps)
    return Line(name, len(steps), tokens, sum(step.drafted for step in steps), levels, same)


def fit(model: Model, draft: LM, texts: Texts, given: argparse.Namespace, **settings: Any) -> Calibration:
    """Trace the draft and the table, and fit the calibration to the traces."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.jsonl"
        with TraceWriter(path) as writer:
            for spec in (f"draft:depth=6,width=4,nodes={given.nodes}", f"recycling:nodes={given.nodes},price=0"):
                drafter = method(spec, draft)
                for prompt in texts.learned:
                    model.generate(prompt, method=drafter, trace=writer, **settings)
        return calibrate([read(path)], given.nodes, given.level_cost)


def table(lines: Seq[Line], found: Calibration, level_cost: float) -> str:
    heads = ["", "tokens per pass", "nodes per pass", "draft levels per pass", "x plain if a level costs", "as plain"]
    heads[4] += f" {level_cost:g} passes, a pass of all nodes 1"
    rows = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads), *(line.row(level_cost) for line in lines)]
    gates = ", ".join(
        f"depth {gate.depth} at {gate.floor:.2f}, keeping {gate.keep:.0%}" for gate in found.grafting.gates
    )
    return "\n".join(rows) + f"\n\nCalibrated gates, from {found.passes} passes: {gates or 'none'}."


def compare(model: Model, draft: LM, prompts: Seq[list[int]], given: argparse.Namespace) -> str:
    settings = {"max_tokens": given.max_tokens}
    texts = Texts.of(model, prompts, **settings)
    found = fit(model, draft, texts, given, **settings)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "c.json"
        tuning_file.write(path, {"graft": found.grafting.to_dict()})
        wanted = specs(given.nodes, path)
        lines = [run(model, name, method(spec, draft), texts, **settings) for name, spec in wanted.items()]
    return table(lines, found, given.level_cost)


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--draft-layers", default="0-3+6+8-29", help="layers of the model that form the draft")
    parser.add_argument("--nodes", type=int, default=24)
    parser.add_argument("--limit", type=int, default=2, help="prompts per task")
    parser.add_argument("--max-tokens", type=int, default=40)
    parser.add_argument("--level-cost", type=float, default=0.1)
    parser.add_argument("--update", type=Path, help="document with <!-- bench:graft --> to write the table to")
    return parser


def main() -> None:
    given = arguments().parse_args()
    model = outpace.load(given.model)
    found = tasks.load(None, TASKS, given.limit)
    # Alternating, so that both halves have prompts of every task.
    prompts = [tasks.encode(prompt, model) for prompt in found[::2] + found[1::2]]
    text = compare(
        model,
        layers_of(model.lm).slice(layer_search.parse(given.draft_layers)),
        prompts,
        given,
    )
    typer.echo(text)
    if given.update is not None:
        update(given.update, PLACE, text)


if __name__ == "__main__":
    main()
