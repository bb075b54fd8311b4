"""LM: the interface of a model, as target or as draft model, and the records that it exchanges with the engine.

A model holds sequences in slots of its KV cache. Tokens are committed to a slot by `keep` or by `feed`. Nodes that were
scored but not kept are provisional: the next pass overwrites them, so rollback costs nothing.

A model must have only the methods of `LM`. Everything else is a capability: an object that may be None.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence as Seq
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from torch import Tensor

from outpace.core.layout import Layout
from outpace.errors import UnsupportedModel
from outpace.sampling.logits import Logits as Logits  # part of this interface
from outpace.sampling.logprobs import Logprob
from outpace.sampling.sampler import Pick

if TYPE_CHECKING:
    from outpace.models.embeddings import Embeddings
    from outpace.models.memory import MemoryNeed
    from outpace.threads.worker import Worker

Picks = Seq[Pick | None] | None
Context = Hashable | None  # what a text is conditioned on besides its tokens, such as encoder states


class LM(ABC):
    """The interface of a model for the engine and the drafters."""

    vocab: int
    max_length: int  # maximum number of tokens in a slot
    worker: Worker  # the thread that runs its passes; models that share weights or slots share it
    identity: str = ""  # what the cost of a pass depends on, apart from the machine
    trees: bool = True  # False: only chains can be scored
    asynchronous: bool = False  # True: `score` returns before the pass has finished
    token_price: float = 0.0  # roughly what one more token adds to a pass, as a share of a pass of one
    lazy_logits: bool = False  # True: reading logits is slow; use the model's own choice where possible
    prompt_tokens: int = 512  # of prompts, to feed between two passes of other requests
    usual_batch: int = 16  # requests that run at a time, unless the caller says otherwise
    late_prompts: bool = False  # True: the last part of a prompt may run together with its first choice
    late_choices: bool = False  # True: choices on the device may have edits and report log-probabilities

    layers: Layers | None = None
    drafts: SelfDraft | None = None
    run_ahead: RunAhead | None = None
    states: HiddenStates | None = None
    weights: Weights | None = None

    @abstractmethod
    def acquire(self, tokens: list[int], *, context: Context = None, taps: tuple[int, ...] = ()) -> int:
        """Return a slot for a text that begins with `tokens`. A cached prefix is reused if it has the same `context`.

        `taps` are the hidden states that will be read, numbered as in Transformers.
        """

    @abstractmethod
    def release(self, slot: int) -> None:
        """Free the slot; its text stays cached until another text overwrites it."""

    @abstractmethod
    def feed(
        self, tokens: Seq[list[int]], slots: Seq[int], limit: int | None = None, defer: bool = False
    ) -> list[bool]:
        """Make each slot hold exactly these tokens: keep the common prefix, run the rest. Return which slots do.

        With a `limit`, stop after about `limit` tokens. Call again, with the same tokens, for the slots that do not.
        With `defer`, a model with `late_prompts` may leave the last part of a prompt to the next `score`, whose layout
        must then be a single node.
        """

    @abstractmethod
    def score(
        self, layouts: Seq[Layout], slots: Seq[int], since: Seq[int] | None = None, picks: Picks = None
    ) -> list[Scores]:
        """Score the nodes of each layout from `since` on. A model may make the choices of `picks` itself."""

    @abstractmethod
    def keep(self, paths: Seq[list[int]], slots: Seq[int]) -> None:
        """Commit these nodes of the last scored layouts, in order, and drop the others."""

    @abstractmethod
    def clear(self) -> None:
        """Drop what idle slots hold, so that the next request reuses no cached prefix."""

    def reused(self, slot: int) -> int:
        """Return how many tokens of a slot's text were in the cache when the slot was acquired."""
        return 0

    def prepare(self, requests: int) -> None:  # noqa: B027 (most models have nothing to prepare)
        """Prepare passes of up to this many requests, so that no answer waits for it."""

    @property
    def embeddings(self) -> Embeddings | None:
        """The embedding matrices that heads borrow, or None if the model has no such matrices."""
        return None if self.states is None else self.states.embeddings

    def reference(self) -> Reference:
        """Return the model without the engine, to compare with."""
        raise UnsupportedModel(f"{type(self).__name__} has no reference: it cannot run without the engine")


@dataclass
class Picked:
    """The choice at each node and its largest logit, which is not finite where no choice was possible."""

    tokens: Seq[int]  # may be fetched only when read
    best: list[float]
    probs: list[float]  # of the choices, after the temperature
    on_device: bool = True  # the device has them too, so the next pass can start before the host reads them

    @property
    def device_tokens(self) -> Seq[int]:
        """The choices as the device has them, before any corrections by the host."""
        return self.tokens

    def wait(self) -> None:
        """Wait until the choices are made."""

    def logprob(self, node: int) -> Logprob | None:
        """Return the log-probability of a node's choice, if the pick asked for it and the device knows it."""
        return None


@dataclass(frozen=True)
class Scores:
    """The results of a pass for its new nodes."""

    logits: Logits
    hidden: Tensor | None = None  # [nodes, taps], for slots acquired with taps
    picked: Picked | None = None  # choices by the model itself, if requested and supported

    def wait(self) -> None:
        """Wait for this pass, but not for one launched after it."""
        (self.logits if self.picked is None else self.picked).wait()


class Reference(Protocol):
    """A model without Outpace's engine, cache and attention. Proofs of losslessness compare with it."""

    def native(self, tokens: list[int], count: int) -> Tensor:
        """Return the logits after each of the last `count` tokens, in the model's own precision."""  # [count, vocab]

    def precise(self, tokens: list[int], count: int) -> Tensor:
        """Return the same logits in higher precision."""  # [count, vocab], float64


class Layers(Protocol):
    """The layers of a model that can run subsets of them."""

    count: int

    def slice(self, layers: Seq[int], compile: bool = True) -> LM:
        """Return a model of some of the layers that shares the weights and has its own slots."""

    def early_exit(self, count: int) -> LM | None:
        """Return the first layers and the head as a draft model on this model's slots; `score` continues from them."""

    def cost_share(self, count: int) -> float:
        """Return the cost of `count` layers and the head as a share of a pass, by the weights read."""

    def reference(self, layers: Seq[int]) -> Reference:
        """Return some of the layers without a cache, to inspect their output."""


def layers_of(lm: LM) -> Layers:
    """Return the layers of a model; raise an error if it cannot run subsets of them."""
    if lm.layers is None:
        raise UnsupportedModel(f"{type(lm).__name__} cannot run a subset of its layers")
    return lm.layers


class DraftShape(NamedTuple):
    """The shape of a draft that a model makes on its own: a chain or a tree."""

    depth: int
    width: int = 1  # candidates after each node, and nodes per level that are extended
    nodes: int = 0  # of a tree: it keeps this number of the likeliest nodes


class DraftToken(NamedTuple):
    """A draft token, its probability and its parent."""

    token: int
    prob: float
    parent: int = -1  # index of the parent draft token; -1: it follows the text


class SelfDraft(Protocol):
    """Drafting of whole chains or trees inside the model, without host control at each level."""

    def draft(
        self, slots: Seq[int], tokens: Seq[int], shapes: Seq[DraftShape], picks: Seq[Pick]
    ) -> list[list[DraftToken]] | None:
        """Return drafts after each slot and its token, parents first; None: call `score` level by level."""


class RunAhead(Protocol):
    """Launching of passes before the host has read the pass before."""

    def begin(self, slots: Seq[int], picks: Seq[Pick | None]) -> bool:
        """Launch the pass after one without drafts, with its choices as roots; return False if that is impossible."""


class HiddenStates(Protocol):
    """The hidden states that trained heads read and the matrices that they borrow."""

    embeddings: Embeddings | None  # None: the model has no such matrices

    @property
    def captures(self) -> bool:
        """Whether heads may run as captured graphs beside this model."""

    def read(self, slot: int, first: int = 0) -> Tensor | None:  # [tokens - first, taps]
        """Return the hidden states of the committed tokens from `first` on, for a slot acquired with taps."""

    def attach(self, head: Any) -> LM:
        """Wrap a head that drafts token by token as a model that runs like this one."""

    def prepare_head(self, head: Any) -> Any:
        """Prepare a head that drafts several tokens at once to run as fast as possible with this model."""


class Weights(Protocol):
    """The weights of a model, which training may change in place."""

    version: int

    def changed(self) -> None:
        """Drop everything computed from the old weights, after they have changed."""

    def memory(self, tokens: int, requests: int = 1) -> MemoryNeed | None:
        """Return the memory of the weights, and of the cache for requests of `tokens` tokens; None if unknown."""
