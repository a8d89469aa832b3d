"""TokenTree against a plain model: a set of paths."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.tree import Node, TokenTree


class Numbered:
    """A node source with room to spare."""

    room = 1000

    def __init__(self) -> None:
        self.made = 0

    def speculative(self, token: int, position: int) -> Node:
        self.made += 1
        return Node(self.made, token, position, slot=self.made)


def make_tree() -> TokenTree:
    return TokenTree(Node(0, 9, 0, 0), Numbered())


def paths(tree: TokenTree) -> set[tuple[int, ...]]:
    """Token paths below the root."""
    found = set()
    for node in tree.nodes():
        path = []
        while node is not tree.root:
            path.append(node.token)
            assert node.parent is not None
            node = node.parent
        found.add(tuple(reversed(path)))
    return found - {()}


def grow(tree: TokenTree, path: tuple[int, ...]) -> None:
    node = tree.root
    for token in path:
        node = node.children.get(token) or tree.extend(node, token, -1.0)


token_paths = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=4).map(tuple), max_size=12)


@given(token_paths, st.lists(st.integers(0, 2), max_size=5))
def test_commit_keeps_exactly_the_subtree_of_the_token(grown: list[tuple[int, ...]], picks: list[int]) -> None:
    tree = make_tree()
    for path in grown:
        grow(tree, path)
    for pick in picks:
        before, nodes = paths(tree), list(tree.nodes())
        hit, dead = tree.commit(pick)
        kept = {path[1:] for path in before if path[0] == pick and len(path) > 1}
        if hit is None:
            assert pick not in {path[0] for path in before}
            assert {node.id for node in dead} == {node.id for node in nodes[1:]}
            tree.restart(Node(1000, pick, 0, 0))
        assert paths(tree) == kept
        assert tree.size == len(kept) + 1 == len(list(tree.nodes()))
        assert all(not node.alive for node in dead)
        assert all(not node.children for node in dead), "they would hold each other in memory"
        assert all(node.alive for node in tree.nodes())


def test_a_commit_changes_no_score() -> None:
    tree = make_tree()
    grow(tree, (1, 2, 3))
    assert [node.score for node in tree.nodes()] == [0.0, -1.0, -2.0, -3.0]
    tree.commit(1)
    assert [node.score for node in tree.nodes()] == [-1.0, -2.0, -3.0]


def test_a_node_that_is_drafted_from_anew_remembers_what_was_said_and_keeps_its_children() -> None:
    tree = make_tree()
    root, first = tree.root, [(1, -0.5)]
    child = tree.extend(root, 1, -0.5)
    root.asked, root.candidates = True, first
    tree.redraft(root)
    assert (root.asked, root.candidates, root.earlier) == (False, None, (first,))
    root.asked, root.candidates = True, ()
    tree.redraft(root)
    assert root.earlier == (first,), "to have nothing to say is no answer"
    assert root.children == {1: child}


def test_a_correction_is_noted_with_what_it_replaces_and_moves_nothing_by_itself() -> None:
    tree = make_tree()
    grow(tree, (1, 2))
    tree.root.candidates = [(1, -1.0)]
    for answer in ([(2, -0.5)], [(3, -0.25)]):
        tree.correct(tree.root, answer)
    assert (tree.root.candidates, tree.root.earlier) == ([(3, -0.25)], ([(1, -1.0)], [(2, -0.5)]))
    assert tree.corrected == [tree.root, tree.root]
    assert [node.score for node in tree.nodes()] == [0.0, -1.0, -2.0]


@given(token_paths, st.lists(st.tuples(st.integers(0, 50), st.integers(1, 8)), max_size=8))
def test_scores_follow_new_chances(grown: list[tuple[int, ...]], changes: list[tuple[int, int]]) -> None:
    tree = make_tree()
    for path in grown:
        grow(tree, path)
    nodes = list(tree.nodes())
    parents = [nodes[i % len(nodes)] for i, _ in changes]
    for parent, (_, quarters) in zip(parents, changes, strict=True):
        for child in parent.children.values():
            child.chance = -quarters / 4
    tree.rescore(sorted(parents, key=lambda node: node.position))
    for node in nodes:
        assert all(child.score == node.score + child.chance for child in node.children.values())


def test_frontier_is_the_deepest_level() -> None:
    tree = make_tree()
    for path in [(1, 2), (1, 0), (2,)]:
        grow(tree, path)
    assert {node.token for node in tree.frontier()} == {2, 0}
    tree.commit(2)
    assert tree.frontier() == [tree.root]


@given(st.lists(st.tuples(st.integers(0, 3), st.lists(st.integers(0, 2), min_size=1, max_size=4)), max_size=25))
def test_frontier_is_the_deepest_level_whatever_has_been_asked_before(steps: list[tuple[int, list[int]]]) -> None:
    """In the order of a walk from the root, by which strategies break ties."""
    tree = make_tree()
    for kind, path in steps:
        if kind:
            grow(tree, tuple(path))
        elif tree.commit(path[0])[0] is None:
            tree.restart(Node(1000, path[0], tree.root.position + 1, 0))
        if kind < 3:
            nodes = list(tree.nodes())
            deepest = max(node.position for node in nodes)
            assert tree.frontier() == [node for node in nodes if node.position == deepest]


def test_siblings_are_unique_and_the_dead_do_not_grow() -> None:
    tree = make_tree()
    grow(tree, (1,))
    with pytest.raises(AssertionError, match="unique"):
        tree.extend(tree.root, 1, -1.0)
    child = tree.root.children[1]
    tree.discard()
    with pytest.raises(AssertionError, match="dead"):
        tree.extend(child, 1, -1.0)
