"""The live view's state beside the engine that it is of, in random histories and in small ones."""

from __future__ import annotations

import random

import pytest

from penstock.core import FinishReason
from penstock.engine.async_llm import PROBE_PRIORITY
from penstock.engine.loop import EngineLoop, Observer
from penstock.engine.scheduler import Advance
from penstock.messages import Sampling
from penstock.requests.request import Request
from penstock.server.live.state import CELLS, DRAWN, MOST_DONE, RECENT, SHOWN, LiveState, TreeView
from penstock.strategies.base import Autoregressive
from penstock.tree import descendants
from tests.histories import Collected, History

SEEDS = [*range(8), *(pytest.param(seed, marks=pytest.mark.whole) for seed in range(8, 40))]
FEWER = SEEDS[:20]


class Preemptions(Observer):
    """Notes preempted requests: their rows in flight are dead, even where others share their tokens."""

    def __init__(self) -> None:
        self.numbers: set[int] = set()

    def preempted(self, request: Request, at: float) -> None:
        self.numbers.add(request.number)


def watched(seed: int) -> tuple[History, LiveState, Preemptions]:
    history = History(random.Random(seed))
    state, preemptions = LiveState(history.stages), Preemptions()
    history.loop.observers += [state, preemptions]
    return history, state, preemptions


def start(history: History) -> None:
    for request in history.requests:
        history.loop.add(request)


@pytest.mark.parametrize("seed", SEEDS)
def test_what_is_shown_in_flight_is_what_the_engine_has_there(seed: int) -> None:
    history, state, preemptions = watched(seed)
    start(history)
    with state.watch():
        while history.loop.busy:
            history.loop.step()
            check_in_flight(history.loop, state, preemptions)
        history.loop.drain()
        history.loop.observers[0].waits()
        view = state.view(history.clock.now())
        assert view.in_flight == []
        assert view.trees == {}


def check_in_flight(loop: EngineLoop, state: LiveState, preemptions: Preemptions) -> None:
    shown = state.view(loop.clock.now()).in_flight
    in_flight = loop.inflight._batches
    assert [batch.stream for batch in shown] == list(in_flight)
    stages = [batch.stage for batch in shown if batch.stage >= 0]
    assert stages == sorted(set(stages), reverse=True), "one batch a stage, in order"
    for batch, nodes in zip(shown, in_flight.values(), strict=True):
        assert batch.rows == len(nodes)
        for node, letter in zip(nodes[:CELLS], batch.cells, strict=True):
            owner = loop._owner[node.id]
            if owner.finished is not None:
                assert letter == "d"
            elif owner.number not in preemptions.numbers:
                root = len(owner.token_ids) - 1 if owner.prefilling else owner.tree.root.position
                assert letter == ("d" if not node.alive else "c" if node.position <= root else "s")


@pytest.mark.parametrize("seed", SEEDS)
def test_trees_are_drawn_as_they_are(seed: int) -> None:
    drawn_and_checked(seed)


def test_trees_are_drawn_at_all() -> None:
    assert any(drawn_and_checked(seed) for seed in range(3))


class Decoding(Observer):
    """Collects the requests whose trees are to be drawn: those between their first and their last token."""

    def __init__(self) -> None:
        self.requests: dict[int, Request] = {}

    def advanced(self, request: Request, done: Advance, at: float) -> None:
        if done.finished is None:
            self.requests[request.number] = request

    def finished(self, request: Request, reason: FinishReason, at: float) -> None:
        self.requests.pop(request.number, None)


def drawn_and_checked(seed: int) -> int:
    """How many of a history's drawings held more than a root. All are checked, and none may be left out."""
    history, state, _ = watched(seed)
    decoding = Decoding()
    history.loop.observers.append(decoding)
    start(history)
    seen = 0
    with state.watch() as watcher:
        state.claim(watcher, [request.number for request in history.requests])
        while history.loop.busy:
            state._drawn_at = -1.0  # draw in every step
            state.waits()
            trees = state.view(history.clock.now()).trees
            assert trees.keys() == {n for n, request in decoding.requests.items() if not request.prefilling}
            for number, tree_view in trees.items():
                check_tree_view(tree_view, history.loop.requests[number])
                seen += bool(tree_view.nodes)
            history.loop.step()
    return seen


def check_tree_view(tree_view: TreeView, request: Request) -> None:
    live = {node.id: node for node in descendants(request.tree.root)}
    assert (tree_view.root, tree_view.size) == (request.tree.root.id, len(live) - 1)
    assert len(tree_view.nodes) == min(len(live) - 1, DRAWN)
    drawn = {tree_view.root}
    for node_view in tree_view.nodes:
        node = live[node_view.node]
        assert (node_view.token, node_view.depth) == (node.token, node.position - request.tree.root.position)
        assert node_view.parent in drawn, "parents come first"
        drawn.add(node_view.node)
    path = [(node.id, node.token) for node in request.committed[-len(tree_view.path) :]]
    assert [(step.node, step.token) for step in tree_view.path] == path
    assert tree_view.path[-1].node == tree_view.root


@pytest.mark.parametrize("seed", FEWER)
def test_batches_that_came_out_are_told_with_what_became_of_their_rows(seed: int) -> None:
    history, state, _ = watched(seed)
    start(history)
    entered: dict[int, int] = {}
    told: dict[int, int] = {}
    with state.watch():
        while history.loop.busy:
            history.loop.step()
            view = state.view(history.clock.now())
            entered |= {batch.stream: batch.rows for batch in view.in_flight}
            for batch in view.done:
                told[batch.stream] = batch.committed + batch.speculated + batch.dead
                assert [span.stage for span in batch.spans] == list(range(history.stages))
            assert len(view.done) <= MOST_DONE
    assert told
    assert told.items() <= entered.items()


@pytest.mark.parametrize("seed", FEWER)
def test_every_request_has_its_timeline(seed: int) -> None:
    history, state, _ = watched(seed)
    history.run()
    lines = {line.number: line for line in state.view(0.0).timelines}
    assert lines.keys() == {request.number for request in history.requests}
    for request in history.requests:
        line, output = lines[request.number], request.output
        assert isinstance(output, Collected)
        assert [line.finish_reason] == output.reasons
        assert (line.tokens, line.prompt_tokens) == (len(output.tokens), len(request.prompt))
        assert (line.accepted, line.drafts) == (request.metrics.accepted, request.metrics.drafts)
        moments = [line.queued_at, line.started_at, line.first_token_at, line.ended_at]
        known = [moment for moment in moments if moment is not None]
        assert known == sorted(known)
        assert (line.first_token_at is not None) == bool(output.tokens)


def test_while_nobody_watches_only_the_timelines_are_kept() -> None:
    history, state, _ = watched(3)
    start(history)
    while history.loop.busy:
        history.loop.step()
        view = state.view(history.clock.now())
        assert (view.in_flight, view.done, view.trees) == ([], [], {})
    assert len(view.timelines) == len(history.requests)


def test_a_watcher_may_come_and_go_in_the_middle() -> None:
    """A watcher does not see what entered before it came, and leaves nothing behind when it goes."""
    history, state, _ = watched(5)
    start(history)
    while history.loop.busy:
        with state.watch():
            for _ in range(3):
                if history.loop.busy:
                    history.loop.step()
        assert state.view(history.clock.now()).done == []
    assert state.watchers == 0


def request(number: int, priority: int = 0) -> Request:
    return Request(number, [1, 2], Sampling(), 4, frozenset(), Autoregressive(), Collected(), priority)


def test_only_the_newest_requests_are_shown() -> None:
    state = LiveState(stages=1)
    for number in range(100):
        state.queued(request(number), at=number)
        if number < 90:
            state.finished(request(number), FinishReason.ABORT, at=number + 0.5)
    lines = state.view(0.0).timelines
    assert [line.number for line in lines] == list(range(99, 99 - 10 - RECENT, -1))
    assert len(lines) <= SHOWN


def test_the_servers_own_question_is_not_shown() -> None:
    state = LiveState(stages=1)
    probe = request(0, PROBE_PRIORITY)
    state.queued(probe, at=0.0)
    state.admitted(probe, at=0.0)
    state.finished(probe, FinishReason.LENGTH, at=1.0)
    assert state.view(1.0).timelines == []
