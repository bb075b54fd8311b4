"""GRPO with speculative rollouts: SmolLM2 learns to count from a rule, and a frozen MTP head drafts for it.

    python examples/grpo.py --head FOLDER --steps 40 --plot build/grpo.png      # a head from `outpace train mtp`
    python examples/grpo.py --tiny                                             # a random model, in seconds

Every step samples a group of answers to each of a few questions, scores them by the rule, and moves the policy towards
the better answers of each group. It prints the mean reward, the entropy of the policy, the share of draft tokens
accepted at each position, and how far the log-probabilities of the rollouts are from those of the trained model. That
difference would show at once if the rollouts came from other weights.
"""

from __future__ import annotations

import argparse
import random
import re
from collections.abc import Callable, Sequence as Seq
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

import outpace
from outpace.api.rollouts import Rollout, merged

Reward = Callable[[Rollout], float]
EXAMPLE = [{"role": "user", "content": "Count from 3 to 7."}, {"role": "assistant", "content": "3, 4, 5, 6, 7"}]
IGNORED = 0  # padding, which is masked, so any token will do


@dataclass(frozen=True)
class Question:
    """A prompt, and the rule that scores its answers."""

    prompt: Any
    reward: Reward


@dataclass(frozen=True)
class Row:
    """The figures that are printed for one step."""

    step: int
    reward: float
    entropy: float  # nats per token
    acceptance: list[float]  # by draft position
    tokens_per_pass: float
    drift: float  # largest difference of log-probabilities between the rollouts and the model, before the update


@dataclass(frozen=True)
class Batch:
    """A batch of samples, padded on the right."""

    tokens: Tensor  # [samples, longest]: prompt and answer
    answer: Tensor  # [samples, longest - 1]: whether each token from the second on was sampled
    logprobs: Tensor  # [samples, longest - 1]: log-probabilities at sampling
    advantages: Tensor  # [samples]


def counts(rng: random.Random, count: int) -> list[Question]:
    """Ask to count from one number to another; reward the share of correct numbers before the first wrong one."""

    def question(first: int, last: int) -> Question:
        wanted = [str(number) for number in range(first, last + 1)]

        def reward(answer: Rollout) -> float:
            said = re.findall(r"\d+", answer.text)
            pairs = enumerate(zip(said, wanted, strict=False))
            right = next((i for i, (a, b) in pairs if a != b), min(len(said), len(wanted)))
            return right / max(len(said), len(wanted))

        asked = {"role": "user", "content": f"Count from {first} to {last}."}
        return Question([*EXAMPLE, asked], reward)

    starts = [rng.randint(1, 40) for _ in range(count)]
    return [question(start, start + rng.randint(4, 8)) for start in starts]


def evens(rng: random.Random, count: int) -> list[Question]:
    """Reward the share of even tokens, for a model without a tokenizer."""

    def reward(answer: Rollout) -> float:
        return sum(token % 2 == 0 for token in answer.tokens) / len(answer.tokens)

    return [Question([rng.randrange(64) for _ in range(4)], reward) for _ in range(count)]


def advantages(rewards: Seq[float], group: int) -> Tensor:  # [samples]
    """The advantage of each answer over the mean of its group, in standard deviations."""
    scored = torch.tensor(rewards).view(-1, group)
    return ((scored - scored.mean(1, keepdim=True)) / (scored.std(1, keepdim=True) + 1e-4)).flatten()


def collate(rollouts: Seq[Rollout], gains: Tensor, device: torch.device) -> Batch:
    longest = max(len(r.prompt_tokens) + len(r.tokens) for r in rollouts)
    tokens = torch.full((len(rollouts), longest), IGNORED)
    answer = torch.zeros(len(rollouts), longest - 1, dtype=torch.bool)
    logprobs = torch.zeros(len(rollouts), longest - 1)
    for i, r in enumerate(rollouts):
        start, end = len(r.prompt_tokens), len(r.prompt_tokens) + len(r.tokens)
        tokens[i, :end] = torch.tensor(r.prompt_tokens + r.tokens)
        answer[i, start - 1 : end - 1] = True
        logprobs[i, start - 1 : end - 1] = torch.tensor(r.logprobs)
    return Batch(tokens.to(device), answer.to(device), logprobs.to(device), gains.to(device))


def judged(model: Any, tokens: Tensor, temperature: float) -> Tensor:  # [samples, longest - 1]
    """The model's log-probability of each token, at the temperature of the rollouts."""
    logits = model(input_ids=tokens[:, :-1], use_cache=False).logits.float() / temperature
    return logits.log_softmax(-1).gather(-1, tokens[:, 1:, None]).squeeze(-1)


def loss_of(logprobs: Tensor, batch: Batch, clip: float) -> Tensor:
    """The clipped objective, summed over the sampled tokens."""
    ratio = (logprobs - batch.logprobs).exp()
    gains = batch.advantages[:, None]
    gained = torch.minimum(ratio * gains, ratio.clamp(1 - clip, 1 + clip) * gains)
    return -(gained * batch.answer).sum()


def learn(model: Any, optimizer: torch.optim.Optimizer, batches: Seq[Batch], given: argparse.Namespace) -> float:
    """Train on the samples for a few epochs; return the drift from their log-probabilities in the first one."""
    drift, count = 0.0, sum(int(batch.answer.sum()) for batch in batches)
    for epoch in range(given.epochs):
        for batch in batches:
            logprobs = judged(model, batch.tokens, given.temperature)
            if epoch == 0:
                drift = max(drift, float(((logprobs - batch.logprobs).detach() * batch.answer).abs().max()))
            (loss_of(logprobs, batch, given.clip) / count).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return drift


def train(model: Any, lm: outpace.Model, task: Callable[..., list[Question]], given: argparse.Namespace) -> list[Row]:
    console, rows = Console(), list[Row]()
    rng = random.Random(given.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=given.lr, weight_decay=0.0)
    speculation = {"method": given.method, "verifier": given.verifier, **({"head": given.head} if given.head else {})}
    for step in range(given.steps):
        questions = task(rng, given.prompts)
        rollouts = outpace.rollout(
            lm, [q.prompt for q in questions], given.group, temperature=given.temperature,
            max_tokens=given.max_tokens, seed=given.seed + step, **speculation,
        )  # fmt: skip
        rewards = [questions[r.prompt].reward(r) for r in rollouts]
        gains = advantages(rewards, given.group)
        parts = [slice(i, i + given.micro) for i in range(0, len(rollouts), given.micro)]
        drift = learn(model, optimizer, [collate(rollouts[p], gains[p], model.device) for p in parts], given)
        stats, entropies = merged(rollouts), [e for r in rollouts for e in r.entropies]
        rows.append(
            Row(
                step, sum(rewards) / len(rewards), sum(entropies) / len(entropies), stats.acceptance_by_depth,
                stats.tokens_per_pass, drift,
            )
        )  # fmt: skip
        console.print(line(rows[-1]), highlight=False, soft_wrap=True)
    return rows


def line(row: Row) -> str:
    accepted = " ".join(f"{share:.2f}" for share in row.acceptance)
    return (
        f"step {row.step:3}  reward {row.reward:.3f}  entropy {row.entropy:.2f}  accepted {accepted}  "
        f"{row.tokens_per_pass:.2f} tokens per pass  drift {row.drift:.1e}"
    )


def plot(rows: Seq[Row], path: Path) -> None:
    """Plot the acceptance of the first draft token against the entropy of the policy, one point per step."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    drafted = [row for row in rows if row.acceptance]
    figure, axes = pyplot.subplots(figsize=(6, 4), layout="constrained")
    x, y = [row.entropy for row in drafted], [row.acceptance[0] for row in drafted]
    points = axes.scatter(x, y, c=[row.step for row in drafted], cmap="viridis")
    figure.colorbar(points, label="step")
    axes.set(xlabel="entropy of the policy (nats per token)", ylabel="acceptance of the first draft token", ylim=(0, 1))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def tiny() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    shape = dict(hidden_size=32, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2, head_dim=8)
    config = LlamaConfig(
        vocab_size=64, num_hidden_layers=2, initializer_range=0.3, tie_word_embeddings=False, bos_token_id=None,
        eos_token_id=None, **shape,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def arguments(words: Seq[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="use a tiny random model and a rule on its tokens")
    parser.add_argument("--model", default="smollm2-135m-instruct", help="demo model, folder or Hugging Face id")
    parser.add_argument("--head", help='folder of the head, or "random"; default: the one that ships with Outpace')
    parser.add_argument("--method", default="mtp")
    parser.add_argument("--verifier", default="residual")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--prompts", type=int, default=4, help="questions per step")
    parser.add_argument("--group", type=int, default=8, help="answers per question")
    parser.add_argument("--micro", type=int, default=8, help="answers per training pass")
    parser.add_argument("--epochs", type=int, default=1, help="optimiser steps on the same answers")
    parser.add_argument("--max-tokens", type=int, default=40)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--lr", type=float)
    parser.add_argument("--clip", type=float, default=0.2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plot", type=Path, help="write acceptance against entropy to this file")
    given = parser.parse_args(words)
    given.steps = given.steps or (4 if given.tiny else 40)
    given.lr = given.lr or (1e-2 if given.tiny else 5e-6)
    return given


def main(words: Seq[str] | None = None) -> list[dict[str, Any]]:
    given = arguments(words)
    if given.tiny:
        model = tiny()
        lm, task, given.head = outpace.wrap(model, compile=False), evens, given.head or "random"
    else:
        # compile=False: on a CPU, compiled passes read half-size copies of the weights, which training does not update.
        # float32: in bfloat16, the default on a GPU, most updates would be rounded away.
        lm, task = outpace.load(given.model, compile=False, dtype="float32"), counts
        model = lm.lm.model  # type: ignore[attr-defined]
    rows = train(model, lm, task, given)
    if given.plot is not None:
        plot(rows, given.plot)
    return [asdict(row) for row in rows]


if __name__ == "__main__":
    main()
