"""Upper bound of PipeDec's speed: its tree in ideal lockstep, without links, drafting time or overhead.

    python -m benchmarks.papers.pipedec_bound

A timestep is one stage time at the tree's width (``pipedec-14x3090``). The target's token is among the drafter's first
k candidates with the stated accuracy, once with the same confidence at every node and once with the synthetic drafter's
varying confidence. `penstock bench` with the same profile measures the engine itself.
"""

from __future__ import annotations

import math
import random

import numpy as np

from penstock.cluster import load_cluster, plain_step_seconds, stage_timings
from penstock.drafters.base import confidence
from penstock.estimates.estimates import Estimates, Load
from penstock.strategies.base import NOW, Context
from penstock.strategies.pipedec import PipeDec
from penstock.tree import Node, TokenTree

ACCURACY = [0.70, 0.80, 0.85, 0.88] + [0.88 + 0.07 * (i + 1) / 12 for i in range(12)]
TOKENS = 3000
ALONE = Context(
    now=0.0, draft_due=math.inf, load=Load(), estimates=Estimates(), oldest=None, foretold=False, redrafts=False
)
"""PipeDec's context, which it does not read."""


class Numbered:
    """Makes nodes without slots."""

    room = 1 << 30

    def __init__(self) -> None:
        self.made = 0

    def speculative(self, token: int, position: int) -> Node:
        self.made += 1
        return Node(self.made, token, position, 0)


class IdealDrafter:
    """A drafter whose candidate k is token k; on the path the truth is drawn from the node's own chances."""

    def __init__(self, varying: bool, seed: int) -> None:
        self._rng = random.Random(seed)
        self._varying = varying
        self._steps = list(np.diff(ACCURACY, prepend=0.0))
        self.truth: dict[int, int] = {}

    def draft(self, node: Node, right: bool) -> None:
        chances = confidence(ACCURACY, self._rng) if self._varying else self._steps
        node.candidates = [(k, float(np.log(max(p, 1e-4)))) for k, p in enumerate(chances)]
        if right and node.position not in self.truth:
            rank = int(np.searchsorted(np.cumsum(chances), self._rng.random(), side="right"))
            self.truth[node.position] = rank if rank < len(chances) else -1


def steps_per_token(depth: int, width: int, varying: bool, seed: int) -> float:
    """Timesteps per token. A layer enters each timestep; its result is there ``depth`` timesteps later."""
    drafter, strategy = IdealDrafter(varying, seed), PipeDec(depth, width, len(ACCURACY))
    tree, right = new_tree(0)
    root_entered, tokens, now = 0, 0, 0
    entered: dict[int, int] = {}
    while tokens < TOKENS:
        if tree.root.entered and now - entered.get(tree.root.id, root_entered) >= depth:
            tokens += 1
            hit, _ = tree.commit(drafter.truth[tree.root.position])
            if hit is None:
                tree, right = new_tree(tree.root.position + 1)
        if strategy.ready_at(tree, ALONE) == NOW:
            for node in strategy.enter(tree, ALONE):
                node.entered = True
                entered[node.id] = now
                is_right = node is tree.root or (
                    node.parent in right and drafter.truth[node.position - 1] == node.token
                )
                if is_right:
                    right.add(node)
                drafter.draft(node, is_right)
        now += 1
    return now / tokens


def new_tree(position: int) -> tuple[TokenTree, set[Node]]:
    """A tree of its root alone, and the set that will hold its nodes on the right path."""
    return TokenTree(Node(0, 0, position, 0), Numbered()), set()


def main() -> None:
    cluster = load_cluster("pipedec-14x3090")
    stages = stage_timings(cluster)
    plain = plain_step_seconds(cluster)
    print("confidence  width  timesteps/token  stage ms  speed-up over plain, at most")
    for varying in (False, True):
        for width in (16, 32, 48, 64):
            steps = float(np.mean([steps_per_token(len(stages), width, varying, seed) for seed in range(3)]))
            stage = max(timing.seconds(width) for timing in stages)
            name = "varying" if varying else "constant"
            print(f"{name:10}  {width:5}  {steps:15.2f}  {1e3 * stage:8.1f}  {plain / (steps * stage):8.2f}x")


if __name__ == "__main__":
    main()
