"""The nodes that each strategy lets enter, on hand-made trees and on random candidates."""

from __future__ import annotations

import math
import random

import pytest

from penstock.strategies.base import NOW, ON_EVENT, Autoregressive, Strategy
from penstock.strategies.pipedec import PipeDec, StaticTree, best_candidates
from penstock.tree import Node, TokenTree
from tests.contexts import context
from tests.unit.test_tree import make_tree


def answer(nodes: list[Node], rng: random.Random, count: int) -> None:
    """Give every node ``count`` random candidates, best first, whose chances sum to at most 1."""
    for node in nodes:
        weights = sorted((rng.random() + 1e-3 for _ in range(count)), reverse=True)
        total = sum(weights) * 1.1
        tokens = rng.sample(range(100), count)
        node.asked = True
        node.candidates = [(token, math.log(w / total)) for token, w in zip(tokens, weights, strict=True)]


def is_ready(strategy: Strategy, tree: TokenTree) -> bool:
    at = strategy.ready_at(tree, context())
    assert at in (NOW, ON_EVENT), "these strategies wait for nothing but events"
    return at == NOW


def enter(strategy: Strategy, tree: TokenTree) -> list[Node]:
    assert is_ready(strategy, tree)
    rows = strategy.enter(tree, context())
    seen: set[int] = set()
    for node in rows:
        assert not node.entered, "a node enters once"
        assert node.parent is None or node.parent.entered or node.parent.id in seen, "parents enter first"
        seen.add(node.id)
    for node in rows:
        node.entered = True
    assert rows
    return rows


def test_autoregressive_enters_the_root_once() -> None:
    tree, strategy = make_tree(), Autoregressive()
    assert enter(strategy, tree) == [tree.root]
    assert not is_ready(strategy, tree)
    assert strategy.ask(tree, context()) == []


def test_pipedec_takes_the_width_best_of_the_layer_by_cumulative_probability() -> None:
    rng = random.Random(1)
    tree, strategy = make_tree(), PipeDec(depth=9, width=5, children=4)
    assert enter(strategy, tree) == [tree.root]
    for _ in range(4):
        frontier = strategy.ask(tree, context())
        assert not is_ready(strategy, tree), "the drafter has yet to answer"
        answer(frontier, rng, 4)
        scores = sorted((n.score + chance for n in frontier for _, chance in n.candidates or ()), reverse=True)
        layer = enter(strategy, tree)
        assert len(layer) == min(5, 4 * len(frontier))
        assert sorted((node.score for node in layer), reverse=True) == pytest.approx(scores[: len(layer)])
        assert len({node.position for node in layer}) == 1


def test_pipedec_keeps_one_layer_for_each_stage() -> None:
    """Section 3.1: the tree is as deep as there are groups, so the next layer waits for a result to prune by."""
    tree, strategy = make_tree(), PipeDec(depth=3, width=2, children=2)
    for _ in range(3):
        answer(enter(strategy, tree), random.Random(5), 2)
    assert not is_ready(strategy, tree)
    tree.commit(next(iter(tree.root.children)))
    assert len(enter(strategy, tree)) <= 2


def test_pipedec_chooses_among_the_survivors_of_a_prune() -> None:
    """Section 3.3.4: the update comes after the pruning, so the survivors fill the layer."""
    tree, strategy = make_tree(), PipeDec(depth=9, width=2, children=2)
    enter(strategy, tree)
    tree.root.candidates = [(1, math.log(0.6)), (2, math.log(0.4))]
    good, bad = enter(strategy, tree)
    good.candidates = [(3, math.log(0.9)), (4, math.log(0.1))]
    bad.candidates = [(5, math.log(0.5)), (6, math.log(0.5))]
    tree.commit(bad.token)
    assert [node.token for node in enter(strategy, tree)] == [5, 6]


def test_pipedec_grows_from_the_deepest_live_nodes_when_the_last_layer_has_died() -> None:
    tree, strategy = make_tree(), PipeDec(depth=9, width=1, children=2)
    enter(strategy, tree)
    tree.root.candidates = [(1, -0.1), (2, -3.0)]
    (child,) = enter(strategy, tree)
    assert not is_ready(strategy, tree)
    child.candidates = [(3, -0.1)]
    (grandchild,) = enter(strategy, tree)
    tree.commit(1)
    tree.commit(3)
    assert tree.root is grandchild
    assert strategy.ask(tree, context()) == [grandchild]


def test_static_tree_drafts_in_full_then_enters_in_one_batch() -> None:
    rng = random.Random(2)
    tree, strategy = make_tree(), StaticTree(tree_size=12, tree_depth=3, children=4)
    for depth in range(3):
        assert not is_ready(strategy, tree)
        level = strategy.ask(tree, context())
        assert {node.position for node in level} == {tree.root.position + depth}
        answer(level, rng, 4)
    assert strategy.ask(tree, context()) == []
    rows = enter(strategy, tree)
    assert len(rows) == 13
    assert rows[0] is tree.root
    entered = {node.id for node in rows}
    left = [node.score for node in tree.nodes() if node.id not in entered]
    assert min(node.score for node in rows) >= max(left, default=-math.inf)
    assert not is_ready(strategy, tree), "lockstep: nothing enters until the root has moved"


def test_static_tree_in_segments_waits_until_all_are_back() -> None:
    """FlowSpec's naive PP: the best nodes first, nothing pruned, and no new tree while one is under way."""
    rng = random.Random(2)
    tree, strategy = make_tree(), StaticTree(tree_size=9, tree_depth=3, children=4, segments=3)
    assert not strategy.holds_results(context()), "of the prompt"
    while nodes := strategy.ask(tree, context()):
        answer(nodes, rng, 4)
    segments: list[list[Node]] = []
    for stream in range(3):
        assert is_ready(strategy, tree)
        segments.append(enter(strategy, tree))
        for node in segments[-1]:
            node.stream = stream
        assert strategy.holds_results(context(oldest=0))
    assert [len(rows) for rows in segments] == [3, 3, 4]
    scores = [node.score for rows in segments for node in rows]
    assert scores == sorted(scores, reverse=True)
    assert not is_ready(strategy, tree)
    assert strategy.ask(tree, context()) == []
    assert strategy.holds_results(context(oldest=2))
    assert not strategy.holds_results(context(oldest=3)), "another request's"
    assert not strategy.holds_results(context())


def test_static_tree_forgets_segments_of_a_tree_that_was_given_up() -> None:
    tree, strategy = make_tree(), StaticTree(tree_size=4, tree_depth=1, children=4, segments=2)
    answer(strategy.ask(tree, context()), random.Random(1), 4)
    enter(strategy, tree)
    tree.discard()
    tree.root.alive = False
    anew = make_tree()
    assert not strategy.holds_results(context(oldest=0))
    assert not is_ready(strategy, anew), "its root has to be drafted from"
    assert strategy.ask(anew, context()) == [anew.root]


def test_static_tree_begins_anew_after_a_miss() -> None:
    rng = random.Random(3)
    tree, strategy = make_tree(), StaticTree(tree_size=3, tree_depth=1, children=3)
    answer(strategy.ask(tree, context()), rng, 3)
    enter(strategy, tree)
    tree.commit(1000)
    tree.restart(Node(500, 1000, 1, 500))
    assert strategy.ask(tree, context()) == [tree.root]


def test_strategies_stay_within_the_trees_room() -> None:
    for strategy in (PipeDec(9, 8, 4), StaticTree(20, 3, 4)):
        tree = make_tree()
        tree._source.room = 2  # type: ignore[attr-defined]
        if isinstance(strategy, PipeDec):
            enter(strategy, tree)
        while nodes := strategy.ask(tree, context()):
            answer(nodes, random.Random(4), 4)
            tree._source.room = 2 - (tree.size - 1)  # type: ignore[attr-defined]
        if is_ready(strategy, tree):
            strategy.enter(tree, context())
        assert tree.size <= 3


def test_best_candidates_leaves_out_those_that_are_nodes_already() -> None:
    tree = make_tree()
    tree.root.candidates = [(1, -0.1), (2, -0.2), (3, -0.3)]
    tree.extend(tree.root, 1, -0.1)
    assert best_candidates([tree.root], 5) == [(tree.root, 2, -0.2), (tree.root, 3, -0.3)]
