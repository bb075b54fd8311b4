"""Comparison of two versions of the package: the same work in turn, each version in its own warm process.

    git worktree add build/old COMMIT
    python benchmarks/versions.py --other build/old                  # SmolLM2 in float32, on a CPU
    python benchmarks/versions.py --other build/old --shape 8b       # a random Llama with that shape, on a GPU

The random model continues every token with one other token, far likelier than all the rest, so that no near ties make
texts differ. The drafts of `oracle` know that token, cost nothing, and are correct with a given probability.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

SHAPES = {  # hidden size, feed-forward size, layers, heads, key-value heads
    "tiny": (128, 256, 2, 4, 2),
    "8b": (4096, 14336, 32, 32, 8),
}
VOCAB = 128256
FLAT = 20.0  # the temperature at which the random model's distribution is flat
STORY = "Once upon a time there was a ship that sailed to the edge of the world."
EDIT = f"Repeat this text word by word: {STORY} {STORY} It found nothing there."


def successors() -> list[int]:
    """The token that the random model predicts after each token."""
    order = list(range(VOCAB))
    random.Random(0).shuffle(order)
    return order


def random_model(shape: str, device: str) -> Any:
    """Build a Llama whose last hidden state predicts the successor of the last token, whatever the layers add."""
    from transformers import LlamaConfig, LlamaForCausalLM

    hidden, feedforward, layers, heads, kv_heads = SHAPES[shape]
    config = LlamaConfig(
        hidden_size=hidden, intermediate_size=feedforward, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        vocab_size=VOCAB, max_position_embeddings=40_000, tie_word_embeddings=False,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
    )  # fmt: skip
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(torch.bfloat16 if device == "cuda" else torch.float32)
    model = model.to_empty(device=device)
    generator = torch.Generator(device).manual_seed(0)
    for name, parameter in model.named_parameters():
        parameter.data.normal_(0, 1.0 if "embed" in name else 0.005, generator=generator)
        if "norm" in name:
            parameter.data.fill_(1.0)
    after = torch.tensor(successors(), device=device)
    model.lm_head.weight.data[after] = model.get_input_embeddings().weight.data / config.hidden_size**0.5
    model.model.rotary_emb = type(model.model.rotary_emb)(config).to(device)
    return model.eval()


def found(*names: str) -> Any:
    """Import the first of these modules that this version has."""
    for name in names:
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError:
            continue
    raise ModuleNotFoundError(names[0])


def oracle(right: float, depth: int) -> Any:
    """Make a drafter for the random model, with the names of either version."""
    tree = found("outpace.core.tree", "outpace.tree")
    base, after = found("outpace.core.drafter", "outpace.drafter").Drafter, successors()
    draws = random.Random(1)

    class Oracle(base):  # type: ignore[misc, valid-type]
        shape = limit = tree.Budget(depth, depth, 1)

        def propose(self, seq: Any, budget: Any) -> Any:
            tokens = [seq.tokens[-1]]
            for _ in range(min(depth, budget.depth)):
                tokens.append(after[tokens[-1]])
            return tree.Tree.chain([tokens[0], *(t if draws.random() < right else t ^ 1 for t in tokens[1:])])

    return Oracle()


def works_on_random(model: Any) -> Iterator[tuple[str, Callable[[], list[Any]]]]:
    """Yield the name and the function of each workload."""
    draws = random.Random(2)
    prompts = [[draws.randrange(VOCAB) for _ in range(64 + i)] for i in range(64)]
    long = [[draws.randrange(VOCAB) for _ in range(4096)] for _ in range(8)]
    turn = iter(range(10**9))

    def ask(count: int, tokens: int, **settings: Any) -> list[Any]:
        return model.generate(prompts[:count], max_tokens=tokens, ignore_eos=True, **settings)

    plain = {"method": "plain"}
    yield "plain", partial(ask, 1, 128, **plain)
    yield "plain, temperature 0.8", partial(ask, 1, 128, **plain, temperature=0.8)
    yield (
        "plain, temperature 0.8, top_k 50, top_p 0.9",
        partial(ask, 1, 128, **plain, temperature=0.8, top_k=50, top_p=0.9),
    )
    yield "plain, flat, top_p 0.9", partial(ask, 1, 32, **plain, temperature=FLAT, top_p=0.9)
    yield "plain, 64 requests", partial(ask, 64, 64, **plain)
    yield "auto", partial(ask, 1, 128, method="auto")
    for right, depth, count, policy in (
        (0.9, 7, 1, "fixed"),
        (0.6, 4, 1, "fixed"),
        (0.0, 4, 1, "auto"),
        (0.7, 4, 16, "auto"),
    ):
        name = f"oracle, {right} right, {depth} deep, {policy}, {count} request{'s' * (count > 1)}"
        yield name, partial(ask, count, 128, method=oracle(right, depth), policy=policy)
    yield (
        "8 prompts of 4,096, one token",
        lambda: model.generate([[next(turn) % VOCAB, *prompt] for prompt in long], max_tokens=1, **plain),
    )


def works_on_text(model: Any) -> Iterator[tuple[str, Callable[[], list[Any]]]]:
    def ask(prompts: list[str], **settings: Any) -> list[Any]:
        return model.generate(prompts, max_tokens=64, ignore_eos=True, **settings)

    for name, settings in {
        "": {},
        ", temperature 0.8, top_p 0.95": {"temperature": 0.8, "top_p": 0.95, "seed": 1},
    }.items():
        for method in ("plain", "suffix", "auto"):
            yield f"{method}{name}", partial(ask, [EDIT], method=method, **settings)
        yield f"plain, 8 requests{name}", partial(ask, [f"{i}. {STORY}" for i in range(8)], method="plain", **settings)


def work(shape: str | None) -> None:
    """Run workloads by name, one per line of standard input, in the process of one version."""
    import outpace

    model: Any
    if shape is None:
        model = outpace.load("smollm2-135m-instruct", device="cpu", dtype="float32")
        works = dict(works_on_text(model))
    else:
        model = outpace.wrap(random_model(shape, "cuda" if torch.cuda.is_available() else "cpu"))
        model.max_rows = model.max_batch = 64  # the old and the new name
        works = dict(works_on_random(model))
    send(list(works))
    for line in sys.stdin:
        start = time.perf_counter()
        done = works[json.loads(line)]()
        seconds = time.perf_counter() - start
        send([seconds, [each.tokens for each in done]])


def send(what: Any) -> None:
    sys.stdout.write(f"\n@{json.dumps(what)}\n")
    sys.stdout.flush()


class Version:
    """A worker process that runs one version."""

    def __init__(self, folder: Path, shape: str | None):
        command = [sys.executable, str(Path(__file__).resolve()), "--worker", *(["--shape", shape] if shape else [])]
        environment = os.environ | {"PYTHONPATH": str(folder)}
        self._process = subprocess.Popen(
            command, cwd=folder, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def ready(self) -> list[str]:
        """Wait until the version has loaded its model; return the names of its workloads."""
        names: list[str] = self._answer()
        return names

    def run(self, name: str) -> tuple[float, list[list[int]]]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(name) + "\n")
        self._process.stdin.flush()
        seconds, tokens = self._answer()
        return seconds, tokens

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("@"):
                return json.loads(line[1:])
        raise SystemExit(f"a worker process ended with exit code {self._process.wait()}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--other", type=Path, help="checkout of the other version")
    parser.add_argument("--shape", choices=SHAPES, help="use a random model with this shape instead of SmolLM2")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.worker:
        return work(asked.shape)
    if asked.other is None:
        parser.error("--other is missing: pass a checkout of the version to compare with")
    there, here = (
        Version(folder, asked.shape) for folder in (asked.other.resolve(), Path(__file__).resolve().parent.parent)
    )
    sys.stdout.write("| | tokens/s there | tokens/s here | here / there | texts |\n|---|---|---|---|---|\n")
    there.ready()  # both load at the same time
    for name in here.ready():
        rates: dict[Version, list[float]] = {there: [], here: []}
        for turn in range(asked.rounds + 2):  # the first two warm up
            texts = []
            for version in (there, here) if turn % 2 else (here, there):
                seconds, tokens = version.run(name)
                texts.append(tokens)
                rates[version] += [sum(map(len, tokens)) / seconds] if turn > 1 else []
        middle = [statistics.median(rates[version]) for version in (there, here)]
        ratio = statistics.median(b / a for a, b in zip(rates[there], rates[here], strict=True))
        same = "same" if texts[0] == texts[1] else "differ"
        sys.stdout.write(f"| {name} | {middle[0]:.1f} | {middle[1]:.1f} | {ratio:.2f} | {same} |\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
