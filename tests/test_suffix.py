"""Drafters without a model against brute force: suffix automaton, n-gram lookup, token recycling, lookahead."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence as Seq
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings, strategies as st

from outpace import Drafter, Sequence, Step
from outpace.core.lm import Logits, Scores
from outpace.core.policy import Policy
from outpace.core.sequence import Limits
from outpace.core.tree import ROOT, Budget, Tree
from outpace.core.verifier import Match
from outpace.drafting.successor_table import EMPTY
from outpace.errors import UsageError
from outpace.methods.lookahead import Lookahead
from outpace.methods.ngram import NGram, continuation
from outpace.methods.recycling import Recycling
from outpace.methods.suffix import COUNTED, NO_MATCH, SEPARATOR, START, Automaton, Suffix
from outpace.sampling.sampler import Sampler
from outpace.sampling.settings import Sampling
from outpace.testing import ToyLM

steady = settings(derandomize=True, deadline=None, max_examples=150)
letters = st.integers(0, 2)
strings = st.lists(letters, max_size=24)
VOCAB = 24


def sequence(tokens: Seq[int], drafter: Drafter, generated: Seq[int] = ()) -> Sequence:
    seq = Sequence(list(tokens), Limits(1000), Sampler(Sampling()), drafter, Match(), Policy(), vocab=VOCAB)
    seq.tokens += generated
    return seq


def spelled(tree: Tree, node: int) -> tuple[int, ...]:
    return tuple(tree.tokens[n] for n in tree.path(node)[1:])


def occurrences(text: Seq[int], part: Seq[int]) -> list[int]:
    """Where `part` ends in `text`."""
    return [end for end in range(len(part), len(text) + 1) if list(text[end - len(part) : end]) == list(part)]


# Suffix automaton


def automaton_of(text: Seq[int]) -> Automaton:
    automaton = Automaton()
    for token in text:
        automaton.add(token)
    return automaton


def state_of(automaton: Automaton, part: Seq[int]) -> int | None:
    state = START
    for token in part:
        if token not in automaton.next[state]:
            return None
        state = automaton.next[state][token]
    return state


@given(strings)
@example([0] * 30)
@example([0, 1] * 12)
@settings(steady, max_examples=200)
def test_counts_are_how_often_a_part_occurs(text: list[int]) -> None:
    automaton = automaton_of(text)
    parts = {tuple(text[i:j]) for i in range(len(text)) for j in range(i + 1, len(text) + 1)}
    for part in parts:
        state = state_of(automaton, part)
        assert state is not None and automaton.count[state] == len(occurrences(text, part))
    for part in itertools.product(range(4), repeat=3):
        assert (state_of(automaton, part) is not None) == (part in parts)
    assert automaton.tokens == len(text) and len(automaton.length) <= max(2, 2 * len(text))


def test_counting_is_bounded_in_long_repetitions() -> None:
    """Only the longest COUNTED contexts that end at a token are counted, and what is counted is never too much."""
    text = [0] * (COUNTED + 20)
    automaton = automaton_of(text)
    for length in range(1, len(text) + 1):
        state = state_of(automaton, [0] * length)
        assert state is not None and automaton.count[state] == min(COUNTED, len(text) - length + 1)


@given(strings, strings)
@settings(steady, max_examples=300)
def test_follow_finds_the_longest_end_that_occurs(text: list[int], request: list[int]) -> None:
    automaton, match = automaton_of(text), NO_MATCH
    for read in range(1, len(request) + 1):
        match = automaton.follow(match, request[read - 1])
        ends = [request[read - n : read] for n in range(read + 1)]
        longest = max((end for end in ends if occurrences(text, end)), key=len)
        assert match.length == len(longest)
        assert match.state == state_of(automaton, longest)


@given(strings)
@settings(steady, max_examples=300)
def test_follow_on_a_text_that_grows_with_it(text: list[int]) -> None:
    """As a request reads itself: each token is matched, then added."""
    automaton, match = Automaton(), NO_MATCH
    for read in range(1, len(text) + 1):
        match = automaton.follow(match, text[read - 1])
        automaton.add(text[read - 1])
        ends = [text[read - n : read] for n in range(read)]
        longest = max((end for end in ends if occurrences(text[: read - 1], end)), key=len)
        assert match.length == len(longest)
        # What may follow, and how often it did.
        found = {token: automaton.count[state] for token, state in automaton.next[match.state].items()}
        wanted = Counter(text[end] for end in occurrences(text[:read], longest) if end < read)
        assert found == dict(wanted)


ABC, ABD = [(False, t) for t in (5, 0, 1, 2)], [(False, t) for t in (6, 0, 1, 3)]


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 3)), max_size=30))
@example([*ABC, (True, 1), *ABD, (True, 3)])
@settings(steady, max_examples=500)
def test_follow_on_a_text_to_which_others_add(turns: list[tuple[bool, int]]) -> None:
    """As a request reads the store while other requests end: the state that it stands on is split under it."""
    automaton, match, text, request = Automaton(), NO_MATCH, [], []
    for reads, token in turns:
        if not reads:
            automaton.add(token)
            text.append(token)
            continue
        request.append(token)
        match = automaton.follow(match, token)
        ends = [request[len(request) - n :] for n in range(len(request) + 1)]
        assert match.length <= max(len(end) for end in ends if occurrences(text, end))  # never more than there is


# Suffix drafter


def test_suffix_continues_itself_as_far_as_it_matched() -> None:
    drafter = Suffix()
    assert drafter.propose(sequence([1, 2, 3], drafter), Budget(9, 9)).tokens == [3]
    seq = sequence([1, 2, 3, 4, 5, 9, 1, 2, 3], drafter)
    assert drafter.propose(seq, Budget(9, 9)).tokens == [3, 4, 5, 9]  # three tokens matched, three are drafted
    assert drafter.propose(seq, Budget(2, 9)).tokens == [3, 4, 5]
    assert drafter.propose(seq, Budget(9, 1)).tokens == [3, 4]
    assert Suffix(per_match=2.0).propose(sequence(seq.tokens, drafter), Budget(9, 9)).tokens == [3, 4, 5, 9, 1, 2, 3]
    assert len(Suffix(min_match=4).propose(sequence(seq.tokens, drafter), Budget(9, 9))) == 1
    seq.tokens += [4, 7]
    assert len(drafter.propose(seq, Budget(9, 9))) == 1  # 7 is new
    seq.tokens += [1, 2]
    assert drafter.propose(seq, Budget(9, 9)).tokens[:2] == [2, 3]


@given(st.lists(letters, min_size=2, max_size=24), st.integers(1, 3), st.integers(1, 5), st.integers(1, 10))
@settings(steady, max_examples=200)
def test_suffix_guesses_what_followed_most_often(text: list[int], width: int, depth: int, nodes: int) -> None:
    drafter, budget = Suffix(min_prob=0.0, per_match=100.0), Budget(depth, nodes, width)
    tree = drafter.propose(sequence(text, drafter), budget)
    assert tree.trim(budget) is tree  # it keeps its budget
    ends = [text[len(text) - n :] for n in range(len(text))]
    context = max((end for end in ends if len(occurrences(text, end)) > 1), key=len, default=[])
    if not context:
        assert len(tree) == 1
        return

    def follows(part: Seq[int]) -> Counter[int]:
        return Counter(text[end] for end in occurrences(text, part) if end < len(text))

    def chance(path: Seq[int]) -> float:
        total = 1.0
        for i, token in enumerate(path):
            counts = follows([*context, *path[:i]])
            total *= counts[token] / counts.total()
        return total

    assert len(tree) > 1
    for node in range(len(tree)):
        path = spelled(tree, node)
        if node:
            assert tree.signals[node].prob == pytest.approx(chance(path))
        offered = sorted(follows([*context, *path]).values(), reverse=True)
        taken = [follows([*context, *path])[tree.tokens[child]] for child in tree.children(node)]
        assert taken == offered[: len(taken)]  # the most frequent first
    if not any(tree.children(node)[1:] for node in range(len(tree))) and width == 1:
        assert len(tree) - 1 <= min(depth, nodes)
    added = [tree.signals[node].prob for node in range(1, len(tree))]
    assert all(a >= b - 1e-12 for a, b in itertools.pairwise(added))  # best first


def test_suffix_drops_unlikely_paths() -> None:
    text = [0, 1, 0, 1, 0, 1, 0, 2, 0]
    tree = Suffix(width=2, min_prob=0.3).propose(sequence(text, Suffix()), Budget(1, 8, 2))
    assert tree.tokens == [0, 1]
    tree = Suffix(width=2, min_prob=0.2).propose(sequence(text, Suffix()), Budget(1, 8, 2))
    assert tree.tokens == [0, 1, 2] and [tree.signals[n].prob for n in (1, 2)] == [0.75, 0.25]


def test_suffix_remembers_answers_for_later_requests() -> None:
    drafter = Suffix()
    drafter.close(sequence([20], drafter, generated=[1, 2, 3, 4]))
    drafter.close(sequence([20], drafter, generated=[5, 6]))
    assert drafter.propose(sequence([9, 1, 2], drafter), Budget(9, 9)).tokens == [2, 3, 4]
    # Nothing is continued from one answer into the next, nor with what stands between them.
    assert drafter.propose(sequence([9, 3, 4], drafter), Budget(9, 9)).tokens == [4]
    assert drafter.propose(sequence([9, 2, 3], drafter), Budget(9, 9)).tokens == [3, 4]
    assert drafter.propose(sequence([SEPARATOR + 1], drafter), Budget(9, 9)).tokens == [0]
    fresh = Suffix(store_tokens=0)
    fresh.close(sequence([20], fresh, generated=[1, 2, 3, 4]))
    assert fresh.propose(sequence([9, 1, 2], fresh), Budget(9, 9)).tokens == [2]
    assert sum(automaton.tokens for automaton in fresh._store) == 0


@given(st.lists(st.integers(0, 30), max_size=30), st.integers(1, 40))
@settings(steady, max_examples=60)
def test_the_store_is_bounded(lengths: list[int], most: int) -> None:
    """`store_tokens` is the most that is remembered across requests."""
    drafter = Suffix(store_tokens=most)
    for i, length in enumerate(lengths):
        drafter.remember([i % VOCAB] * length)
        assert sum(automaton.tokens for automaton in drafter._store) <= most


def test_the_store_drops_its_older_half() -> None:
    drafter = Suffix(store_tokens=40)
    for i in range(20):
        drafter.remember([i, 100 + i])
        guesses = [drafter.propose(sequence([j], drafter), Budget(4, 4)).tokens for j in range(20)]
        known = [j for j in range(20) if guesses[j] == [j, 100 + j]]
        assert known == list(range(i + 1 - len(known), i + 1))  # what it knows is the newest
        assert len(known) == i + 1 if 3 * (i + 1) <= 20 else len(known) >= 6
        assert all(guess == [j] for j, guess in enumerate(guesses) if j not in known)


@pytest.mark.parametrize("options", [{"min_match": 0}, {"width": 0}, {"store_tokens": -1}])
def test_suffix_options_out_of_range(options: dict[str, int]) -> None:
    with pytest.raises(UsageError):
        Suffix(**options)


# N-grams


@given(st.lists(letters, min_size=1, max_size=20), st.integers(1, 4), st.integers(0, 3), st.integers(1, 8))
@settings(steady, max_examples=400)
def test_ngram_copies_what_followed_the_longest_and_most_recent_match(
    text: list[int], min_n: int, more: int, depth: int
) -> None:
    drafter = NGram(min_n=min_n, max_n=min_n + more)
    found = drafter.propose(sequence(text, drafter), Budget(depth, depth))
    wanted: list[int] = []
    for n in range(min_n + more, min_n - 1, -1):
        ends = [end for end in occurrences(text, text[-n:]) if end < len(text)] if n <= len(text) else []
        if ends and not wanted:
            wanted = continuation(text, ends[-1], depth)
    assert found.is_chain and found.tokens == [text[-1], *wanted]


@given(st.lists(letters, min_size=1, max_size=20), st.integers(2, 4), st.integers(1, 5), st.integers(1, 12))
@settings(steady, max_examples=200)
def test_ngram_makes_a_tree_of_several_matches(text: list[int], matches: int, depth: int, nodes: int) -> None:
    drafter, budget = NGram(matches=matches, max_n=3), Budget(depth, nodes, matches)
    found = drafter.propose(sequence(text, drafter), budget)
    places = []
    for n in (3, 2, 1):
        ends = [end for end in occurrences(text, text[-n:]) if end < len(text)] if n <= len(text) else []
        places += [end for end in reversed(ends) if end not in places]
    wanted = Tree([text[-1]])
    for end in places[:matches]:
        wanted.add_path(continuation(text, end, depth), budget)
    assert (found.tokens, found.parents) == (wanted.tokens, wanted.parents)
    assert found.trim(budget) is found


@given(st.lists(letters, min_size=2, max_size=16), st.data())
@steady
def test_ngram_sees_the_same_whether_text_comes_at_once_or_bit_by_bit(text: list[int], data: st.DataObject) -> None:
    drafter, at = NGram(), data.draw(st.integers(1, len(text) - 1))
    seq = sequence(text[:at], drafter)
    while True:
        once = drafter.propose(sequence(seq.tokens, drafter), Budget(4, 4))
        assert drafter.propose(seq, Budget(4, 4)).tokens == once.tokens
        if len(seq.tokens) == len(text):
            break
        seq.tokens += text[len(seq.tokens) :][: data.draw(st.integers(1, 3))]


@given(st.lists(letters, min_size=2, max_size=12), st.integers(0, 30), st.data())
@steady
def test_a_continuation_goes_on_with_itself(text: list[int], count: int, data: st.DataObject) -> None:
    start = data.draw(st.integers(1, len(text) - 1))
    longer = list(text)
    while len(longer) < start + count:  # the token that follows is the one that stood a period before
        longer.append(longer[len(longer) - (len(text) - start)])
    assert continuation(text, start, count) == longer[start : start + count]


def test_a_repetition_is_drafted_in_full() -> None:
    drafter = NGram()
    assert drafter.propose(sequence([9, 1, 2, 1, 2, 1], drafter), Budget(7, 7)).tokens == [1, 2, 1, 2, 1, 2, 1, 2]
    assert drafter.propose(sequence([3, 3], drafter), Budget(4, 4)).tokens == [3, 3, 3, 3, 3]


@pytest.mark.parametrize("options", [{"min_n": 0}, {"min_n": 5}, {"max_n": 0}, {"matches": 0}])
def test_ngram_options_out_of_range(options: dict[str, int]) -> None:
    with pytest.raises(UsageError):
        NGram(**options)


# Token recycling


def scored(tree: Tree, seed: int = 0) -> Scores:
    return Scores(
        Logits(torch.randn(len(tree), VOCAB, generator=torch.Generator().manual_seed(seed), dtype=torch.float64))
    )


def passed(tree: Tree, path: list[int], scores: Scores) -> Step:
    tokens = [tree.tokens[n] for n in path[1:]] + [int(scores.logits[path[-1]].argmax())]
    return Step(tree, path, tokens, path)


def test_recycling_starts_with_the_prompt() -> None:
    drafter = Recycling(k=3)
    tree = drafter.propose(sequence([1, 2, 3, 1], drafter), Budget(5, 20, 3))
    assert tree.is_chain and tree.tokens == [1, 2, 3, 1, 2, 3]
    # A later prompt teaches only what is not known.
    drafter.propose(sequence([2, 9, 4, 2], drafter), Budget(5, 20, 3))
    assert [int(drafter._known.table[token, 0]) for token in (1, 2, 3, 9, 4)] == [2, 3, 1, 4, 2]
    assert bool((drafter._known.table[:, 1:] == EMPTY).all())


def test_recyclings_table_is_the_targets_last_word_on_every_token() -> None:
    drafter = Recycling(k=3)
    seq = sequence([1, 2], drafter)
    tree = Tree([2, 5, 6, 5, 7], [-1, 0, 0, 2, 2])  # 5 stands twice: what was said last of it holds
    scores = scored(tree)
    drafter.observe(seq, passed(tree, [0, 1], scores), scores)
    best = scores.logits.all().topk(3).indices.tolist()
    assert [drafter._known.table[token].tolist() for token in (2, 5, 6, 7)] == [best[0], best[3], best[2], best[4]]
    assert drafter._known.table[1].tolist() == [2, EMPTY, EMPTY]
    assert bool((drafter._known.table[[0, 3, 4, *range(8, VOCAB)]] == EMPTY).all())
    again = scored(Tree([5]), seed=1)
    drafter.observe(seq, passed(Tree([5]), [0], again), again)
    assert drafter._known.table[5].tolist() == again.logits[0].topk(3).indices.tolist()
    assert drafter._known.table[2].tolist() == best[0]


@given(st.integers(0, 1000), st.integers(1, 4), st.integers(1, 20), st.integers(1, 5))
@settings(steady, max_examples=60)
def test_recyclings_tree_is_read_from_the_table(seed: int, depth: int, nodes: int, width: int) -> None:
    drafter, budget = Recycling(k=4), Budget(depth, nodes, width)
    seq = sequence([0, 1], drafter)
    everything = Tree([1, *(t for t in range(VOCAB) if t != 1)], [-1, *[0] * (VOCAB - 1)])
    scores = scored(everything, seed)
    drafter.observe(seq, passed(everything, [0], scores), scores)
    tree = drafter.propose(seq, budget)
    assert tree.trim(budget) is tree
    for node in range(len(tree)):
        children = [tree.tokens[child] for child in tree.children(node)]
        assert children == drafter._known.table[tree.tokens[node]].tolist()[: len(children)]
    most = sum(min(width, 4) ** level for level in range(1, depth + 1))
    assert len(tree) - 1 == min(nodes, most)  # the table is full, so the budget is used


def test_recycling_drafts_only_what_is_likelier_than_its_price() -> None:
    """While nothing is drafted, the text still says how often each rank is right."""
    drafter, target = Recycling(k=3), ToyLM(vocab=VOCAB)
    seq = sequence([0, 1], drafter)
    seq.target = target
    everything = Tree([1, *(t for t in range(VOCAB) if t != 1)], [-1, *[0] * (VOCAB - 1)])
    scores = scored(everything)
    drafter.observe(seq, passed(everything, [0], scores), scores)
    sizes = []
    for price in (0.0, 0.02, 0.2, 0.7):
        target.token_price = price
        sizes.append(len(drafter.propose(seq, Budget(3, 20, 3))))
    assert sizes == sorted(sizes, reverse=True) and sizes[0] == 21 and sizes[-1] == 1
    said = Scores(Logits(scores.logits.all()[:1]))
    for _ in range(60):  # the likeliest successor comes every time
        tree = drafter.propose(seq, Budget(3, 20, 3))
        drafter.observe(seq, Step(Tree([1]), [0], [int(drafter._known.table[1, 0])], [0]), said)
    assert len(tree) > 1 and tree.tokens[1] == int(drafter._known.table[1, 0])
    for _ in range(200):  # and then never again
        drafter.propose(seq, Budget(3, 20, 3))
        drafter.observe(seq, Step(Tree([1]), [0], [EMPTY - 1], [0]), said)
    assert len(drafter.propose(seq, Budget(3, 20, 3))) == 1


def test_recycling_learns_which_rank_is_right() -> None:
    """When the second guess is the one that is accepted, it comes to be guessed first of all."""
    drafter = Recycling(k=3, depth=3)
    seq = sequence([0, 1], drafter)
    everything = Tree([1, *(t for t in range(VOCAB) if t != 1)], [-1, *[0] * (VOCAB - 1)])
    scores = scored(everything)
    drafter.observe(seq, passed(everything, [0], scores), scores)
    for _ in range(60):
        tree = drafter.propose(seq, Budget(1, 3, 3))
        second = tree.children(ROOT)[1]
        said = Scores(
            Logits(scores.logits.all()[[everything.tokens.index(t) for t in tree.tokens]])
        )  # the same as before
        drafter.observe(seq, Step(tree, [0, second], [tree.tokens[second], 5], [0, second]), said)
    tree = drafter.propose(seq, Budget(3, 4, 3))
    first, second = tree.children(ROOT)[:2]
    assert tree.children(second) and not tree.children(first)


def test_recycling_counts_ranks_by_its_table_in_a_tree_that_others_changed() -> None:
    drafter = Recycling(k=3)
    seq = sequence([0, 1], drafter)
    scores = Scores(
        Logits(torch.zeros(1, VOCAB).index_fill_(1, torch.tensor(5), 3.0).index_fill_(1, torch.tensor(6), 2.0))
    )
    drafter.observe(seq, Step(Tree([1]), [0], [5], [0]), scores)
    before = list(drafter._matched)
    assert drafter.propose(seq, Budget(1, 3, 3)).tokens[1:3] == [5, 6]
    merged = Tree([1, 9, 6], [-1, 0, 0])  # another's guess came first, and 5 was not verified
    drafter.observe(seq, Step(merged, [0, 2], [6, 7], [0, 2]), Scores(Logits(torch.zeros(3, VOCAB))))
    assert [after - b for after, b in zip(drafter._matched, before, strict=True)] == [0, 1, 0]
    offered = list(drafter._offered)
    drafter.observe(seq, Step(Tree([1]), [0], [6], [0]), scores)  # it was not asked for this pass
    assert drafter._offered == offered


def test_guesses_say_how_likely_they_are() -> None:
    text = [1, 2, 3, 4, 5, 9, 1, 2, 3]
    for drafter in (NGram(), Suffix(per_match=2.0)):
        tree = drafter.propose(sequence(text, drafter), Budget(4, 4))
        chances = [tree.probs[node] for node in range(1, len(tree))]
        assert len(chances) == 4 and chances == sorted(chances) and 0.5 < chances[0] < chances[3] < 1
    short = NGram().propose(sequence([3, 1, 3], NGram()), Budget(1, 1))
    assert short.probs[1] < 0.3  # one token matched


# Lookahead


def comb(tree: Tree, levels: list[list[int]], column: int) -> int:
    """The node at the end of the tooth under column `column`."""
    path = [*levels[0][:column], *(level[column] for level in levels)]
    nodes = tree.walk([tree.tokens[ROOT], *path])
    assert len(nodes) == 1 + len(path)
    return nodes[-1]


@given(
    st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=9),
    st.integers(1, 5),
    st.integers(2, 4),
    st.integers(0, 99),
)
@settings(steady, max_examples=60)
def test_lookaheads_window_advances_and_fills_the_pool(prompt: list[int], window: int, n: int, seed: int) -> None:
    drafter = Lookahead(window=window, n=n, guesses=3)
    seq = sequence(prompt, drafter)
    pool: dict[int, list[tuple[int, ...]]] = {}
    for round in range(6):
        levels = [list(level) for level in drafter._state(seq).levels]
        assert len(levels) == n - 1 and all(len(level) == window for level in levels)
        tree = drafter.propose(seq, drafter.limit)
        for rest in pool.get(seq.tokens[-1], []):  # what the pool knows of the last token is tried
            assert len(tree.walk([seq.tokens[-1], *rest])) == n
        scores = scored(tree, seed + round)
        predicted = [int(scores.logits[comb(tree, levels, column)].argmax()) for column in range(window)]
        for column in range(window):
            first, *rest = [*(level[column] for level in levels), predicted[column]]
            known = pool.setdefault(first, [])
            pool[first] = [*(other for other in known if other != tuple(rest)), tuple(rest)][-3:]
        drafter.observe(seq, passed(tree, [0], scores), scores)
        assert drafter._state(seq).levels == [*levels[1:], predicted]
        assert {first: list(rests) for first, rests in drafter._state(seq).pool.items()} == pool
        seq.tokens.append(data_token(pool, seed + round))


def data_token(pool: dict[int, list[tuple[int, ...]]], at: int) -> int:
    """A token that the pool knows, so that its n-grams are tried."""
    return sorted(pool)[at % len(pool)]


def test_lookahead_keeps_its_window_where_a_budget_left_no_room() -> None:
    """Teeth that were not scored predict nothing: their guesses stay, and no n-gram is made up."""
    drafter = Lookahead(window=4, n=3, guesses=2)
    seq = sequence([1, 2, 3], drafter)
    levels = [list(level) for level in drafter._state(seq).levels]
    tree = drafter.propose(seq, drafter.limit).trim(Budget(2, 2, 1))
    scores = scored(tree)
    drafter.observe(seq, passed(tree, [0], scores), scores)
    assert drafter._state(seq).levels == [levels[1], [int(scores.logits[-1].argmax()), *levels[1][1:]]]
    assert sum(len(rests) for rests in drafter._state(seq).pool.values()) == 1


def test_lookaheads_newest_guess_comes_first() -> None:
    drafter = Lookahead(window=1, n=3, guesses=2)
    seq = sequence([1, 2], drafter)
    for gram in ([2, 5, 6], [2, 7, 8], [2, 5, 9], [2, 7, 8]):
        drafter._remember(drafter._state(seq), gram)
    tree = drafter.propose(seq, drafter.limit)
    assert [spelled(tree, node) for node in range(1, 5)] == [(7,), (7, 8), (5,), (5, 9)]


def test_lookahead_fits_its_own_shape() -> None:
    for window, n, guesses in itertools.product((1, 3, 5), (2, 3, 4), (1, 4)):
        drafter = Lookahead(window=window, n=n, guesses=guesses)
        seq = sequence(list(range(20)), drafter)
        for i in range(guesses):
            drafter._remember(drafter._state(seq), [19, *(i + j for j in range(n - 1))])
        tree = drafter.propose(seq, drafter.limit)
        assert tree.trim(drafter.limit) is tree


@pytest.mark.parametrize(
    ("price", "shape"),
    [(0, (5, 4, 4)), (0.012, (5, 4, 4)), (0.015, (5, 3, 4)), (0.08, (2, 2, 2)), (0.16, (1, 2, 1)), (0.2, (0, 2, 0))],
)
def test_lookahead_is_as_large_as_the_price_of_its_tokens_allows(price: float, shape: tuple[int, int, int]) -> None:
    dear, target = Lookahead(), ToyLM(vocab=VOCAB)
    target.token_price = price
    for drafter in (dear, Lookahead(price=price)):
        seq = sequence(list(range(9)), drafter)
        seq.target = target if drafter is dear else None
        for turn in range(4):
            tree = drafter.propose(seq, drafter.limit)
            assert drafter._state(seq).shape == shape and price * (len(tree) - 1) <= 1 / 3
            assert (len(tree) > 1) == (shape[0] > 0) and tree.trim(drafter.limit) is tree
            scores = scored(tree, turn)
            drafter.observe(seq, passed(tree, [0], scores), scores)
    seq = sequence(list(range(9)), free := Lookahead(price=0.0))
    seq.target = target
    assert free._shape(seq) == (5, 4, 4)


@pytest.mark.parametrize("options", [{"window": 0}, {"n": 1}, {"guesses": 0}, {"price": -0.1}])
def test_lookahead_options_out_of_range(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        Lookahead(**options)
