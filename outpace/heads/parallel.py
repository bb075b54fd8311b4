"""Parallel: heads that draft several tokens in one pass, one per slot (a position of the draft).

The drafter gives them texts that grow between two passes; what a head caches of a text is stored with the text. A slot
alone does not know which tokens the slots before it hold. A `linked` head has one small layer that adds this, run once
per draft token, as in Hydra and Domino. Everything else still runs for all slots at once.
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
    """The current state of a text that is drafted for."""

    token: int = 0  # the newest one, which has no state of the target yet
    hidden: Tensor | None = None  # [tokens before it, taps * hidden]
    cached: dict[str, Any] = field(default_factory=dict)  # what the head caches between passes


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

    @abstractmethod
    def slots(self, texts: Seq[Text], count: int) -> Tensor:
        """Return the states of `count` slots after each text, or of all if it has fewer."""  # [texts, slots, hidden]

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
