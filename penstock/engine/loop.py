"""The engine's loop: results in, rows out. No torch, no socket, no clock of its own."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

from penstock.core import FinishReason, PenstockError, PipelineError
from penstock.drafters.base import Ask, Draft, Drafter
from penstock.engine.commit import Advance, advance
from penstock.engine.inflight import InFlight
from penstock.engine.pace import Pace
from penstock.engine.scheduler import Scheduler
from penstock.messages import Batch, Result
from penstock.pipeline.base import Clock, Pipeline
from penstock.requests.feed import Feed
from penstock.requests.request import Nodes, Request
from penstock.requests.slots import SlotPool
from penstock.strategies.experience import Experience
from penstock.tree import Node


class Observer:
    """Watches a run: traces, the live view and the bench are observers. Times are the clock's seconds.

    A step of the loop is one ``waits`` and then what came of it. Each method does nothing here.
    """

    def waits(self) -> None:
        """All that could be done has been: what happens next has waited for something."""

    def submitted(self, batch: Batch, at: float) -> None:
        """A batch has been sent to the first stage."""

    def arrived(self, result: Result, at: float) -> None:
        """A batch has come out; ``advanced`` follows for every request that it told something."""

    def drafted(self, drafts: Sequence[Draft], asked_at: float, at: float) -> None:
        """The drafter has answered what it was asked then, or a part of it."""

    def advanced(self, request: Request, done: Advance, at: float) -> None:
        """A request's tree has been walked with what a result said."""


class EngineLoop:
    """Requests over one pipeline and at most one drafter. ``step`` is called until ``busy`` is False."""

    def __init__(
        self,
        pipeline: Pipeline,
        drafter: Drafter | None,
        scheduler: Scheduler,
        clock: Clock,
        observers: Sequence[Observer] = (),
    ) -> None:
        self.pipeline = pipeline
        self.drafter = drafter
        self.scheduler = scheduler
        self.clock = clock
        self.observers = list(observers)
        self.pool: SlotPool = scheduler.pool
        self.nodes = Nodes(self.pool)
        self.feed = Feed()
        self.inflight = InFlight()
        self.experience = Experience()
        self.requests: dict[int, Request] = {}
        self.ended: str | None = None
        self._owner: dict[int, Request] = {}
        self._asked: dict[int, tuple[Request, bool]] = {}
        """Whose the nodes are that the drafter has been asked about, and whether they had entered by then; it may come
        back to any that is in a tree."""
        self._asked_at = 0.0
        self._asked_rows = 0
        self.pace = Pace(self.experience, pipeline.stages)
        self._changed = False
        """Whether any request or tree is other than when rows and asks were last composed: else none are due."""
        self._free_at_last: tuple[bool, bool, bool] | None = None

    @property
    def busy(self) -> bool:
        return bool(self.requests)

    def add(self, request: Request) -> None:
        """Queue a request. Raises RequestError if it can never run, PipelineError if nothing runs any more."""
        if self.ended is not None:
            raise PipelineError(f"this engine takes no more requests ({self.ended}); start a new one")
        self.scheduler.add(request)
        self.requests[request.number] = request
        self._changed = True

    def abort(self, request: Request) -> None:
        """End a request now, whatever is in flight for it."""
        if request.finished is None:
            self._finish(request, FinishReason.ABORT)

    def end(self) -> None:
        """Abort what still runs and take no more requests."""
        if self.ended is None:
            for request in list(self.requests.values()):
                self.abort(request)
            self.ended = "it was closed"

    def step(self) -> None:
        """Wait for what is next, take it in, and keep stages and drafter fed.

        Whatever interrupts the work, a lost stage or Ctrl-C, ends all requests; an interrupted wait ends none.
        """
        for observer in self.observers:
            observer.waits()
        self.clock.wait(self._due())
        self.experience.now = self.clock.now()
        try:
            self._take_results()
            self._take_drafts()
            if self._changed or self._free != self._free_at_last or self.clock.now() >= self.experience.look_again:
                self._changed = False
                self.experience.look_again = math.inf
                self._start_requests()
                self._ask()  # first: what enters may better wait for the answer
                self._submit()
                self._ask()  # again: of what has just entered
                self._free_at_last = self._free
        except BaseException as error:
            self._lose_everything(error)
            raise

    @property
    def _free(self) -> tuple[bool, bool, bool]:
        """Whether the first stage can take a batch, the slowest one a further batch, and the drafter a question."""
        return self.pipeline.ready, not self._held, self.drafter is not None and not self.drafter.busy

    @property
    def _held(self) -> bool:
        return self.pace.holds(self.clock.now(), len(self.inflight))

    def drain(self) -> None:
        """Step until nothing is in flight any more, neither in the stages nor in the drafter."""
        while self._under_way:
            self.step()

    @property
    def _under_way(self) -> bool:
        return len(self.inflight) > 0 or (self.drafter is not None and self.drafter.busy)

    def consult(self, experience: Experience) -> None:
        """Learn into this from now on, and have the strategies of requests that come ask it.

        Raises PenstockError unless the loop is idle: what is under way was begun with another experience.
        """
        if self.busy or self._under_way:
            raise PenstockError("an engine changes its experience only while idle: run its requests and drain it first")
        self.experience = experience
        self.pace = Pace(experience, self.pipeline.stages)

    def _due(self) -> float | None:
        if self.scheduler.waiting and not self.scheduler.running:
            return self.clock.now()
        moments = [self.experience.look_again]
        if (due := self.pipeline.due) is not None:
            moments.append(due)
        if self.drafter is not None and (due := self.drafter.due) is not None:
            moments.append(due)
        if self.pace.until > self.clock.now():
            moments.append(self.pace.until)
        first = min(moments)
        return first if first < math.inf else None

    def _take_results(self) -> None:
        for result in self.pipeline.poll():
            self._changed = True
            out = self.inflight.out(result.stream)
            self.experience.arrived(result)
            touched: dict[int, Request] = {}
            for pick in result.picks:
                node, request = out[pick.node], self._owner[pick.node]
                if node.alive and request.finished is None:
                    node.picked = pick.token
                    request.picks[node.id] = pick
                    touched[request.number] = request
            for node_id in out:
                del self._owner[node_id]
            for observer in self.observers:
                observer.arrived(result, self.clock.now())
            for request in touched.values():
                self._advance(request)

    def _advance(self, request: Request) -> None:
        now = self.clock.now()
        done = advance(request, self.nodes, self.pool, now)
        self._cancel(request, done.dead)
        self.experience.decided(done.hits, len(done.committed))
        for root in done.verdicts:
            self.experience.judge(root)
        for observer in self.observers:
            observer.advanced(request, done, now)
        if done.finished is not None:
            self._finish(request, done.finished)

    def _cancel(self, request: Request, dead: Sequence[Node]) -> None:
        for node in dead:
            request.picks.pop(node.id, None)
            self._asked.pop(node.id, None)
        message = self.inflight.cancel(dead)
        if message is not None:
            request.metrics.rows_dead += len(message.nodes)
            self.pipeline.cancel(message)

    def _take_drafts(self) -> None:
        if self.drafter is None:
            return
        drafts = self.drafter.poll()
        for draft in drafts:
            self._take_draft(draft)
        if not self.drafter.busy:
            if self._asked_rows:
                self.experience.drafter.learn(self._asked_rows, self.clock.now() - self._asked_at)
                if (turn := self.drafter.spent.turn) is not None:
                    self.experience.pipeline.yielded(turn)
            self.experience.draft_due = math.inf
            self._asked_rows = 0
        if drafts:
            self._changed = True
            for observer in self.observers:
                observer.drafted(drafts, self._asked_at, self.clock.now())

    def _take_draft(self, draft: Draft) -> None:
        """A node's first answer or, where there is one, a correction."""
        node = draft.node
        request, entered = self._asked.get(node.id, (None, False))
        if node.candidates:
            if draft.candidates and request is not None and request.strategy.corrects:
                request.tree.correct(node, draft.candidates)
            return
        if draft.candidates is None and request is not None:
            request.postpone(node, entered)
        node.candidates = draft.candidates or ()

    def _start_requests(self) -> None:
        for request in self.scheduler.admit():
            request.start(self.nodes)

    def _submit(self) -> None:
        while self.pipeline.ready and (entries := self.scheduler.compose(self._held)):
            wanted: set[int] = set()
            entering: list[Node] = []
            for request, nodes in entries:
                request.metrics.rows_entered += len(nodes)
                for node in nodes:
                    node.entered = True
                    self._owner[node.id] = request
                    if node.position >= request.tree.root.position:
                        wanted.add(node.id)
                entering.extend(nodes)
            batch = self.feed.batch(entries, wanted)
            self.inflight.entered(batch.stream, entering)
            due = self.experience.entered(batch.stream, len(entering))
            for node in entering:
                node.due, node.stream = due, batch.stream
            self.pipeline.submit(batch)
            self.pace.entered(self.clock.now(), len(batch.rows))
            for observer in self.observers:
                observer.submitted(batch, self.clock.now())

    def _ask(self) -> None:
        if self.drafter is None or self.drafter.busy:
            return
        asks = []
        for request in self.scheduler.running:
            nodes = [*request.take_postponed(), *request.strategy.ask(request.tree)]
            if nodes:
                strategy, stream = request.strategy, self.feed.next_stream - 1
                asks.append(Ask(request, nodes, strategy.candidates, stream, strategy.corrects))
                request.metrics.drafted_nodes += len(nodes)
            for node in nodes:
                node.asked = True
        if asks:
            self._asked.update((node.id, (ask.request, node.entered)) for ask in asks for node in ask.nodes)
            self._asked_at = self.clock.now()
            self._asked_rows = self.drafter.ask(asks)
            self.experience.draft_due = self._asked_at + self.experience.drafter.seconds(self._asked_rows)

    def _finish(self, request: Request, reason: FinishReason) -> None:
        """End a request: everything of it in flight is cancelled, every slot freed, one final reply given."""
        request.finished = reason
        self._changed = True
        if request.certain:
            dead = request.tree.discard()
            self.pool.free_speculative(node.slot for node in dead)
            self._cancel(request, [*dead, *request.certain])
            self.pool.free_certain(node.slot for node in request.certain)
        self.scheduler.remove(request)
        self.feed.close(request.number)
        if self.drafter is not None:
            self.drafter.forget(request)
        del self.requests[request.number]
        request.output.finish(reason, self.clock.now())

    def _lose_everything(self, cause: BaseException) -> None:
        """The pipeline is gone: every request gets its final reply."""
        self.ended = f"{type(cause).__name__}: {cause}"
        for request in list(self.requests.values()):
            request.finished = FinishReason.ERROR
            request.output.finish(FinishReason.ERROR, self.clock.now())
        self.requests.clear()

    def audit(self) -> None:
        """Raise PenstockError unless every slot is accounted for. Cheap; called when idle and by the tests."""
        running = [request for request in self.scheduler.running if request.certain]
        certain = sum(len(request.certain) for request in running)
        self.pool.audit(certain, sum(request.tree.size - 1 for request in running))


def fresh_seed() -> int:
    """A seed for a request that names none."""
    return random.SystemRandom().getrandbits(62)
