"""Draft models for one target, with the same or another tokenizer, against Transformers' assisted generation.

python benchmarks/universal.py --target QWEN_1_5B --draft smollm2-135m-instruct --draft QWEN_0_5B

All contestants answer each prompt in turn, in a different order each round. Tokens per pass counts the passes of the
target, including prefill; tokens/s is the median over rounds of all answers of a kind, with prefill. When sampling,
Transformers draws different texts: compare rates, not answers.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

import outpace
from outpace import registry
from outpace.cross_tokenizer.by_tokens import TranslatedLM

PROMPTS: dict[str, list[str]] = {
    "code": [
        "Write a Python function that merges two sorted lists. Only code.",
        "Write a Python class for a bank account with deposit, withdraw and a history. Only code.",
        "Write a JavaScript function that groups an array of objects by a key. Only code.",
    ],
    "chat": [
        "Why is the sky blue? Answer in a short paragraph.",
        "Give me five tips for learning a language.",
        "Summarise the story of the tortoise and the hare for a child.",
    ],
}


def say(line: str) -> None:
    print(line, flush=True)  # noqa: T201


class Answer(NamedTuple):
    """The tokens of an answer, and the number of target passes that they took."""

    tokens: list[int]
    passes: int


@dataclass
class Contestant:
    """A way to answer, with its times and answers."""

    name: str
    answer: Callable[[list[int]], Answer]
    seconds: dict[str, list[float]] = field(default_factory=dict)  # by kind of prompt, for each round
    answers: dict[str, list[Answer]] = field(default_factory=dict)  # by kind of prompt, from the last round

    def run(self, kind: str, prompts: list[list[int]]) -> None:
        start = time.perf_counter()
        self.answers[kind] = [self.answer(prompt) for prompt in prompts]
        self.seconds.setdefault(kind, []).append(time.perf_counter() - start)

    def rate(self, kind: str) -> float:
        tokens = sum(len(answer.tokens) for answer in self.answers[kind])
        return tokens / statistics.median(self.seconds[kind])

    def per_pass(self, kind: str) -> float:
        found = self.answers[kind]
        return sum(len(answer.tokens) for answer in found) / sum(answer.passes for answer in found)


class Transformers:
    """Transformers' `generate`, alone or with an assistant, with a count of the target's passes."""

    def __init__(self, target: outpace.Model, draft: outpace.Model | None, settings: dict[str, Any]):
        runtime: Any = target.lm
        self.model, self.settings, self.passes = runtime.model, dict(settings), 0
        if draft is not None:
            # With another tokenizer and sampling, Transformers modifies the assistant permanently.
            assistant: Any = draft.lm
            self.settings["assistant_model"] = copy.deepcopy(assistant.model)
            if isinstance(target.draft_of(draft), TranslatedLM):
                self.settings |= {"tokenizer": target.tokenizer, "assistant_tokenizer": draft.tokenizer}

    def __call__(self, prompt: list[int]) -> Answer:
        self.passes = 0
        hook = self.model.register_forward_pre_hook(self._count)
        try:
            ids = torch.tensor([prompt], device=self.model.device)
            torch.manual_seed(0)
            with torch.no_grad():
                out = self.model.generate(ids, attention_mask=torch.ones_like(ids), **self.settings)
        finally:
            hook.remove()
        return Answer(out[0, len(prompt) :].tolist(), self.passes)

    def _count(self, module: Any, given: Any) -> None:
        self.passes += 1


def ours(
    target: outpace.Model, asked: argparse.Namespace, name: str, draft: outpace.Model | None = None, **options: Any
) -> Callable[[list[int]], Answer]:
    """Answer with a new method and no cache each time, so that all rounds are the same."""
    if draft is not None:
        options["draft"] = target.draft_of(draft)

    def answer(prompt: list[int]) -> Answer:
        for model in (target, draft):
            if model is not None:
                model.clear_cache()
        fresh = registry.method(name, **options)
        done = target.generate(prompt, method=fresh, max_tokens=asked.tokens, temperature=asked.temperature)
        return Answer(done.tokens, done.stats.passes)

    return answer


def contestants(target: outpace.Model, drafts: dict[str, outpace.Model], asked: argparse.Namespace) -> list[Contestant]:
    theirs: dict[str, Any] = {"max_new_tokens": asked.tokens, "do_sample": asked.temperature > 0}
    theirs |= {"temperature": asked.temperature, "top_k": 0, "top_p": 1.0} if asked.temperature else {}
    found = [
        Contestant("plain", ours(target, asked, "plain")),
        Contestant("Transformers `generate`", Transformers(target, None, theirs)),
    ]
    for name, draft in drafts.items():
        lm = target.draft_of(draft)
        ways = ("tokens", "text") if isinstance(lm, TranslatedLM) else ("auto",)
        if isinstance(lm, TranslatedLM):
            say(f"{name}: shared tokens cover {lm.pair.overlap:.0%} of a text, by the estimate that `auto` uses")
        for way in ways:
            label = f"`draft` {name}" + (f", align={way}" if way != "auto" else "")
            answer = ours(target, asked, "draft", draft, align=way, depth=asked.depth)
            found.append(Contestant(label, answer))
        found.append(Contestant(f"`auto` {name}", ours(target, asked, "auto", draft)))
        found.append(Contestant(f"Transformers assisted {name}", Transformers(target, draft, theirs)))
    return found


def table(everyone: list[Contestant]) -> None:
    say("| kind | | tokens per pass | tokens/s | x plain | answers that differ from plain |")
    say("|---|---|---|---|---|---|")
    plain = everyone[0]
    for kind in PROMPTS:
        for one in everyone:
            pairs = list(zip(one.answers[kind], plain.answers[kind], strict=True))
            differ = sum(a.tokens != b.tokens for a, b in pairs)
            rate = one.rate(kind)
            say(
                f"| {kind} | {one.name} | {one.per_pass(kind):.2f} | {rate:.1f} | {rate / plain.rate(kind):.2f} | "
                f"{differ} of {len(pairs)} |"
            )


def main(asked: argparse.Namespace) -> None:
    target = outpace.load(asked.target, dtype=asked.dtype)
    drafts = {name.rstrip("/").rpartition("/")[2]: outpace.load(name, dtype=asked.dtype) for name in asked.draft}
    tokenizer: Any = target.tokenizer
    prompts = {
        kind: [
            tokenizer.apply_chat_template(
                [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=True
            )["input_ids"]
            for text in texts[: asked.limit]
        ]
        for kind, texts in PROMPTS.items()
    }
    everyone = contestants(target, drafts, asked)
    for turn in range(asked.rounds + 1):
        order = everyone[turn % len(everyone) :] + everyone[: turn % len(everyone)]
        for kind in prompts:
            for one in order:
                one.run(kind, prompts[kind] if turn else prompts[kind][:1])
        if not turn:  # end of the warm-up
            for one in everyone:
                one.seconds.clear()
    say(f"{asked.target}, {asked.tokens} tokens at most, temperature {asked.temperature}, {asked.rounds} rounds")
    table(everyone)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True, help="demo model, folder or Hugging Face id")
    parser.add_argument("--draft", action="append", required=True, help="draft model; repeatable")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--depth", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--limit", type=int, default=3, help="prompts per kind")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--dtype", default=None)
    main(parser.parse_args())
