"""VIA-SD: a slim verifier (the target without some of its layers) judges draft tokens before the target does.

The slim verifier accepts a draft token that is nearly as likely as its own best token, and replaces one that it doubts.
An unlikely one is left to the target, which then runs one pass over everything decided since its last pass. This is
lossy. With `exact=True` the slim verifier decides nothing: it drops unlikely draft tokens and sorts the rest, and the
target verifies all of them. The threshold then follows from its probabilities for the tokens that the target chose.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from typing import ClassVar

from torch import Tensor

from outpace import registry
from outpace.core.drafter import Drafter
from outpace.core.lm import LM, Layers, Scores, layers_of
from outpace.core.sequence import Sequence, Step
from outpace.core.tree import ROOT, Budget, Signal, Tree
from outpace.drafting import slim_search as choice, tuning_file
from outpace.drafting.layer_search import parse
from outpace.errors import UsageError

LEAST, MOST = 20, 400  # fewest and most choices of the target from which the floor is estimated
MISSED = 0.05  # share of them that may fall below the floor
Distributions = dict[tuple[int, ...], Tensor]  # tokens after the root -> the slim verifier's distribution, [vocab]


@dataclass
class PendingBlock:
    """What has been decided for one request since the target's last pass."""

    shadow: Sequence  # the request as if that were committed, for the drafter and the slim verifier
    budget: Budget
    tree: Tree
    open: bool = True  # whether more can be decided without the target

    @classmethod
    def begin(cls, seq: Sequence, budget: Budget) -> PendingBlock:
        # Only the tokens are copied; the rest is shared, including the drafter's state for the request.
        return cls(replace(seq, tokens=list(seq.tokens)), budget, Tree([seq.tokens[-1]]))

    @property
    def left(self) -> int:
        return min(self.budget.depth, self.budget.nodes) - len(self.tree) + 1


@dataclass(eq=False)
class ViaSD(Drafter):
    """A pruned target verifies first, the full target in doubt."""

    lossless = False
    lossless_if: ClassVar[dict[str, object]] = {"exact": True}
    verifier = "tiered"
    draft: LM | None = None
    inner: str | Drafter | None = None  # the wrapped method; None: draft, or suffix if there is no draft
    exact: bool = False
    accept: float = 0.6  # share of the slim verifier's largest probability from which it accepts
    ask: float = 0.3  # share below which the target decides; with `exact`, the largest share that is dropped
    block: int = 5  # draft tokens that are judged at once
    depth: int = 20  # tokens after which the target runs in any case
    skip: float = 0.45  # share of the layers that the slim verifier leaves out
    layers: str = ""  # layers that it keeps, such as 0-5+9+12-29; empty: by `calibration`, or evenly spread
    calibration: str | None = None  # a file from `outpace calibrate --layers-of MODEL`
    _inner: Drafter = field(init=False, repr=False)
    _target: LM | None = field(default=None, init=False, repr=False)
    _slim: LM | None = field(default=None, init=False, repr=False)
    _held: deque[float] = field(default_factory=lambda: deque(maxlen=MOST), init=False, repr=False)

    def __post_init__(self) -> None:
        if not 0 <= self.ask <= self.accept <= 1:
            raise UsageError(f"via_sd needs 0 <= ask <= accept <= 1, got {self.ask} and {self.accept}")
        if self.block < 1 or self.depth < 1 or not 0 <= self.skip < 1:
            raise UsageError("via_sd needs block >= 1, depth >= 1 and 0 <= skip < 1")
        if self.layers and self.calibration:
            raise UsageError("via_sd takes its layers either from `layers` or from `calibration`, not from both")
        self._inner = registry.inner(self.inner, self.draft)
        self.lossless = self.exact
        self.verifier = "match" if self.exact else "tiered"
        self.limit = self._inner.limit if self.exact else Budget(self.depth, self.depth)

    @property
    def model_source(self) -> str | None:  # type: ignore[override]
        return self._inner.model_source or (None if self._inner.model_source is None else self._inner.name)

    def models(self) -> list[LM]:
        return self._inner.models()

    def open(self, seq: Sequence) -> None:
        self._inner.open(seq)
        target = seq.target
        assert target is not None, "the engine names the target"
        if self._slim is None:
            self._target, self._slim = target, self._sliced(layers_of(target))
        elif self._target is not target:
            raise UsageError("this via_sd uses the layers of another model; make one for each model")

    def _sliced(self, layers: Layers) -> LM:
        if self.calibration is not None:
            found = tuning_file.section(self.calibration, "via_sd")
            if not isinstance(found.get("layers"), list):
                raise UsageError(f"the calibration file {self.calibration!r} has no list of layers")
            return layers.slice(found["layers"])
        kept = parse(self.layers) if self.layers else choice.spread(layers.count, self.skip)
        return layers.slice(kept)

    def propose(self, seq: Sequence, budget: Budget) -> Tree:
        return self.propose_batch([seq], [budget])[0]

    def propose_batch(self, seqs: Seq[Sequence], budgets: Seq[Budget]) -> list[Tree]:
        if self.exact:
            drafted = self._inner.propose_batch(seqs, budgets)
            judged = [i for i, tree in enumerate(drafted) if len(tree) > 1 and not tree.proposals]
            scores = self._score([seqs[i] for i in judged], [drafted[i] for i in judged])
            for i, logits in zip(judged, scores, strict=True):
                drafted[i] = self._ordered(seqs[i], drafted[i], logits)
            return drafted
        blocks = [PendingBlock.begin(seq, budget) for seq, budget in zip(seqs, budgets, strict=True)]
        while active := [block for block in blocks if block.open]:
            self._round(active)
        return [block.tree for block in blocks]

    def _score(self, seqs: Seq[Sequence], trees: Seq[Tree]) -> list[Tensor]:
        """The slim verifier's logits for every node."""  # of each tree: [nodes, vocab]
        assert self._slim is not None, "open() runs before propose()"
        if not seqs:
            return []
        slots = [self._slot(seq) for seq in seqs]
        self._slim.feed([seq.tokens[:-1] for seq in seqs], slots)
        return [scores.logits.all() for scores in self._slim.score(trees, slots)]

    def _slot(self, seq: Sequence) -> int:
        slim = self._slim
        assert slim is not None
        return seq.state(slim, lambda: slim.acquire(seq.tokens[:-1], context=seq.context))

    def _ordered(self, seq: Sequence, tree: Tree, logits: Tensor) -> Tree:
        """The tree without the nodes that the slim verifier finds unlikely, the likeliest paths first."""
        reach, kept, distributions = {ROOT: 1.0}, [ROOT], seq.state(self, Distributions)
        floor = self._floor
        for node in range(len(tree)):
            children = tree.children(node)
            if node not in reach or not children:
                continue
            after = [tree.tokens[n] for n in tree.path(node)[1:]]
            processed = seq.sampler.process(logits[node], seq.tokens + after)
            # With the noise with which the target will choose.
            distribution = seq.sampler.noised(processed, len(seq.tokens + after)).double().softmax(-1)
            distributions[tuple(after)], least = distribution, floor * float(distribution.max())
            for child in children:
                prob = float(distribution[tree.tokens[child]])
                if prob >= least and prob > 0:
                    reach[child], tree.probs[child] = reach[node] * prob, prob
                    tree.sources.setdefault(child, self._inner.name)
                    kept.append(child)
        return tree.select(sorted(kept, key=lambda node: (-reach[node], node)))

    @property
    def _floor(self) -> float:
        """The share of the slim verifier's best below which a token is dropped: the target seldom chooses those."""
        if len(self._held) < LEAST:
            return 0.0
        return min(self.ask, sorted(self._held)[int(MISSED * len(self._held))])

    def _round(self, blocks: Seq[PendingBlock]) -> None:
        """Draft one block for each request, and let the slim verifier decide on it."""
        sizes = [min(self.block, block.left) for block in blocks]
        budgets = [replace(b.budget, depth=n, nodes=n, width=1) for b, n in zip(blocks, sizes, strict=True)]
        shadows = [block.shadow for block in blocks]
        drafted = [t.trim(b) for t, b in zip(self._inner.propose_batch(shadows, budgets), budgets, strict=True)]
        for block, tree, logits in zip(blocks, drafted, self._score(shadows, drafted), strict=True):
            block.open = len(tree) > 1 and self._judge(block, tree, logits) and block.left > 0
            # A draft model can follow the shadow's tokens; other methods only know the tokens that were committed.
            block.open = block.open and self._inner.model_source is not None

    def _judge(self, block: PendingBlock, drafted: Tree, logits: Tensor) -> bool:
        """Add the decisions on a chain; return True while the target is not needed."""  # [nodes, vocab]
        seq, tree, needs_target = block.shadow, block.tree, False
        for node, token in enumerate(drafted.tokens[1:]):
            processed = seq.sampler.process(logits[node], seq.tokens)
            distribution = processed.double().softmax(-1)
            share = float(distribution[token] / distribution.max())
            if share == 0:  # it may not be allowed, and what follows it could not be judged
                return False
            doubted = self.ask <= share < self.accept
            chosen = int(seq.sampler.noised(processed, len(seq.tokens)).argmax()) if doubted else token
            source, prob = self._inner.name if chosen == token else f"{self.name}: slim", float(distribution[chosen])
            added = tree.add(len(tree) - 1, chosen, Signal(prob, 0.0), source, prob)
            if share >= self.ask:
                tree.trusted.add(added)
            needs_target = needs_target or share < self.ask
            seq.tokens.append(chosen)
            if chosen in seq.limits.stop_token_ids:
                return False
            if chosen != token:
                break
        return not needs_target

    def observe(self, seq: Sequence, step: Step, scores: Scores) -> None:
        self._inner.observe(seq, step, scores)
        distributions = seq.state(self, Distributions)
        for depth, token in enumerate(step.tokens):
            distribution = distributions.get(tuple(step.tokens[:depth]))
            if distribution is not None:
                self._held.append(float(distribution[token] / distribution.max()))
        distributions.clear()

    def close(self, seq: Sequence) -> None:
        self._inner.close(seq)
        slot = seq.forget(self._slim)
        if slot is not None and self._slim is not None:
            self._slim.release(slot)
