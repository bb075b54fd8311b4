"""What a model chose by itself, where it was asked to: at the nodes of a tree, or along a chain."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import NamedTuple


@dataclass
class Chosen:
    """The choice at each node, and the largest logit there, which is not finite where no choice could be made."""

    tokens: Seq[int]  # found when they are looked at, perhaps
    best: list[float]
    probs: list[float]  # of the choices, after the temperature


class Guess(NamedTuple):
    """A token of a chain, and how likely the model held it."""

    token: int
    prob: float
