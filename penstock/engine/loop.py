"""The engine's loop: results in, rows out. No torch, no socket, no clock of its own."""

from __future__ import annotations

import contextlib
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from penstock.core import FinishReason, PenstockError, PipelineError, PipelineLost
from penstock.drafters.base import Draft, Drafter, DraftRequest
from penstock.engine.commit import Advance, advance
from penstock.engine.inflight import InFlight
from penstock.engine.pace import Pace
from penstock.engine.recovery import Recovery
from penstock.engine.scheduler import Scheduler
from penstock.estimates.estimates import Estimates
from penstock.estimates.load import Load
from penstock.messages import Batch, Cancel, Result
from penstock.pipeline.base import Clock, Pipeline
from penstock.requests.batch_builder import BatchBuilder
from penstock.requests.request import Nodes, Request
from penstock.requests.slots import SlotPool
from penstock.strategies.context import Context
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

    def queued(self, request: Request, at: float) -> None:
        """A request has been taken; it waits."""

    def admitted(self, request: Request, at: float) -> None:
        """A request runs from now on; again, if it has been preempted."""

    def preempted(self, request: Request, at: float) -> None:
        """A request has given its slots to others and waits again, to be recomputed."""

    def vacated(self, at: float) -> None:
        """A stage is lost and nothing is in flight any more; all requests have been preempted and wait for others."""

    def finished(self, request: Request, reason: FinishReason, at: float) -> None:
        """A request has ended."""


class EngineLoop:
    """Requests over one pipeline and at most one drafter. ``step`` is called until ``busy`` is False.

    ``contended``: stages that compute at the same time may slow each other, as real ones of one host do. ``slowed``:
    how many times as long they are taken to be then at first; None where batches overlap even so, as a drafter needs
    that says nothing of a node before it has entered. Without a ``recovery`` a lost stage or drafter ends all requests.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        drafter: Drafter | None,
        scheduler: Scheduler,
        clock: Clock,
        observers: Sequence[Observer] = (),
        *,
        contended: bool = False,
        apart: frozenset[int] = frozenset(),
        slowed: float | None = 0.0,
        recovery: Recovery | None = None,
    ) -> None:
        self.pipeline = pipeline
        self.drafter = drafter
        self.scheduler = scheduler
        self.clock = clock
        self.observers = list(observers)
        self.pool: SlotPool = scheduler.pool
        self.nodes: Nodes = scheduler.nodes
        self.builder = BatchBuilder()
        self.inflight = InFlight()
        self.estimates = Estimates(contended, apart, pipeline.stages, slowed)
        self._share_quality()
        self.draft_due = math.inf
        """When the drafter is expected to answer; infinite while it has not been asked."""
        self.requests: dict[int, Request] = {}
        self.ended: str | None = None
        self.recovery = recovery
        self.tokens = 0
        """That have come, of all requests."""
        self._awaiting_grammars: dict[int, Request] = {}
        self._owner: dict[int, Request] = {}
        self._asked: dict[int, tuple[Request, bool]] = {}
        """Whose the nodes are that the drafter has been asked about, and whether they had entered by then; it may come
        back to any that is in a tree."""
        self._asked_at = 0.0
        self._asked_rows = 0
        self._cancels: list[Cancel] = []
        """That have yet to be sent."""
        self._deferred: list[Callable[[], object]] = []
        """What neither stages nor drafter wait for: learning from what has come, and its text."""
        self.pace = Pace(self.estimates, pipeline.stages)
        self._changed = False
        """Whether any request or tree is other than when rows and asks were last composed: else none are due."""
        self._now = 0.0
        """The moment of the present step: as of it, strategies decide and results have come."""
        self._wake_at = math.inf
        """When strategies that wait are to be asked again, whatever happens until then."""
        self._free_at_last: tuple[bool, ...] | None = None
        """What was ``_free`` when rows and asks were last composed, and still was afterwards."""

    @property
    def busy(self) -> bool:
        return bool(self.requests)

    @property
    def trouble(self) -> str | None:
        """Why nothing runs any more, for good or until hosts are back; may be read from any thread."""
        return self.ended if self.ended is not None or self.recovery is None else self.recovery.given_up

    def rebalance(self) -> bool:
        """Have stages move to hosts that are back: requests that run pause. Returns whether any stage does."""
        return self.recovery is not None and self.recovery.ask_to_move()

    def check_taking(self) -> None:
        """Raise PipelineError where no request is taken; may be called from any thread."""
        if self.ended is not None:
            raise PipelineError(f"this engine takes no more requests ({self.ended}); start a new one")
        if self.trouble is not None:
            raise PipelineError(f"no request is taken until hosts are back: {self.trouble}")

    def add(self, request: Request) -> None:
        """Queue a request. Raises RequestError if it can never run, PipelineError if nothing runs any more."""
        self.check_taking()
        self.scheduler.add(request)
        self.requests[request.number] = request
        self._changed = True
        for observer in self.observers:
            observer.queued(request, self.clock.now())

    def abort(self, request: Request) -> None:
        """End a request now, whatever is in flight for it."""
        if request.finished is None:
            self._finish(request, FinishReason.ABORT)
            self._send_cancels()

    def end(self) -> None:
        """Abort what still runs and take no more requests."""
        if self.ended is None:
            for request in list(self.requests.values()):
                self.abort(request)
            self.ended = "it was closed"
            self._stop_recovery()

    def step(self) -> None:
        """Wait for what is next, take it in, and keep stages and drafter fed.

        Where a stage is lost, requests wait until it has been replaced. Whatever else interrupts the work, Ctrl-C for
        one, ends all requests; an interrupted wait ends none.
        """
        for observer in self.observers:
            observer.waits()
        self.clock.wait(self._due())
        self._now = self.clock.now()
        try:
            if self.recovery is None or self.recovery.advance(self):
                self._work()
        except PipelineLost as lost:
            self._recover(lost)
        except BaseException as error:
            self.fail_all(error)
            raise

    def _work(self) -> None:
        self._take_results()
        self._take_drafts()
        self._take_grammars()
        free = self._free
        if self._changed or free != self._free_at_last or self.clock.now() >= self._wake_at:
            self._changed = False
            self._wake_at = math.inf
            if not self._awaits_results:
                self._compose()
            # What became free meanwhile has not been made use of: for that there is another step.
            self._free_at_last = tuple(then and now for then, now in zip(free, self._free, strict=True))
        self._send_cancels()  # every stage gets one, and none is in such haste as what enters
        self._do_deferred()

    def _compose(self) -> None:
        """Let in what may enter, and ask the drafter."""
        self._start_requests()
        self.estimates.pipeline.decode(len(self.scheduler.running))
        if not self._sends_root_first:
            self._ask()  # first: what enters may better wait for the answer
            if self._foretold and self.draft_due < math.inf:
                self._take_drafts()  # they are there at once
                self._ask()  # what enters may better wait for what follows them, too
        self._submit()
        self._ask()  # again: of what has just entered

    def _recover(self, lost: PipelineLost) -> None:
        """Begin to replace what is lost, or end all requests."""
        try:
            if self.recovery is None:
                raise lost
            self.recovery.begin(self, lost)
        except BaseException as error:
            self.fail_all(error)
            raise

    @property
    def _free(self) -> tuple[bool, ...]:
        """Whether the first stage can take a batch, the slowest one a further batch, and the drafter a question."""
        idle = self.drafter is not None and not self.drafter.busy
        return self.pipeline.ready and not self._full, not self._held, idle

    @property
    def _sends_root_first(self) -> bool:
        """Whether all that can enter are new roots, which do so at once: to miss is dear enough without any delay."""
        return all(
            (request.strategy.sends_root_first or self._is_plain(request))
            and not request.prefilling
            and not request.tree.root.entered
            for request in self.scheduler.running
        )

    @property
    def _awaits_results(self) -> bool:
        """Whether nothing can enter before a result comes: all decode plainly, their roots are under way, none waits.

        The drafter was asked about them as they entered. A host's cores are better left to its stages meanwhile."""
        running = self.scheduler.running
        return not self.scheduler.waiting and all(
            self._is_plain(one) and not one.prefilling and one.tree.root.entered for one in running
        )

    def _is_plain(self, request: Request) -> bool:
        """Whether nothing but roots is sent for a request, by its strategy or by what trials decided last."""
        strategy = request.strategy
        return not strategy.candidates or (strategy.on_trial and self.estimates.trials.plainly)

    @property
    def _held(self) -> bool:
        return self.pace.should_wait(self.clock.now(), len(self.inflight))

    @property
    def _full(self) -> bool:
        """Whether batches had better wait outside, and grow: not where one request runs, whose every row is urgent."""
        return len(self.scheduler.running) > 1 and len(self.inflight) >= self._batches

    @property
    def _batches(self) -> int:
        running, trials = self.scheduler.running, self.estimates.trials
        decoding = sum(not request.prefilling for request in running)
        speculates = trials.speculates(trials.counted(decoding, len(running) - decoding))
        drafted = any(one.strategy.rate_limited and (speculates or not one.strategy.on_trial) for one in running)
        return self.pace.target_in_flight(len(running), drafted)

    def drain(self) -> None:
        """Step until nothing is in flight any more, neither in the stages nor in the drafter."""
        while self._under_way:
            self.step()

    @property
    def _under_way(self) -> bool:
        return len(self.inflight) > 0 or (self.drafter is not None and self.drafter.busy)

    def use_estimates(self, estimates: Estimates) -> None:
        """Record into these from now on, and let the strategies of requests that come read them.

        Raises PenstockError unless the loop is idle: what is under way was begun with others.
        """
        if self.busy or self._under_way:
            raise PenstockError("an engine changes its estimates only while idle: run its requests and drain it first")
        self.estimates = estimates
        self._share_quality()
        self.pace = Pace(estimates, self.pipeline.stages)

    def _share_quality(self) -> None:
        if self.drafter is not None:
            self.drafter.calibrate_by(self.estimates.drafts)

    def _context(self) -> Context:
        """What strategies are told in a new round of questions."""
        running = self.scheduler.running
        decoding = sum(not request.prefilling for request in running)
        redrafts = self.drafter is not None and self.drafter.reads_target
        load, oldest = Load(requests=decoding, prefilling=len(running) - decoding), self.inflight.oldest
        return Context(self._now, self.draft_due, load, self.estimates, oldest, self._foretold, redrafts)

    @property
    def _foretold(self) -> bool:
        return self.drafter is not None and self.drafter.free

    def _due(self) -> float | None:
        if self.recovery is not None and self.recovery.reason is not None:
            return self.recovery.due
        moments = [self._wake_at]
        if self.recovery is not None:
            moments.append(self.recovery.due)
        if (due := self.pipeline.due) is not None:
            moments.append(due)
        if self.drafter is not None and (due := self.drafter.due) is not None:
            moments.append(due)
        if self.pace.until > self.clock.now() and not self._awaits_results:
            moments.append(self.pace.until)
        # A request may have come or been aborted between two steps; a moment that has just passed is none of the above.
        if self._changed or self._free != self._free_at_last:
            return self.clock.now()
        if self.recovery is not None and self.recovery.is_due_to_move(self):
            return self.clock.now()
        first = min(moments)
        return first if first < math.inf else None

    def _take_results(self) -> None:
        tokens = 0
        for result in self.pipeline.poll():
            self._changed = True
            out = self.inflight.out(result.stream)
            self._deferred.append(partial(self.estimates.record_result, result, self._now))
            touched: dict[int, Request] = {}
            for pick in result.picks:
                node, request = out[pick.node], self._owner[pick.node]
                if node.alive and request.finished is None:
                    node.picked = None if pick.error else pick.token
                    request.picks[node.id] = pick
                    touched[request.number] = request
            for node_id in out:
                del self._owner[node_id]
            for observer in self.observers:
                observer.arrived(result, self.clock.now())
            self._deferred += [request.output.detokenize_pending for request in touched.values()]
            context = self._context()
            for request in touched.values():
                if request.strategy.holds_results(context):
                    continue
                before = request.produced
                while request.started and self._advance(request):
                    if not self.scheduler.grow(request):
                        self._preempt(request)
                tokens += request.produced - before
        if tokens:
            self.tokens += tokens
            self._record_tokens(tokens)

    def _record_tokens(self, tokens: int) -> None:
        """Have the estimates know when tokens come, and what is under way by then."""
        running, following = self.scheduler.running, self.builder.next_stream
        decoding = all(one.strategy.on_trial and one.produced and not one.prefilling for one in running)
        oldest = self.inflight.oldest
        self.estimates.trials.record_tokens(
            tokens,
            self._now,
            len(running) if decoding else 0,
            following if oldest is None else oldest,
            following,
            self._foretold,
        )

    def _advance(self, request: Request) -> bool:
        """Walk a request's tree as far as it goes. Returns whether it goes on once there are slots for it."""
        now, root = self.clock.now(), request.tree.root
        done = advance(request, self.nodes, self.pool, now)
        self._cancel(request, done.dead)
        for node in [root, *done.committed][:-1]:
            self._asked.pop(node.id, None)
        self.estimates.drafts.record_hits(done.hits, len(done.committed))
        for root in done.verdicts:
            self.estimates.drafts.record_pick(root)
            if request.strategy.on_trial:
                assert root.candidates
                right = root.picked == root.candidates[0][0]
                self.estimates.trials.foretell(len(self.scheduler.running), right)
        for observer in self.observers:
            observer.advanced(request, done, now)
        if done.committed:
            request.losses = 0
        if done.finished is not None:
            request.error = done.error
            self._finish(request, done.finished)
        return done.needs_slot

    def _preempt(self, request: Request) -> None:
        """Preempt the least of the running requests, be it this one: it begins anew with what is committed by then."""
        victim = self.scheduler.victim()
        self._begin_anew(victim)
        if victim is not request and not self.scheduler.grow(request):
            self._preempt(request)

    def _begin_anew(self, request: Request) -> None:
        self._release(request)
        request.reset_for_recompute()
        self.scheduler.preempt(request)
        for observer in self.observers:
            observer.preempted(request, self.clock.now())

    def _cancel(self, request: Request, dead: Sequence[Node]) -> None:
        for node in dead:
            request.picks.pop(node.id, None)
            self._asked.pop(node.id, None)
        message = self.inflight.cancel(dead)
        if message is not None:
            request.metrics.rows_dead += len(message.nodes)
            self._cancels.append(message)

    def _send_cancels(self) -> None:
        cancels, self._cancels = self._cancels, []
        for message in cancels:
            self.pipeline.cancel(message)

    def _do_deferred(self) -> None:
        later, self._deferred = self._deferred, []
        for do in later:
            do()

    def _take_drafts(self) -> None:
        if self.drafter is None:
            return
        drafts = self.drafter.poll()
        if drafts:
            context = self._context()
            for draft in drafts:
                self._take_draft(draft, context)
        if not self.drafter.busy:
            if self.draft_due < math.inf:
                seconds = self.clock.now() - self._asked_at
                timing = self.drafter.timing
                self._deferred.append(partial(self.estimates.record_draft, self._asked_rows, seconds, timing))
            self.draft_due = math.inf
            self._asked_rows = 0
        if drafts:
            self._changed = True
            for observer in self.observers:
                observer.drafted(drafts, self._asked_at, self.clock.now())

    def _take_draft(self, draft: Draft, context: Context) -> None:
        """A node's first answer or, where there is one, a correction."""
        node = draft.node
        request, entered = self._asked.get(node.id, (None, False))
        if node.candidates:
            if draft.candidates and request is not None and request.strategy.corrects(context):
                request.tree.correct(node, draft.candidates)
            return
        if draft.candidates is None and request is not None:
            request.postpone(node, entered)
        node.candidates = draft.candidates or ()

    def _start_requests(self) -> None:
        for request in self.scheduler.admit():
            self.estimates.trials.interrupt()
            if request.sampling.grammar:
                self._prepare_grammar(request)
            if len(self.scheduler.running) == 1:
                self.estimates.trials.begin_text()
            for observer in self.observers:
                observer.admitted(request, self.clock.now())
        self._take_grammars()

    def _prepare_grammar(self, request: Request) -> None:
        """Have the request's grammar compiled. Until then none of its rows enters: whole stages would wait."""
        self.pipeline.prepare_grammar(request.number, request.sampling.grammar)
        if self.drafter is not None:
            self.drafter.prepare_grammar(request)
        request.awaits_grammar = True
        self._awaiting_grammars[request.number] = request

    def _take_grammars(self) -> None:
        """Let those go on whose grammars have been compiled."""
        for request in list(self._awaiting_grammars.values()):
            drafter_ready = self.drafter is None or self.drafter.has_grammar(request)
            if drafter_ready and self.pipeline.has_grammar(request.number):
                request.awaits_grammar = False
                del self._awaiting_grammars[request.number]
                self._changed = True

    def _submit(self) -> None:
        while self.pipeline.ready and not self._full:
            entries, wake_at = self.scheduler.schedule(self._context(), self._batches, self._held)
            self._wake_at = min(self._wake_at, wake_at)
            if not entries:
                break
            wanted: set[int] = set()
            entering: list[Node] = []
            drafted = False
            for request, nodes in entries:
                request.metrics.rows_entered += len(nodes)
                for node in nodes:
                    node.entered = True
                    self._owner[node.id] = request
                    if not request.prefilling and node.position >= request.tree.root.position:
                        wanted.add(node.id)
                        drafted |= node.position > request.tree.root.position
                entering.extend(nodes)
            batch = self.builder.batch(entries, wanted)
            if drafted:
                self.estimates.trials.record_drafted(batch.stream)
            for request, _ in entries:
                self.scheduler.cache_blocks(request, self.builder.prefix(request))
            beside, rows = len(self.inflight), len(entering)
            self.inflight.entered(batch.stream, entering)
            due = self.estimates.round_trips.record_entered(batch.stream, rows, self._now, beside)
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
        context = self._context()
        for request in self.scheduler.running:
            if request.prefilling:
                continue  # what the target has yet to compute may still turn out to be another's block
            nodes = list(dict.fromkeys([*request.take_postponed(), *request.strategy.ask(request.tree, context)]))
            context = replace(context, load=context.load.with_asked(len(nodes)))
            if nodes:
                strategy, stream = request.strategy, self.builder.next_stream - 1
                asks.append(DraftRequest(request, nodes, strategy.candidates, stream, strategy.corrects(context)))
                request.metrics.drafted_nodes += len(nodes)
            for node in nodes:
                node.asked = True
        if asks:
            self._asked.update((node.id, (ask.request, node.entered)) for ask in asks for node in ask.nodes)
            self._asked_at = self.clock.now()
            self._asked_rows = self.drafter.ask(asks)
            self.draft_due = self._asked_at + self.estimates.drafter.seconds(self._asked_rows)

    def _finish(self, request: Request, reason: FinishReason) -> None:
        """End a request: everything of it in flight is cancelled, every slot freed, one final reply given."""
        request.finished = reason
        if request in self.scheduler.running:
            self._release(request)
        self.scheduler.remove(request)
        del self.requests[request.number]
        request.output.finish(reason, self.clock.now())  # before an observer can fail
        for observer in self.observers:
            observer.finished(request, reason, self.clock.now())

    def _release(self, request: Request) -> None:
        """Cancel everything of a request that is in flight, and free its every slot. What it shares goes on."""
        self._changed = True
        dead = [] if request.prefilling else request.tree.discard()
        self.pool.free_speculative(node.slot for node in dead)
        self._cancel(request, [*dead, *request.private_nodes])
        for node in request.committed[-1:]:
            self._asked.pop(node.id, None)
        self.pool.free_committed(node.slot for node in request.private_nodes)
        self.pool.cache.let_go(request.blocks)
        self.pool.unreserve(request.reserved)
        self.builder.close(request.number)
        if request.sampling.grammar:
            self._awaiting_grammars.pop(request.number, None)
            self.pipeline.forget_grammar(request.number)
        if self.drafter is not None:
            self.drafter.forget(request)

    def fail_all(self, cause: BaseException) -> None:
        """Nothing can go on: every request gets its final reply, and no further one is taken."""
        if self.ended is None:
            self.ended = f"{type(cause).__name__}: {cause}"
        for request in list(self.requests.values()):
            del self.requests[request.number]
            request.finished = FinishReason.ERROR
            self.scheduler.remove(request)
            tell: list[Callable[[FinishReason, float], None]] = [request.output.finish]
            tell += [partial(observer.finished, request) for observer in self.observers]
            for told in tell:
                with contextlib.suppress(BaseException):  # it may be the cause; the others are told all the same
                    told(FinishReason.ERROR, self.clock.now())
        self._stop_recovery()

    # --------------------------------------------------------------------------------------------- for the recovery

    @property
    def running(self) -> list[Request]:
        return list(self.scheduler.running)

    def vacate(self) -> None:
        """Have all running requests wait, to begin anew: the stages know nothing any more."""
        for request in self.running:
            self._begin_anew(request)
        self.pool.forget_cached()
        self._do_deferred()
        self.inflight, self._owner, self._asked, self._cancels = InFlight(), {}, {}, []
        self.draft_due, self._asked_rows, self._wake_at = math.inf, 0, math.inf
        for observer in self.observers:
            observer.vacated(self.clock.now())

    def fail(self, request: Request, error: str) -> None:
        """End a request that cannot go on."""
        request.error = error
        self._finish(request, FinishReason.ERROR)

    def lose_all(self) -> None:
        """End all requests, those that wait too: nothing can go on."""
        for request in list(self.requests.values()):
            self._finish(request, FinishReason.ERROR)

    def resume(self, pipeline: Pipeline, drafter: Drafter | None, apart: frozenset[int]) -> None:
        """Go on with these stages, which know nothing yet."""
        self.pipeline, self.drafter = pipeline, drafter
        self._share_quality()
        self.estimates.forget_pipeline(apart)
        self.builder = BatchBuilder(self.builder.next_stream)
        self.pace = Pace(self.estimates, pipeline.stages)
        self._changed = True

    def draft_with(self, drafter: Drafter | None) -> None:
        """Go on with another drafter, which knows nothing yet. What was asked of the one before is left undrafted."""
        self.drafter = drafter
        self._share_quality()
        self.draft_due, self._asked_rows, self._asked = math.inf, 0, {}
        for request in self.running:
            for node in () if request.prefilling else request.tree.nodes():
                if node.asked and node.candidates is None:
                    node.candidates = ()
            if request.sampling.grammar and drafter is not None:
                drafter.prepare_grammar(request)
        self._changed = True

    def _stop_recovery(self) -> None:
        if self.recovery is not None:
            self.recovery.stop()

    def audit(self) -> None:
        """Raise PenstockError unless every slot is accounted for. Cheap; called when idle and by the tests."""
        running = self.scheduler.running
        trees = [request.tree for request in running if not request.prefilling]
        self.pool.audit(sum(len(request.private_nodes) for request in running), sum(tree.size - 1 for tree in trees))


def fresh_seed() -> int:
    """A seed for a request that names none."""
    return random.SystemRandom().getrandbits(62)
