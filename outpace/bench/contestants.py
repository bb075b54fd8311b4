"""Contestants: Outpace's methods and Transformers' own generation loops, on the same model object."""

from __future__ import annotations

import gc
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from outpace import registry
from outpace.api.model import Model
from outpace.api.request import Request
from outpace.api.stream import Completion
from outpace.bench.run import AnswerSettings, Group, Run
from outpace.bench.specs import PLAIN, TRANSFORMERS, MethodSpec
from outpace.core.drafter import Drafter
from outpace.core.policy import Policy
from outpace.core.stats import Stats
from outpace.core.verifier import Verifier
from outpace.errors import RequestFailed, UsageError
from outpace.tracing.trace import TraceWriter

LOOKUP_TOKENS = 10


def sweep(
    model: Model, methods: Seq[MethodSpec], draft: Model | None, policies: Seq[MethodSpec], verifier: MethodSpec | None
) -> list[OutpaceContestant]:
    """Return every method under every policy, or under its own default policy; plain decoding appears once."""
    own = RunRules(None, verifier)
    every = [RunRules(policy, verifier, named=True) for policy in policies] or [own]
    return [
        OutpaceContestant(model, spec, draft, rules)
        for spec in methods
        for rules in ([own] if spec.name == PLAIN else every)
    ]


@dataclass(frozen=True)
class BatchAnswers:
    """A contestant's answers to one batch."""

    tokens: list[list[int]]
    stats: Stats | None
    compared: bool


class TimedContestant(ABC):
    """What all contestants share: clearing the caches, timing, and measuring peak memory."""

    name: str
    models: list[Model]  # their caches are cleared before each run

    @abstractmethod
    def answer(self, prompts: list[list[int]], settings: AnswerSettings) -> BatchAnswers:
        """Answer these prompts as one batch."""

    def run(self, prompts: list[list[int]], settings: AnswerSettings) -> Run:
        for model in self.models:
            model.clear_cache()  # no contestant profits from a prompt that is still cached
        gc.collect()
        gc.disable()
        try:
            watched = _forget_peak()
            _wait()
            start = time.perf_counter()
            found = self.answer(prompts, settings)
            _wait()
            seconds = time.perf_counter() - start
        finally:
            gc.enable()
        return Run(self.name, found.tokens, seconds, found.stats, _peak() if watched else None, found.compared)


class OutpaceContestant(TimedContestant):
    """Runs a method of Outpace."""

    drafter: Drafter
    policy: Policy
    verifier: Verifier

    def __init__(self, model: Model, spec: MethodSpec, draft: Model | None = None, rules: RunRules | None = None):
        self.model, self.spec, self.rules = model, spec, rules or RunRules()
        self.options = dict(spec.options)
        self.models = [model]
        if draft is not None and "draft" in registry.options(registry.find(spec.name)):
            self.options["draft"] = model.draft_of(draft)
            self.models.append(draft)
        self.fresh()
        lossless = spec.name == PLAIN or (self.drafter.lossless and self.verifier.lossless)
        policy = f", {self.rules.policy.text}" if self.rules.policy is not None and self.rules.named else ""
        self.name = spec.text + policy + ("" if lossless else " (lossy)")

    def fresh(self) -> None:
        self.drafter = registry.method(self.spec.name, **self.options)
        policy = self.rules.policy or MethodSpec.parse(self.drafter.policy)
        self.policy = registry.policy(policy.name, **policy.options)
        verifier = self.rules.verifier or MethodSpec.parse(self.drafter.verifier)
        self.verifier = registry.verifier(verifier.name, **verifier.options)

    def answer(self, prompts: list[list[int]], settings: AnswerSettings) -> BatchAnswers:
        done = self._generate(prompts, settings)
        stats = done[0].stats
        for other in done[1:]:
            # The requests of a batch share its passes, so the longest of their times is the time of the batch.
            longest = {k: max(s, other.stats.seconds.get(k, 0.0)) for k, s in stats.seconds.items()}
            stats = replace(stats.merge(other.stats), seconds=longest)
        compared = settings.greedy or self.verifier.shares_noise
        return BatchAnswers([completion.tokens for completion in done], stats, compared)

    def trace(self, groups: Seq[Group], writer: TraceWriter) -> None:
        """Answer once more, untimed, and trace every pass."""
        self.fresh()
        for group in groups:
            self._generate(group.prompts, group.settings, writer)

    def _generate(
        self, prompts: list[list[int]], settings: AnswerSettings, trace: TraceWriter | None = None
    ) -> list[Completion]:
        requests = [
            Request(
                prompt, self.drafter, policy=self.policy, verifier=self.verifier,
                max_tokens=settings.max_tokens, sampling=settings.sampling,
            )
            for prompt in prompts
        ]  # fmt: skip
        done: list[Completion] = self.model.generate(requests, trace=trace)
        for completion in done:
            if completion.error is not None:
                raise RequestFailed(f"{self.name}: {completion.error}")
        return done


@dataclass(frozen=True)
class RunRules:
    """The policy and verifier of all Outpace methods, plain decoding too: a rule is compared with itself."""

    policy: MethodSpec | None = None  # None: the method's default
    verifier: MethodSpec | None = None  # None: the method's default
    named: bool = False  # whether a contestant's name includes the policy


class TransformersContestant(TimedContestant):
    """Runs Transformers' `generate`, with options that select how it speculates, if it does."""

    def __init__(self, name: str, model: Model, one_by_one: bool = False, **options: Any):
        self.name = name + (", one by one" if one_by_one else "")
        self.model, self.one_by_one, self.options = model, one_by_one, options
        self.models = [model]

    def fresh(self) -> None:
        """Do nothing: `generate` keeps nothing between prompts."""

    def answer(self, prompts: list[list[int]], settings: AnswerSettings) -> BatchAnswers:
        torch.manual_seed(settings.sampling.seed)
        batches = [[prompt] for prompt in prompts] if self.one_by_one else [prompts]
        tokens = [answer for batch in batches for answer in self._generate(batch, settings)]
        return BatchAnswers(tokens, None, compared=settings.greedy)

    def _generate(self, prompts: list[list[int]], settings: AnswerSettings) -> list[list[int]]:
        model, stops = transformers_model(self.model), self.model.stop_token_ids
        width = max(map(len, prompts))
        padded = [[0] * (width - len(prompt)) + prompt for prompt in prompts]
        mask = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]
        out = model.generate(
            torch.tensor(padded, device=model.device),
            attention_mask=torch.tensor(mask, device=model.device),
            max_new_tokens=settings.max_tokens,
            pad_token_id=0,
            eos_token_id=sorted(stops) or None,
            repetition_penalty=1.0,  # a checkpoint may have another default
            **_sampling(settings),
            **self.options,
        )
        return [_ended(row, stops) for row in out[:, width:].tolist()]


def _sampling(settings: AnswerSettings) -> dict[str, Any]:
    if settings.greedy:
        return {"do_sample": False}
    wanted = settings.sampling
    return {"do_sample": True, "temperature": wanted.temperature, "top_p": wanted.top_p, "top_k": wanted.top_k}


def _ended(tokens: list[int], stops: frozenset[int]) -> list[int]:
    """Cut off after the stop token; what follows it in a batch is padding."""
    end = next((i for i, token in enumerate(tokens) if token in stops), len(tokens))
    return tokens[: end + 1]


def transformers_model(model: Model) -> Any:
    """Return the Transformers model of this model."""
    found = getattr(model.lm, "model", None)
    if found is None:
        raise UsageError(f"{model.name or 'this model'} is not a Transformers model: add --no-transformers")
    return found


def transformers_contestants(model: Model, draft: Model | None, batched: bool) -> list[TransformersContestant]:
    """Return Transformers plain, with prompt lookup and, given a draft, assisted; the last two cannot run batches."""
    transformers_model(model)
    found = [
        TransformersContestant(f"{TRANSFORMERS} generate", model),
        TransformersContestant(f"{TRANSFORMERS} prompt lookup", model, batched, prompt_lookup_num_tokens=LOOKUP_TOKENS),
    ]
    if draft is not None:
        found.append(
            TransformersContestant(
                f"{TRANSFORMERS} assisted", model, batched, assistant_model=transformers_model(draft)
            )
        )
    return found


def _wait() -> None:
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()


def _on_cuda() -> bool:
    return torch.cuda.is_available() and torch.cuda.memory_allocated() > 0


def _forget_peak() -> bool:
    """Reset the peak memory counter; False if that is not possible."""
    if _on_cuda():
        torch.cuda.reset_peak_memory_stats()
        return True
    try:
        Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
    except OSError:
        return False
    return True


def _peak() -> int | None:
    if _on_cuda():
        return torch.cuda.max_memory_allocated()
    lines = Path("/proc/self/status").read_text().splitlines()
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM")), None)
