"""Which layers of a model could guess for it: by an early exit, without a block of layers, or without some of them.

All is found without training, on a text: an exit or a set of layers is as good as the share of places where it would
choose the token that the whole model chooses. The first layer always stays, and where there is a choice the last.
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

EIGHTHS = range(1, 8)  # of the layers, after which an exit is tried
TRIES = 24  # sets of layers that a search looks at
SEED = 0


def parse(spec: str | int | Iterable[int]) -> list[int]:
    """Layers from "0-8+15+20-29", or numbers as they are."""
    if isinstance(spec, int):
        return [spec]
    if not isinstance(spec, str):
        return list(spec)
    found: list[int] = []
    for part in filter(None, spec.replace(" ", "").split("+")):
        first, dash, last = part.partition("-")
        if not first.isdigit() or (dash and not last.isdigit()):
            raise UsageError(f"{spec!r} names no layers; write them as 0-8+15+20-29")
        found.extend(range(int(first), int(last if dash else first) + 1))
    return found


def spell(layers: Iterable[int]) -> str:
    """The same layers as `parse` reads them."""
    runs: list[list[int]] = []
    for layer in sorted(layers):
        if runs and layer == runs[-1][-1] + 1:
            runs[-1].append(layer)
        else:
            runs.append([layer])
    return "+".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def without(stack: int, removed: Iterable[int]) -> list[int]:
    """The other layers; `UsageError` if these cannot all go."""
    gone = set(removed)
    if not gone <= set(range(1, stack)):
        raise UsageError(f"of {stack} layers, 1 to {stack - 1} can be left out, not {spell(gone)}")
    return [layer for layer in range(stack) if layer not in gone]


@dataclass(frozen=True)
class ProbeText:
    """A text, and from which of its tokens on the choices that follow them count."""

    tokens: list[int]
    start: int = 0


Matches = list[list[bool]]  # of each text: whether a draft chooses what the model chooses, place by place


def agreement(matches: Matches) -> float:
    """The share of places where they choose alike."""
    places = [same for text in matches for same in text]
    return sum(places) / max(len(places), 1)


def tokens_per_pass(matches: Matches, depth: int) -> float:
    """What chains of this depth give when nothing is drawn: a chain goes on in the text for as long as it is right."""
    tokens = passes = 0
    for text in matches:
        at = 0
        while at < len(text):
            chain = text[at : at + depth]
            right = next((i for i, same in enumerate(chain) if not same), len(chain))
            tokens, passes, at = tokens + right + 1, passes + 1, at + right + 1
    return tokens / max(passes, 1)


def gain(matches: Matches, share: float, depth: int) -> float:
    """Tokens for the price of a pass, when a guess costs this share of one, and to verify a chain costs one."""
    return tokens_per_pass(matches, depth) / (1 + depth * share)


@dataclass
class LayerProbe:
    """A model on texts that show what it would choose."""

    target: LM
    samples: Seq[ProbeText]
    seen: dict[tuple[int, ...], Matches] = field(default_factory=dict)  # of sets of layers

    @cached_property
    def lm(self) -> LM:
        """All layers, with rows of their own: those of the target are left alone."""
        return layers_of(self.target).slice(range(layers_of(self.target).count), compile=False)

    @cached_property
    def wanted(self) -> list[list[int]]:
        return self._choices(self.lm)

    def _choices(self, lm: LM) -> list[list[int]]:
        found = []
        for sample in self.samples:
            row = lm.acquire([])
            try:
                logits = lm.score([Tree.chain(sample.tokens)], [row])[0].logits.all()[sample.start :]
                found.append(logits.argmax(-1).tolist())
            finally:
                lm.release(row)
        return found

    def matches(self, draft: LM) -> Matches:
        """Whether it chooses what the model chooses."""
        pairs = zip(self._choices(draft), self.wanted, strict=True)
        return [[a == b for a, b in zip(ours, theirs, strict=True)] for ours, theirs in pairs]

    def exit(self, layers: int) -> Matches:
        """Of the first layers."""
        early = layers_of(self.lm).early_exit(layers)
        return self.matches(layers_of(self.lm).slice(range(layers), compile=False) if early is None else early)

    def kept(self, layers: Seq[int]) -> Matches:
        """Of these layers alone."""
        key = tuple(layers)
        if key not in self.seen:
            self.seen[key] = self.matches(layers_of(self.lm).slice(layers, compile=False))
        return self.seen[key]

    def best_exit(self, depth: int) -> int:
        """Where to leave for the most tokens for the price of a pass, with chains of this depth."""
        stack = layers_of(self.target).count
        tried = sorted({min(max(1, stack * part // 8), stack - 1) for part in EIGHTHS})
        return max(tried, key=lambda layers: gain(self.exit(layers), layers_of(self.target).cost_share(layers), depth))

    @cached_property
    def states(self) -> Tensor:  # [layers + 1, tokens, hidden]
        """What enters each layer, of all tokens but the first of a text: those are often unlike all others."""
        taps, found = tuple(range(layers_of(self.target).count + 1)), []
        for sample in self.samples:
            row = self.lm.acquire([], taps=taps)
            try:
                hidden = self.lm.score([Tree.chain(sample.tokens)], [row])[0].hidden
                assert hidden is not None
                found.append(hidden.unflatten(-1, (len(taps), -1)).transpose(0, 1)[:, len(sample.tokens) > 1 :])
            finally:
                self.lm.release(row)
        return torch.cat(found, dim=1)

    def angle(self, first: int, count: int) -> float:
        """How far these layers turn what enters them, as a share of a half turn."""
        into, out = self.states[first].double(), self.states[first + count].double()
        return float(torch.cosine_similarity(into, out, dim=-1).clamp(-1, 1).arccos().mean()) / math.pi

    def block(self, count: int) -> list[int]:
        """The consecutive layers that turn least what enters them."""
        last = layers_of(self.target).count - count
        first = min(range(1, last), key=lambda layer: self.angle(layer, count), default=last)
        return list(range(first, first + count))

    def search(self, count: int, tries: int = TRIES) -> list[int]:
        """So many layers, anywhere, without which the model agrees with itself most often, of those that were tried.

        From the ones that turn least, by exchanging one at a time; the same ones every time.
        """
        stack, draw = layers_of(self.target).count, random.Random(SEED)
        order = sorted(range(1, stack - 1), key=lambda layer: self.angle(layer, 1))[: max(3 * count, 8)]
        if len(order) < count:
            return self.block(count)

        def right(gone: Iterable[int]) -> float:
            return agreement(self.kept(without(stack, gone)))

        best = max((order[:count], self.block(count)), key=right)
        for _ in range(tries if len(order) > count else 0):
            gone = set(best) - {draw.choice(best)}
            gone.add(draw.choice([layer for layer in order if layer not in best]))
            if right(gone) > right(best):
                best = list(gone)
        return sorted(best)

    def best_count(self, most: int, depth: int) -> int:
        """How many layers to leave out for the most tokens for the price of a pass, blocks of up to `most`."""
        stack = layers_of(self.target).count

        def worth(count: int) -> float:
            return gain(
                self.kept(without(stack, self.block(count))), layers_of(self.target).cost_share(stack - count), depth
            )

        return max(range(1, most + 1), key=worth)
