"""Parallel: heads that draft several tokens in one pass, one per slot (a position of the draft).

The drafter gives them texts that grow between two passes; what a head caches of a text is stored with the text. A slot
alone does not know which tokens the slots before it hold. A `linked` head has one small layer that adds this, run once
per draft token, as in Hydra and Domino. Everything else still runs for all slots at once.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from outpace.errors import UsageError
from outpace.heads.base import ChainStepOutput, Head, HeadSpec, embedding
from outpace.heads.joins import SlotLink
from outpace.models.cache.pool import CacheShape
from outpace.models.embeddings import Embeddings


@dataclass
class Text:
    """The current state of a text that is drafted for."""

    token: int = 0  # the newest one, which has no state of the target yet
    hidden: Tensor | None = None  # [tokens before it, taps * hidden]
    cached: dict[str, Any] = field(default_factory=dict)  # what the head caches between passes


class TextInputs(NamedTuple):
    """What a head reads of several texts, as tensors."""

    hidden: Tensor  # [states, taps * hidden]: the target's states that it has not read yet, text after text
    positions: Tensor  # [states]
    last: Tensor  # [texts]: place of each text's last state
    tokens: Tensor  # [texts]: the newest ones, which have no states
    starts: Tensor  # [texts]: their positions


class TextCache(Protocol):
    """Where a head keeps keys and values of texts, and how its blocks attend to them."""

    def write(self, layer: int, keys_values: Tensor) -> None:
        """Write those of the states that the head reads now."""  # [2, kv heads, states, dim]

    def attend(self, layer: int, queries: Tensor, keys_values: Tensor) -> Tensor:
        """Attend from a block of each text to its text and itself."""
        # [heads, texts * size, dim], [2, kv heads, texts * size, dim] -> [heads, texts * size, dim]


class Parallel(Head):
    """Base class of parallel heads: output, link, and the check of the number of slots."""

    def __init__(self, embeddings: Embeddings, spec: HeadSpec, ids: Tensor | None = None):
        super().__init__()
        self.spec = spec
        self.equip(embeddings, ids)
        self.embed = embedding(embeddings)
        self.link = SlotLink(embeddings.hidden, spec.linked) if spec.linked else None

    def logits(self, states: Tensor) -> Tensor:  # [..., hidden] -> [..., draft vocab]
        return self.output(states) if self.spec.own_output else self.unembed(states)

    @property
    def cache_shape(self) -> CacheShape | None:
        """What it caches of each token of a text; None: nothing, since it reads only the last state."""
        return None

    def read(self, hidden: Tensor, positions: Tensor, cache: TextCache) -> None:
        """Add states to the cache."""  # [states, taps * hidden], [states]

    @abstractmethod
    def fill(self, inputs: TextInputs, cache: TextCache | None, count: int) -> Tensor:
        """Read states, and return the states of `count` slots after each text, or of all if there are fewer.

        The host reads nothing, so that it can be captured.
        """  # [texts, slots, hidden]

    def contexts(self, texts: Seq[Text]) -> tuple[TextCache | None, list[int]]:
        """Return the cache of these texts, and for each the first state that is not in it."""
        return None, [len(text.hidden) - 1 for text in texts if text.hidden is not None]

    def slots(self, texts: Seq[Text], count: int) -> Tensor:
        """Return the states of `count` slots after each text, or of all if it has fewer."""  # [texts, slots, hidden]
        cache, firsts = self.contexts(texts)
        new = [text.hidden[first:] for text, first in zip(texts, firsts, strict=True) if text.hidden is not None]
        hidden, ends = torch.cat(new), accumulate(map(len, new))
        places = [torch.arange(first, first + len(part)) for first, part in zip(firsts, new, strict=True)]
        about = [
            [end - 1, text.token, first + len(part)]
            for end, text, first, part in zip(ends, texts, firsts, new, strict=True)
        ]
        last, tokens, starts = torch.tensor(about).to(hidden.device).unbind(-1)
        return self.fill(TextInputs(hidden, torch.cat(places).to(hidden.device), last, tokens, starts), cache, count)

    def step_outputs(self, tokens: Tensor, columns: Tensor, slots: Seq[Tensor]) -> list[ChainStepOutput]:
        """Return the output of slots at some columns of a training text, which provides the token before each slot.

        [batch, tokens], [batch, columns], for each step [batch, columns, hidden].
        """
        outputs, before = [], torch.zeros_like(slots[0])
        for step, slot in enumerate(slots):
            at = columns + 1 + step
            if self.link is not None:
                previous = tokens.gather(1, at.clamp(max=tokens.shape[1] - 1))
                slot = before = self.link(slot, before, self.embed(previous))
            outputs.append(ChainStepOutput(slot, at, self.logits))
        return outputs

    def check(self, steps: int) -> None:
        if steps > self.spec.steps:
            raise UsageError(f"this {self.kind} head drafts {self.spec.steps} tokens, not {steps}")
