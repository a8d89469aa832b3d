"""Requests: their tokens and trees, the batches that are built of their rows, and the queue in which they wait."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Protocol

from penstock.core import FinishReason, SpeculationMetrics
from penstock.messages import NO_SLOT, Batch, CommittedSlots, Opened, Rows, SampledToken, Sampling
from penstock.requests.slots import BLOCK, Block, SlotPool
from penstock.strategies.base import Strategy
from penstock.tree import Node, TokenTree

# -------------------------------------------------------------------------------------------------------------- request
# One request in the engine: its committed tokens, the tree of drafts below the last one, and how it ends.


class Output(Protocol):
    """The receiver of a request's tokens, which may end the request (by a stop string)."""

    def append(self, pick: SampledToken, at: float) -> FinishReason | None:
        """Take a token at time ``at``. The stages wait: work that decides nothing is for ``detokenize_pending``."""
        ...

    def detokenize_pending(self) -> None:
        """Do the postponed work for the tokens so far."""
        ...

    def finish(self, reason: FinishReason, at: float, plain_s: float = 0.0) -> None:
        """End the output, after any postponed work. No token follows.

        ``plain_s`` is the seconds that each of its tokens would have taken in plain decoding, 0 if that is not known.
        """
        ...


class Nodes:
    """Makes nodes, each with a slot from ``pool``; their numbers are never reused in a session."""

    def __init__(self, pool: SlotPool) -> None:
        self._pool = pool
        self._next = 0

    @property
    def room(self) -> int:
        """Number of further speculative nodes that can have a slot now."""
        return self._pool.room

    def speculative(self, token: int, position: int) -> Node:
        """A new drafted node in a speculative slot. Raises PenstockError if ``room`` is 0."""
        return self._node(token, position, self._pool.take_speculative())

    def committed(self, token: int, position: int) -> Node:
        """A new committed node in a slot that the caller has reserved."""
        return self._node(token, position, self._pool.take_committed())

    def _node(self, token: int, position: int, slot: int) -> Node:
        self._next += 1
        return Node(self._next, token, position, slot)


class Request:
    """State of one running request.

    ``token_ids`` are the tokens known at admission: the prompt and, after a preemption or where an answer that was cut
    off goes on (``resumed``), the output so far. ``produced`` counts the tokens of the output, ``picks`` holds the
    target's picks that the tree has not been walked along yet, by node id.
    ``committed`` holds a node per committed token, in position order, as far as prefill has come. Once it covers
    ``token_ids``, its last node is the tree's root, whose next token the target has not picked yet. The first nodes lie
    in ``blocks``, shared with other requests; ``reserved`` counts the slots set aside for the rest. ``drafted_tree``
    says that the present root was itself drafted, so that its tree has already been counted.
    """

    def __init__(
        self,
        number: int,
        prompt: Sequence[int],
        sampling: Sampling,
        max_tokens: int,
        stop_ids: frozenset[int],
        strategy: Strategy,
        output: Output,
        priority: int = 0,
        client: str = "",
        resumed: Sequence[int] = (),
    ) -> None:
        self.number = number
        self.prompt = list(prompt)
        self.sampling = sampling
        self.max_tokens = max_tokens
        self.stop_ids = stop_ids
        self.strategy = strategy
        self.output = output
        self.priority = priority
        """Requests with lower numbers are served earlier."""
        self.client = client
        """The client that sent the request; clients get equal shares of the engine."""
        self.metrics = SpeculationMetrics()
        self.drafted_tree = False
        self.token_ids = [*self.prompt, *resumed]
        self.committed: list[Node] = []
        self.blocks: list[Block] = []
        self.reserved = 0
        self.cached = 0
        """Prompt tokens found in the prefix cache when the request was first computed."""
        self.is_new = True
        """Whether it is computed for the first time: neither preemption nor a lost stage has dropped its nodes."""
        self.tree: TokenTree
        self.resumed = len(resumed)
        """Number of the output's tokens that came from an earlier run; they count as produced."""
        self.produced = self.resumed
        self.picks: dict[int, SampledToken] = {}
        self.finished: FinishReason | None = None
        self.undisturbed = True
        """Whether it has run alone and without a break so far: its speed can be compared with plain decoding's."""
        self.losses = 0
        """Number of losses of a stage since its latest token."""
        self.error = ""
        """Why it ended early, "" if it did not; begins with the field at fault."""
        self.awaits_grammar = False
        """Whether its rows have to wait because the stages are still compiling its grammar."""
        self._postponed: list[tuple[Node, bool]] = []
        """Nodes that the drafter could not answer for, and whether each had entered when it was asked."""
        self._postponed_under: Node | None = None
        """The tree's root when the last node was postponed."""

    @property
    def slots_needed(self) -> int:
        """Committed slots that it takes at most, if it shares none: those of its prompt and its output."""
        return len(self.prompt) + self.max_tokens

    @property
    def started(self) -> bool:
        """Whether it has any node; if not, it is waiting or has just been admitted."""
        return bool(self.committed)

    @property
    def prefilling(self) -> bool:
        """Whether tokens of ``token_ids`` still have to enter."""
        return len(self.committed) < len(self.token_ids)

    @property
    def private_nodes(self) -> list[Node]:
        """Committed nodes outside shared blocks, whose slots only this request holds."""
        return self.committed[len(self.blocks) * BLOCK :]

    @property
    def has_slot(self) -> bool:
        """Whether a slot is reserved for one more committed token."""
        return len(self.committed) - len(self.blocks) * BLOCK < self.reserved

    def take_prefill_chunk(self, nodes: Nodes, most: int) -> list[Node]:
        """Make nodes for up to ``most`` further tokens of ``token_ids``; the node of the last token becomes the root.

        If more tokens follow, the chunk ends at a block's end where it can, so that the block can be shared.
        """
        first = len(self.committed)
        last = first + most
        if last < len(self.token_ids):
            # Down to a block's end, but no shorter than one block, or than ``most`` if that is less.
            last = max(last // BLOCK * BLOCK, min(last, first + BLOCK))
        # Committed from the beginning: a prompt's tokens are known, and nothing can reject them.
        for position in range(first, min(last, len(self.token_ids))):
            self.committed.append(nodes.committed(self.token_ids[position], position))
        # No tree before the last token has a node: what follows an earlier one is known.
        if not self.prefilling:
            self.tree = TokenTree(self.committed[-1], nodes)
        return self.committed[first:]

    def attach_block(self, block: Block) -> None:
        """Continue after a block that others have computed, or whose rows enter before this request's."""
        assert len(self.committed) == len(self.blocks) * BLOCK
        self.blocks.append(block)
        # Nodes of its own: requests that share a block must not share the links of their trees.
        self.committed += [replace(node, children={}) for node in block.nodes]
        if self.is_new:
            self.cached = min(len(self.committed), len(self.prompt))

    def reset_for_recompute(self) -> None:
        """Drop all nodes, to start again from the tokens committed so far."""
        # Whoever still holds one of these nodes, as the drafter may, finds it dead.
        for node in self.committed:
            node.alive = node.open = False
        # Set first: ``tokens`` reads the nodes that are dropped next.
        self.token_ids = self.tokens
        self.committed, self.blocks, self.picks, self.reserved = [], [], {}, 0
        self.drafted_tree, self._postponed, self.undisturbed, self.is_new = False, [], False, False

    @property
    def tokens(self) -> list[int]:
        """The tokens of the prompt and of the output so far."""
        return self.token_ids if self.prefilling else [node.token for node in self.committed]

    def postpone(self, node: Node, entered: bool) -> None:
        """Ask the drafter about ``node`` again under another root, or once it has entered: it had no answer now.

        ``entered`` is whether the node had entered when the drafter was asked; it may have since.
        """
        self._postponed.append((node, entered))
        self._postponed_under = self.tree.root

    def take_postponed(self) -> list[Node]:
        """The postponed nodes to ask about again: all if the root has moved, else those that have entered since.

        They are no longer postponed; the others stay so.
        """
        if not self._postponed:
            return []
        moved = self._postponed_under is not self.tree.root
        live = [(n, had) for n, had in self._postponed if n.open]
        self._postponed = [] if moved else [(node, had) for node, had in live if had or not node.entered]
        return [node for node, had in live if moved or (node.entered and not had)]

    def path(self, node: Node) -> list[int]:
        """Token ids from the prompt's first to that of ``node``, which is in the tree."""
        return [committed.token for committed in self.committed] + self.path_below_root(node)

    def path_below_root(self, node: Node) -> list[int]:
        """Token ids from the root's child down to ``node``; empty for the root itself."""
        above: list[int] = []
        current: Node | None = node
        while current is not None and current is not self.tree.root:
            above.append(current.token)
            current = current.parent
        return above[::-1]

    def end_of(self, token: int) -> FinishReason | None:
        """Why the request is over with this committed token, its text aside; None if it is not."""
        if token in self.stop_ids:
            return FinishReason.STOP
        return FinishReason.LENGTH if self.produced >= self.max_tokens else None


# -------------------------------------------------------------------------------------------------------- batch builder
# The batches of one pipeline: what they must tell its stages, and which rows have yet to enter.


@dataclass
class _StreamState:
    """The part of one request that one stream has told its stages: ``committed`` slots were announced as such, ``fed``
    has the ids of the nodes that have entered.

    The first ``prefix`` committed nodes have all entered. The first ``blocks`` of the request's blocks have been
    searched for nodes that entered with other requests.
    """

    committed: int = 0
    blocks: int = 0
    prefix: int = 0
    fed: set[int] = field(default_factory=set)


class BatchBuilder:
    """Builds the batches of one stream. The target's stages have a builder, and a drafting model has another.

    A batch announces the committed slots of the requests whose rows it carries, always a prefix without holes:

        committed nodes   p0 p1 p2 p3 | c4 c5 c6        announced so far: up to |
        fed                  all      yes yes no      c6 is the root after a miss: it has yet to enter
        this batch                       rows: c6     announces c4 c5 c6
    """

    def __init__(self, first: int = 0) -> None:
        self.next_stream = first
        self._told: dict[int, _StreamState] = {}
        self._closed: list[int] = []
        self._holds: dict[int, int] = {}
        """The node whose row entered a slot last, by slot: requests that share the slot's block skip that row."""

    def close(self, request: int) -> None:
        """Note that the request has ended; the next batch tells the stages."""
        # A request without an entry has never entered a batch: no stage knows it.
        if self._told.pop(request, None):
            self._closed.append(request)

    def has(self, request: Request, node: Node) -> bool:
        """Whether the node's row has entered."""
        return node.id in self._told_of(request).fed

    def prefix(self, request: Request) -> int:
        """Number of a request's first committed nodes that have all entered."""
        return self._told_of(request).prefix

    def drop(self, nodes: Iterable[Node]) -> None:
        """Note that these nodes entered but may never be computed: requests that share them must enter them anew."""
        for node in nodes:
            if self._holds.get(node.slot) == node.id:
                del self._holds[node.slot]

    def _told_of(self, request: Request) -> _StreamState:
        """The stream's state for a request, with the nodes of shared blocks that other requests have entered."""
        # A new state is kept by ``_add`` alone, which also announces the request: asking about one opens nothing.
        told = self._told.get(request.number) or _StreamState()
        if told.blocks < len(request.blocks):
            shared = request.committed[told.blocks * BLOCK : len(request.blocks) * BLOCK]
            # Compared by node, not by slot alone: the slot may hold the row of an earlier node, or one that was
            # dropped.
            told.fed.update(node.id for node in shared if self._holds.get(node.slot) == node.id)
            told.blocks = len(request.blocks)
        return told

    def missing(self, request: Request, nodes: Iterable[Node]) -> list[Node]:
        """``nodes`` and all their ancestors whose rows have not entered yet, parents first."""
        told = self._told_of(request)
        wanted: dict[int, Node] = {}
        # A path stops at the first ancestor that has entered or is already wanted: the ones above it are, too.
        for node in nodes:
            path = []
            current: Node | None = node
            while current is not None and current.id not in told.fed and current.id not in wanted:
                path.append(current)
                current = current.parent
            wanted.update((step.id, step) for step in reversed(path))
        # Committed nodes that the stream still lacks go first: all rows below attend to them.
        lacking = {node.id: node for node in request.committed[told.prefix :] if node.id not in told.fed}
        return list({**lacking, **wanted}.values())

    def batch(
        self,
        entries: Sequence[tuple[Request, Sequence[Node]]],
        wanted: set[int],
        candidates: int = 0,
        again: Container[int] = (),
    ) -> Batch:
        """The next batch, with rows for these nodes. ``wanted`` are ids of nodes whose next token is asked for.

        ``again`` are ids of nodes that may enter a second time: a learned drafter's, computed anew or asked about
        again.
        """
        batch = Batch(stream=self.next_stream, rows=Rows(), candidates=candidates)
        self.next_stream += 1
        # Handed over with this batch: every header counts on every stage, so each ending is said once.
        batch.closed, self._closed = self._closed, []
        for request, nodes in entries:
            self._add(batch, request, nodes, wanted, again)
        batch.alive = list(range(len(batch.rows)))
        return batch

    def _add(
        self, batch: Batch, request: Request, nodes: Sequence[Node], wanted: set[int], again: Container[int]
    ) -> None:
        told = self._told_of(request)
        if request.number not in self._told:
            self._told[request.number] = told
            batch.opened.append(Opened(request.number, request.sampling))
        row = len(batch.rows)
        for node in nodes:
            if node.id in told.fed and node.id not in again and node.id not in wanted:
                assert node.position < told.blocks * BLOCK, "a node enters once"
                continue  # another request that shares its block has entered it since this one was composed
            told.fed.add(node.id)
            # Batches are computed in order, so the row that enters a slot last is the one that it holds for all later
            # batches.
            self._holds[node.slot] = node.id
            if node.id in wanted:
                batch.wanted.append(row)
            # A committed node has no parent link any more: its predecessor is the committed node one position before.
            parent = request.committed[node.position - 1] if node.parent is None and node.position else node.parent
            slot = parent.slot if parent else NO_SLOT
            batch.rows.append(request.number, node.id, node.slot, slot, node.position, node.token)
            row += 1
        # Only a prefix without holes is announced: stages take committed slots in the order of positions.
        while told.prefix < len(request.committed) and request.committed[told.prefix].id in told.fed:
            told.prefix += 1
        if told.prefix > told.committed:
            slots = [node.slot for node in request.committed[told.committed : told.prefix]]
            batch.committed.append(CommittedSlots(request.number, slots))
            told.committed = told.prefix


# ---------------------------------------------------------------------------------------------------------------- queue
# The queue of requests: fair among clients, earlier for a lower ``priority``, and without starvation.

PRIORITY_TOKENS: Final = 65_536
"""Tokens by which one step of ``priority`` moves a request back in the queue, a negative one forward. They are 16 texts
of the default length (``engine.resolve.DEFAULT_MODEL_LEN``), so that a step counts for more than the order of arrival
in a usual queue."""
CLIENTS: Final = 1024
"""Upper limit of the clients whose shares are remembered: a service may have a new client with every request."""


class FairQueue:
    """Start-time fair queueing (Goyal et al., 1996) over tokens, prompt and answer alike.

    A request's tag is the later one of two: where its client's last request ends, or the tag of the request taken last.
    A client with many requests therefore queues behind itself. A single client is served in the order of arrival. A
    priority moves the tag by a bounded number of tokens, so that every request reaches the front at last.
    """

    def __init__(self) -> None:
        self._queue: list[tuple[float, int, Request]] = []
        self._tags: dict[int, tuple[float, int]] = {}
        """Tag and arrival of each request that has not ended, by number: a preempted request keeps its place."""
        self._ends: dict[str, float] = {}
        """End of each client's last request, in tokens of the queue's time. Beyond ``CLIENTS`` clients the one whose
        last request ends first is dropped."""
        self._now = 0.0
        """The queue's time, in tokens: the tag, without its priority, of the request taken last."""
        self._arrivals = 0
        """Number of requests added so far, which orders requests of equal tags."""

    def __len__(self) -> int:
        return len(self._queue)

    def __iter__(self) -> Iterator[Request]:
        return (request for _, _, request in self._queue)

    def __contains__(self, request: Request) -> bool:
        return any(waiting is request for waiting in self)

    def add(self, request: Request) -> None:
        """Queue a request. A preempted one returns to its old place."""
        if request.number not in self._tags:
            self._arrivals += 1
            begin = max(self._now, self._ends.get(request.client, 0.0))
            self._ends[request.client] = begin + request.slots_needed
            if len(self._ends) > CLIENTS:
                del self._ends[min(self._ends, key=self._ends.__getitem__)]
            self._tags[request.number] = begin + request.priority * PRIORITY_TOKENS, self._arrivals
        # Every arrival has its own number, so that requests themselves are never compared.
        insort(self._queue, (*self._tags[request.number], request))

    def first(self) -> Request:
        """The request that is taken next. There must be one."""
        return self._queue[0][2]

    def take(self) -> Request:
        """Remove and return the first request, whose tag becomes the queue's time. There must be one."""
        tag, _, request = self._queue.pop(0)
        # Without the priority's shift, which moves one request and not the queue's time.
        self._now = max(self._now, tag - request.priority * PRIORITY_TOKENS)
        # A client whose last request ends before now would begin now in any case.
        self._ends = {client: end for client, end in self._ends.items() if end > self._now}
        return request

    def order(self, request: Request) -> tuple[float, int]:
        """The request's sort key. Of the running requests, the last one in this order is preempted first."""
        return self._tags[request.number]

    def forget(self, request: Request) -> None:
        """Remove a request that has ended."""
        if (tag := self._tags.pop(request.number, None)) is not None:
            place = bisect_left(self._queue, tag, key=lambda entry: entry[:2])
            if place < len(self._queue) and self._queue[place][2] is request:
                del self._queue[place]
