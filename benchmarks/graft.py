"""Graft against what it wraps, at the same number of nodes: tokens per pass, and levels that the draft was asked for.

    .venv/bin/python benchmarks/graft.py --nodes 24 --max-tokens 40 --update docs/benchmarks.md

The draft is the target without a few layers: it guesses as a draft model does, and costs far more, so nothing is timed
here. `calibrated` is fitted to traces of the first half of the prompts, for a draft whose level costs `--level-cost`
passes; figures are of the other half. Every answer is compared with plain decoding's.
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
from outpace import calibrated, layers, registry, slim
from outpace.api import Model
from outpace.bench import tasks
from outpace.bench.tables import update
from outpace.calibrate import Calibration, calibrate
from outpace.models.base import LM
from outpace.trace import TraceWriter, read

TASKS = ("qa", "math", "code", "summarization", "chat", "rag")
PLACE = "graft"  # of the table in the document


@dataclass(frozen=True)
class Line:
    """What one method did."""

    name: str
    passes: int
    tokens: int
    nodes: int
    levels: int  # that the draft model was asked for
    same: bool  # as plain decoding

    def row(self, level_cost: float) -> str:
        per_pass, levels = self.tokens / self.passes, self.levels / self.passes
        speed = per_pass / (1 + level_cost * levels)
        figures = f"{per_pass:.2f} | {self.nodes / self.passes:.1f} | {levels:.2f} | {speed:.2f}"
        return f"| {self.name} | {figures} | {'yes' if self.same else '**no**'} |"


def specs(nodes: int, calibration: Path) -> dict[str, str]:
    """Every method with the same number of nodes; the draft as a tree."""
    draft, table = f"draft:depth=6,width=4,nodes={nodes}", f"recycling:nodes={nodes}"
    return {
        "`draft`": draft,
        "`graft` over `draft`, the paper's gates": f"graft:nodes={nodes},inner={draft}",
        "`graft` over `draft`, calibrated": f"graft:nodes={nodes},calibration={calibration},inner={draft}",
        "`recycling`": table,
        "`graft` over `recycling`, the paper's gates": f"graft:nodes={nodes},inner={table}",
    }


def run(model: Model, name: str, spec: str, draft: LM, prompts: Seq[list[int]], **settings: Any) -> Line:
    """One after the other: what a method learns serves the next prompt."""
    chosen, options = registry.parse(spec)
    if "draft" in registry.options(registry.find(chosen)):
        options["draft"] = draft
    drafter, steps, same = registry.method(chosen, **options), [], True
    for prompt in prompts:
        pieces = list(model.stream(prompt, method=drafter, **settings))
        done = pieces[-1].completion
        steps += [piece.step for piece in pieces if piece.step is not None]
        same = same and done is not None and done.tokens == model.generate(prompt, method="plain", **settings).tokens
    levels = sum(max((step.tree.depths[node] for node in step.tree.signals), default=0) for step in steps)
    tokens = sum(len(step.tokens) for step in steps)
    return Line(name, len(steps), tokens, sum(step.drafted for step in steps), levels, same)


def fit(
    model: Model, draft: LM, prompts: Seq[list[int]], nodes: int, level_cost: float, **settings: Any
) -> Calibration:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.jsonl"
        with TraceWriter(path) as writer:
            for spec in (f"draft:depth=6,width=4,nodes={nodes}", f"recycling:nodes={nodes}"):
                name, options = registry.parse(spec)
                drafter = registry.method(name, **options, **({"draft": draft} if name == "draft" else {}))
                for prompt in prompts:
                    model.generate(prompt, method=drafter, trace=writer, **settings)
        return calibrate([read(path)], nodes, level_cost)


def table(lines: Seq[Line], found: Calibration, level_cost: float) -> str:
    heads = ["", "tokens per pass", "nodes per pass", "draft levels per pass", "x plain if a level costs", "as plain"]
    heads[4] += f" {level_cost:g} passes, a pass of all nodes 1"
    rows = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads), *(line.row(level_cost) for line in lines)]
    gates = ", ".join(
        f"depth {gate.depth} at {gate.floor:.2f}, keeping {gate.keep:.0%}" for gate in found.grafting.gates
    )
    return "\n".join(rows) + f"\n\nCalibrated gates, from {found.passes} passes: {gates or 'none'}."


def compare(model: Model, draft: LM, prompts: Seq[list[int]], given: argparse.Namespace) -> str:
    half, settings = (len(prompts) + 1) // 2, {"max_tokens": given.max_tokens}
    found = fit(model, draft, prompts[:half], given.nodes, given.level_cost, **settings)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "c.json"
        calibrated.write(path, {"graft": found.grafting.to_dict()})
        lines = [
            run(model, name, spec, draft, prompts[half:], **settings) for name, spec in specs(given.nodes, path).items()
        ]
    return table(lines, found, given.level_cost)


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--draft-layers", default="0-3+6+8-29", help="of the model, that the draft has")
    parser.add_argument("--nodes", type=int, default=24)
    parser.add_argument("--limit", type=int, default=2, help="prompts of each task")
    parser.add_argument("--max-tokens", type=int, default=40)
    parser.add_argument("--level-cost", type=float, default=0.1)
    parser.add_argument("--update", type=Path, help="a document with <!-- bench:graft --> in it")
    return parser


def main() -> None:
    given = arguments().parse_args()
    model = outpace.load(given.model)
    found = tasks.load(None, TASKS, given.limit)
    # Alternating, so that both halves have prompts of every task.
    prompts = [tasks.encode(prompt, model) for prompt in found[::2] + found[1::2]]
    text = compare(model, slim.layered(model.lm, "the draft").slice(layers.parse(given.draft_layers)), prompts, given)
    typer.echo(text)
    if given.update is not None:
        update(given.update, PLACE, text)


if __name__ == "__main__":
    main()
