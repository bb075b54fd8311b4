"""Trained heads on a model with the shape of 8B: speed, with real text, real drafts and the costs of an 8B.

    python benchmarks/heads_on_large.py --small smollm2-135m-instruct --prompts spec_bench.jsonl
    python benchmarks/heads_on_large.py --small FOLDER --limit 4 --max-tokens 64 --rounds 1 --batches 1 --temperatures 0

The small model and its heads are grown on the device (grown.py, grown_heads.py): nothing is downloaded or written.
FOLDER holds the small model in safetensors, with its tokenizer; its heads are those in weights/, or in `--small-heads`.
Two numbers are to be read with care. The shipped heads have three or four layers, where published ones for 8B models
have one; with `--narrow` their inner layers are as wide as in the small model, and three layers of `eagle3` cost about
as much as one layer of an 8B. And the number of tokens per pass is that of heads for a model of 135M.

A column is a number of requests that run at a time; it answers twice as many prompts, and at least `--limit`. Methods
take turns. The first round warms up (it captures graphs), and the best of the others counts. The time is that of the
whole call: reading the prompts is part of it. No text is remembered from round to round. In bfloat16 a pass of another
size may resolve a tie differently, so some texts differ from plain decoding's. For the first few, the script says how
far the two tokens are apart in plain decoding, in logits and with the noise of their position; logits of 16 to 32 have
steps of 0.125.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from dataclasses import dataclass
from itertools import chain, cycle, islice, zip_longest
from pathlib import Path

import torch
from grown import SHAPES, grow, large_config, read, source
from grown_heads import KINDS, grown_heads
from transformers import AutoTokenizer

import outpace
from outpace import registry
from outpace.core.drafter import Drafter
from outpace.heads.base import Head
from outpace.models.compiled.cuda_graph import GraphRunner
from outpace.prompts import tasks
from outpace.sampling.noise import gumbel

# The best known options: docs/results/heads.md.
METHODS = [
    "plain", "suffix", "auto", "eagle3:nodes=60,depth=8,width=8", "block:nodes=80,width=10", "mtp:depth=12",
    "medusa:nodes=60,depth=6,width=8",
]  # fmt: skip
EXAMINED = 3  # texts that differ from plain decoding's, of which the reason is looked for
SEED = 1


@dataclass(frozen=True)
class Run:
    """The answers to all prompts of a column by one method."""

    rate: float  # tokens per second
    per_pass: float  # tokens per pass of a request
    texts: list[list[int]]


@dataclass(frozen=True)
class Column:
    """What a column measures."""

    requests: int
    temperature: float
    prompts: list[list[int]]

    @property
    def name(self) -> str:
        return f"{self.requests} at temperature {self.temperature:g}" if self.temperature else f"{self.requests} greedy"


def say(line: str) -> None:
    print(line, flush=True)  # noqa: T201


class Contest:
    """A large model, its heads, and the methods that are compared on it."""

    def __init__(self, model: outpace.Model, heads: dict[str, Head], policy: str, max_tokens: int):
        self.model, self.heads, self.policy, self.max_tokens = model, heads, policy, max_tokens
        self._kept: dict[str, Drafter] = {}

    def drafter(self, spec: str) -> Drafter:
        """A method. Those with a head are kept with their graphs; others would know the texts of earlier rounds."""
        name, options = registry.parse(spec)
        if name not in self.heads:
            return registry.method(name, **options)
        if spec not in self._kept:
            self._kept[spec] = registry.method(name, head=self.heads[name], **options)
        return self._kept[spec]

    def run(self, spec: str, column: Column) -> Run:
        self.model.max_batch = column.requests
        self.model.clear_cache()
        given = {} if spec == "plain" else {"policy": self.policy}
        method = self.drafter(spec)
        start = self._now()
        done = self.model.generate(
            column.prompts,
            method=method,
            max_tokens=self.max_tokens,
            temperature=column.temperature,
            seed=SEED,
            **given,
        )
        spent = self._now() - start
        errors = [c.error for c in done if c.error]
        if errors:
            raise SystemExit(f"{spec}: {errors[0]}")
        tokens = sum(len(c.tokens) for c in done)
        return Run(tokens / spent, tokens / sum(c.stats.passes for c in done), [c.tokens for c in done])

    def measure(self, specs: list[str], column: Column, rounds: int) -> dict[str, Run]:
        """Return the best run of each method, after one that does not count."""
        runs = defaultdict[str, list[Run]](list)
        for _ in range(rounds + 1):
            for spec in specs:
                runs[spec].append(self.run(spec, column))
        return {spec: max(of[1:], key=lambda run: run.rate) for spec, of in runs.items()}

    def differences(self, column: Column, plain: Run, other: Run) -> str:
        """Count the texts that differ from plain decoding's, and say how near a tie the first few parted."""
        pairs = zip(column.prompts, plain.texts, other.texts, strict=True)
        differing = [(prompt, due, found) for prompt, due, found in pairs if due != found]
        if not differing:
            return "0"
        gaps = [self.gap(*texts, column.temperature) for texts in differing[:EXAMINED]]
        known = [gap for gap in gaps if gap is not None]
        reason = f"of {len(known)} examined, at most {max(known):.3f} apart" if known else "none could be examined"
        return f"{len(differing)} ({reason})"

    def gap(self, prompt: list[int], due: list[int], found: list[int], temperature: float) -> float | None:
        """How far two texts' tokens are apart where they part; None if one ends there or plain alone goes another way.

        The scores are those of sampling: logits plus noise, both in units of logits.
        """
        at = next((i for i, (a, b) in enumerate(zip(due, found, strict=False)) if a != b), None)
        if at is None:
            return None
        plain = self.model.generate(
            prompt, method="plain", max_tokens=at + 1, logprobs=50, temperature=temperature, seed=SEED
        )
        top = plain.logprobs[at].top if len(plain.tokens) > at else {}
        if plain.tokens[:at] != due[:at] or not {due[at], found[at]} <= set(top):
            return None
        noise = temperature * gumbel(torch.tensor([due[at], found[at]]), SEED, len(prompt) + at)
        return abs(top[due[at]] - top[found[at]] + float(noise[0] - noise[1]))

    def _now(self) -> float:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter()


def built(asked: argparse.Namespace) -> tuple[outpace.Model, dict[str, Head]]:
    """Grow the model and the heads that are asked for, on the GPU if there is one."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    start, small = time.perf_counter(), read(asked.small)
    large = grow(small, large_config(small.config, **SHAPES[asked.shape]), device, torch.bfloat16)
    model = outpace.wrap(large, AutoTokenizer.from_pretrained(source(asked.small)), compile=device == "cuda")
    if device == "cuda":
        assert isinstance(getattr(model.lm, "runner", None), GraphRunner), "the model runs eagerly"
    kinds = [kind for kind in KINDS if any(registry.parse(spec)[0] == kind for spec in asked.methods)]
    heads = grown_heads(small, model.lm, asked.small_heads, asked.narrow, kinds)
    say(f"grown and compiled in {time.perf_counter() - start:.0f} s; parameters without output matrices:")
    for kind, head in heads.items():
        own = sum(tensor.numel() for name, tensor in head.own_tensors().items() if name != "ids")
        say(f"- {kind}: {own / 1e6:.0f} million, of {head.spec.draft_vocab or 'all'} tokens")
    model.max_batch = max(asked.batches)
    model.warm_up()
    return model, heads


def columns(asked: argparse.Namespace, model: outpace.Model) -> list[Column]:
    """Make the columns. Their prompts come from all tasks in turn, and are repeated if there are too few."""
    by = defaultdict[str, list[list[int]]](list)
    for prompt in tasks.load(asked.prompts):
        by[prompt.task].append(tasks.encode(prompt, model))
    found = [prompt for prompt in chain.from_iterable(zip_longest(*by.values())) if prompt is not None]
    counts = {size: max(asked.limit, 2 * size) for size in asked.batches}
    if max(counts.values()) > len(found):
        say(f"{len(found)} prompts are repeated to make {max(counts.values())}: what repeats is easy to draft")
    return [
        Column(size, temperature, list(islice(cycle(found), counts[size])))
        for temperature in asked.temperatures
        for size in asked.batches
    ]


def table(measured: dict[str, dict[str, Run]], differing: dict[tuple[str, str], str]) -> str:
    """Rows are methods; a cell holds tokens/s, the ratio to plain, tokens per pass, and how many texts differ."""
    specs = list(dict.fromkeys(spec for runs in measured.values() for spec in runs))
    lines = [f"| method | {' | '.join(measured)} |", "|" + "---|" * (len(measured) + 1)]
    for spec in specs:
        cells = []
        for column, runs in measured.items():
            run, plain = runs[spec], runs["plain"]
            cell = f"{run.rate:.0f}, {run.rate / plain.rate:.2f} x, {run.per_pass:.2f} a pass"
            cells.append(cell if spec == "plain" else f"{cell}, {differing[column, spec].split()[0]} differ")
        lines.append(f"| `{spec}` | {' | '.join(cells)} |")
    return "\n".join(lines)


def compare(contest: Contest, specs: list[str], wanted: list[Column], rounds: int) -> str:
    """Measure column by column, and report each at once: the time on a GPU may end early."""
    measured, differing = dict[str, dict[str, Run]](), dict[tuple[str, str], str]()
    for column in wanted:
        start = time.perf_counter()
        runs = measured[column.name] = contest.measure(specs, column, rounds)
        for spec in specs[1:]:
            differing[column.name, spec] = contest.differences(column, runs["plain"], runs[spec])
        say(f"\n{column.name}: {len(column.prompts)} prompts, {time.perf_counter() - start:.0f} s")
        for spec, run in runs.items():
            reason = f"; texts that differ: {differing[column.name, spec]}" if spec != "plain" else ""
            ratio = run.rate / runs["plain"].rate
            say(f"  {spec}: {run.rate:.1f} tokens/s, {ratio:.2f} x, {run.per_pass:.2f} tokens per pass{reason}")
    return table(measured, differing)


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", default="smollm2-135m-instruct", help="demo model or folder of a Llama to grow")
    parser.add_argument("--small-heads", type=Path, help="folder of its heads; default: those in weights/")
    parser.add_argument("--narrow", action="store_true", help="inner layers of heads keep their width")
    parser.add_argument("--shape", choices=SHAPES, default="8b")
    parser.add_argument("--prompts", type=Path, help="JSONL file; default: built-in prompts")
    parser.add_argument("--limit", type=int, default=8, help="minimum number of prompts of a column")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=2, help="rounds that count")
    parser.add_argument("--methods", nargs="+", default=METHODS, help="methods with options; plain is always measured")
    parser.add_argument("--policy", default="auto", help="policy of all methods; auto verifies what pays")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.8])
    return parser


def main() -> None:
    asked = arguments().parse_args()
    model, heads = built(asked)
    specs = list(dict.fromkeys(["plain", *asked.methods]))
    contest = Contest(model, heads, asked.policy, asked.max_tokens)
    say(f"\n{compare(contest, specs, columns(asked, model), asked.rounds)}")


if __name__ == "__main__":
    main()
