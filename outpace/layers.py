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

from outpace.errors import UsageError
from outpace.models.base import LM
from outpace.tree import Tree

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


def gain(agreement: float, cost: float, depth: int) -> float:
    """Tokens for the price of a pass, if every guess of a chain is right with this chance and costs so much of one."""
    tokens = sum(agreement**d for d in range(depth + 1))
    return tokens / (1 + depth * cost)


@dataclass
class Probe:
    """A model on texts that show what it would choose."""

    target: LM
    texts: Seq[list[int]]
    seen: dict[tuple[int, ...], float] = field(default_factory=dict)  # agreement of sets of layers

    @cached_property
    def lm(self) -> LM:
        """All layers, with rows of their own: those of the target are left alone."""
        return self.target.slice(range(self.target.stack), eager=True)

    @cached_property
    def wanted(self) -> Tensor:  # [tokens of all texts]
        return self._choices(self.lm)

    def _choices(self, lm: LM) -> Tensor:
        found = []
        for text in self.texts:
            row = lm.acquire([])
            try:
                found.append(lm.score([Tree.chain(text)], [row])[0].logits.argmax(-1).cpu())
            finally:
                lm.release(row)
        return torch.cat(found)

    def agreement(self, draft: LM) -> float:
        """The share of places where it chooses what the model chooses."""
        return float((self._choices(draft) == self.wanted).double().mean())

    def exit(self, layers: int) -> float:
        """Agreement of the first layers."""
        early = self.lm.early(layers)
        return self.agreement(self.lm.slice(range(layers), eager=True) if early is None else early)

    def kept(self, layers: Seq[int]) -> float:
        """Agreement of these layers alone."""
        key = tuple(layers)
        if key not in self.seen:
            self.seen[key] = self.agreement(self.lm.slice(layers, eager=True))
        return self.seen[key]

    def best_exit(self, depth: int) -> int:
        """Where to leave for the most tokens for the price of a pass, with chains of this depth."""
        stack = self.target.stack
        tried = sorted({min(max(1, stack * part // 8), stack - 1) for part in EIGHTHS})
        return max(tried, key=lambda layers: gain(self.exit(layers), self.target.share(layers), depth))

    @cached_property
    def states(self) -> Tensor:  # [layers + 1, tokens, hidden]
        """What enters each layer, of all tokens but the first of a text: those are often unlike all others."""
        taps, found = tuple(range(self.target.stack + 1)), []
        for text in self.texts:
            row = self.lm.acquire([], taps)
            try:
                hidden = self.lm.score([Tree.chain(text)], [row])[0].hidden
                assert hidden is not None
                found.append(hidden.unflatten(-1, (len(taps), -1)).transpose(0, 1)[:, len(text) > 1 :])
            finally:
                self.lm.release(row)
        return torch.cat(found, dim=1)

    def angle(self, first: int, count: int) -> float:
        """How far these layers turn what enters them, as a share of a half turn."""
        into, out = self.states[first].double(), self.states[first + count].double()
        return float(torch.cosine_similarity(into, out, dim=-1).clamp(-1, 1).arccos().mean()) / math.pi

    def block(self, count: int) -> list[int]:
        """The consecutive layers that turn least what enters them."""
        last = self.target.stack - count
        first = min(range(1, last), key=lambda layer: self.angle(layer, count), default=last)
        return list(range(first, first + count))

    def search(self, count: int, tries: int = TRIES) -> list[int]:
        """So many layers, anywhere, without which the model agrees with itself most often, of those that were tried.

        From the ones that turn least, by exchanging one at a time; the same ones every time.
        """
        stack, draw = self.target.stack, random.Random(SEED)
        order = sorted(range(1, stack - 1), key=lambda layer: self.angle(layer, 1))[: max(3 * count, 8)]
        if len(order) < count:
            return self.block(count)
        best = min((order[:count], self.block(count)), key=lambda gone: -self.kept(without(stack, gone)))
        for _ in range(tries if len(order) > count else 0):
            gone = set(best) - {draw.choice(best)}
            gone.add(draw.choice([layer for layer in order if layer not in best]))
            if self.kept(without(stack, gone)) > self.kept(without(stack, best)):
                best = list(gone)
        return sorted(best)

    def best_count(self, most: int, depth: int) -> int:
        """How many layers to leave out for the most tokens for the price of a pass, blocks of up to `most`."""
        stack = self.target.stack

        def worth(count: int) -> float:
            return gain(self.kept(without(stack, self.block(count))), self.target.share(stack - count), depth)

        return max(range(1, most + 1), key=worth)
