"""Head: a small trained network that drafts for one target from the target's hidden states.

It borrows the target's embeddings, and its output matrix unless it has its own; borrowed matrices are never saved.
Training calls `unroll`, which predicts at every position of a text at once; each kind drafts in its own way.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

from outpace.errors import UsageError
from outpace.models.embeddings import Embeddings

LEAST = {"layers": 1, "steps": 1, "draft_vocab": 0, "feedforward": 0, "rank": 0, "linked": 0}
BORROWED = ("embed", "unembed")  # names of the modules that hold the target's matrices


class ChainStepOutput(NamedTuple):
    """A head's output at one step of all its chains over a training text; the chain of column t follows token t + 1."""

    states: Tensor  # [batch, columns, hidden]
    at: Tensor  # [batch, columns]: the text token after which this distribution should match the target's
    output: Callable[[Tensor], Tensor]  # [..., hidden] -> [..., draft vocab]: only called for states that are needed

    @property
    def logits(self) -> Tensor:  # [batch, columns, draft vocab]
        return self.output(self.states)


@dataclass(frozen=True)
class HeadSpec:
    """The settings of a head: all that is needed, beside its weights, to build it for a target."""

    kind: str
    taps: tuple[int, ...]  # hidden states of the target that it reads, numbered as in Transformers
    layers: int = 1
    steps: int = 4  # tokens ahead that it was built, or trained, to predict
    draft_vocab: int = 0  # tokens that it can draft; 0: all of them
    normed: bool = False  # eagle3: states are normalised before they enter, and where they are fed back
    own_output: bool = False  # it has an output matrix of its own
    feedforward: int = 0  # width; 0: the target's
    rank: int = 0  # medusa: width of a head's inner layer; 0: the target's own
    entry_norm: str = ""  # eagle3: states are normalised "each" or "joined" before they enter; "": each if `normed`
    residual_norm: bool = False  # eagle3: the residual connection around the attention is normalised too
    parts: str = "llama"  # the classes of its layers: llama, qwen3, target
    linked: int = 0  # medusa, block: width of the layer that links a slot to those before it; 0: no links
    shape: dict[str, Any] = field(default_factory=dict)  # settings of its layers that differ from the target's

    def __post_init__(self) -> None:
        for name, least in LEAST.items():
            value = getattr(self, name)
            if type(value) is not int or value < least:
                raise UsageError(f"{name} of a head must be an integer of at least {least}, got {value!r}")


class Head(nn.Module):
    """Base class of all kinds of heads."""

    kind: ClassVar[str]
    like_target: ClassVar[bool] = False  # its layers are like the target's last ones, from which training starts
    spec: HeadSpec
    ids: Tensor | None  # [draft vocab]: the target's id of each token that it can draft; None: the ids are the same

    @classmethod
    def defaults(cls, layer_count: int, given: dict[str, Any]) -> dict[str, Any]:
        """Return default settings for a target with `layer_count` layers; `given` are the settings already chosen."""
        raise NotImplementedError

    def equip(self, embeddings: Embeddings, ids: Tensor | None) -> None:
        """Set the output matrix for the tokens `ids`, or for all: the target's, or the head's own, copied from it."""
        rows = embeddings.unembed if ids is None else embeddings.unembed[ids]
        if self.spec.own_output:
            self.output = nn.Linear(rows.shape[1], rows.shape[0], bias=False)
            self.output.weight.data = rows.clone()
        else:
            self.unembed = borrowed(rows)
        self.register_buffer("ids", ids)

    @abstractmethod
    def unroll(self, tokens: Tensor, hidden: Tensor, steps: int, starts: Tensor | None = None) -> list[ChainStepOutput]:
        """Draft `steps` tokens at every position; a head that drafts only at some positions prefers those in `starts`.

        [batch, tokens], [batch, tokens, taps * hidden]; `starts` [batch, tokens]: the tokens after which chains start.
        """

    def pieces(self) -> list[nn.Module]:
        """Return the modules that training compiles: those that compute each position independently."""
        return [module for module in self.modules() if isinstance(module, LlamaRMSNorm | LlamaMLP)]

    def own_tensors(self) -> dict[str, Tensor]:
        """Return the tensors that are saved: all that do not belong to the target."""
        return {name: t for name, t in self.state_dict().items() if not set(name.split(".")) & set(BORROWED)}

    def spread(self, logits: Tensor, vocab: int) -> Tensor:
        """Expand logits to the target's vocabulary."""  # [..., draft vocab] -> [..., vocab]
        if self.ids is None:
            return logits
        full = logits.new_full((*logits.shape[:-1], vocab), -torch.inf)
        return full.index_copy(-1, self.ids, logits)


def borrowed(weight: Tensor) -> nn.Linear:
    """Return an output layer on a matrix of the target, which training does not change."""
    with torch.device("meta"):
        layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    layer.weight = nn.Parameter(weight, requires_grad=False)
    return layer


def evenly(first: int, last: int, count: int) -> tuple[int, ...]:
    """Return `count` evenly spaced integers from `first` to `last`, or fewer if the range has fewer."""
    last = max(first, last)
    return tuple(sorted({round(first + i * (last - first) / max(count - 1, 1)) for i in range(count)}))


def embedding(embeddings: Embeddings) -> nn.Embedding:
    return nn.Embedding.from_pretrained(embeddings.embed, freeze=True)
