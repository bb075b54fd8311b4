"""Recordings: the target's answers, with its likeliest next tokens along each answer and on branches beside it.

Drafters that learn from rejected nodes need the target's predictions off the path of its answer, too. So the answers
are recorded with drafters that draft broad trees. These drafters are lossless, so they do not change the answers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from outpace.api.model import Model
from outpace.api.request import Request
from outpace.core.engine import Engine, Event
from outpace.core.tree import Tree
from outpace.errors import OutpaceError
from outpace.registry import method
from outpace.sampling.settings import Sampling

EXPLORERS = "lookahead:price=0+recycling:price=0"  # both draft broad trees, each in its own way
TOP = 16  # likeliest successors that are kept for each place; drafters that learn from logits read these

# A place in a tree: how many tokens of the answer come before it, then the tokens of the branch that leaves the answer.
Place = tuple[int, ...]


@dataclass
class Recording:
    """One recorded answer."""

    prompt: list[int]
    answer: list[int] = field(default_factory=list)
    likely: dict[Place, list[int]] = field(default_factory=dict)  # place -> its TOP likeliest successors

    @property
    def text(self) -> list[int]:
        return self.prompt + self.answer


def places(tree: Tree, at: dict[int, int]) -> list[Place]:
    """Return the place of every node; `at` gives the number of answer tokens before each node on the answer."""
    found: list[Place] = []
    for node, parent in enumerate(tree.parents):
        found.append((at[node],) if node in at else (*found[parent], tree.tokens[node]))
    return found


def record(
    model: Model, prompts: list[list[int]], max_tokens: int, sampling: Sampling, done: Callable[[], object]
) -> list[Recording]:
    """Record plain decoding's answers to all prompts; `done` is called after each answer."""
    engine = Engine(model.lm, max_batch=1, overlap=False)  # one at a time, as in the replay, where drafters learn
    drafter = method("auto", candidates=EXPLORERS) if model.lm.trees else method("plain")
    found = {}
    for prompt in prompts:
        seq = model.sequence(Request(prompt, drafter, policy="fixed", max_tokens=max_tokens, sampling=sampling))
        found[seq.id] = Recording(prompt)
        engine.submit(seq)
    for event in engine.run():
        if event.seq.error is not None:
            raise OutpaceError(f"the target could not answer a prompt: {event.seq.error}")
        _take(found[event.seq.id], event)
        if event.seq.finished:
            done()
    return list(found.values())


def _take(recording: Recording, event: Event) -> None:
    step, scores = event.step, event.scores
    assert step is not None and scores is not None
    start = len(recording.answer)
    top = scores.logits.top_k(min(TOP, event.seq.vocab)).tolist()  # [nodes, TOP]
    at = {node: start + depth for depth, node in enumerate(step.path)}
    recording.likely |= dict(zip(places(step.tree, at), top, strict=True))
    recording.answer += step.tokens
