"""LM: what the loop needs of a model, as target or as draft; and the records that it speaks in."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch import Tensor

from outpace.core.tree import Tree
from outpace.sampling.sampler import Pick
from outpace.threads.worker import Worker

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

Picks = Seq[Pick | None] | None


@dataclass(frozen=True)
class Scores:
    """What a pass says about the nodes that were new to it."""

    logits: Tensor  # [nodes, vocab]
    hidden: Tensor | None = None  # [nodes, taps], for rows acquired with taps
    chosen: Picked | None = None  # by the model itself, where it was asked to and can


class Reference(Protocol):
    """What a model says by itself: no loop, no cache, no attention of ours. Proofs compare with it."""

    def native(self, tokens: list[int], count: int) -> Tensor:
        """Logits after each of the last `count` tokens, in the model's own precision."""  # [count, vocab]

    def precise(self, tokens: list[int], count: int) -> Tensor:
        """The same in a higher precision."""  # [count, vocab], float64


class LM(Protocol):
    """A model as the engine and the drafters see it."""

    vocab: int
    context: int  # the most tokens a row can hold
    trees: bool  # False: only chains can be scored
    asynchronous: bool  # True: `score` returns before the pass is done
    handy: bool  # False: to look at logits takes a while, beside the choices of `picks`
    stack: int  # layers that can be taken apart; 0: none can
    ends: Embeddings | None  # its embeddings and its output matrix, which heads borrow; None: it has no such matrices
    worker: Worker  # whose thread runs its passes; models that share weights or rows share it

    def acquire(self, tokens: list[int], taps: tuple[int, ...] = ()) -> int:
        """A row for a request that starts with `tokens`; what a row already knows of them is reused."""

    def release(self, row: int) -> None:
        """Give the row back."""

    def sync(self, tokens: Seq[list[int]], rows: Seq[int]) -> None:
        """Make each row hold exactly these tokens: keep the common prefix, feed the rest."""

    def score(
        self, trees: Seq[Tree], rows: Seq[int], since: Seq[int] | None = None, picks: Picks = None
    ) -> list[Scores]:
        """Score nodes of each tree from `since` on; a model may make the choices of `picks` itself."""

    def keep(self, paths: Seq[list[int]], rows: Seq[int]) -> None:
        """Commit these nodes of the trees last scored, root first, and forget the others."""

    def ahead(self, rows: Seq[int], picks: Seq[Pick | None]) -> bool:
        """Behind a pass of roots: begin the next one, with what it chooses there as roots; whether that could be."""

    def guess(
        self, rows: Seq[int], tokens: Seq[int], shapes: Seq[DraftShape], picks: Seq[Pick]
    ) -> list[list[DraftToken]] | None:
        """The model's own chains or trees after each row and its `token`, parents first; None: ask `score` by level."""

    def slice(self, layers: Seq[int], eager: bool = False) -> LM:
        """A model of some of the layers on the same weights, with rows of its own; `eager`: not worth compiling."""

    def early(self, layers: int) -> LM | None:
        """The first layers and the head as a draft on this model's own rows, where `score` goes on; None: it cannot."""

    def share(self, layers: int) -> float:
        """How much of a pass so many layers and the head are, by the weights that are read."""

    def clear(self) -> None:
        """Forget what idle rows hold: the next request is computed from its first token on."""

    @property
    def version(self) -> int:
        """Of its weights, counted by `refresh`."""

    def refresh(self) -> None:
        """The weights have changed, in place: use nothing that came of the old ones."""

    def hidden(self, row: int) -> Tensor | None:  # [tokens, taps]
        """Hidden states of the committed tokens, for a row acquired with taps."""

    def reference(self) -> Reference:
        """The model by itself, to compare with."""

    def memory(self, tokens: int) -> MemoryNeed | None:
        """What the weights take, and the cache of so many tokens; None when this model does not know."""


@dataclass
class Picked:
    """The choice at each node, and the largest logit there, which is not finite where no choice could be made."""

    tokens: Seq[int]  # found when they are looked at, perhaps
    best: list[float]
    probs: list[float]  # of the choices, after the temperature
    there: bool = True  # the device has choices as well, so that a pass can begin with them before the host knows them

    @property
    def fed(self) -> Seq[int]:
        """The choices as the device has them."""
        return self.tokens

    def wait(self) -> None:
        """Until the choices are made."""


class DraftShape(NamedTuple):
    """Of what a model is to guess by itself: a chain, or a tree."""

    depth: int
    width: int = 1  # likeliest tokens behind a node, and nodes of a level that go on
    nodes: int = 0  # of a tree, the likeliest ones


class DraftToken(NamedTuple):
    """A token that a model guesses, and how likely it held it."""

    token: int
    prob: float
    parent: int = -1  # place of the guess that it follows; -1: it follows the text


@dataclass(frozen=True)
class Embeddings:
    """What enters a model's first layer for a token, and what its last state is compared with for each token."""

    embed: Tensor  # [vocab, hidden]
    unembed: Tensor  # [vocab, hidden]
    config: PreTrainedConfig | None = None  # of the layers between

    @property
    def hidden(self) -> int:
        return self.embed.shape[1]

    @property
    def vocab(self) -> int:
        return self.embed.shape[0]

    @property
    def fingerprint(self) -> list[float]:
        """A few numbers by which the same weights are known again, in another precision too."""
        places = torch.linspace(0, self.embed.numel() - 1, 16, dtype=torch.float64).long()
        return self.embed.reshape(-1)[places.to(self.embed.device)].float().tolist()


@dataclass(frozen=True)
class MemoryNeed:
    """Bytes of the weights, of the cache for some tokens, and what the cache may have."""

    weights: int
    token: int  # of the cache, for one token
    tokens: int
    available: int  # for the whole cache: what it holds now, and what is free

    @property
    def cache(self) -> int:
        return self.token * self.tokens

    @property
    def fits(self) -> bool:
        return self.cache <= self.available

    def __str__(self) -> str:
        return (
            f"{size(self.weights)} of weights and {size(self.cache)} of cache for {self.tokens} tokens "
            f"({size(self.available)} are there for it)"
        )


def size(count: int) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"
