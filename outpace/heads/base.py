"""Head: a small trained network that drafts for one target, from the hidden states that the target leaves.

It borrows the target's embeddings, and its output matrix unless it has one of its own; those are never saved with it.
Training asks `unroll`, which predicts at every place of a text at once; drafting has its own way through each kind.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

from outpace.core.lm import Embeddings
from outpace.errors import UsageError

LEAST = {"layers": 1, "steps": 1, "draft_vocab": 0, "feedforward": 0, "rank": 0, "linked": 0}
BORROWED = ("embed", "unembed")  # names of the modules that hold a target's matrices


class ChainStepOutput(NamedTuple):
    """What a head says at one step of all its chains over a training text: column t guesses behind token t + 1."""

    states: Tensor  # [batch, columns, hidden]
    at: Tensor  # [batch, columns]: the token of the text behind which this distribution is to be that of the target
    output: Callable[[Tensor], Tensor]  # [..., hidden] -> [..., draft vocab]: not of states that nobody asks for

    @property
    def logits(self) -> Tensor:  # [batch, columns, draft vocab]
        return self.output(self.states)


@dataclass(frozen=True)
class HeadSpec:
    """What a head is, beside its weights: enough to build it for a target."""

    kind: str
    taps: tuple[int, ...]  # hidden states of the target that it reads, as Transformers numbers them
    layers: int = 1
    steps: int = 4  # tokens ahead that it was made, or trained, to guess
    draft_vocab: int = 0  # tokens that it can guess; 0: all of them
    normed: bool = False  # eagle3: states are normalised before they enter, and where they are fed back
    own_output: bool = False  # it has an output matrix of its own
    feedforward: int = 0  # 0: as wide as the target's
    rank: int = 0  # medusa: width of a head's inner layer; 0: the target's own
    entry_norm: str = ""  # eagle3: states are normalised "each" or "joined" before they enter; "": each if `normed`
    residual_norm: bool = False  # eagle3: what passes by the attention is normalised too
    parts: str = "llama"  # of what its layers are made: llama, qwen3, target
    linked: int = 0  # medusa, block: width of the layer that tells a slot of those before it; 0: they do not know
    shape: dict[str, Any] = field(default_factory=dict)  # settings of its layers that are not the target's

    def __post_init__(self) -> None:
        for name, least in LEAST.items():
            value = getattr(self, name)
            if type(value) is not int or value < least:
                raise UsageError(f"{name} of a head is a whole number of at least {least}, got {value!r}")


class Head(nn.Module):
    """Base of all kinds."""

    kind: ClassVar[str]
    like_target: ClassVar[bool] = False  # its layers are like the target's last ones, and training starts from those
    spec: HeadSpec
    ids: Tensor | None  # [draft vocab]: the target's id of each token that it can guess; None: they are the same

    @classmethod
    def usual(cls, layer_count: int, given: dict[str, Any]) -> dict[str, Any]:
        """Settings of a head for a target of so many layers, where they are not given."""
        raise NotImplementedError

    def equip(self, embeddings: Embeddings, ids: Tensor | None) -> None:
        """Take the target's output matrix, or one of its own that starts as it; for these tokens, or for all."""
        rows = embeddings.unembed if ids is None else embeddings.unembed[ids]
        if self.spec.own_output:
            self.output = nn.Linear(rows.shape[1], rows.shape[0], bias=False)
            self.output.weight.data = rows.clone()
        else:
            self.unembed = borrowed(rows)
        self.register_buffer("ids", ids)

    @abstractmethod
    def unroll(self, tokens: Tensor, hidden: Tensor, steps: int, asked: Tensor | None = None) -> list[ChainStepOutput]:
        """Guesses of `steps` tokens at every place; a head that guesses at some only takes those that are asked for.

        [batch, tokens], [batch, tokens, taps * hidden]; `asked` [batch, tokens]: behind which tokens chains start.
        """

    def pieces(self) -> list[nn.Module]:
        """Modules that only calculate, each place by itself, which training compiles."""
        return [module for module in self.modules() if isinstance(module, LlamaRMSNorm | LlamaMLP)]

    def own(self) -> dict[str, Tensor]:
        """What is saved: all that is not the target's."""
        return {name: t for name, t in self.state_dict().items() if not set(name.split(".")) & set(BORROWED)}

    def spread(self, logits: Tensor, vocab: int) -> Tensor:
        """Logits over the target's vocabulary."""  # [..., draft vocab] -> [..., vocab]
        if self.ids is None:
            return logits
        full = logits.new_full((*logits.shape[:-1], vocab), -torch.inf)
        return full.index_copy(-1, self.ids, logits)


def borrowed(weight: Tensor) -> nn.Linear:
    """An output layer on a matrix of the target, which training leaves alone."""
    with torch.device("meta"):
        layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    layer.weight = nn.Parameter(weight, requires_grad=False)
    return layer


def evenly(first: int, last: int, count: int) -> tuple[int, ...]:
    """So many numbers from `first` to `last`, evenly spaced; fewer where there are not so many."""
    last = max(first, last)
    return tuple(sorted({round(first + i * (last - first) / max(count - 1, 1)) for i in range(count)}))


def embedding(embeddings: Embeddings) -> nn.Embedding:
    return nn.Embedding.from_pretrained(embeddings.embed, freeze=True)
