"""The run log beside the engine that it is of, in random histories, and from two threads."""

from __future__ import annotations

import random
import threading

import pytest

from penstock.core import FinishReason
from penstock.engine.loop import Observer
from penstock.engine.scheduler import Advance
from penstock.engine.stats import COMMITTED, DEAD, SPECULATED, LoggedBatch, RunLog
from penstock.messages import Batch, Result, Rows
from penstock.requests.request import Request
from tests.histories import History


class Logging(Observer):
    """Keeps a log of all that it is told, the batches that left it, and the nodes that were committed and that died."""

    def __init__(self, log: RunLog) -> None:
        self.log = log
        self.settled: list[LoggedBatch] = []
        self.committed: set[int] = set()
        self.dead: set[int] = set()
        self.of_gone: set[int] = set()
        """Nodes of requests that ended or gave way while they were in flight."""

    def waits(self) -> None:
        settled = self.log.settle()
        for node, fate in [pair for batch in settled for pair in batch.fates.items()]:
            assert fate != SPECULATED or node not in self.committed | self.dead
            assert fate != COMMITTED or node not in self.dead
            assert fate != DEAD or node in self.dead | self.of_gone
        self.settled += settled

    def queued(self, request: Request, at: float) -> None:
        self.log.queued(request)

    def submitted(self, batch: Batch, at: float) -> None:
        self.log.submitted(batch, at)

    def arrived(self, result: Result, at: float) -> None:
        self.log.arrived(result)

    def advanced(self, request: Request, done: Advance, at: float) -> None:
        self.log.moved(request)
        self.log.advanced(done)
        self.committed.update(node.id for node in done.committed)
        self.dead.update(node.id for node in done.dead)

    def preempted(self, request: Request, at: float) -> None:
        self.log.dropped(request)
        self.note_gone(request)

    def finished(self, request: Request, reason: FinishReason, at: float) -> None:
        self.log.ended(request)
        self.note_gone(request)

    def note_gone(self, request: Request) -> None:
        for batch, _ in self.log.placed(0.0):
            rows = batch.rows
            self.of_gone.update(n for n, of in zip(rows.nodes, rows.requests, strict=True) if of == request.number)


def logged(seed: int) -> tuple[History, Logging]:
    history = History(random.Random(seed))
    observer = Logging(RunLog(history.stages))
    history.loop.observers.append(observer)
    for request in history.requests:
        history.loop.add(request)
    return history, observer


@pytest.mark.parametrize("seed", range(30))
def test_every_batch_leaves_the_log_with_spans_and_with_the_fates_that_the_engine_gave(seed: int) -> None:
    history, observer = logged(seed)
    while history.loop.busy:
        history.loop.step()
        placed = observer.log.placed(history.clock.now())
        assert [batch.stream for batch, _ in placed] == list(history.loop.inflight._batches)
        stages = [stage for _, stage in placed if stage >= 0]
        assert stages == sorted(set(stages), reverse=True), "one batch a stage, in order"
        assert max(stages, default=0) < history.stages
    while len(history.loop.inflight):
        history.loop.step()
    observer.waits()
    assert observer.log.placed(history.clock.now()) == []
    assert [batch.stream for batch in observer.settled] == list(range(history.loop.builder.next_stream))
    for batch in observer.settled:
        assert [span.stage for span in batch.spans] == list(range(history.stages))
        assert sum(map(batch.count, (COMMITTED, SPECULATED, DEAD))) == len(batch.fates)


def test_batches_from_before_the_log_are_unknown_to_it() -> None:
    log = RunLog(2)
    assert log.arrived(Result(stream=7)) is None
    assert log.settle() == []


def test_given_delays_are_kept_and_others_are_learned() -> None:
    history, observer = logged(1)
    given = RunLog(history.stages, [0.0] * history.stages)
    history.loop.observers.append(Logging(given))
    while history.loop.busy:
        history.loop.step()
    assert given._delays == [0.0] * history.stages
    assert observer.log._delays != given._delays


def test_another_thread_may_ask_where_batches_are_while_the_engine_goes_on() -> None:
    log = RunLog(3, [0.0, 1.0, 2.0])
    failed: list[BaseException] = []
    over = threading.Event()

    def ask() -> None:
        try:
            while not over.is_set():
                for batch, _ in log.placed(2.0):
                    sum(batch.fates[node] == DEAD for node in batch.rows.nodes)
        except BaseException as error:
            failed.append(error)

    asking = threading.Thread(target=ask)
    asking.start()
    for stream in range(5_000):
        log.submitted(Batch(stream=stream, rows=Rows([0], [stream], [0], [0], [0], [0])), 0.0)
        log.arrived(Result(stream=stream - 3))
        log.settle()
    over.set()
    asking.join()
    assert failed == []
