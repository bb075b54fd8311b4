"""Stats on passes made by hand: what is counted, per depth, and that one merge adds everything."""

from __future__ import annotations

import json

from outpace.core.sequence import Step
from outpace.core.stats import Stats, timed
from outpace.core.tree import Tree

CHAIN = Tree.chain([9, 1, 2, 3])
#    9 ─ 1 ─ 2
#      │   └ 3 ─ 4
#      └ 5
TREE = Tree([9, 1, 2, 3, 4, 5], [-1, 0, 1, 1, 3, 0])


def step(tree: Tree, path: list[int], tokens: list[int]) -> Step:
    return Step(tree, path, tokens, path)


def counted(*steps: Step) -> Stats:
    stats = Stats()
    for one in steps:
        stats.add(one)
    return stats


def test_nothing_yet() -> None:
    stats = Stats()
    assert (stats.tokens_per_pass, stats.acceptance, stats.acceptance_by_depth) == (0.0, 0.0, [])


def test_a_pass_without_a_draft() -> None:
    stats = counted(step(Tree([9]), [0], [4]))
    assert stats == Stats(passes=1, tokens=1)
    assert (stats.tokens_per_pass, stats.acceptance, stats.acceptance_by_depth) == (1.0, 0.0, [])


def test_a_chain_rejected_at_once_in_the_middle_and_never() -> None:
    rejected, middle, whole = (
        step(CHAIN, [0], [7]),
        step(CHAIN, [0, 1], [1, 7]),
        step(CHAIN, [0, 1, 2, 3], [1, 2, 3, 7]),
    )
    assert counted(rejected) == Stats(1, 1, 3, 0, [1], [0])
    assert counted(middle) == Stats(1, 2, 3, 1, [1, 1], [1, 0])
    assert counted(whole) == Stats(1, 4, 3, 3, [1, 1, 1], [1, 1, 1])
    stats = counted(rejected, middle, whole, step(Tree([9]), [0], [4]))
    assert stats == Stats(4, 8, 9, 4, [3, 2, 1], [2, 1, 1])
    assert stats.tokens_per_pass == 2.0 and stats.acceptance == 4 / 9
    assert stats.acceptance_by_depth == [2 / 3, 1 / 2, 1.0]


def test_a_tree_counts_levels_of_the_path_that_was_chosen() -> None:
    stats = counted(
        step(TREE, [0, 1, 3, 4], [1, 3, 4, 8]),
        step(TREE, [0, 1, 2], [1, 2, 8]),  # node 2 has no children: depth 3 was not offered there
        step(TREE, [0, 5], [5, 8]),  # nor depth 2 under node 5
        step(TREE, [0], [8]),
    )
    assert stats == Stats(4, 10, 20, 6, [4, 2, 1], [3, 2, 1])


def test_drafted_tokens_that_were_not_committed_are_not_accepted() -> None:
    """A rule that leaves the last node undecided commits one token less than it has nodes on the path."""
    one = step(CHAIN, [0, 1, 2], [1, 2])
    assert (one.drafted, one.accepted) == (3, 2)
    cut = step(CHAIN, [0, 1, 2, 3], [1, 2])
    assert (cut.drafted, cut.accepted) == (3, 2)


def test_a_request_that_ends_inside_its_tree_was_not_rejected_there() -> None:
    """Token 2 was the stop token: the target was never asked what it thinks of the 3 after it."""
    stats = counted(step(CHAIN, [0, 1, 2], [1, 2]))
    assert (stats.passes, stats.tokens, stats.drafted, stats.accepted) == (1, 2, 3, 2)
    assert stats.acceptance_by_depth == [1.0, 1.0]


def test_merge_adds_everything_and_changes_neither() -> None:
    short = counted(step(CHAIN, [0, 1], [1, 7]))
    long = counted(step(CHAIN, [0, 1, 2, 3], [1, 2, 3, 7]), step(CHAIN, [0], [7]))
    short.seconds, long.seconds = {"draft": 1.0, "score": 2.0}, {"score": 0.5, "keep": 0.25}
    before = short.to_dict(), long.to_dict()
    both = short.merge(long)
    assert both == long.merge(short)
    assert both == Stats(3, 7, 9, 4, [3, 2, 1], [2, 1, 1], {"draft": 1.0, "score": 2.5, "keep": 0.25})
    assert (short.to_dict(), long.to_dict()) == before
    assert short.merge(Stats()) == short
    both.offered.append(1)
    assert len(short.offered) == 2 and len(long.offered) == 3


def test_merge_of_steps_is_the_sum_of_their_merges() -> None:
    steps = [step(TREE, [0, 1, 2], [1, 2, 8]), step(CHAIN, [0], [7]), step(Tree([9]), [0], [4])]
    merged = Stats()
    for one in steps:
        merged = merged.merge(counted(one))
    assert merged == counted(*steps)


def test_to_dict_has_counts_and_shares_and_is_json() -> None:
    stats = counted(step(CHAIN, [0, 1], [1, 7]), step(CHAIN, [0, 1, 2], [1, 2, 7]))
    stats.seconds["score"] = 0.5
    assert json.loads(json.dumps(stats.to_dict())) == {
        "passes": 2,
        "tokens": 5,
        "drafted": 6,
        "accepted": 3,
        "offered": [2, 2, 1],
        "matched": [2, 1, 0],
        "seconds": {"score": 0.5},
        "tokens_per_pass": 2.5,
        "acceptance": 0.5,
        "acceptance_by_depth": [1.0, 0.5, 0.0],
    }


def test_timed_adds_up_also_when_what_it_times_fails() -> None:
    seconds: dict[str, float] = {"score": 1.0}
    with timed(seconds, "draft"):
        pass
    try:
        with timed(seconds, "score"):
            raise KeyError
    except KeyError:
        pass
    assert seconds["score"] >= 1.0 and seconds["draft"] >= 0.0 and len(seconds) == 2
