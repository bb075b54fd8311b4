"""Recording: the target's own answers, once, and what it held likely after each token of them and beside them.

Drafters that learn from rejected nodes need to know what the target says where its answer does not go. So the answers
are recorded with drafters that guess broadly; being lossless, they do not change them.
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

EXPLORERS = "lookahead+recycling"  # they guess broadly, and each in its own way
TOP = 16  # likeliest successors that are kept of each place; drafters that learn from scores read these

# A place: how many tokens of the answer come before it, then tokens that leave the answer there.
Place = tuple[int, ...]


@dataclass
class Recording:
    """One answer."""

    prompt: list[int]
    answer: list[int] = field(default_factory=list)
    likely: dict[Place, list[int]] = field(default_factory=dict)  # place -> the TOP successors

    @property
    def text(self) -> list[int]:
        return self.prompt + self.answer


def places(tree: Tree, at: dict[int, int]) -> list[Place]:
    """The place of every node, given how much of the answer comes before those that are on it."""
    found: list[Place] = []
    for node, parent in enumerate(tree.parents):
        found.append((at[node],) if node in at else (*found[parent], tree.tokens[node]))
    return found


def record(
    model: Model, prompts: list[list[int]], max_tokens: int, sampling: Sampling, done: Callable[[], object]
) -> list[Recording]:
    """Plain decoding's answers to all prompts; `done` is called after each answer."""
    engine = Engine(model.lm, max_batch=1, overlap=False)  # one after the other, as a drafter that learns will see them
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
    top = scores.logits.all().topk(min(TOP, scores.logits.all().shape[-1])).indices.tolist()  # [nodes, TOP]
    at = {node: start + depth for depth, node in enumerate(step.path)}
    recording.likely |= dict(zip(places(step.tree, at), top, strict=True))
    recording.answer += step.tokens
