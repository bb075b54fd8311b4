"""A simulation of plain decoding, fixed methods and `auto` on recorded answers, for machines with given cost curves.

    .venv/bin/python benchmarks/controller.py --prompts 2 --max-tokens 192 --recordings build/recordings.pickle

The answers of a model are recorded once; then the whole loop replays them, and a pass takes the time that the machine's
cost curve gives. `--host` adds the real time of drafting here. Unpredictable texts, and texts that alternate between
repetition and noise, are added to the real ones. `worst` is the text on which auto is slowest.
"""

from __future__ import annotations

import argparse
import pickle
import random
import time
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

import torch
import typer

import outpace
from outpace.advise.recording import Recording, record
from outpace.advise.replay import ReplayLM
from outpace.api.model import Model
from outpace.api.request import Request
from outpace.core import stats
from outpace.core.engine import Engine
from outpace.core.layout import Layout
from outpace.core.lm import Picks, Scores
from outpace.models.segment import Segment, SegmentOutput
from outpace.policies.controller.costs import Costs
from outpace.prompts import tasks
from outpace.sampling.settings import Sampling

CURVES = {  # machine -> seconds of a pass of one token, and (tokens of a pass, its cost in passes of one token)
    "cpu": (0.040, ((1, 1.0), (2, 1.03), (4, 1.1), (8, 1.3), (16, 1.8), (32, 3.0), (64, 5.5))),
    "small cpu": (0.060, ((1, 1.0), (2, 1.08), (4, 1.38), (8, 1.85), (16, 1.9), (32, 2.3), (64, 3.0))),
    "gpu": (0.006, ((1, 1.0), (8, 1.05), (64, 1.2), (128, 1.9), (256, 3.4))),
}
MACHINES = {name: Costs(tuple((n, base * x) for n, x in curve)) for name, (base, curve) in CURVES.items()}
FIXED = ("plain", "suffix", "ngram", "recycling:nodes=8", "recycling:nodes=24", "recycling")
VOCAB = 49152


class Clock:
    """Simulated time, plus a share of the real time."""

    def __init__(self, host: float):
        self.host, self.simulated, self.hidden = host, 0.0, 0.0

    def perf_counter(self) -> float:
        return self.simulated + self.host * (time.perf_counter() - self.hidden)


class Simulated(ReplayLM):
    """A target that replays several recordings at once, on a machine with these costs."""

    def __init__(self, model: Any, texts: Seq[Recording], costs: Costs, clock: Clock):
        super().__init__(model, texts)
        self.texts, self.costs, self.clock = texts, costs, clock

    def score(
        self, layouts: Seq[Layout], slots: Seq[int], since: Seq[int] | None = None, picks: Picks = None
    ) -> list[Scores]:
        start = time.perf_counter()
        found = super().score(layouts, slots, since, picks)
        self.clock.hidden += time.perf_counter() - start
        self.clock.simulated += self.costs.seconds(sum(map(len, layouts)), len(layouts))
        return found

    def forward(self, jobs: Seq[Segment], taps: tuple[int, ...]) -> list[SegmentOutput]:
        outputs = []
        for job in jobs:
            held = self.slots[job.slot].tokens + job.pending + (job.tree.tokens[:1] if job.layout is not None else [])
            self.recording = next((t for t in self.texts if t.text[: len(held)] == held), None)
            outputs += super().forward([job], taps)
        return outputs


class Target:
    vocab, max_length, trees, layers = VOCAB, 8192, True, None


def noise(words: int, seed: int, count: int = 256) -> Recording:
    draw = random.Random(f"{words}/{seed}")
    pool = [draw.randrange(VOCAB) for _ in range(words)]
    return Recording([draw.choice(pool) for _ in range(60)], [draw.choice(pool) for _ in range(count)])


def changing(seed: int, count: int = 256) -> Recording:
    draw, answer = random.Random(seed), list[int]()
    while len(answer) < count:
        phrase = [draw.randrange(VOCAB) for _ in range(12)]
        answer += phrase * 4 + [draw.randrange(VOCAB) for _ in range(48)]
    return Recording([draw.randrange(VOCAB) for _ in range(60)], answer[:count])


def seconds(spec: str, texts: Seq[Recording], costs: Costs, batch: int, host: float) -> list[float]:
    """Simulate each batch and return its seconds; what a method learns carries over to the next batch."""
    clock = Clock(host)
    stats.time = clock  # type: ignore[assignment, attr-defined]
    target, found = Simulated(Target(), texts, costs, clock), []
    model = Model(target)
    model._costs = costs
    for at in range(0, len(texts), batch):
        target.clear()
        engine, start = Engine(target), clock.perf_counter()
        for text in texts[at : at + batch]:
            given = {"method": spec, "max_tokens": len(text.answer), "ignore_eos": True}
            engine.submit(model.sequence(Request.from_keywords(text.prompt, given)))
        for _ in engine.run():
            pass
        found.append(clock.perf_counter() - start)
    return found


def recorded(path: Path, prompts: int, max_tokens: int) -> list[Recording]:
    if not path.exists():
        model = outpace.load("smollm2-135m-instruct", dtype="float32", device="cpu")
        asked = [tasks.encode(prompt, model) for prompt in tasks.load(None, limit=prompts)]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(pickle.dumps(record(model, asked, max_tokens, Sampling(), lambda: None)))
    found: list[Recording] = pickle.loads(path.read_bytes())
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recordings", type=Path, default=Path("build/recordings.pickle"))
    parser.add_argument("--prompts", type=int, default=2, help="prompts of each task, if nothing is recorded yet")
    parser.add_argument("--max-tokens", type=int, default=192)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--host", type=float, default=0.0, help="share of the real drafting time to add")
    given = parser.parse_args()
    torch.set_num_threads(1)
    sets = {
        "answers": recorded(given.recordings, given.prompts, given.max_tokens),
        "noise": [noise(40_000, seed) for seed in range(4)],
        "misleading": [noise(50, seed) for seed in range(4)],
        "changing": [changing(seed) for seed in range(4)],
    }
    typer.echo("| machine | texts | auto | worst | best fixed | | auto / best fixed |\n|---|---|---|---|---|---|---|")
    for machine, costs in MACHINES.items():
        for name, texts in sets.items():
            took = {spec: seconds(spec, texts, costs, given.batch, given.host) for spec in (*FIXED, "auto")}
            plain, auto = took["plain"], took["auto"]
            best = min(FIXED, key=lambda spec: sum(took[spec]))
            worst = min(p / a for p, a in zip(plain, auto, strict=True))
            figures = [sum(plain) / sum(auto), worst, sum(plain) / sum(took[best]), sum(took[best]) / sum(auto)]
            a, w, b, r = (f"{figure:.3f}" for figure in figures)
            typer.echo(f"| {machine} | {name} | {a} | {w} | {b} | {best} | {r} |")


if __name__ == "__main__":
    main()
