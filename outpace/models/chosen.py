"""What a model chose by itself, where it was asked to: at the nodes of a tree, or one guess behind the other."""

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
    there: bool = True  # the device has choices as well, so that a pass can begin with them before the host knows them

    @property
    def fed(self) -> Seq[int]:
        """The choices as the device has them."""
        return self.tokens

    def wait(self) -> None:
        """Until the choices are made."""


class Shape(NamedTuple):
    """Of what a model is to guess by itself: a chain, or a tree."""

    depth: int
    width: int = 1  # likeliest tokens behind a node, and nodes of a level that go on
    nodes: int = 0  # of a tree, the likeliest ones


class Guess(NamedTuple):
    """A token that a model guesses, and how likely it held it."""

    token: int
    prob: float
    parent: int = -1  # place of the guess that it follows; -1: it follows the text
