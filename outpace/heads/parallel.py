"""Parallel: heads that guess several tokens in one go, each without knowing which the others are.

Drafting hands them texts that go on between two passes; what a head keeps of a text lies with the text.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from outpace.errors import UsageError
from outpace.heads.base import Head, Spec
from outpace.models.ends import Ends


@dataclass
class Text:
    """A text that is drafted for, as it is now."""

    token: int = 0  # the newest one, of which the target has left no state yet
    hidden: Tensor | None = None  # [tokens before it, taps * hidden]
    kept: dict[str, Any] = field(default_factory=dict)  # by the head, from what came before


class Parallel(Head):
    """Base of such heads: outputs, and the slots' number."""

    def __init__(self, ends: Ends, spec: Spec, ids: Tensor | None = None):
        super().__init__()
        self.spec = spec
        self.equip(ends, ids)

    def logits(self, states: Tensor) -> Tensor:  # [..., hidden] -> [..., draft vocab]
        return self.output(states) if self.spec.own_output else self.unembed(states)

    @abstractmethod
    def guess(self, texts: Seq[Text], slots: int) -> Tensor:
        """The laws of so many tokens behind each text, if the head has so many."""  # [texts, slots, draft vocab]

    def check(self, steps: int) -> None:
        if steps > self.spec.steps:
            raise UsageError(f"this {self.kind} head guesses {self.spec.steps} tokens, not {steps}")
