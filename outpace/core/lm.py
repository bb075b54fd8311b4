"""LM: what the loop needs of a model, as target or as draft, and the records that it speaks in.

A model holds sequences in slots of its key-value cache. Tokens are committed to a slot by `keep`, or by `feed`. Nodes
that were scored and not kept are provisional: the next pass overwrites them, so rollback costs nothing.

The methods of `LM` are all that a model must have. Everything else is a capability: an object that may be None.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence as Seq
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor

from outpace.core.layout import Layout
from outpace.errors import UnsupportedModel
from outpace.sampling.sampler import Pick

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from outpace.threads.worker import Worker

Picks = Seq[Pick | None] | None
Context = Hashable | None  # what a text is conditioned on besides its tokens, such as the states of an encoder


class LM(ABC):
    """A model as the engine and the drafters see it."""

    vocab: int
    max_length: int  # the most tokens that a slot can hold
    worker: Worker  # the thread that runs its passes; models that share weights or slots share it
    identity: str = ""  # what the cost of a pass depends on, besides the machine
    trees: bool = True  # False: only chains can be scored
    asynchronous: bool = False  # True: `score` returns before the pass is done
    lazy_logits: bool = False  # True: reading logits is slow; use the model's own choice where you can

    layers: Layers | None = None
    drafts: SelfDraft | None = None
    run_ahead: RunAhead | None = None
    states: HiddenStates | None = None
    weights: Weights | None = None

    @abstractmethod
    def acquire(self, tokens: list[int], *, context: Context = None, taps: tuple[int, ...] = ()) -> int:
        """A slot for a text that begins with `tokens`; what a slot already knows of them is reused.

        A slot is only reused for the same `context`. `taps` are hidden states that will be read, as Transformers
        numbers them.
        """

    @abstractmethod
    def release(self, slot: int) -> None:
        """Give the slot back; its text stays known until another one takes its place."""

    @abstractmethod
    def feed(self, tokens: Seq[list[int]], slots: Seq[int], limit: int | None = None) -> bool:
        """Make each slot hold exactly these tokens: keep the common prefix, run the rest.

        With a `limit` it stops after about so many tokens; False: call it again, with the same tokens.
        """

    @abstractmethod
    def score(
        self, layouts: Seq[Layout], slots: Seq[int], since: Seq[int] | None = None, picks: Picks = None
    ) -> list[Scores]:
        """Score the nodes of each layout from `since` on; a model may make the choices of `picks` itself."""

    @abstractmethod
    def keep(self, paths: Seq[list[int]], slots: Seq[int]) -> None:
        """Commit these nodes of the layouts last scored, in order, and forget the others."""

    @abstractmethod
    def clear(self) -> None:
        """Forget what idle slots hold: the next request is computed from its first token on."""

    @property
    def embeddings(self) -> Embeddings | None:
        """The matrices that heads borrow; None: it has no such matrices."""
        return None if self.states is None else self.states.embeddings

    def reference(self) -> Reference:
        """The model by itself, to compare with."""
        raise UnsupportedModel(f"{type(self).__name__} cannot be run by itself, so there is nothing to compare with")


class Logits:
    """Logits of the nodes that a pass scored. A runtime that owns its memory fetches them when they are read."""

    def __init__(self, table: Tensor):  # [nodes, vocab]
        self._table = table

    def __len__(self) -> int:
        return len(self._table)

    def __getitem__(self, node: int) -> Tensor:  # [vocab]
        return self._table[node]

    def all(self) -> Tensor:  # [nodes, vocab]
        """The logits of all nodes."""
        return self._table

    def wait(self) -> None:
        """Wait until the device has computed them."""
        if self._table.is_cuda:
            torch.cuda.synchronize()


@dataclass
class Picked:
    """The choice at each node, and the largest logit there, which is not finite where no choice could be made."""

    tokens: Seq[int]  # may be fetched when they are read
    best: list[float]
    probs: list[float]  # of the choices, after the temperature
    on_device: bool = True  # the device has them too, so a pass can begin with them before the host has read them

    @property
    def device_tokens(self) -> Seq[int]:
        """The choices as the device has them, before the host corrected any."""
        return self.tokens

    def wait(self) -> None:
        """Wait until the choices are made."""


@dataclass(frozen=True)
class Scores:
    """What a pass says about the nodes that were new to it."""

    logits: Logits
    hidden: Tensor | None = None  # [nodes, taps], for slots acquired with taps
    picked: Picked | None = None  # by the model itself, where it was asked to and can

    def wait(self) -> None:
        """Wait for this pass, not for one that may have begun after it."""
        (self.logits if self.picked is None else self.picked).wait()


class Reference(Protocol):
    """A model by itself: without the loop, our cache and our attention. Proofs compare with it."""

    def native(self, tokens: list[int], count: int) -> Tensor:
        """Logits after each of the last `count` tokens, in the model's own precision."""  # [count, vocab]

    def precise(self, tokens: list[int], count: int) -> Tensor:
        """The same in a higher precision."""  # [count, vocab], float64


class Layers(Protocol):
    """The layers of a model, where they can be run apart from each other."""

    count: int

    def slice(self, layers: Seq[int], compile: bool = True) -> LM:
        """A model of some of the layers on the same weights, with slots of its own."""

    def early_exit(self, count: int) -> LM | None:
        """The first layers and the head as a draft on this model's own slots, where `score` goes on from them."""

    def cost_share(self, count: int) -> float:
        """The share of a pass that so many layers and the head are, by the weights that are read."""

    def reference(self, layers: Seq[int]) -> Reference:
        """Some of the layers without a cache, to see what they say."""


def layers_of(lm: LM) -> Layers:
    """The layers of a model, or an error that it has none that can be run apart."""
    if lm.layers is None:
        raise UnsupportedModel(f"{type(lm).__name__} cannot be run without some of its layers")
    return lm.layers


class DraftShape(NamedTuple):
    """What a model is to draft by itself: a chain, or a tree."""

    depth: int
    width: int = 1  # likeliest tokens after a node, and nodes of a level that go on
    nodes: int = 0  # of a tree, the likeliest ones


class DraftToken(NamedTuple):
    """A token that a model drafted, and its probability."""

    token: int
    prob: float
    parent: int = -1  # place of the draft token that it follows; -1: it follows the text


class SelfDraft(Protocol):
    """Chains or trees that a model drafts without a look from outside at each level."""

    def draft(
        self, slots: Seq[int], tokens: Seq[int], shapes: Seq[DraftShape], picks: Seq[Pick]
    ) -> list[list[DraftToken]] | None:
        """Drafts after each slot and its `token`, parents first; None: ask `score` level by level."""


class RunAhead(Protocol):
    """Passes that begin before the host has read the pass before them."""

    def begin(self, slots: Seq[int], picks: Seq[Pick | None]) -> bool:
        """Begin the pass after one of roots, with what that one chooses as roots; False: it could not be begun."""


class HiddenStates(Protocol):
    """What trained heads read of a model, and borrow from it."""

    embeddings: Embeddings | None  # None: the model has no such matrices

    def read(self, slot: int) -> Tensor | None:  # [tokens, taps]
        """Hidden states of the committed tokens, for a slot acquired with taps."""

    def attach(self, head: Any) -> LM:
        """A head that is asked token by token, as a model that runs as this one does."""

    def ready(self, head: Any) -> Any:
        """A head that drafts several tokens at once, as it runs fastest beside this model."""


class Weights(Protocol):
    """The weights of a model, which training may change in place."""

    version: int

    def changed(self) -> None:
        """The weights have changed: use nothing that came of the old ones."""

    def memory(self, tokens: int) -> MemoryNeed | None:
        """What the weights take, and the cache of so many tokens; None when the model does not know."""


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
            f"{spell_bytes(self.weights)} of weights and {spell_bytes(self.cache)} of cache for {self.tokens} tokens "
            f"({spell_bytes(self.available)} available for the cache)"
        )


def spell_bytes(count: int) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"
