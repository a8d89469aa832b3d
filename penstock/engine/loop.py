"""The engine's loop: results in, rows out. No torch, no socket, no clock of its own."""

from __future__ import annotations

import contextlib
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from penstock.core import FinishReason, PenstockError, PipelineError, PipelineLost
from penstock.drafters.base import Draft, Drafter, DraftRequest, size_in_nodes
from penstock.engine.recovery import Recovery
from penstock.engine.scheduler import Advance, InFlight, Pace, Scheduler, advance
from penstock.estimates.estimates import Estimates, Load
from penstock.messages import Batch, Cancel, Result
from penstock.pipeline.base import Clock, Pipeline
from penstock.requests.request import BatchBuilder, Nodes, Request
from penstock.requests.slots import SlotPool
from penstock.strategies.base import Context
from penstock.tree import Node


class Observer:
    """Watches a run: traces, the live view and the bench are observers. Times are the clock's seconds.

    Each step of the loop calls ``waits`` once, then the methods for what happened in the step. Here they do nothing.
    """

    def waits(self) -> None:
        """The loop is about to wait: it has done all that it could."""

    def submitted(self, batch: Batch, at: float) -> None:
        """A batch has been sent to the first stage."""

    def arrived(self, result: Result, at: float) -> None:
        """A batch has come out; ``advanced`` follows for the requests that got a pick from it."""

    def drafted(self, drafts: Sequence[Draft], asked_at: float, at: float) -> None:
        """The drafter has answered all or part of what it was asked at ``asked_at``."""

    def advanced(self, request: Request, done: Advance, at: float) -> None:
        """A request's tree has been walked along the picks of a result."""

    def queued(self, request: Request, at: float) -> None:
        """A request has been taken; it waits."""

    def admitted(self, request: Request, at: float) -> None:
        """A request runs from now on; called once more after each preemption."""

    def preempted(self, request: Request, at: float) -> None:
        """A request has given its slots to others and waits again, to be recomputed."""

    def vacated(self, at: float) -> None:
        """A stage is lost and nothing is in flight any more; all requests are preempted and wait for new stages."""

    def finished(self, request: Request, reason: FinishReason, at: float) -> None:
        """A request has ended."""


class EngineLoop:
    """Requests over one pipeline and at most one drafter. ``step`` is called until ``busy`` is False.

    It records into ``estimates``, by default those of stages that do not slow each other, of which nothing is known
    yet. Without a ``recovery`` a lost stage or drafter ends all requests.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        drafter: Drafter | None,
        scheduler: Scheduler,
        clock: Clock,
        observers: Sequence[Observer] = (),
        *,
        estimates: Estimates | None = None,
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
        self.estimates = estimates or Estimates(stages=pipeline.stages)
        self._share_quality()
        self.draft_due = math.inf
        """Time at which the drafter is expected to answer; infinite while it has not been asked."""
        self.requests: dict[int, Request] = {}
        self.ended: str | None = None
        self.recovery = recovery
        self.idle_timeout = math.inf
        """Seconds without a request after which stages and drafter rest, where the loop is stepped meanwhile."""
        self._busy_at = clock.now()
        """Time of the last step at whose end there were requests."""
        self.tokens = 0
        """Tokens committed so far, over all requests."""
        self._awaiting_grammars: dict[int, Request] = {}
        self._owner: dict[int, Request] = {}
        self._asked: dict[int, tuple[Request, bool]] = {}
        """Nodes that the drafter was asked about: their request, and whether they had entered by then. They stay here
        while they are in a tree, since the drafter may correct an answer."""
        self._asked_at, self._asked_size = 0.0, 0
        self._cancels: list[Cancel] = []
        """Cancels that have yet to be sent."""
        self._deferred: list[Callable[[], object]] = []
        """Work that neither stages nor drafter wait for, done last in a step: learning from results, decoding text."""
        self.pace = Pace(self.estimates, pipeline.stages)
        self._changed = False
        """Whether a request or tree has changed since rows and questions were last composed; else there is nothing to
        compose."""
        self._now = 0.0
        """Time of the current step: strategies decide as of it, and results count as having come then."""
        self._wake_at = math.inf
        """Time at which strategies that wait are asked again if nothing else happens before."""
        self._free_at_last: tuple[bool, ...] | None = None
        """The parts of ``_free`` that were free both before and after rows and questions were last composed."""

    @property
    def busy(self) -> bool:
        return bool(self.requests)

    @property
    def trouble(self) -> str | None:
        """Why nothing runs, for good or until hosts are back; None otherwise. May be read from any thread."""
        return self.ended if self.ended is not None or self.recovery is None else self.recovery.given_up

    def rebalance(self) -> bool:
        """Have stages move to hosts that are back, while requests pause. Returns whether any stage moves."""
        return self.recovery is not None and self.recovery.ask_to_move()

    def check_taking(self) -> None:
        """Raise PipelineError if no request is taken now; may be called from any thread."""
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
            self._send_cancels()  # now: the next step may be long in coming

    def end(self) -> None:
        """Abort what still runs and take no more requests."""
        if self.ended is None:
            for request in list(self.requests.values()):
                self.abort(request)
            self.ended = "it was closed"
            self._stop_recovery()

    def step(self) -> None:
        """Wait for the next event, take it in, and keep stages and drafter busy.

        If a stage is lost, requests wait until it has been replaced. Any other exception in the work, Ctrl-C for one,
        ends all requests, since the state is half changed; one that interrupts the wait ends none.
        """
        for observer in self.observers:
            observer.waits()
        self.clock.wait(self._due())
        self._now = self.clock.now()
        try:
            if self.recovery is None or self.recovery.advance(self):
                self._work()
                self._rest_if_idle(self.recovery)
        except PipelineLost as lost:
            self._recover(lost)
        except BaseException as error:
            self.fail_all(error)
            raise

    def _rest_if_idle(self, recovery: Recovery | None) -> None:
        if self.busy or self._under_way:
            self._busy_at = self._now
        elif recovery is not None and recovery.may_rest and self._now >= self._busy_at + self.idle_timeout:
            recovery.rest(self)

    def _work(self) -> None:
        """Do the step's work, first of all what stages wait for."""
        self._take_results()
        self._take_drafts()
        self._take_grammars()
        free = self._free
        if self._changed or free != self._free_at_last or self.clock.now() >= self._wake_at:
            self._changed = False
            self._wake_at = math.inf
            if not self._awaits_results:
                self._compose()
            # What became free meanwhile has not been used yet: ``_free`` then differs, and the next step composes.
            self._free_at_last = tuple(then and now for then, now in zip(free, self._free, strict=True))
        self._send_cancels()  # after the rows: a cancel goes to every stage and only saves work
        self._do_deferred()

    def _compose(self) -> None:
        """Start requests, ask the drafter, and send the rows that may enter."""
        self._start_requests()
        self.estimates.pipeline.decode(len(self.scheduler.running))
        root_first = self._sends_root_first
        if not root_first:
            self._ask()  # before rows enter: a strategy may rather wait for the answer
            while self._foretold and self.draft_due < math.inf:
                self._take_drafts()  # a drafter that takes no device's time has answered already
                self._ask()  # about these drafts, for the same reason
                if not self.estimates.trials.contended:
                    break  # how much is asked then is not bounded by what it takes
        # Asked again only where something has changed since: a root has entered, or drafted rows.
        if self._submit() or root_first:
            self._ask()
            if self._foretold:
                self._take_drafts()  # before other work of the step, which would count as time of the drafter's

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
        """Whether only new roots can enter. They enter before the drafter is asked: after a miss stages are idle."""
        running = self.scheduler.running
        if any(request.prefilling or request.tree.root.entered for request in running):
            return False
        drafting = [request for request in running if not self._is_plain(request)]
        if not drafting:
            return True
        context = self._context()
        return all(request.strategy.sends_root_first(context) for request in drafting)

    @property
    def _awaits_results(self) -> bool:
        """Whether nothing can enter before a result comes: no request waits, and all decode plainly, roots in flight.

        The drafter was asked about these roots as they entered, so the engine leaves the cores to the stages."""
        running = self.scheduler.running
        return not self.scheduler.waiting and all(
            self._is_plain(one) and not one.prefilling and one.tree.root.entered for one in running
        )

    def _is_plain(self, request: Request) -> bool:
        """Whether only roots are sent for a request: its strategy never drafts, or trials last decided against it."""
        strategy = request.strategy
        return not strategy.candidates or (strategy.on_trial and self.estimates.trials.plainly)

    @property
    def _held(self) -> bool:
        return self.pace.should_wait(self.clock.now(), len(self.inflight))

    @property
    def _full(self) -> bool:
        """Whether enough batches are in flight, so that rows wait outside and the next batch grows.

        It is False while one request runs: each of its rows is urgent."""
        return len(self.scheduler.running) > 1 and len(self.inflight) >= self._batches

    @property
    def _batches(self) -> int:
        running, trials = self.scheduler.running, self.estimates.trials
        if len(running) == 1:
            return 1  # the one request is in every batch, however many are in flight
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
        """Record into ``estimates`` from now on, and have strategies read them.

        Raises PenstockError unless the loop is idle: batches in flight are recorded in the estimates before.
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
        """The context that strategies see in a new round of questions."""
        running = self.scheduler.running
        decoding = sum(not request.prefilling for request in running)
        redrafts = self.drafter is not None and self.drafter.reads_target
        load, oldest = Load(requests=decoding, prefilling=len(running) - decoding), self.inflight.oldest
        return Context(self._now, self.draft_due, load, self.estimates, oldest, self._foretold, redrafts)

    @property
    def _foretold(self) -> bool:
        return self.drafter is not None and self.drafter.free

    def _due(self) -> float | None:
        """Time at which the next wait ends even without a message; None for no limit."""
        if self.recovery is not None and self.recovery.resting:
            return self.clock.now() if self.busy else None
        if self.recovery is not None and self.recovery.reason is not None:
            return self.recovery.due
        moments = [self._wake_at]
        if self.recovery is not None:
            moments.append(self.recovery.due)
            if not self.busy and self.recovery.may_rest:
                moments.append(self._busy_at + self.idle_timeout)
        if (due := self.pipeline.due) is not None:
            moments.append(due)
        if self.drafter is not None and (due := self.drafter.due) is not None:
            moments.append(due)
        if self.pace.until > self.clock.now() and not self._awaits_results:
            moments.append(self.pace.until)
        # A request may have come or been aborted between two steps, or ``pace.until`` may have passed just now, which
        # the moments above leave out.
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
            # All picks are noted before any tree is walked: one walk can follow several of them, root after root. A
            # pick below the root is kept until its node is the root.
            for pick in result.picks:
                node, request = out[pick.node], self._owner[pick.node]
                if node.alive and request.finished is None:  # else its row was computed in vain
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
                while request.started and self._advance(request):  # ``_preempt`` may hit this very request
                    if not self.scheduler.grow(request):
                        self._preempt(request)
                tokens += request.produced - before
        if tokens:
            self.tokens += tokens
            self._record_tokens(tokens)

    def _record_tokens(self, tokens: int) -> None:
        """Tell the estimates how many tokens came at this step, and which batches are in flight by then."""
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
        """Walk a request's tree along its picks. Returns whether the walk goes on once the request has more slots."""
        now, root = self.clock.now(), request.tree.root
        done = advance(request, self.nodes, self.pool, now)
        self._cancel(request, done.dead)
        # The last node committed is the new root: its answer may still come, or be corrected.
        for node in [root, *done.committed][:-1]:
            self._asked.pop(node.id, None)
        self.estimates.drafts.record_hits(done.hits, len(done.committed))
        for root in done.verdicts:
            self.estimates.drafts.record_pick(root)
        for observer in self.observers:
            observer.advanced(request, done, now)
        if done.committed:
            request.losses = 0
        if done.finished is not None:
            request.error = done.error
            self._finish(request, done.finished)
        return done.needs_slot

    def _preempt(self, request: Request) -> None:
        """Preempt running requests, the last in the queue's order first, until this one has slots or is preempted.

        A preempted request begins anew later, with its committed tokens as part of its prompt.
        """
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
        # Collected, not sent: rows that may enter now matter more to the stages than rows that they may leave out.
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
                size, timing = self._asked_size, self.drafter.timing
                self._deferred.append(partial(self.estimates.record_draft, size, seconds, timing))
            self.draft_due, self._asked_size = math.inf, 0
        if drafts:
            self._changed = True
            for observer in self.observers:
                observer.drafted(drafts, self._asked_at, self.clock.now())

    def _take_draft(self, draft: Draft, context: Context) -> None:
        """Take in the drafter's first answer for a node, or a correction of an earlier one."""
        node = draft.node
        request, entered = self._asked.get(node.id, (None, False))
        if node.candidates:
            if draft.candidates and request is not None and request.strategy.corrects(context):
                request.tree.correct(node, draft.candidates)
            return
        if draft.candidates is None and request is not None:  # it cannot say yet: the node is asked about again later
            request.postpone(node, entered)
        node.candidates = draft.candidates or ()

    def _start_requests(self) -> None:
        for request in self.scheduler.admit():
            self.estimates.trials.interrupt()
            if request.sampling.grammar:
                self._prepare_grammar(request)
            for observer in self.observers:
                observer.admitted(request, self.clock.now())
        if len(self.scheduler.running) > 1:
            for request in self.scheduler.running:
                request.undisturbed = False
        self._take_grammars()

    def _prepare_grammar(self, request: Request) -> None:
        """Have the request's grammar compiled. Until then none of its rows enters: other requests would wait, too."""
        self.pipeline.prepare_grammar(request.number, request.sampling.grammar)
        if self.drafter is not None:
            self.drafter.prepare_grammar(request)
        request.awaits_grammar = True
        self._awaiting_grammars[request.number] = request

    def _take_grammars(self) -> None:
        """Let requests go on whose grammars have been compiled."""
        for request in list(self._awaiting_grammars.values()):
            drafter_ready = self.drafter is None or self.drafter.has_grammar(request)
            if drafter_ready and self.pipeline.has_grammar(request.number):
                request.awaits_grammar = False
                del self._awaiting_grammars[request.number]
                self._changed = True

    def _submit(self) -> bool:
        """Send batches while the first stage takes them. Returns whether any row has entered."""
        first = self.builder.next_stream
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
                    # A pick is needed after the root and its drafts; the successors of a prompt's rows are known.
                    if not request.prefilling and node.position >= request.tree.root.position:
                        wanted.add(node.id)
                        drafted |= node.position > request.tree.root.position
                entering.extend(nodes)
            batch = self.builder.batch(entries, wanted)
            if drafted:
                self.estimates.trials.record_drafted(batch.stream)
            # Shared only now: a later batch that uses these blocks reaches every stage after this one.
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
        return self.builder.next_stream > first

    def _ask(self) -> None:
        if self.drafter is None or self.drafter.busy:
            return
        asks = []
        self._asked_at = self.clock.now()
        context = self._context()
        for request in self.scheduler.running:
            if request.prefilling:
                continue  # the rest of the prompt may still be found in the prefix cache
            nodes = list(dict.fromkeys([*request.take_postponed(), *request.strategy.ask(request.tree, context)]))
            if nodes:
                context = replace(context, load=context.load.with_asked(len(nodes)))  # the next strategy sees this load
                strategy, stream = request.strategy, self.builder.next_stream - 1
                levels = self.estimates.levels_between if strategy.rate_limited else math.inf
                corrects = strategy.corrects(context)
                asks.append(DraftRequest(request, nodes, strategy.candidates, stream, corrects, levels))
                request.metrics.drafted_nodes += len(nodes)
            for node in nodes:
                node.asked = True
        if asks:
            self._asked |= {node.id: (ask.request, node.entered) for ask in asks for node in ask.nodes}
            self._asked_size = size_in_nodes(self.drafter, self.drafter.ask(asks), asks)
            self.draft_due = self._asked_at + self.estimates.drafter.seconds(self._asked_size)

    def _finish(self, request: Request, reason: FinishReason) -> None:
        """End a request: cancel its rows in flight, free its slots, and give it its one final reply."""
        # Set first: picks of its rows that still come are then ignored.
        request.finished = reason
        if request in self.scheduler.running:
            self._release(request)
        self.scheduler.remove(request)
        del self.requests[request.number]
        comparable = request.undisturbed and request.strategy.candidates
        plain_s = self.estimates.plain_s if comparable else 0.0
        request.output.finish(reason, self.clock.now(), plain_s)  # before the observers, one of which may raise
        for observer in self.observers:
            observer.finished(request, reason, self.clock.now())

    def _release(self, request: Request) -> None:
        """Cancel a request's rows in flight and free all its slots. Blocks of the prefix cache that it holds stay."""
        self._changed = True
        dead = [] if request.prefilling else request.tree.discard()
        self.pool.free_speculative(node.slot for node in dead)
        # Rows of shared blocks are not cancelled, even while they are in flight: other requests may attend to them, and
        # the prefix cache offers them as computed.
        self._cancel(request, [*dead, *request.private_nodes])
        for node in request.committed[-1:]:
            self._asked.pop(node.id, None)
        self.pool.free_committed(node.slot for node in request.private_nodes)
        self.pool.cache.let_go(request.blocks)
        # What was reserved but never taken goes with what has just been freed: ``reserved`` counts both.
        self.pool.unreserve(request.reserved)
        self.builder.close(request.number)
        if request.sampling.grammar:
            self._awaiting_grammars.pop(request.number, None)
            self.pipeline.forget_grammar(request.number)
        if self.drafter is not None:
            self.drafter.forget(request)

    def fail_all(self, cause: BaseException) -> None:
        """End every request with an error as its final reply, and take no more: nothing can go on."""
        if self.ended is None:
            self.ended = f"{type(cause).__name__}: {cause}"
        for request in list(self.requests.values()):
            del self.requests[request.number]
            request.finished = FinishReason.ERROR
            self.scheduler.remove(request)
            tell: list[Callable[[FinishReason, float], None]] = [request.output.finish]
            tell += [partial(observer.finished, request) for observer in self.observers]
            for told in tell:
                with contextlib.suppress(BaseException):  # one of them may be the cause: the others are told, too
                    told(FinishReason.ERROR, self.clock.now())
        self._stop_recovery()

    # --------------------------------------------------------------------------------------------- for the recovery

    @property
    def running(self) -> list[Request]:
        return list(self.scheduler.running)

    def vacate(self) -> None:
        """Have all running requests wait, to begin anew: the new stages hold none of their rows."""
        for request in self.running:
            self._begin_anew(request)
        # After that, when no request holds a block any more: the rows of all blocks are lost.
        self.pool.forget_cached()
        self._do_deferred()
        # The cancels among these are dropped unsent: the stages that they were meant for are gone.
        self.inflight, self._owner, self._asked, self._cancels = InFlight(), {}, {}, []
        self.draft_due, self._asked_size, self._wake_at = math.inf, 0, math.inf
        for observer in self.observers:
            observer.vacated(self.clock.now())

    def fail(self, request: Request, error: str) -> None:
        """End a request that cannot go on."""
        request.error = error
        self._finish(request, FinishReason.ERROR)

    def lose_all(self) -> None:
        """End all requests with an error, also those that wait."""
        for request in list(self.requests.values()):
            self._finish(request, FinishReason.ERROR)

    def resume(self, pipeline: Pipeline, drafter: Drafter | None, apart: frozenset[int]) -> None:
        """Go on with new stages, which hold no rows yet."""
        self.pipeline, self.drafter = pipeline, drafter
        self._share_quality()
        self.estimates.forget_pipeline(apart)
        # Stream numbers go on where they were: observers and traces know batches by them.
        self.builder = BatchBuilder(self.builder.next_stream)
        self.pace = Pace(self.estimates, pipeline.stages)
        self._changed = True
        self._busy_at = self.clock.now()  # they do not rest before anybody could use them

    def draft_with(self, drafter: Drafter | None) -> None:
        """Go on with another drafter, which has seen nothing yet. Nodes that await the old one's answer get none."""
        self.drafter = drafter
        self._share_quality()
        self.draft_due, self._asked_size, self._asked = math.inf, 0, {}
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
    """A seed for a request that names none. Every JSON reader reads it exactly, those with floats alone among them."""
    return random.SystemRandom().getrandbits(53)
