"""Choose layers of a model that can draft for it: up to an early exit, without a block, or without any set of layers.

The search needs no training, only a text. An exit or a set of layers is rated by the share of positions where it
chooses the same token as the full model. The first layer always stays, and so does the last where there is a choice.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Sequence as Seq
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from outpace.core.lm import LM, layers_of
from outpace.core.tree import Tree
from outpace.errors import UsageError

EIGHTHS = range(1, 8)  # the exits to try, in eighths of the layers
TRIES = 24  # sets of layers that a search tries
SEED = 0


def parse(spec: str | int | Iterable[int]) -> list[int]:
    """Read layers from "0-8+15+20-29"; numbers are returned as they are."""
    if isinstance(spec, int):
        return [spec]
    if not isinstance(spec, str):
        return list(spec)
    found: list[int] = []
    for part in filter(None, spec.replace(" ", "").split("+")):
        first, dash, last = part.partition("-")
        if not first.isdigit() or (dash and not last.isdigit()):
            raise UsageError(f"{spec!r} is not a list of layers; write them as 0-8+15+20-29")
        found.extend(range(int(first), int(last if dash else first) + 1))
    return found


def spell(layers: Iterable[int]) -> str:
    """Write layers in the format that `parse` reads."""
    runs: list[list[int]] = []
    for layer in sorted(layers):
        if runs and layer == runs[-1][-1] + 1:
            runs[-1].append(layer)
        else:
            runs.append([layer])
    return "+".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def without(stack: int, removed: Iterable[int]) -> list[int]:
    """The layers that stay without `removed`; raises `UsageError` if these cannot all be left out."""
    gone = set(removed)
    if not gone <= set(range(1, stack)):
        raise UsageError(f"of {stack} layers, only 1 to {stack - 1} can be left out, not {spell(gone)}")
    return [layer for layer in range(stack) if layer not in gone]


@dataclass(frozen=True)
class ProbeText:
    """A text; the choices after its tokens from `start` on are compared."""

    tokens: list[int]
    start: int = 0


Matches = list[list[bool]]  # [text][position]: whether the draft chooses the model's token


def agreement(matches: Matches) -> float:
    """The share of positions where the draft chooses the model's token."""
    places = [same for text in matches for same in text]
    return sum(places) / max(len(places), 1)


def tokens_per_pass(matches: Matches, depth: int) -> float:
    """Tokens per pass with greedy chains of this depth: the matching start of a chain, plus the target's own token."""
    tokens = passes = 0
    for text in matches:
        at = 0
        while at < len(text):
            chain = text[at : at + depth]
            matched = next((i for i, same in enumerate(chain) if not same), len(chain))
            tokens, passes, at = tokens + matched + 1, passes + 1, at + matched + 1
    return tokens / max(passes, 1)


def gain(matches: Matches, share: float, depth: int) -> float:
    """Tokens per cost of one pass, where a draft token costs `share` of a pass and verifying a chain costs one pass."""
    return tokens_per_pass(matches, depth) / (1 + depth * share)


@dataclass
class LayerProbe:
    """Compares the choices of parts of a model with those of the full model on sample texts."""

    target: LM
    samples: Seq[ProbeText]
    seen: dict[tuple[int, ...], Matches] = field(default_factory=dict)  # by set of layers

    @cached_property
    def lm(self) -> LM:
        """All layers, with cache slots of their own: the target's slots stay untouched."""
        return layers_of(self.target).slice(range(layers_of(self.target).count), compile=False)

    @cached_property
    def wanted(self) -> list[list[int]]:
        return self._choices(self.lm)

    def _choices(self, lm: LM) -> list[list[int]]:
        found = []
        for sample in self.samples:
            slot = lm.acquire([])
            try:
                logits = lm.score([Tree.chain(sample.tokens)], [slot])[0].logits.all()[sample.start :]
                found.append(logits.argmax(-1).tolist())
            finally:
                lm.release(slot)
        return found

    def matches(self, draft: LM) -> Matches:
        """Compare the choices of `draft` with the model's."""
        pairs = zip(self._choices(draft), self.wanted, strict=True)
        return [[a == b for a, b in zip(ours, theirs, strict=True)] for ours, theirs in pairs]

    def exit(self, layers: int) -> Matches:
        """Compare an exit after the first `layers` layers."""
        early = layers_of(self.lm).early_exit(layers)
        return self.matches(layers_of(self.lm).slice(range(layers), compile=False) if early is None else early)

    def kept(self, layers: Seq[int]) -> Matches:
        """Compare the model with only these layers."""
        key = tuple(layers)
        if key not in self.seen:
            self.seen[key] = self.matches(layers_of(self.lm).slice(layers, compile=False))
        return self.seen[key]

    def best_exit(self, depth: int) -> int:
        """The exit with the most tokens per cost of a pass, for chains of this depth."""
        stack = layers_of(self.target).count
        tried = sorted({min(max(1, stack * part // 8), stack - 1) for part in EIGHTHS})
        return max(tried, key=lambda layers: gain(self.exit(layers), layers_of(self.target).cost_share(layers), depth))

    @cached_property
    def states(self) -> Tensor:  # [layers + 1, tokens, hidden]
        """The inputs of each layer, without each text's first token: its states are often unlike all others."""
        taps, found = tuple(range(layers_of(self.target).count + 1)), []
        for sample in self.samples:
            slot = self.lm.acquire([], taps=taps)
            try:
                hidden = self.lm.score([Tree.chain(sample.tokens)], [slot])[0].hidden
                assert hidden is not None
                found.append(hidden.unflatten(-1, (len(taps), -1)).transpose(0, 1)[:, len(sample.tokens) > 1 :])
            finally:
                self.lm.release(slot)
        return torch.cat(found, dim=1)

    def angle(self, first: int, count: int) -> float:
        """The mean angle between the input and the output of these layers, as a share of a half turn."""
        into, out = self.states[first].double(), self.states[first + count].double()
        return float(torch.cosine_similarity(into, out, dim=-1).clamp(-1, 1).arccos().mean()) / math.pi

    def block(self, count: int) -> list[int]:
        """The `count` consecutive layers that turn their input least."""
        last = layers_of(self.target).count - count
        first = min(range(1, last), key=lambda layer: self.angle(layer, count), default=last)
        return list(range(first, first + count))

    def search(self, count: int, tries: int = TRIES) -> list[int]:
        """The `count` layers, anywhere, without which the model keeps most of its choices, among the sets tried.

        The search starts from the layers that turn their input least and exchanges one at a time. Its seed is fixed, so
        it finds the same layers every time.
        """
        stack, draw = layers_of(self.target).count, random.Random(SEED)
        order = sorted(range(1, stack - 1), key=lambda layer: self.angle(layer, 1))[: max(3 * count, 8)]
        if len(order) < count:
            return self.block(count)

        def score(gone: Iterable[int]) -> float:
            return agreement(self.kept(without(stack, gone)))

        best = max((order[:count], self.block(count)), key=score)
        for _ in range(tries if len(order) > count else 0):
            gone = set(best) - {draw.choice(best)}
            gone.add(draw.choice([layer for layer in order if layer not in best]))
            if score(gone) > score(best):
                best = list(gone)
        return sorted(best)

    def best_count(self, most: int, depth: int) -> int:
        """The size of the block to leave out, up to `most` layers, for the most tokens per cost of a pass."""
        stack = layers_of(self.target).count

        def worth(count: int) -> float:
            return gain(
                self.kept(without(stack, self.block(count))), layers_of(self.target).cost_share(stack - count), depth
            )

        return max(range(1, most + 1), key=worth)
