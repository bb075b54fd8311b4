"""GPU benchmark: the cost of a pass for a Llama with the shape of 8B or 1B, against reading its weights once; and the
gain of speculation, on the text of a small model that is grown to the large shape.

    python benchmarks/gpu.py passes --shape 8b --context 1024
    python benchmarks/gpu.py draft --int8
    python benchmarks/gpu.py speculation --small smollm2-135m-instruct
    python benchmarks/gpu.py batches --small smollm2-135m-instruct --acceptance 0.2 0.4 0.7
    python benchmarks/gpu.py sampling --small smollm2-135m-instruct
"""

from __future__ import annotations

import argparse
import logging
import random
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeAlias

import torch
from grown import SHAPES, grown
from transformers import LlamaConfig, LlamaForCausalLM

import outpace
from outpace.core.drafter import Drafter
from outpace.core.lm import DraftShape
from outpace.core.sequence import Sequence
from outpace.core.tree import Budget, Tree
from outpace.models.compiled.cuda_graph import GraphRunner
from outpace.models.hf.int8 import quantize
from outpace.sampling.sampler import Pick

RUNS = 5  # the best run counts: the first ones capture graphs of new sizes
Texts: TypeAlias = list[list[int]]
Rate: TypeAlias = tuple[float, float, Texts]  # tokens per second of decoding, tokens per pass, and the tokens
PROMPTS = [64, 200, 90, 140, 310, 120, 80, 256]  # tokens of each prompt


def say(line: str) -> None:
    print(line, flush=True)  # noqa: T201


def build(shape: str, short: bool) -> LlamaForCausalLM:
    """Build a model with random weights in bfloat16, or in int8 if `short`."""
    config = LlamaConfig(
        max_position_embeddings=40_000, tie_word_embeddings=shape == "1b",
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0}, **SHAPES[shape],
    )  # fmt: skip
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(torch.bfloat16)
    model = model.to_empty(device="cuda")
    model.tie_weights()
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.02)
    model.model.rotary_emb = type(model.model.rotary_emb)(config).to("cuda")
    return quantize(model.eval()) if short else model.eval()


def weight_bytes(model: LlamaForCausalLM) -> int:
    """Bytes that a pass has to read: all weights but the embedding, of which it reads one row per token."""
    tied = model.config.tie_word_embeddings
    everything = sum(p.nbytes for p in (*model.parameters(), *model.buffers()))
    own = not tied or hasattr(model.lm_head, "scale")  # an int8 head is a copy
    return everything - (model.get_input_embeddings().weight.nbytes if own else 0)


def bandwidth() -> float:
    """Bytes per second of a copy, counting reads and writes."""
    a = torch.empty(2**30, dtype=torch.int8, device="cuda")
    b = torch.empty_like(a)
    return 2 * a.nbytes / gpu_seconds(lambda: b.copy_(a))


def gpu_seconds(work: Callable[[], object], rounds: int = 20) -> float:
    def once() -> float:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        work()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) / 1e3

    return statistics.median([once() for _ in range(rounds + 3)][3:])


def wall_seconds(work: Callable[[], object], rounds: int = 20) -> float:
    def once() -> float:
        torch.cuda.synchronize()
        start = time.perf_counter()
        work()
        torch.cuda.synchronize()
        return time.perf_counter() - start

    return statistics.median([once() for _ in range(rounds + 3)][3:])


def choose(lm: Any, row: int, size: int) -> list[int]:
    """Run one greedy pass over a chain of tokens."""
    return lm.score([Tree.chain(list(range(5, 5 + size)))], [row], picks=[Pick(0, 0.0)])[0].picked.tokens


def wrapped(model: LlamaForCausalLM) -> outpace.Model:
    start = time.perf_counter()
    found = outpace.wrap(model, compile=True)
    assert isinstance(getattr(found.lm, "runner", None), GraphRunner), "the model runs eagerly"
    say(f"compiled and compared in {time.perf_counter() - start:.1f} s")
    return found


def passes(shape: str, contexts: list[int], short: bool) -> None:
    model = build(shape, short)
    rate, weights = bandwidth(), weight_bytes(model)
    lm: Any = wrapped(model).lm
    assert isinstance(lm.runner, GraphRunner)
    say(f"{shape}: {weights / 1e9:.2f} GB of weights, a copy runs at {rate / 1e12:.2f} TB/s")
    for context in contexts:
        row = lm.acquire([])
        lm.feed([[(7 * i) % 1000 for i in range(context)]], [row])
        limit = (weights + context * lm.cache.token_bytes) / rate
        say(f"context {context}: reading weights and cache once takes {limit * 1e3:.2f} ms")
        first = 0.0
        for size in (1, 2, 4, 8, 16, 32, 64):
            wall = wall_seconds(partial(choose, lm, row, size))
            alone = gpu_seconds(next(reversed(lm.runner._graphs.values())).replay)
            first = first or alone
            say(
                f"  {size:3d} tokens: {alone * 1e3:6.3f} ms, {alone / first:.2f} of one, {alone / limit:.2f} of the "
                f"limit; with the host {wall * 1e3:6.3f} ms"
            )
        lm.release(row)
        lm.clear()
    peak = torch.cuda.max_memory_allocated() / 2**30
    say(f"graphs took {lm.runner.capture_seconds:.1f} s, peak memory {peak:.1f} GiB")


def draft(short: bool) -> None:
    lm: Any = wrapped(build("1b", short)).lm
    assert isinstance(lm.runner, GraphRunner)
    row = lm.acquire([])
    lm.feed([[(7 * i) % 1000 for i in range(1024)]], [row])

    def chain(steps: int) -> float:
        shape, pick = [DraftShape(steps)], [Pick(0, 0.0)]
        return wall_seconds(lambda: (lm.drafts.draft([row], [5], shape, pick), lm.keep([[]], [row])))

    few, many = chain(2), chain(10)
    say(f"1b draft: {(many - few) / 8 * 1e3:.3f} ms per token in a chain, {few * 1e3:.3f} ms for the first two")


@dataclass(eq=False)
class Oracle(Drafter):
    """A drafter that knows the answer; each draft token is correct with probability `acceptance`."""

    answers: dict[int, list[int]] = field(default_factory=dict)  # length of the prompt -> prompt and answer
    acceptance: float = 0.8
    depth: int = 5
    seed: int = 0
    _random: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)

    @property
    def limit(self) -> Budget:  # type: ignore[override]
        return Budget(self.depth, self.depth, 1)

    def propose(self, seq: Sequence, budget: Budget) -> Tree:
        text = self.answers[seq.prompt_length]
        ahead = text[len(seq.tokens) : len(seq.tokens) + budget.depth]
        return Tree.chain([seq.tokens[-1], *(t if self._random.random() < self.acceptance else t + 1 for t in ahead)])


def prompts() -> Iterator[list[int]]:
    words = [284, 1250, 314, 260, 2420, 282, 253, 1528, 11, 284, 638, 359, 325, 2173, 28]
    for i, length in enumerate(PROMPTS):
        yield [words[(j * (i + 3) + j // 7) % len(words)] for j in range(length)]


def batch(size: int) -> Texts:
    """Make `size` prompts of different lengths."""
    return [p[: len(p) - i // 8] for i, p in zip(range(size), list(prompts()) * 8, strict=False)]


def rate(model: outpace.Model, given: Texts, **settings: Any) -> Rate:
    torch.cuda.synchronize()
    start = time.perf_counter()
    done = model.generate(given, ignore_eos=True, **settings)
    torch.cuda.synchronize()
    spent = time.perf_counter() - start - done[0].stats.seconds.get("prefill", 0.0)
    tokens = sum(len(d.tokens) for d in done)
    return tokens / spent, tokens / sum(d.stats.passes for d in done), [d.tokens for d in done]


def settled(model: outpace.Model, given: Texts, known: Texts, draft: Oracle, **settings: Any) -> Rate:
    """Return the best of several runs, as `rate` gives it. A pass of another size may resolve a tie differently, after
    which the draft would no longer know the answer; so it gets the answer of the previous run."""
    runs = []
    for _ in range(RUNS):
        answers = {len(p): p + t for p, t in zip(given, known, strict=True)}
        runs.append(rate(model, given, method=replace(draft, answers=answers), **settings))
        known = runs[-1][2]
    return max(runs)


def speculation(small: str, count: int) -> None:
    model = wrapped(grown(small))
    given = list(prompts())[:1]
    rate(model, given, method="plain", max_tokens=16)
    plain, _, tokens = rate(model, given, method="plain", max_tokens=count)
    say(f"plain: {plain:.1f} tokens/s")
    start = time.perf_counter()
    with torch.no_grad():
        ids = torch.tensor(given, device="cuda")
        runtime: Any = model.lm
        theirs = runtime.model.generate(ids, max_new_tokens=32, min_new_tokens=32, do_sample=False)
    say(f"Transformers generate: {32 / (time.perf_counter() - start):.1f} tokens/s ({theirs.shape[1]} tokens in all)")
    for acceptance, depth in ((0.0, 4), (0.6, 4), (0.8, 4), (0.9, 5), (0.9, 7), (1.0, 7)):
        fast, per_pass, again = settled(model, given, tokens, Oracle({}, acceptance, depth), max_tokens=count)
        lm = model.lm
        row = lm.acquire(given[0])
        lm.feed([given[0]], [row])
        spent = wall_seconds(partial(choose, lm, row, depth + 1))
        lm.release(row)
        say(
            f"acceptance {acceptance:.1f}, depth {depth}: {per_pass:.2f} tokens per pass, {fast:.1f} tokens/s, "
            f"{fast / plain:.2f} of plain; passes alone predict {per_pass / spent:.1f} tokens/s; "
            f"{parting(model, given, tokens[0], again[0])}"
        )


def parting(model: outpace.Model, given: Texts, due: list[int], found: list[int]) -> str:
    """Describe where two texts diverge, and how far the likelier of the two tokens leads in plain decoding."""
    at = next((i for i, (a, b) in enumerate(zip(due, found, strict=True)) if a != b), None)
    if at is None:
        return "same text"
    plain = model.generate(given, method="plain", max_tokens=at + 1, ignore_eos=True, logprobs=5)[0]
    top = plain.logprobs[at].top
    gap = f"{top[due[at]] - top[found[at]]:.4f}" if found[at] in top else f"over {top[due[at]] - min(top.values()):.4f}"
    return f"diverges at token {at}, where the two tokens are {gap} apart"


def batches(small: str, count: int, rates: list[float]) -> None:
    model = wrapped(grown(small))
    model.max_batch = 64
    for size in (1, 4, 16, 64):
        given = batch(size)
        plain, _, tokens = max(rate(model, given, method="plain", max_tokens=count) for _ in range(RUNS))
        for acceptance in rates:
            line = f"batch {size:2d}, acceptance {acceptance:.1f}: plain {plain:7.1f} tokens/s"
            for policy in ("fixed", "auto"):
                draft = Oracle({}, acceptance, 4)
                fast, per_pass, _ = settled(model, given, tokens, draft, policy=policy, max_tokens=count)
                line += f"; {policy} {fast:7.1f} ({fast / plain:.2f}, {per_pass:.2f} tokens per pass)"
            say(line)


SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {},
    "temperature 0.8": {"temperature": 0.8},
    "top_p 0.9": {"temperature": 0.8, "top_p": 0.9},
    "top_k 50, top_p 0.9": {"temperature": 0.8, "top_k": 50, "top_p": 0.9},
    "min_p 0.05": {"temperature": 0.8, "min_p": 0.05},
    "typical_p 0.9": {"temperature": 0.8, "typical_p": 0.9},  # sampled on the host
}


def sampling(small: str, count: int) -> None:
    """Measure the cost of filtering tokens before sampling, in plain decoding."""
    model = wrapped(grown(small))
    model.max_batch = 64
    for size in (1, 16, 64):
        given = batch(size)
        for name, settings in SAMPLING.items():
            fast = max(rate(model, given, method="plain", max_tokens=count, **settings)[0] for _ in range(3))
            say(f"batch {size:2d}, {name}: {fast:7.1f} tokens/s")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["passes", "draft", "speculation", "batches", "sampling"])
    parser.add_argument("--shape", choices=SHAPES, default="8b")
    parser.add_argument("--context", type=int, nargs="+", default=[1024])
    parser.add_argument("--small", default="smollm2-135m-instruct", help="demo model or folder of a Llama to grow")
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--acceptance", type=float, nargs="+", default=[0.7], help="acceptance rate, for batches")
    parser.add_argument("--int8", action="store_true", help="int8 weights, for passes and draft")
    asked = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs a GPU")
    logging.basicConfig(level=logging.INFO)
    if asked.part == "passes":
        passes(asked.shape, asked.context, asked.int8)
    elif asked.part == "draft":
        draft(asked.int8)
    elif asked.part == "speculation":
        speculation(asked.small, asked.tokens)
    elif asked.part == "sampling":
        sampling(asked.small, asked.tokens)
    else:
        batches(asked.small, asked.tokens, asked.acceptance)
