"""BestFirst against its plain definition: look at the whole tree and all candidates, and sort by score."""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.strategies.auto import CERTAIN, FLOOR, BestFirst
from penstock.tree import Node, TokenTree
from tests.unit.test_tree import Numbered

CHANCES = [-0.25 * i for i in range(1, 9)]
"""Sums of these are exact, so that equal scores are equal; there are few of them, so that many are."""
COUNT = 5


def as_drafted(node: Node) -> list[float]:
    """The drafter's own chances."""
    return [chance for _, chance in node.candidates or ()]


class World:
    """A tree under a random engine and drafter, and what BestFirst has to say of it by definition."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.source = Numbered()
        self.tree = TokenTree(Node(0, 0, 0, 0), self.source)
        self.order = BestFirst()
        self.asked: list[Node] = []
        self.chances: dict[int, float] = {}
        """Log-probability by node id, for nodes that existed when their parent's candidates were corrected."""

    def step(self) -> None:
        self.order.look(self.tree, as_drafted)
        self.check()
        twice = [self.send, self.ask, self.answer, self.correct]
        self.rng.choice([*twice, *twice, self.commit, self.room])()

    def send(self) -> None:
        for _ in range(self.rng.randint(1, 4)):
            if self.order.best_unsent(self.tree) == -math.inf:
                break
            expected = self.nodes(lambda node: node.entered), self.candidates()
            node = self.order.take_unsent(self.tree)
            self.check_taken(node, *expected)
            assert not node.entered
            assert node.parent is None or node.parent.entered, "parents before children"
            node.entered = True

    def ask(self) -> None:
        for _ in range(self.rng.randint(1, 4)):
            if self.order.best_unasked(self.tree) == -math.inf:
                break
            expected = self.nodes(lambda node: node.asked), self.candidates()
            node = self.order.take_unasked(self.tree)
            self.check_taken(node, *expected)
            assert not node.asked
            node.asked = True
            self.asked.append(node)

    def answer(self) -> None:
        """Answers come in any order, also for nodes that have died or be committed since."""
        for _ in range(min(len(self.asked), self.rng.randint(1, 3))):
            node = self.asked.pop(self.rng.randrange(len(self.asked)))
            node.candidates = self.draft(self.rng.randint(0, 4))
            if node.candidates and node.open and self.rng.random() < 0.2:
                self.tree.correct(node, self.draft(self.rng.randint(1, 4)))
        self.order.look(self.tree, as_drafted)

    def correct(self) -> None:
        """Several nodes at once, in any order, some of them twice and some below others."""
        answered = [node for node in self.tree.nodes() if node.candidates]
        for _ in range(min(len(answered), self.rng.randint(1, 4))):
            node = self.rng.choice(answered)
            self.tree.correct(node, self.draft(self.rng.randint(1, 4)))
            said = dict(node.candidates or ())
            dropped = [child for child in node.children if child not in said]
            for token, child in node.children.items():
                self.chances[child.id] = said.get(token, rest_of(list(said.values()), len(dropped)))
        if self.rng.random() < 0.3:
            self.commit()
        self.order.look(self.tree, as_drafted)

    def draft(self, count: int) -> list[tuple[int, float]]:
        chances = sorted((self.rng.choice(CHANCES) for _ in range(count)), reverse=True)
        return list(zip(self.rng.sample(range(9), count), chances, strict=True))

    def commit(self) -> None:
        """The engine walks on from a root that has come out; a token that is no node begins a new tree."""
        if not self.tree.root.entered:
            return
        token = self.rng.choice([*self.tree.root.children, self.rng.randrange(10)])
        hit, _ = self.tree.commit(token)
        if hit is None:
            self.tree.restart(Node(self.source.made + 1000, token, self.tree.root.position + 1, 0))
        self.order.look(self.tree, as_drafted)

    def room(self) -> None:
        self.source.room = self.rng.choice([0, 0, 1000])

    def nodes(self, done: Callable[[Node], bool]) -> list[Node]:
        return [node for node in self.tree.nodes() if not done(node)]

    def candidates(self) -> list[tuple[float, Node, int]]:
        """(score, parent, token) of all that are no nodes yet."""
        return [
            (node.score + chance, node, token)
            for node in self.tree.nodes()
            for token, chance in node.candidates or ()
            if token not in node.children
        ]

    def heads(self) -> list[float]:
        """Each node's best candidate that is left."""
        best: dict[int, float] = {}
        for score, parent, _ in self.candidates():
            best[parent.id] = max(best.get(parent.id, -math.inf), score)
        return list(best.values())

    def check_taken(self, node: Node, nodes: list[Node], candidates: list[tuple[float, Node, int]]) -> None:
        """``node`` was to come next among these nodes and, where there is room, candidates."""
        candidates = candidates if self.tree.room > 0 else []
        scores = [other.score for other in nodes] + [score for score, _, _ in candidates]
        assert node.alive
        assert node.position >= self.tree.root.position, "children of past roots are past"
        assert node.score == max(scores)
        tied = [other for other in nodes if other.score == node.score]
        if tied:
            assert node is min(tied, key=lambda other: other.id if other is not self.tree.root else -1)
        else:
            ranks = [token for score, parent, token in candidates if parent is node.parent and score == node.score]
            assert node.token == ranks[0], "of one parent's the better-ranked one"

    def check(self) -> None:
        """Everything that is asked of the order without taking from it."""
        root, order, tree = self.tree.root, self.order, self.tree
        for node in tree.nodes():
            for token, child in node.children.items():
                chance = self.chances.get(child.id)
                assert child.score == node.score + (dict(node.candidates or ())[token] if chance is None else chance)
                assert child.score < node.score
        unsent, unasked = self.nodes(lambda node: node.entered), self.nodes(lambda node: node.asked)
        grown = [score for score, _, _ in self.candidates()] if tree.room > 0 else []
        for found, nodes in ((order.best_unsent(tree), unsent), (order.best_unasked(tree), unasked)):
            assert found == max([*(node.score for node in nodes), *grown], default=-math.inf) - root.score
        known = heapq.nlargest(COUNT, [*(node.score for node in unsent), *self.heads()])
        mass = sum(math.exp(score - root.score) for score in known)
        assert order.mass_unsent(tree, COUNT) == pytest.approx(mass)
        assert order.waterline(tree, COUNT) == (known[-1] - root.score if len(known) == COUNT else -math.inf)
        awaited = [node for node in tree.nodes() if node.asked and node.candidates is None]
        for mass, nodes in ((order.mass_awaited(tree), awaited), (order.mass_unasked(tree), unasked)):
            assert mass == pytest.approx(sum(math.exp(node.score - root.score) for node in nodes))


def rest_of(named: list[float], dropped: int) -> float:
    """Return the log-probability of each child that is no longer among the candidates."""
    left = (1 - sum(map(math.exp, named))) / max(1, dropped)
    return max(FLOOR, min(math.log(left) if left > 0 else FLOOR, min(named)))


@settings(max_examples=settings().max_examples * 3 // 2)
@given(st.randoms(use_true_random=False))
def test_the_best_comes_next_whatever_happens_to_the_tree(rng: random.Random) -> None:
    world = World(rng)
    for _ in range(60):
        world.step()


@pytest.mark.parametrize("seed", range(20))
def test_the_best_comes_next_in_long_runs(seed: int) -> None:
    world = World(random.Random(seed))
    for _ in range(400):
        world.step()


def test_a_certain_child_comes_after_its_parent() -> None:
    world = World(random.Random(0))
    world.order.look(world.tree, as_drafted)
    node = world.order.take_unasked(world.tree)
    node.asked, node.candidates = True, [(1, 0.0)]
    world.order.look(world.tree, as_drafted)
    rows = [world.order.take_unsent(world.tree) for _ in range(2)]
    assert [row.token for row in rows] == [0, 1]
    assert rows[1].score == CERTAIN


def test_a_hit_on_a_leaf_that_has_not_entered_keeps_what_the_drafter_says_of_it() -> None:
    """It is not a new beginning: the drafter was asked about it before the target came to it."""
    for answered in (False, True):
        world = World(random.Random(0))
        tree, order = world.tree, world.order
        order.look(tree, as_drafted)
        order.take_unasked(tree).asked = True
        order.take_unsent(tree).entered = True
        tree.root.candidates = [(1, -0.25)]
        order.look(tree, as_drafted)
        leaf = order.take_unasked(tree)
        leaf.asked = True
        if answered:
            leaf.candidates = [(2, -0.25)]
            order.look(tree, as_drafted)
        tree.commit(1)
        order.look(tree, as_drafted)
        leaf.candidates = [(2, -0.25)]
        order.look(tree, as_drafted)
        assert order.take_unsent(tree) is leaf
        leaf.entered = True
        assert order.take_unsent(tree).token == 2


def test_a_root_that_entered_before_the_first_look_is_still_asked_about() -> None:
    """With the prompt, while the drafter was busy for another request."""
    world = World(random.Random(0))
    world.tree.root.entered = True
    world.order.look(world.tree, as_drafted)
    assert world.order.best_unsent(world.tree) == -math.inf
    assert world.order.take_unasked(world.tree) is world.tree.root


def grown(chances: list[float]) -> World:
    """The root's candidates have these chances, are nodes, and the best of them is drafted from in the same way."""
    world = World(random.Random(0))
    for _ in range(2):
        world.order.look(world.tree, as_drafted)
        node = world.order.take_unasked(world.tree)
        node.asked, node.candidates = True, [(token, math.log(chance)) for token, chance in enumerate(chances)]
    world.order.look(world.tree, as_drafted)
    for _ in range(2 * len(chances) + 1):
        world.order.take_unsent(world.tree).entered = True
    return world


def test_a_corrected_child_enters_next() -> None:
    world = grown([0.6, 0.3])
    world.tree.correct(world.tree.root, [(7, math.log(0.9)), (0, math.log(0.06))])
    world.order.look(world.tree, as_drafted)
    child = world.order.take_unsent(world.tree)
    assert child.token == 7
    assert math.exp(child.score) == pytest.approx(0.9)


def test_what_lies_below_a_child_moves_with_it() -> None:
    world = grown([0.6, 0.3])
    child, dropped = world.tree.root.children[0], world.tree.root.children[1]
    world.tree.correct(world.tree.root, [(7, math.log(0.9)), (0, math.log(0.06))])
    world.order.look(world.tree, as_drafted)
    assert math.exp(child.score) == pytest.approx(0.06)
    assert math.exp(child.children[1].score) == pytest.approx(0.06 * 0.3)
    assert math.exp(dropped.score) == pytest.approx(0.04), "what the candidates leave"


def test_children_that_a_correction_drops_share_what_it_leaves_and_never_come_before_those_that_it_names() -> None:
    world = grown([0.4, 0.3, 0.2])
    world.tree.correct(world.tree.root, [(7, math.log(0.8)), (8, math.log(0.05))])
    world.order.look(world.tree, as_drafted)
    assert [math.exp(child.chance) for child in world.tree.root.children.values()] == pytest.approx([0.05] * 3)
    world.tree.correct(world.tree.root, [(7, math.log(0.8)), (8, math.log(0.17))])
    world.order.look(world.tree, as_drafted)
    assert [math.exp(child.chance) for child in world.tree.root.children.values()] == pytest.approx([0.01] * 3)
    world.tree.correct(world.tree.root, [(7, 0.0)])
    world.order.look(world.tree, as_drafted)
    assert [child.chance for child in world.tree.root.children.values()] == [FLOOR] * 3
