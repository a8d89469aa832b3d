"""The strategy `auto` while trials say that plain decoding is faster."""

from __future__ import annotations

from dataclasses import replace

import pytest

from penstock.estimates.estimates import Estimates, Load
from penstock.messages import Span
from penstock.strategies.auto import Auto
from penstock.strategies.base import NOW, ON_EVENT
from penstock.tree import Node, TokenTree
from tests.contexts import context
from tests.unit.test_tree import Numbered, make_tree

SURE = ((7, -0.001), (8, -8.0))


def contended(*, speculates: bool) -> Estimates:
    """Two stages of 10 ms that may slow each other; the trial of one request stands as said."""
    estimates = Estimates(contended=True)
    for rows in (1, 128):
        estimates.pipeline.record_spans([Span(i, 0.01 * i, 0.01 * i, 0.01 * i + 0.01, 0.0, 0.0, rows) for i in (0, 1)])
    estimates.trials.of(1).speculates = speculates
    return estimates


def answered(tree: TokenTree) -> None:
    tree.root.asked, tree.root.candidates = True, SURE


def test_the_root_enters_alone_and_nothing_is_asked() -> None:
    auto, tree, told = Auto(8, 2), make_tree(), context(contended(speculates=False))
    assert auto.ask(tree, told) == []
    assert auto.ready_at(tree, told) == NOW
    assert auto.enter(tree, told) == [tree.root]
    tree.root.entered = True
    assert auto.ready_at(tree, told) == ON_EVENT
    assert not auto.can_piggyback(tree, told)
    assert not auto.corrects(told)


def test_beside_a_prompt_the_root_enters_alone() -> None:
    """Tokens are not measured there, so that nothing would show what drafts cost."""
    auto, tree, told = Auto(8, 2), make_tree(), context(contended(speculates=True))
    assert auto.ask(tree, told) == [tree.root]
    answered(tree)
    beside = replace(told, load=Load(requests=1, prefilling=1))
    assert auto.ready_at(tree, beside) == NOW
    assert auto.enter(tree, beside) == [tree.root]
    tree.root.entered = True
    assert auto.ready_at(tree, beside) == ON_EVENT
    assert not auto.can_piggyback(tree, beside)
    assert auto.can_piggyback(tree, told)


def test_a_drafter_that_costs_nothing_is_asked_about_a_root_that_has_entered_alone() -> None:
    auto, tree, told = Auto(8, 2), make_tree(), context(contended(speculates=False), foretold=True)
    assert auto.ask(tree, told) == []
    assert auto.ready_at(tree, told) == NOW
    assert auto.enter(tree, told) == [tree.root]
    tree.root.entered = True
    assert auto.ask(tree, told) == [tree.root]
    answered(tree)
    assert auto.ask(tree, told) == []
    assert auto.ready_at(tree, told) == ON_EVENT


def free_drafter(*, right: bool) -> Estimates:
    """Estimates of a drafter whose answers take 1 ms; those about undrafted roots have all been right or all wrong."""
    estimates = contended(speculates=True)
    estimates.drafter.record(1, 0.001)
    for _ in range(200):
        estimates.drafts.record_pick(Node(1, 0, 0, 0, picked=7 if right else 6, candidates=SURE))
    return estimates


def test_a_root_does_not_wait_for_a_drafter_that_is_seldom_right() -> None:
    """The drafter is then asked about a root that has entered: one of three, so that 1 ms of 60 is a fiftieth."""
    auto, told = Auto(8, 2), context(free_drafter(right=False), foretold=True)
    assert auto.sends_root_first(told)
    asked = []
    for position in range(6):
        tree = TokenTree(Node(0, 9, position, 0), Numbered())
        assert auto.ask(tree, told) == []
        assert auto.ready_at(tree, told) == NOW
        assert auto.enter(tree, told) == [tree.root]
        tree.root.entered = True
        asked.append(len(auto.ask(tree, told)))
    assert asked == [1, 0, 0, 1, 0, 0]


def test_a_root_waits_for_a_drafter_that_is_right_often_enough() -> None:
    """Its answer saves a trip of 20 ms, and delays each of the requests that decode by 1 ms."""
    tree, estimates = make_tree(), free_drafter(right=True)
    assert not Auto(8, 2).sends_root_first(context(estimates, foretold=True))
    assert Auto(8, 2).ask(tree, context(estimates, foretold=True)) == [tree.root]
    assert estimates.pays_asking(requests=19)
    assert not estimates.pays_asking(requests=21)


def test_a_drafter_that_becomes_right_is_waited_for_again() -> None:
    auto, estimates = Auto(8, 2), free_drafter(right=False)
    told = context(estimates, foretold=True)
    while auto.sends_root_first(told):
        estimates.drafts.record_pick(Node(1, 0, 0, 0, picked=7, candidates=SURE))
    assert estimates.drafts.found == pytest.approx(0.05, abs=0.02)


def test_only_where_stages_share_the_engines_host_a_root_does_without_a_free_drafter() -> None:
    estimates = free_drafter(right=False)
    assert not Auto(8, 2).sends_root_first(context(estimates, foretold=False))
    estimates.trials.contended = False
    assert not Auto(8, 2).sends_root_first(context(estimates, foretold=True))


def test_what_has_been_drafted_waits_while_plain_decoding_is_measured_and_enters_later() -> None:
    auto, tree, estimates = Auto(8, 2), make_tree(), contended(speculates=True)
    assert auto.ask(tree, context(estimates)) == [tree.root]
    answered(tree)
    estimates.trials.of(1).speculates = False
    assert auto.ready_at(tree, context(estimates)) == NOW
    assert auto.enter(tree, context(estimates)) == [tree.root]
    tree.root.entered = True
    assert auto.ready_at(tree, context(estimates)) == ON_EVENT
    estimates.trials.of(1).speculates = True
    assert auto.ready_at(tree, context(estimates)) == NOW
    assert auto.enter(tree, context(estimates))[0].token == 7


def test_a_drafted_node_that_has_become_the_root_enters() -> None:
    auto, tree, estimates = Auto(8, 2), make_tree(), contended(speculates=True)
    auto.ask(tree, context(estimates))
    answered(tree)
    auto.ready_at(tree, context(estimates))
    (root,) = auto.enter(tree, context(contended(speculates=False)))
    root.entered = True
    drafted, *_ = auto.ask(tree, context(estimates))  # a node now, that has not entered
    tree.commit(7)
    assert tree.root is drafted
    told = context(contended(speculates=False))
    assert auto.ready_at(tree, told) == NOW
    assert auto.enter(tree, told) == [drafted]
