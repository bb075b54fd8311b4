"""VIA-SD's speed against its loss of quality: the KL divergence from the target's distribution and the task score, at
several thresholds.

    .venv/bin/python benchmarks/via_sd.py --draft small-model --calibration layers.json --plot build/via_sd.png

Each point is one pair of thresholds. The exact form and the draft alone, which lose no quality, are shown beside them.
Without a draft model, `suffix` drafts. `--untimed` shows tokens per pass instead of the speed.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

import outpace
from outpace.api.model import Model
from outpace.core.lm import LM, layers_of
from outpace.drafting import layer_search
from outpace.prompts import tasks
from outpace.sampling.settings import Sampling
from outpace.verify.lossy import is_right, price
from outpace.verify.plan import Subject, VerifyPlan

POINTS = ((0.9, 0.6), (0.8, 0.5), (0.6, 0.3), (0.4, 0.2), (0.2, 0.1))  # thresholds: accept and ask


@dataclass(frozen=True)
class Point:
    """The speed and the quality of one method."""

    name: str
    lossless: bool
    kl: float
    score: float | None
    tokens_per_pass: float
    speedup: float | None = None

    def row(self) -> str:
        score = "" if self.score is None else f"{self.score:.0%}"
        speed = "" if self.speedup is None else f"{self.speedup:.2f}"
        kl = "0" if self.lossless else f"{self.kl:.3f}"
        kept = "yes" if self.lossless else "**no**"
        return f"| {self.name} | {kept} | {kl} | {score} | {self.tokens_per_pass:.2f} | {speed} |"


def subjects(draft: Model | LM | None, given: dict[str, Any]) -> list[Subject]:
    own = {"draft": draft} if draft is not None else {}
    inner: dict[str, Any] = {"method": "suffix" if draft is None else "draft", **own}
    found = [
        Subject(inner["method"], inner),
        Subject("via_sd, exact", {"method": "via_sd", "exact": True, **own, **given}),
    ]
    for accept, ask in POINTS:
        settings = {"method": "via_sd", "accept": accept, "ask": ask, **own, **given}
        found.append(Subject(f"via_sd, accept {accept:g}, ask {ask:g}", settings))
    return found


def measure(plan: VerifyPlan, subject: Subject, rounds: int) -> Point:
    seq = plan.model.sequence(plan.request(subject, plan.prompts[0]))
    kept = seq.drafter.lossless and seq.verifier.lossless
    speedup = _speedup(plan, subject, rounds) if rounds else None
    if not kept:
        paid = price(plan, subject).figures
        return Point(subject.name, False, paid["kl"], paid.get("score"), paid["tokens_per_pass"], speedup)
    done = plan.run(subject, Sampling(), list(range(len(plan.prompts))))
    right = [is_right(done[index].text, answer) for index, answer in plan.answers.items()]
    per_pass = sum(one.stats.tokens for one in done) / sum(one.stats.passes for one in done)
    return Point(subject.name, True, 0.0, statistics.mean(right) if right else None, per_pass, speedup)


def _speedup(plan: VerifyPlan, subject: Subject, rounds: int) -> float:
    """The speed-up in tokens per second over plain decoding, in alternate runs; the first run of each is a warm-up."""
    plain, rates = Subject("plain", {"method": "plain"}), dict[str, list[float]]()
    for turn in range(rounds + 1):
        for who in (plain, subject):
            start = time.perf_counter()
            done = plan.run(who, Sampling(), list(range(len(plan.prompts))))
            spent = time.perf_counter() - start
            if turn:
                rates.setdefault(who.name, []).append(sum(len(one.tokens) for one in done) / spent)
    return statistics.median(rates[subject.name]) / statistics.median(rates["plain"])


def table(points: Seq[Point]) -> str:
    heads = ["", "lossless", "KL, nats", "task score", "tokens per pass", "x plain"]
    return "\n".join(["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads), *(point.row() for point in points)])


def plot(points: Seq[Point], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    timed = points[0].speedup is not None
    figure, axes = pyplot.subplots(1, 2, figsize=(10, 4), sharey=True, layout="constrained")
    for axis, label, of in zip(
        axes, ("KL from the target's distribution, nats", "task score"), ("kl", "score"), strict=True
    ):
        names = dict[tuple[float, float], list[str]]()  # coinciding points share a label
        for point in points:
            x, y = getattr(point, of), point.speedup if timed else point.tokens_per_pass
            if x is not None and y is not None:
                axis.plot(x, y, "o" if point.lossless else "s", color="tab:green" if point.lossless else "tab:red")
                names.setdefault((x, y), []).append(point.name.removeprefix("via_sd, "))
        for place, shown in names.items():
            axis.annotate("\n".join(shown), place, fontsize=7, xytext=(5, 5), textcoords="offset points")
        axis.margins(0.3, 0.2)
        axis.set_xlabel(label)
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("times plain decoding" if timed else "tokens per pass")
    figure.suptitle("VIA-SD: green is lossless, red is not")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--draft", help="draft model; default: none, suffix drafts")
    parser.add_argument("--draft-layers", help="layers of the model itself that form the draft")
    parser.add_argument("--calibration", help="file written by `outpace calibrate --layers-of MODEL`")
    parser.add_argument("--skip", type=float, default=0.45, help="share of layers left out if there is no calibration")
    parser.add_argument("--task", action="append", help="default: math and qa, which have answers")
    parser.add_argument("--limit", type=int, default=4, help="prompts per task")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--samples", type=int, default=200, help="draws per prompt for the KL divergence")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--untimed", action="store_true")
    parser.add_argument("--plot", type=Path)
    return parser


def points_of(
    model: Model, draft: Model | LM | None, prompts: Seq[tasks.Prompt], given: argparse.Namespace
) -> list[Point]:
    answers = {i: prompt.answer for i, prompt in enumerate(prompts) if prompt.answer is not None}
    plan = VerifyPlan(
        model, [tasks.encode(prompt, model) for prompt in prompts], given.max_tokens, samples=given.samples,
        answers=answers,
    )  # fmt: skip
    settings = {"calibration": given.calibration} if given.calibration else {"skip": given.skip}
    return [measure(plan, who, 0 if given.untimed else given.rounds) for who in subjects(draft, settings)]


def main() -> None:
    given = arguments().parse_args()
    model = outpace.load(given.model)
    draft: Model | LM | None = outpace.load(given.draft) if given.draft else None
    if given.draft_layers:
        draft = layers_of(model.lm).slice(layer_search.parse(given.draft_layers))
    points = points_of(model, draft, tasks.load(None, given.task or ["math", "qa"], given.limit), given)
    typer.echo(table(points))
    if given.plot is not None:
        plot(points, given.plot)


if __name__ == "__main__":
    main()
