"""Parallel: heads that guess several tokens in one go, a slot each.

Drafting hands them texts that go on between two passes; what a head keeps of a text lies with the text. By itself a
slot does not know what the slots before it hold. A head that is `linked` has one small layer that tells it, asked once
per guess (Hydra and Domino do so): all else is still done for all slots at once.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from outpace.core.lm import Embeddings
from outpace.errors import UsageError
from outpace.heads.base import ChainStepOutput, Head, HeadSpec, embedding
from outpace.heads.joins import SlotLink


@dataclass
class Text:
    """A text that is drafted for, as it is now."""

    token: int = 0  # the newest one, of which the target has left no state yet
    hidden: Tensor | None = None  # [tokens before it, taps * hidden]
    kept: dict[str, Any] = field(default_factory=dict)  # by the head, from what came before


class Parallel(Head):
    """Base of such heads: outputs, links, and the slots' number."""

    def __init__(self, embeddings: Embeddings, spec: HeadSpec, ids: Tensor | None = None):
        super().__init__()
        self.spec = spec
        self.equip(embeddings, ids)
        self.embed = embedding(embeddings)
        self.link = SlotLink(embeddings.hidden, spec.linked) if spec.linked else None

    def logits(self, states: Tensor) -> Tensor:  # [..., hidden] -> [..., draft vocab]
        return self.output(states) if self.spec.own_output else self.unembed(states)

    @abstractmethod
    def slots(self, texts: Seq[Text], count: int) -> Tensor:
        """The states of so many slots behind each text, if the head has so many."""  # [texts, slots, hidden]

    def guessed(self, tokens: Tensor, columns: Tensor, slots: Seq[Tensor]) -> list[ChainStepOutput]:
        """Of slots that were made at some columns of a training text, which knows what came before each of them.

        [batch, tokens], [batch, columns], of each step [batch, columns, hidden].
        """
        found, before = [], torch.zeros_like(slots[0])
        for step, slot in enumerate(slots):
            at = columns + 1 + step
            if self.link is not None:
                told = tokens.gather(1, at.clamp(max=tokens.shape[1] - 1))
                slot = before = self.link(slot, before, self.embed(told))
            found.append(ChainStepOutput(slot, at, self.logits))
        return found

    def check(self, steps: int) -> None:
        if steps > self.spec.steps:
            raise UsageError(f"this {self.kind} head guesses {self.spec.steps} tokens, not {steps}")
