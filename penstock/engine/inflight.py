"""Keeps track of the nodes that are on their way through the stages."""

from __future__ import annotations

from collections.abc import Iterable

from penstock.messages import Cancel
from penstock.tree import Node


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
