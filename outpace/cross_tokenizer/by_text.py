"""TextDrafter: drafts in the draft model's own tokens, then re-encodes the text of the draft in the target's tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence as Seq
from dataclasses import dataclass
from typing import NamedTuple

from outpace.core.drafter import Drafter
from outpace.core.policy import Policy
from outpace.core.sequence import Limits, Sequence
from outpace.core.tree import ROOT, Budget, Signal, Tree
from outpace.core.verifier import Match
from outpace.cross_tokenizer.alignment import Pair
from outpace.cross_tokenizer.follower import Follower
from outpace.sampling.sampler import Sampler
from outpace.sampling.settings import Sampling


@dataclass
class ShadowPolicy(Policy):
    """Applies the policy of a request to its shadow."""

    policy: Policy | None = None
    seq: Sequence | None = None

    def keep_drafting(self, seq: Sequence, signal: Signal, depth: int) -> bool:
        assert self.policy is not None and self.seq is not None
        return self.policy.keep_drafting(self.seq, signal, depth)

    @property
    def watches_draft(self) -> bool:
        return self.policy is not None and self.policy.watches_draft


class Shadow(NamedTuple):
    """A request as the draft sees it: in the draft's tokens, and greedy, as the likeliest text is the best draft."""

    seq: Sequence
    follower: Follower


class AlignedPath(NamedTuple):
    """A path of the draft's tree: its bytes, and for each of its tokens the offset in them and the signal."""

    text: bytes
    starts: list[int]
    signals: list[Signal]
    last: int | None  # the target's special token at its end


@dataclass(eq=False)
class TextDrafter(Drafter):
    """Lets `inner` draft for shadows of the requests, in the draft's tokens, and re-encodes its trees."""

    inner: Drafter
    pair: Pair
    context: int  # context length of the draft

    def propose(self, seq: Sequence, budget: Budget) -> Tree:
        return self.propose_batch([seq], [budget])[0]

    def propose_batch(self, seqs: Seq[Sequence], budgets: Seq[Budget]) -> list[Tree]:
        shadows = [self._followed(seq) for seq in seqs]
        drafts = self.inner.propose_batch([shadow.seq for shadow in shadows], budgets)
        return [self._reencoded(*given) for given in zip(seqs, shadows, drafts, strict=True)]

    def close(self, seq: Sequence) -> None:
        shadow: Shadow | None = seq.forget(self)
        if shadow is not None:
            self.inner.close(shadow.seq)

    def _followed(self, seq: Sequence) -> Shadow:
        shadow = seq.state(self, lambda: self._shadow(seq))
        shadow.seq.tokens = shadow.follower.follow(seq.tokens)
        return shadow

    def _shadow(self, seq: Sequence) -> Shadow:
        policy, limits = ShadowPolicy(policy=seq.policy, seq=seq), Limits(seq.limits.max_tokens)
        shadow = Sequence([], limits, Sampler(Sampling()), self.inner, Match(), policy)
        shadow.vocab, shadow.context = self.pair.theirs.vocab, seq.context
        return Shadow(shadow, Follower(self.pair, self.context))

    def _reencoded(self, seq: Sequence, shadow: Shadow, drafted: Tree) -> Tree:
        tree = Tree([seq.tokens[-1]])
        # If the draft's ids cannot spell an incomplete character, each path must begin with its bytes.
        unread = b"" if shadow.follower.loose else shadow.follower.rest
        for path in _paths(drafted):
            aligned = self._aligned(drafted, path, begins=not shadow.follower.text)
            if not aligned.text.startswith(unread):
                continue
            node, since = ROOT, len(unread)
            for token in self.pair.respell(seq.tokens, aligned.text[since:]):
                end = since + len(self.pair.ours.bytes_of(token) or b"")
                node = tree.add(node, token, _signal(aligned, since, end))
                since = end
            if aligned.last is not None and since >= len(aligned.text):  # an end token only follows the whole text
                tree.add(node, aligned.last, aligned.signals[-1])
        return tree

    def _aligned(self, tree: Tree, path: list[int], begins: bool) -> AlignedPath:
        text, starts, signals, last = b"", [], [], None
        for node in path:
            token, signal = tree.tokens[node], tree.signals[node]
            piece = self.pair.theirs.bytes_of(token)
            if piece is None:
                last = self.pair.special_back.get(token)
                signals.append(signal)
                break
            if begins and not text and self.pair.theirs.prefix_space and piece[:1] == b" ":
                piece = piece[1:]  # the tokenizer puts it before every text; it is no part of the text
            starts.append(len(text))
            signals.append(signal)
            text += piece
        return AlignedPath(text, starts, signals, last)


def _paths(tree: Tree) -> Iterator[list[int]]:
    """Every path from the root to a leaf, without the root, in the order of the leaves."""
    inner = set(tree.parents)
    for node in range(1, len(tree)):
        if node not in inner:
            yield tree.path(node)[1:]


def _signal(path: AlignedPath, since: int, end: int) -> Signal:
    """The draft's signal for these bytes, from all tokens that begin in them; the rest of a token adds no doubt."""
    begun = [signal for at, signal in zip(path.starts, path.signals, strict=False) if since <= at < end]
    prob = 1.0
    for signal in begun:
        prob *= signal.prob
    return Signal(prob, begun[0].entropy, begun[0].top) if begun else Signal(prob, 0.0)
