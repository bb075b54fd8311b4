"""Tree and Budget against brute-force definitions: a node is what its path spells, and everything follows from that."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings, strategies as st

from outpace.core.tree import OFF, ROOT, Budget, Signal, Tree

steady = settings(derandomize=True, deadline=None, max_examples=150)
tokens = st.integers(0, 3)
budgets = st.builds(Budget, depth=st.integers(0, 5), nodes=st.integers(0, 12), width=st.integers(1, 4))


@st.composite
def trees(draw: st.DrawFn, most: int = 14) -> Tree:
    """A tree grown node by node; some nodes carry a signal, some a distribution."""
    tree = Tree([draw(tokens)])
    for i in range(draw(st.integers(0, most))):
        parent = draw(st.integers(max(0, len(tree) - 3), len(tree) - 1) | st.integers(0, len(tree) - 1))
        node = tree.add(parent, draw(tokens), Signal(i / 100, 0.5, (0.1, 0.2)) if draw(st.booleans()) else None)
        if draw(st.booleans()):
            tree.proposals[node] = torch.tensor([0.25, 0.75])
    return tree


def spelled(tree: Tree, node: int) -> tuple[int, ...]:
    """What the path to a node spells: siblings differ, so no two nodes spell the same."""
    return tuple(tree.tokens[n] for n in tree.path(node))


def spellings(tree: Tree) -> list[tuple[int, ...]]:
    return [spelled(tree, node) for node in range(len(tree))]


# What a tree may be


@given(
    st.integers(0, 5).flatmap(
        lambda n: st.tuples(
            st.lists(tokens, min_size=max(0, n - 1), max_size=n + 1),
            st.lists(st.integers(-1, n), min_size=n, max_size=n),
        )
    )
)
@settings(steady, max_examples=400)
def test_a_tree_is_refused_exactly_when_it_is_not_one(made: tuple[list[int], list[int]]) -> None:
    tokens, parents = made
    right = len(tokens) == len(parents) and parents[:1] == [-1]
    right = right and all(0 <= parent < node for node, parent in enumerate(parents) if node)
    right = right and len(set(zip(parents, tokens, strict=True))) == len(tokens)
    if right:
        tree = Tree(list(tokens), list(parents))
        assert (tree.tokens, tree.parents, len(tree)) == (tokens, parents, len(tokens))
    else:
        with pytest.raises(ValueError, match=r"one parent per token|parents must come before|occurs twice"):
            Tree(list(tokens), list(parents))


def test_errors_say_what_is_wrong() -> None:
    with pytest.raises(ValueError, match="got 2 and 1"):
        Tree([1, 2])
    with pytest.raises(ValueError, match=r"root has parent -1, got \[0, 0\]"):
        Tree([1, 2], [0, 0])
    with pytest.raises(ValueError, match=r"got \[-1, 1\]"):
        Tree([1, 2], [-1, 1])
    with pytest.raises(ValueError, match="token 7 occurs twice under node 0"):
        Tree([1, 7, 7], [-1, 0, 0])
    with pytest.raises(ValueError, match="parent -1"):
        Tree.chain([])


@given(st.lists(tokens, min_size=1, max_size=12))
@steady
def test_a_chain_is_one_path(given: list[int]) -> None:
    tree = Tree.chain(given)
    assert tree.tokens == given and tree.is_chain
    assert tree.path(len(given) - 1) == list(range(len(given)))
    assert tree.depths == list(range(len(given)))
    tree.tokens.append(0)
    assert len(given) == len(tree.parents)  # the list that was given is not the tree's


# Growing


@given(trees(), st.data())
@steady
def test_add_finds_or_makes(tree: Tree, data: st.DataObject) -> None:
    before, parents = spellings(tree), list(tree.parents)
    parent, token = data.draw(st.integers(0, len(tree) - 1)), data.draw(tokens)
    known, signals = tree.child(parent, token), dict(tree.signals)
    node = tree.add(parent, token, Signal(0.9, 0.0))
    assert tree.child(parent, token) == node and spelled(tree, node) == (*spelled(tree, parent), token)
    if (*before[parent], token) in before:
        assert node == known and len(tree) == len(before)
        assert tree.signals == signals  # what was known of a node when it was first guessed stays
    else:
        assert known is None and node == len(before)
        assert tree.signals == {**signals, node: Signal(0.9, 0.0)}
    assert spellings(tree)[: len(before)] == before and tree.parents[: len(before)] == parents
    assert len(set(spellings(tree))) == len(tree)
    assert Tree(tree.tokens, tree.parents).children(parent) == tree.children(parent)


@given(trees(), st.lists(tokens, max_size=7), budgets)
@steady
def test_add_path_goes_as_far_as_the_budget(tree: Tree, path: list[int], budget: Budget) -> None:
    known, root = spellings(tree), tree.tokens[ROOT]
    wanted, have = [], list(known)
    for depth in range(1, len(path) + 1):
        parent, node = (root, *path[: depth - 1]), (root, *path[:depth])
        siblings = sum(len(other) == depth + 1 and other[:depth] == parent for other in have)
        if depth > budget.depth:
            break
        if node not in have:
            if len(have) - 1 >= budget.nodes or siblings >= budget.width:
                break
            have.append(node)
        wanted.append(path[depth - 1])
    tree.add_path(path, budget)
    assert spellings(tree) == have  # nothing else was added, and nothing moved
    assert len(tree.walk([root, *path])) >= 1 + len(wanted)


@given(st.lists(st.lists(tokens, max_size=7), max_size=8), budgets)
@steady
def test_paths_alone_never_leave_the_budget(paths: list[list[int]], budget: Budget) -> None:
    tree = Tree([0])
    for path in paths:
        tree.add_path(path, budget)
    assert fits(tree, budget) and tree.trim(budget) is tree


# What is derived


@given(trees())
@steady
def test_depths_paths_ancestors_and_children_agree(tree: Tree) -> None:
    def climb(node: int) -> list[int]:
        return [node] if node == ROOT else [*climb(tree.parents[node]), node]

    nodes = range(len(tree))
    assert [tree.path(node) for node in nodes] == [climb(node) for node in nodes]
    assert tree.depths == [len(climb(node)) - 1 for node in nodes]
    assert [tree.children(node) for node in nodes] == [[c for c in nodes if tree.parents[c] == node] for node in nodes]
    sees = torch.tensor([[key in climb(query) for key in nodes] for query in nodes])
    for since in range(len(tree) + 1):
        rows = tree.visible(since)
        assert rows.dtype == torch.bool and rows.shape == (len(tree) - since, len(tree))
        assert torch.equal(rows, sees[since:])
    assert tree.is_chain == (tree.depths == list(nodes))


@given(trees(), st.lists(tokens, max_size=8))
@steady
def test_walk_is_the_longest_path_that_spells_a_prefix(tree: Tree, given: list[int]) -> None:
    fitting = [node for node in range(len(tree)) if list(spelled(tree, node)) == given[: len(spelled(tree, node))]]
    longest = max(fitting, key=lambda node: len(tree.path(node)), default=None)
    assert tree.walk(given) == ([] if longest is None else tree.path(longest))


@given(trees(), st.data())
@steady
def test_walk_finds_every_node(tree: Tree, data: st.DataObject) -> None:
    node = data.draw(st.integers(0, len(tree) - 1))
    assert tree.walk(spelled(tree, node)) == tree.path(node)


# Budgets


def fits(tree: Tree, budget: Budget) -> bool:
    widest = max(len(tree.children(node)) for node in range(len(tree)))
    return len(tree) - 1 <= budget.nodes and max(tree.depths) <= budget.depth and widest <= budget.width


@given(trees(), budgets)
@settings(steady, max_examples=400)
def test_trim_keeps_the_first_nodes_that_fit(tree: Tree, budget: Budget) -> None:
    before = spellings(tree)
    small = tree.trim(budget)
    after = spellings(small)
    assert len(small) == 1 if budget.nodes == 0 or budget.depth == 0 else fits(small, budget)
    assert [path for path in before if path in set(after)] == after  # a sub-tree, in the same order
    place = {path: node for node, path in enumerate(before)}
    signals = {node: tree.signals[place[path]] for node, path in enumerate(after) if place[path] in tree.signals}
    assert small.signals == signals
    assert {n: q.tolist() for n, q in small.proposals.items()} == {
        node: tree.proposals[place[path]].tolist() for node, path in enumerate(after) if place[path] in tree.proposals
    }
    # Nothing was dropped for which there was room when its turn came.
    for path in before:
        if path not in after:
            earlier = [other for other in after if place[other] < place[path]]
            siblings = [other for other in earlier if len(other) == len(path) and other[:-1] == path[:-1]]
            full = len(earlier) > budget.nodes or len(path) - 1 > budget.depth or len(siblings) >= budget.width
            assert full or path[:-1] not in after
    assert spellings(tree) == before  # the tree itself is as it was
    again = small.trim(budget)
    assert again is small


@given(trees(), st.integers(0, 3))
@steady
def test_trim_to_enough_is_the_tree_itself(tree: Tree, spare: int) -> None:
    widest = max(len(tree.children(node)) for node in range(len(tree)))
    assert tree.trim(Budget(max(tree.depths) + spare, len(tree) - 1 + spare, max(1, widest + spare))) is tree


@given(budgets, st.integers(-3, 8), st.booleans())
@steady
def test_within_is_no_larger_and_a_chain_where_it_must_be(budget: Budget, depth: int, trees: bool) -> None:
    small = budget.within(depth, trees)
    assert small.depth == max(0, min(depth, budget.depth))
    assert small.nodes <= budget.nodes and small.width == (budget.width if trees else 1)
    assert small.within(depth, trees) == small
    if small.depth == 0:
        assert small.nodes == 0
    if small.width == 1:
        assert small.nodes == min(budget.nodes, small.depth)
    elif small.depth:
        assert small.nodes == budget.nodes
    chain = Tree.chain(range(10))
    assert len(chain.trim(small)) - 1 == min(small.nodes, small.depth)


def test_off_drafts_nothing() -> None:
    assert len(Tree([1, 2, 3], [-1, 0, 0]).trim(OFF)) == 1
    assert OFF.within(10, True) == OFF
