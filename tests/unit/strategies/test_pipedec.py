"""PipeDec's tree beside the paper's arrays, written down as sections 3.3.1 to 3.3.4 have them."""

from __future__ import annotations

import random

import numpy as np
import pytest

from penstock.strategies.base import NOW
from penstock.strategies.pipedec import PipeDec
from penstock.tree import Node, TokenTree
from tests.contexts import context
from tests.unit.test_tree import Numbered, make_tree

MISS = 999


class Arrays:
    """The tree in breadth-first order: child counts C, tokens X, probabilities P and the mask matrix M (3.3.1)."""

    def __init__(self, token: int) -> None:
        """3.3.2: the root alone."""
        self.C, self.X, self.P = np.array([0]), np.array([token]), np.array([1.0])
        self.M = np.array([[True]])
        self.last = 1
        """Nodes of the last layer: n^(l)."""

    def update(self, Q: np.ndarray, Y: np.ndarray, width: int) -> None:
        """3.3.3: Q and Y [n^(l), c] are the last layer's candidates."""
        B = self.M @ np.log(self.P)
        layer = np.log(Q) + B[-self.last :, None]
        count = min(width, layer.size)
        S = np.zeros(layer.size, dtype=bool)
        S[np.argsort(-layer.flatten(), kind="stable")[:count]] = True
        children = S.reshape(layer.shape).sum(axis=1)
        inherited = np.repeat(self.M[-self.last :], children, axis=0)
        self.M = np.block(
            [[self.M, np.zeros((len(self.X), count), dtype=bool)], [inherited, np.eye(count, dtype=bool)]]
        )
        self.C = np.concatenate([self.C[: -self.last], children, np.zeros(count, dtype=int)])
        self.X = np.concatenate([self.X, Y.flatten()[S]])
        self.P = np.concatenate([self.P, Q.flatten()[S]])
        self.last = count

    def prune(self, token: int) -> bool:
        """3.3.4: whether the second layer holds the token; then only what lies below it stays."""
        second = list(self.X[1 : 1 + self.C[0]])
        if token not in second:
            return False
        kept = self.M[:, 1 + second.index(token)]
        self.last = int(kept[-self.last :].sum())
        self.X, self.P, self.C, self.M = self.X[kept], self.P[kept], self.C[kept], self.M[kept][:, kept]
        return True


class Drafts:
    """A draft model: candidates of a path, best first, drawn at random."""

    def __init__(self, seed: int, children: int) -> None:
        self.seed = seed
        self.children = children

    def after(self, path: tuple[int, ...]) -> list[tuple[int, float]]:
        rng = random.Random(repr((self.seed, path)))
        weights = sorted((rng.random() + 0.05 for _ in range(self.children)), reverse=True)
        tokens = rng.sample(range(50), self.children)
        return [(token, weight / sum(weights) / 1.1) for token, weight in zip(tokens, weights, strict=True)]


def path_of(tree: TokenTree, node: Node) -> tuple[int, ...]:
    return (*(path_of(tree, node.parent) if node is not tree.root and node.parent else ()), node.token)


def arrays_of(tree: TokenTree) -> tuple[list[int], list[int], np.ndarray]:
    """Tokens, child counts and the mask of our tree, breadth first."""
    nodes = list(tree.nodes())
    place = {node.id: i for i, node in enumerate(nodes)}
    mask = np.eye(len(nodes), dtype=bool)
    for node in nodes[1:]:
        assert node.parent is not None
        mask[place[node.id]] |= mask[place[node.parent.id]]
    return [node.token for node in nodes], [len(node.children) for node in nodes], mask


@pytest.mark.parametrize("seed", range(20))
def test_the_tree_is_the_papers_arrays(seed: int) -> None:
    """Timestep by timestep: a layer enters, and once the pipeline is full the target's token prunes before it does.

    Where pruning leaves none of the last layer, the paper has nothing to grow from until the next miss, and our tree
    grows on from its deepest nodes: there the two part, on purpose.
    """
    rng = random.Random(seed)
    groups, width, children = rng.randint(2, 6), rng.randint(1, 6), rng.randint(1, 4)
    drafts, strategy, source = Drafts(seed, children), PipeDec(groups, width, children), Numbered()
    tree, arrays, entered, compared = make_tree(), Arrays(9), 0, 0
    for _ in range(40):
        if entered == groups:
            token = pick(tree, rng)
            hit, _ = tree.commit(token)
            if not arrays.prune(token):
                assert hit is None
                root = source.speculative(token, tree.root.position + 1)
                tree.restart(root)
                arrays, entered = Arrays(token), 0
            else:
                entered -= 1
        if arrays.last == 0:
            break
        if entered:
            candidates = [drafts.after(path_of(tree, node)) for node in tree.frontier()]
            Q = np.array([[chance for _, chance in one] for one in candidates])
            Y = np.array([[token for token, _ in one] for one in candidates])
            arrays.update(Q, Y, width)
        for node in strategy.ask(tree, context()):
            node.asked = True
            node.candidates = [(token, float(np.log(chance))) for token, chance in drafts.after(path_of(tree, node))]
        assert strategy.ready_at(tree, context()) == NOW
        for node in strategy.enter(tree, context()):
            node.entered = True
        entered += 1
        tokens, counts, mask = arrays_of(tree)
        assert tokens == list(arrays.X)
        assert counts == list(arrays.C)
        assert np.array_equal(mask, arrays.M)
        chances = [node.chance for node in tree.nodes()][1:]
        assert chances == pytest.approx(np.log(arrays.P[1:]))
        compared += 1
    assert compared > groups or arrays.last == 0


def pick(tree: TokenTree, rng: random.Random) -> int:
    """The target's token after the root: mostly one of its children."""
    children = list(tree.root.children)
    return rng.choice(children) if children and rng.random() < 0.7 else MISS
