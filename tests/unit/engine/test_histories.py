"""Random histories on the hash model; ``python -m tests.histories 10000`` runs more of them."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.strategies.base import Strategy
from penstock.tree import Node, TokenTree
from tests.histories import History


@pytest.mark.parametrize(
    "block", [*range(4), *(pytest.param(block, marks=pytest.mark.whole) for block in range(4, 10))]
)
def test_numbered_histories(block: int) -> None:
    for seed in range(block * 30, block * 30 + 30):
        History(random.Random(seed)).run()


def test_histories_have_corrections(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without corrections the histories would test nothing about them."""
    corrected: list[Node] = []
    monkeypatch.setattr(TokenTree, "correct", noting(TokenTree.correct, corrected))
    seed = 0
    while len(corrected) <= 3:
        assert seed < 300
        History(random.Random(seed)).run()
        seed += 1


class WithFlowSpec(History):
    """A history in which every request runs under FlowSpec, the strategy that drafts again from known nodes."""

    def _strategy(self) -> Strategy:
        return self._flowspec(self.vocabulary - 1)


def test_histories_with_nodes_that_are_drafted_from_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    again: list[Node] = []
    redraft = TokenTree.redraft

    def noted(tree: TokenTree, node: Node) -> None:
        again.append(node)
        redraft(tree, node)

    monkeypatch.setattr(TokenTree, "redraft", noted)
    for seed in range(30):
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


def test_histories_share_and_preempt() -> None:
    """Without shared prefixes and preemptions the histories would test nothing about them."""
    cached = preempted = seed = 0
    while min(cached, preempted) < 3:
        history, seed = History(random.Random(seed)), seed + 1
        history.run()
        cached += sum(request.cached > 0 for request in history.requests)
        preempted += len(history.preempted)
        assert seed < 200


def test_histories_begin_and_end_speculation_on_trial() -> None:
    """Without trials that begin and end the histories would test nothing about them."""
    began = ended = seed = 0
    while began < 5 or not ended:
        history, seed = History(random.Random(seed)), seed + 1
        history.run()
        trials = [history.loop.estimates.trials.of(requests) for requests in (1, 2, 3, 5)]
        began += any(trial.speculating.weight > 0 for trial in trials)
        ended += any(trial.speculating.weight > 0 and not trial.speculates for trial in trials)
        assert seed < 300
