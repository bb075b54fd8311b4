"""Parity checks: the same tokens as plain decoding and Transformers, with the same seed, and in any batch."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Any

import torch

from outpace.api.stream import Completion
from outpace.sampling.settings import Sampling
from outpace.verify.callers import WAYS
from outpace.verify.plan import Subject, VerifyPlan
from outpace.verify.records import Check, Divergence, verdict_of

PLAIN = Subject("plain", {"method": "plain"})
GREEDY = Sampling()


class Parity:
    """The parity checks of one plan; each answer is computed once."""

    def __init__(self, plan: VerifyPlan):
        self.plan = plan
        self._answers: dict[tuple[str, float, int], list[Completion]] = {}

    def greedy(self, subject: Subject) -> Check:
        """Check that greedy answers equal those of plain decoding."""
        return self._equal(subject, "greedy = plain", GREEDY)

    def seeded(self, subject: Subject) -> Check:
        """Check that sampled answers equal those of plain decoding with the same seed."""
        return self._equal(subject, "same seed = plain", self.plan.sampling)

    def batched(self, subject: Subject) -> Check:
        """Check that answers in ragged batches equal those of plain decoding at batch size 1."""
        sizes = self.plan.batches
        parts = [
            self._alone(subject, sampling, self._run(subject, sampling, size))
            for size in sizes
            for sampling in self._samplings(subject)
        ]
        found = self._all(subject, "batch = alone", parts, f"in batches of {', '.join(map(str, sizes))}")
        return replace(found, figures=found.figures | {"batches": list(sizes)})

    def callers(self, subject: Subject) -> Check:
        """Check that answers to concurrent callers equal those of plain decoding at batch size 1."""
        parts = [
            self._alone(subject, sampling, answers)
            for way in WAYS.values()
            for sampling in self._samplings(subject)
            for answers in self.plan.together(subject, sampling, way)
        ]
        return self._all(subject, "callers = alone", parts, f"in {' and '.join(WAYS)}")

    def judged(self, subject: Subject) -> Check:
        """Check that every token of every answer is the model's own choice, in higher precision."""
        plan, divergences, tokens = self.plan, list[Divergence](), 0
        for sampling in self._samplings(subject):
            for index, completion in enumerate(self._run(subject, sampling, 1)):
                divergences += plan.judge.answer(plan.answer(completion, index, sampling), index)
                tokens += len(completion.tokens)
        bugs = sum(not d.explained for d in divergences)
        summary = f"{tokens} tokens judged in higher precision: {len(divergences) - bugs} ties, {bugs} wrong"
        figures = {"tokens": tokens, "ties": len(divergences) - bugs, "wrong": bugs}
        return Check(subject.name, "every token", verdict_of(divergences), summary, self._named(divergences), figures)

    def transformers(self, subject: Subject) -> Check:
        """Check that greedy answers equal those of Transformers' own `generate`."""
        plan, name = self.plan, "greedy = Transformers"
        model: Any = getattr(plan.model.lm, "model", None)
        if model is None:
            return Check(subject.name, name, "skip", "not a Transformers model")
        divergences = []
        ours = self._run(subject, GREEDY, 1)
        for index, completion in enumerate(ours):
            theirs = _generate(model, plan.prompts[index], plan.max_tokens, plan.model.stop_token_ids)
            expected = plan.answer(replace(completion, tokens=theirs), index, GREEDY)
            divergences += [d for d in [plan.judge.between(expected, completion.tokens, index)] if d is not None]
        return self._check(subject, name, divergences, len(ours))

    def _samplings(self, subject: Subject) -> list[Sampling]:
        return [GREEDY, self.plan.sampling] if keeps_seed(self.plan, subject) else [GREEDY]

    def _equal(self, subject: Subject, name: str, sampling: Sampling) -> Check:
        given = self._run(subject, sampling, 1)
        return self._check(subject, name, self._alone(subject, sampling, given), len(given))

    def _alone(self, subject: Subject, sampling: Sampling, given: list[Completion]) -> list[Divergence]:
        """Find where answers differ from those of plain decoding at batch size 1."""
        plan, divergences = self.plan, list[Divergence]()
        for index, (wanted, got) in enumerate(zip(self._run(_plain(subject), sampling, 1), given, strict=True)):
            expected = plan.answer(wanted, index, sampling)
            divergences += [d for d in [plan.judge.between(expected, got.tokens, index)] if d is not None]
        return divergences

    def _all(self, subject: Subject, name: str, parts: list[list[Divergence]], how: str) -> Check:
        found = self._check(subject, name, [d for part in parts for d in part], len(parts) * len(self.plan.prompts))
        return replace(found, summary=f"{found.summary} {how}")

    def _check(self, subject: Subject, name: str, divergences: list[Divergence], answers: int) -> Check:
        summary, figures = _said(divergences, answers), {"answers": answers, "divergences": len(divergences)}
        return Check(subject.name, name, verdict_of(divergences), summary, self._named(divergences), figures)

    def _run(self, subject: Subject, sampling: Sampling, batch: int) -> list[Completion]:
        key = (subject.name, sampling.temperature, batch)
        if key not in self._answers:
            self._answers[key] = self.plan.run(subject, sampling, list(range(len(self.plan.prompts))), batch)
        return self._answers[key]

    def _named(self, divergences: list[Divergence]) -> list[Divergence]:
        """Add the texts of the two tokens to each divergence."""
        tokenizer = self.plan.model.tokenizer
        if tokenizer is None:
            return divergences

        def text(token: int) -> str:
            return tokenizer.decode([token]) if token >= 0 else "(the end)"

        return [replace(d, texts=(text(d.expected), text(d.got))) for d in divergences]


def keeps_seed(plan: VerifyPlan, subject: Subject) -> bool:
    """Whether the method promises the same text for a seed, and not only the same distribution."""
    return plan.model.sequence(plan.request(subject, plan.prompts[0])).verifier.shares_noise


def _plain(subject: Subject) -> Subject:
    """Plain decoding under the same rule: a verifier such as contrastive search defines its own."""
    rule = {k: v for k, v in subject.settings.items() if k == "verifier"}
    return Subject(f"plain{rule}", {"method": "plain", **rule}) if rule else PLAIN


def _said(divergences: Seq[Divergence], answers: int) -> str:
    if not divergences:
        return f"{answers} of {answers} answers equal"
    bugs = [d for d in divergences if not d.explained]
    worst = max(bugs or divergences, key=lambda d: d.gap if d.gap is not None else float("inf"))
    gap = "" if worst.gap is None else f", gap {worst.gap:.3g} with rounding {worst.rounding:.3g}"
    kind = f"{len(bugs)} not explained by rounding" if bugs else "all ties"
    where = f"prompt {worst.prompt}, token {worst.position}{gap}"
    return f"{answers - len(divergences)} of {answers} answers equal; {kind} ({where})"


def _generate(model: Any, prompt: list[int], most: int, stops: frozenset[int]) -> list[int]:
    from transformers import GenerationConfig

    # A new config: the checkpoint's may hold penalties that this check does not use.
    config = GenerationConfig(max_new_tokens=most, eos_token_id=sorted(stops) or None, pad_token_id=0)
    ids = torch.tensor([prompt], device=model.device)
    with torch.no_grad():
        out = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
    return out[0, len(prompt) :].tolist()
