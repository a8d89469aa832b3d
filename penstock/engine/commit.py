"""Walks a tree along the target's picks: commit, prune or miss; and the batches in flight."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from penstock.core import FinishReason
from penstock.messages import Cancel
from penstock.requests.request import Nodes, Request
from penstock.requests.slots import SlotPool
from penstock.tree import Node

# --------------------------------------------------------------------------------------------------------------- commit
# Walks the tree along the target's picks: commit, prune, or miss.


@dataclass
class Advance:
    """The outcome of one walk: ``committed`` nodes in order, ``hits`` of them drafted, and ``dead`` nodes to cancel.

    ``verdicts`` are the roots for which the drafter had proposed children: their ``picked`` tokens judge its proposals.
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
    computed for them. Without one the tree starts anew from a node that has yet to enter.
    """
    done = Advance()
    while done.finished is None and (pick := request.picks.get(request.tree.root.id)) is not None:
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
    if root.candidates:
        done.verdicts.append(root)
    hit, dead = request.tree.commit(root.picked)
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

    A cancelled node stays in flight until its batch comes out.
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
        return next(iter(self._batches), None)

    def entered(self, stream: int, nodes: list[Node]) -> None:
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
