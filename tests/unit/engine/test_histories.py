"""Random histories on the hash model; ``python -m tests.histories 10000`` runs more of them."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.strategies.base import Strategy
from penstock.tree import Node, TokenTree
from tests.histories import History

SEEDS = (*range(36), 41, 49, *range(112, 118))
"""Histories in which everything happens that a history may bring; `make test-all` runs more."""
MORE = [seed for seed in range(300) if seed not in SEEDS]


def test_numbered_histories(monkeypatch: pytest.MonkeyPatch) -> None:
    """Corrections, shared prefixes, preemptions and trials happen in them: else they would test nothing of those."""
    corrected: list[Node] = []
    monkeypatch.setattr(TokenTree, "correct", noting(TokenTree.correct, corrected))
    happened: Counter[str] = Counter()
    for seed in SEEDS:
        history = History(random.Random(seed))
        history.run()
        happened["shared"] += sum(request.cached > 0 for request in history.requests)
        happened["preempted"] += len(history.preempted)
        trials = [history.loop.estimates.trials.of(requests) for requests in (1, 2, 3, 5)]
        tried = [trial for trial in trials if trial.speculating.weight > 0]
        happened["began"] += bool(tried)
        happened["ended"] += any(not trial.speculates for trial in tried)
    happened["corrected"] = len(corrected)
    for event, times in {"shared": 3, "preempted": 3, "began": 5, "ended": 1, "corrected": 4}.items():
        assert happened[event] >= times, event


@pytest.mark.whole
@pytest.mark.parametrize("block", range(8))
def test_more_numbered_histories(block: int) -> None:
    for seed in MORE[block::8]:
        History(random.Random(seed)).run()


class WithFlowSpec(History):
    """A history in which every request runs under FlowSpec, the strategy that drafts again from known nodes."""

    def _strategy(self) -> Strategy:
        return self._flowspec(self.vocabulary - 1)


@pytest.mark.parametrize("seeds", [20, pytest.param(60, marks=pytest.mark.whole)])
def test_histories_with_nodes_that_are_drafted_from_anew(seeds: int, monkeypatch: pytest.MonkeyPatch) -> None:
    again: list[Node] = []
    redraft = TokenTree.redraft

    def noted(tree: TokenTree, node: Node) -> None:
        again.append(node)
        redraft(tree, node)

    monkeypatch.setattr(TokenTree, "redraft", noted)
    for seed in range(seeds):
        WithFlowSpec(random.Random(seed)).run()
    assert len(again) > 10


def noting(correct: Callable[..., None], corrected: list[Node]) -> Callable[..., None]:
    def run(tree: TokenTree, node: Node, candidates: Sequence[tuple[int, float]]) -> None:
        corrected.append(node)
        correct(tree, node, candidates)

    return run


@settings(max_examples=60)
@given(st.randoms(use_true_random=False))
def test_any_history(rng: random.Random) -> None:
    """Hypothesis chooses every draw itself, so a failure is reported as a short history."""
    History(rng).run()
