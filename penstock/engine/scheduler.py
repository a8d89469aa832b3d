"""Decides which requests run, whose rows fill the next batch, and what becomes of a batch's picks in its trees."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple, Protocol

from penstock.core import FinishReason, RequestError
from penstock.estimates.estimates import Estimates
from penstock.estimates.times import HARDLY
from penstock.messages import Cancel
from penstock.requests.request import FairQueue, Nodes, Request
from penstock.requests.slots import BLOCK, SlotPool
from penstock.strategies.base import NOW, Context
from penstock.tree import Node

# --------------------------------------------------------------------------------------------------------------- commit
# Walks the tree along the target's picks: commit, prune, or miss.


@dataclass
class Advance:
    """The outcome of one walk: ``committed`` nodes in order, ``hits`` of them drafted, and ``dead`` nodes to cancel.

    ``verdicts`` are the roots for which the drafter had answered: their ``picked`` tokens judge its proposals.
    """

    committed: list[Node] = field(default_factory=list)
    hits: int = 0
    dead: list[Node] = field(default_factory=list)
    verdicts: list[Node] = field(default_factory=list)
    finished: FinishReason | None = None
    error: str = ""
    """Why there is no token, where ``finished`` is ERROR."""
    needs_slot: bool = False
    """Whether the walk goes on once a slot has been reserved for the next token."""


def advance(request: Request, nodes: Nodes, pool: SlotPool, at: float) -> Advance:
    """Commit token by token while the root's successor is known; EOS, a stop, max_tokens or an error ends the walk.

    A drafted child that carries the target's token keeps its slot, its subtree and whatever the stages have already
    computed for them. Without one the tree starts anew from a node that has yet to enter. This is pruning in PipeDec
    (section 3.3.4) and the continuous condition in FlowSpec (section 3.3). ``at`` is the time in seconds.
    """
    done = Advance()
    while done.finished is None and (pick := request.picks.get(request.tree.root.id)) is not None:
        # An error counts only for the root, which is committed: a drafted row may fail because its path is wrong.
        if pick.error:
            done.finished, done.error = FinishReason.ERROR, pick.error
            break
        if not request.has_slot:  # hit or miss, the next token counts against the reserved slots
            done.needs_slot = True
            break
        _commit_one(request, nodes, pool, done, at)
    return done


def _commit_one(request: Request, nodes: Nodes, pool: SlotPool, done: Advance, at: float) -> None:
    root = request.tree.root
    assert root.picked is not None
    pick = request.picks.pop(root.id)
    _count(request, root)  # before the tree moves on: it looks at the root's children
    if root.candidates is not None:
        done.verdicts.append(root)
    hit, dead = request.tree.commit(root.picked)
    # Before a miss takes a slot: its row may then get a dead node's slot, which is safe, because every stage computes
    # it later.
    pool.free_speculative(node.slot for node in dead)
    done.dead.extend(dead)
    if hit is None:  # nobody drafted the token: it takes a reserved slot and has yet to enter
        hit = nodes.committed(root.picked, root.position + 1)
        request.tree.restart(hit)
    else:  # in place: the node keeps its slot, which counts as committed from now on
        pool.commit()
        done.hits += 1
    request.committed.append(hit)
    request.produced += 1
    done.committed.append(hit)
    # Counted before: ``end_of`` compares ``produced`` with max_tokens.
    stopped = request.output.append(pick, at)
    done.finished = stopped or request.end_of(hit.token)  # a stop string on the last token allowed is a stop


def _count(request: Request, root: Node) -> None:
    """Keep the request's speculation metrics. A tree counts once, when its first drafted child has a verdict."""
    if not root.children:
        request.drafted_tree = False
        return
    if not request.drafted_tree:
        request.metrics.drafts += 1
    request.drafted_tree = root.picked in root.children
    if request.drafted_tree:
        request.metrics.accepted += 1
    else:
        request.metrics.misses += 1


# ------------------------------------------------------------------------------------------------------------- inflight
# Keeps track of the nodes that are on their way through the stages.


class InFlight:
    """Nodes that have entered and are not out yet, by the stream number of their batch.

    A cancelled node stays in flight until its batch comes out: stages may have computed its row, and the batch has a
    result in any case.
    """

    def __init__(self) -> None:
        self._batches: dict[int, list[Node]] = {}
        self._stream_of: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._batches)

    @property
    def rows(self) -> int:
        """The number of nodes in flight. Any thread may ask."""
        return sum(map(len, list(self._batches.values())))

    @property
    def oldest(self) -> int | None:
        """The stream number of the batch that comes out next; None while nothing is in flight."""
        # Batches are entered in order, and come out in it: the first key is the lowest.
        return next(iter(self._batches), None)

    def entered(self, stream: int, nodes: list[Node]) -> None:
        """Note that the batch with this stream number has entered, with these nodes. Numbers rise from call to call."""
        self._batches[stream] = nodes
        self._stream_of.update((node.id, stream) for node in nodes)

    def out(self, stream: int) -> dict[int, Node]:
        """The nodes of a batch that has come out, by id."""
        nodes = self._batches.pop(stream)
        for node in nodes:
            del self._stream_of[node.id]
        return {node.id: node for node in nodes}

    def cancel(self, dead: Iterable[Node]) -> Cancel | None:
        """A message that tells the stages which of the dead nodes they need not compute; None if none is in flight."""
        streams = {node.id: self._stream_of[node.id] for node in dead if node.id in self._stream_of}
        if not streams:
            return None
        # Stages forget the cancel once they have passed the last batch that holds one of these nodes.
        return Cancel(before=max(streams.values()) + 1, nodes=list(streams))


# ------------------------------------------------------------------------------------------------------------ scheduler
# Decides which requests run, and whose rows fill the next batch.

GROWTH: Final = 64
"""Number of committed slots that a request reserves at a time, beyond those for its text. It is four blocks of the
prefix cache. With one, a request reserves at every token; with more, it holds slots that others could use."""

Entries = list[tuple[Request, list[Node]]]
"""The rows that enter a batch, request by request, parents first."""


class Pieces(Protocol):
    """A plan of the pieces in which prompts enter: ``planner.costs.PieceTable``."""

    def ends(self, tokens: int, cached: int = 0) -> Sequence[int]:
        """Ends (in tokens) of the pieces that follow a text's ``cached`` first tokens; the last one is ``tokens``."""
        ...


class Schedule(NamedTuple):
    """Rows that enter next, request by request, and the time at which to ask strategies again that wait."""

    entries: Entries
    wake_at: float


class Scheduler:
    """Admission by KV slots, in the order of ``FairQueue``; batches are shared among the requests that are ready.

    ``chunk`` bounds the prompt rows of a batch: chunks follow each other through the stages. While other requests
    decode, it shrinks until a batch takes the slowest stage at most ``prefill_stretch`` times as long as without it
    (FlowSpec, section 3.1, chunked prefill; Jupiter, section IV-A, intra-sequence pipeline parallelism). With
    ``pieces`` a chunk also ends where a planned piece does (Jupiter, section IV-B).
    """

    def __init__(
        self,
        pool: SlotPool,
        chunk: int,
        max_running: int,
        max_model_len: int,
        prefill_stretch: float = math.inf,
        pieces: Pieces | None = None,
    ) -> None:
        self.pool = pool
        self.nodes = Nodes(pool)
        self.chunk = chunk
        self.max_running = max_running
        self.max_model_len = max_model_len
        self.prefill_stretch = prefill_stretch
        self._pieces = pieces
        self.growth = GROWTH
        self.waiting = FairQueue()
        self.running: deque[Request] = deque()

    def check(self, request: Request) -> None:
        """Raise RequestError, with the numbers, if a request could never run."""
        length, tokens = len(request.prompt), request.max_tokens
        if not length:
            raise RequestError("the prompt is empty: give at least one token")
        if request.slots_needed > self.max_model_len:
            raise RequestError(
                f"prompt of {length} tokens + max_tokens {tokens} = {request.slots_needed} exceeds "
                f"max_model_len {self.max_model_len}: shorten one or raise max_model_len"
            )
        if request.slots_needed > self.pool.committed_capacity:
            raise RequestError(
                f"prompt of {length} tokens + max_tokens {tokens} needs {request.slots_needed} KV slots of "
                f"{self.pool.committed_capacity}: shorten one or raise kv_slots"
            )

    def add(self, request: Request) -> None:
        """Queue a request. Raises RequestError if it could never run."""
        self.check(request)
        self.waiting.add(request)

    def admit(self) -> list[Request]:
        """Move waiting requests to running, in order, as long as slots for their text and some more can be reserved."""
        admitted = []
        # Strictly in order: a later request that would fit does not overtake the first, which would starve if it did.
        while self.waiting and len(self.running) < self.max_running and self._reserve(self.waiting.first()):
            admitted.append(self.waiting.take())
            self.running.append(admitted[-1])
        return admitted

    def grow(self, request: Request) -> bool:
        """Reserve up to ``growth`` further slots for a running request. Returns False if so many are not free."""
        count = min(self.growth, request.slots_needed - len(request.committed))
        if not self.pool.reserve(count):
            return False
        request.reserved += count
        return True

    def victim(self) -> Request:
        """The running request that gives way first: the last in the queue's order."""
        return max(self.running, key=self.waiting.order)

    def preempt(self, request: Request) -> None:
        """Have a running request wait again, at its old place."""
        self.running.remove(request)
        self.waiting.add(request)

    def remove(self, request: Request) -> None:
        """Take out a request that has ended, running or still waiting."""
        self.waiting.forget(request)
        if request in self.running:
            self.running.remove(request)

    def cache_blocks(self, request: Request, entered: int) -> None:
        """Share with others the full blocks among a request's first ``entered`` committed rows.

        Only rows that have entered: a later holder's rows come after them in the stream, so every stage has computed
        the block by then.
        """
        while (first := len(request.blocks) * BLOCK) + BLOCK <= entered:
            block = self.pool.share(request.blocks[-1] if first else None, request.committed[first : first + BLOCK])
            # Sharing is off, or another request's block has these tokens. Then nothing behind them can be shared
            # either, since a chain of blocks has no gap.
            if block is None:
                return
            request.blocks.append(block)
            request.reserved -= BLOCK  # the cache counts the block's slots from now on

    def schedule(self, context: Context, batches: int, held: bool = False) -> Schedule:
        """Rows for the next batch, request by request; the requests that were served go to the back of the queue.

        A batch takes ceil(running / batches) requests, so that they spread over ``batches`` batches in flight and no
        stage stands idle; those whose root has yet to enter come first. A prompt waits for no result: if none is among
        them, the next one goes along. Drafted rows of further requests ride along where they are worth it. While
        ``held``, strategies that are rate-limited wait, unless their root has yet to enter.
        """
        batch = Composition(context, held)
        ready = [request for request in self.running if batch.is_ready(request)]
        # The sort is stable: within each half the requests keep their turns.
        ready.sort(key=lambda request: not request.prefilling and request.tree.root.entered)
        chosen = ready[: -(-len(self.running) // batches)]  # rounded up
        decoding = [request for request in chosen if not request.prefilling]
        for following, request in zip(reversed(range(len(decoding))), decoding, strict=True):
            # Asked once more: beside the rows that the batch has by now, a strategy may rather wait.
            if not batch.entries or batch.is_ready(request):
                batch.enter(request, following)
        prefilling = [request for request in chosen if request.prefilling]
        prefilling = prefilling or [request for request in ready if request.prefilling][:1]
        # Prompt rows come last: their number depends on how many rows the decoding requests have taken.
        batch.entries += self._schedule_prefill(prefilling, batch.context)
        served = {request.number: request for request, _ in batch.entries}
        if served:
            batch.piggyback([request for request in self.running if request.number not in served])
        # ``served`` was made before requests rode along: these keep their turn.
        for request in served.values():
            self.running.remove(request)
            self.running.append(request)
        return Schedule(batch.entries, batch.wake_at)

    def _reserve(self, request: Request) -> bool:
        """Reserve the slots that a request needs to begin, beside cached blocks of its text, if they are there."""
        blocks = list(self.pool.cache.chain(request.token_ids))
        # Held before slots are reserved, which evicts blocks that nobody holds.
        for block in blocks:
            self.pool.cache.hold(block)
        count = min(len(request.token_ids) + self.growth, request.slots_needed) - len(blocks) * BLOCK
        if not self.pool.reserve(count):
            self.pool.cache.let_go(blocks)
            return False
        request.reserved = count
        for block in blocks:
            request.attach_block(block)
        return True

    def _schedule_prefill(self, requests: Sequence[Request], context: Context) -> Entries:
        """Chunks of these requests' texts, with as many rows together as the batch may take."""
        entries: Entries = []
        left = self._most_rows(context) if requests else 0
        for request in requests:
            if left <= 0:
                break
            self._attach_blocks(request)
            entries.append((request, request.take_prefill_chunk(self.nodes, min(left, self._piece(request)))))
            left -= len(entries[-1][1])
        return entries

    def _piece(self, request: Request) -> int:
        """Number of tokens that are left of the request's current piece; without a plan, of its whole text."""
        done, tokens = len(request.committed), len(request.token_ids)
        if self._pieces is None:
            return tokens - done
        return next(end for end in self._pieces.ends(tokens, request.cached) if end > done) - done

    def _most_rows(self, context: Context) -> int:
        """Number of prompt rows that may join those in the batch: all of ``chunk`` while no request decodes."""
        load, times, rows = context.load, context.estimates.pipeline, self.chunk
        if load.requests:
            limit = self.prefill_stretch * times.step_s(max(load.rows, 1))
            # It stops at about a block, so that prompts always advance.
            while rows > BLOCK and times.step_s(load.rows + rows) > limit:
                rows //= 2
        return rows

    def _attach_blocks(self, request: Request) -> None:
        """Skip the next tokens of the text if others have computed them since the request was admitted."""
        while (first := len(request.committed)) == len(request.blocks) * BLOCK and first + BLOCK < len(
            request.token_ids
        ):
            before = request.blocks[-1] if request.blocks else None
            block = self.pool.cache.find(before, request.token_ids[first : first + BLOCK])
            if block is None:
                return
            self.pool.cache.hold(block)
            request.attach_block(block)
            # The slots that were reserved for these tokens are given back: the block has its own.
            request.reserved -= BLOCK
            self.pool.unreserve(BLOCK)


class Composition:
    """One batch while it is composed: its rows so far, and the context that strategies see, which counts them."""

    def __init__(self, context: Context, held: bool) -> None:
        self.context = context
        self.held = held
        self.entries: Entries = []
        self.wake_at = math.inf

    def is_ready(self, request: Request) -> bool:
        """Whether a request has rows to enter. If its strategy waits, ``wake_at`` notes until when."""
        if request.awaits_grammar:
            return False
        if request.prefilling:
            return True
        if self.held and request.strategy.rate_limited and request.tree.root.entered:
            return False
        at = request.strategy.ready_at(request.tree, self.context)
        if at != NOW:
            self.wake_at = min(self.wake_at, at)
        return at == NOW

    def enter(self, request: Request, following: int = 0) -> None:
        """Add a request's rows. ``following``: how many other requests' rows may still join this batch."""
        context = self.context
        if following:
            context = replace(context, load=context.load._replace(following=following))
        nodes = request.strategy.enter(request.tree, context)
        self.entries.append((request, nodes))
        self.context = replace(self.context, load=self.context.load.with_rows(request.tree, nodes))

    def piggyback(self, others: Iterable[Request]) -> None:
        """Add drafted rows of further requests where they are worth it."""
        for request in others:
            if request.prefilling or not request.tree.root.entered:
                continue
            if request.strategy.can_piggyback(request.tree, self.context):
                self.enter(request)


# ----------------------------------------------------------------------------------------------------------------- pace
# The pace at which batches enter: that of the slowest stage, so that none waits inside the pipeline.

WAKING: Final = 0.1
"""Fraction of a step by which a batch may be late and still count as on time: a process needs a moment to wake up. At 0
each late wake-up would delay all later batches; at 1 nothing would tell a batch that is late by a step."""
SPARE: Final = 1
"""Number of batches in flight beyond those that stages and links work on, so that one lies ready for the slowest
stage."""

ALIKE: Final = 0.999
"""Fraction of the best rate that counts as equal; among equals more batches in flight win. A lower one gives up rate
for more batches."""

WANTED: Final = 16
"""Number of rows that the drafts of a few requests easily fill. Rows count as dear if a batch of so many takes longer
than a batch of one row."""


class Pace:
    """Holds a batch back until the slowest stage can take it, and while stages and links hold as many as they can.

    The first rule has the rows of a batch chosen as late as possible. The second bounds the batches that queue inside
    if the slowest stage is slower than estimated; until times are known, the bound is one batch per stage.
    """

    def __init__(self, estimates: Estimates, stages: int) -> None:
        self.until = 0.0
        self._most = self._steps = self._stages = stages
        """``_most``: most batches in flight. ``_steps``: the last batch's trip, in steps of the slowest stage."""
        self._estimates = estimates

    def should_wait(self, now: float, in_flight: int) -> bool:
        """Whether the next batch waits at ``now`` (seconds), while ``in_flight`` batches are under way."""
        return now < self.until or in_flight >= self._most

    def target_in_flight(self, requests: int, drafted: bool = False) -> int:
        """Number of batches that should be in flight while ``requests`` run; further rows that are ready wait outside.

        With b batches in flight each request gets a token every b steps or every trip, whichever is longer. Where rows
        cost next to nothing, that favours fewer and larger batches than a trip has steps. Where ``drafted`` rows go
        along and rows are dear, there is a batch for every step of a trip: a request then has several in flight, and
        each may bring a token. The exception is a drafter that shares a stage's device, which every batch would cost a
        pass of the drafter, too. Until times are known, it is one batch per stage.
        """
        if not self._estimates.pipeline.step_s(1):
            return self._stages
        most = max(1, self._most - SPARE)
        # The largest number first: of rates that count as equal the first one wins below.
        rates = {batches: self._rate(batches, requests) for batches in range(most, max(0, most - 3), -1)}
        enough = ALIKE * max(rates.values())
        target = next(batches for batches, rate in rates.items() if rate >= enough)
        times = self._estimates.pipeline
        dear = times.step_s(WANTED) > HARDLY * times.step_s(1)
        return max(target, self._steps) if drafted and dear and not times.shared else target

    def _rate(self, batches: int, requests: int) -> float:
        """Tokens per second of ``requests`` requests with ``batches`` batches in flight."""
        rows = math.ceil(requests / batches)
        longest = max(batches * self._estimates.pipeline.step_s(rows), self._estimates.round_trips.round_trip_s(rows))
        return requests / longest

    def entered(self, now: float, rows: int) -> None:
        """Note that a batch of ``rows`` rows has entered at ``now``.

        The next is due one step after this one was due, so that wake-up delays do not add up from batch to batch. If
        this one was later than that explains, the next is due one step from now.
        """
        step = self._estimates.pipeline.step_s(rows)
        self.until = (self.until if now - self.until < WAKING * step else now) + step
        if step:
            steps = self._estimates.round_trips.round_trip_s(rows) / step
            self._most, self._steps = math.ceil(steps) + SPARE, round(steps)
