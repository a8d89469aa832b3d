"""The dead nodes that cancels have announced to a stage beside the stream of batches."""

from __future__ import annotations

from penstock.messages import Batch, Cancel


class Cancels:
    """Dead nodes, each remembered until the stream number that its cancel precedes has passed.

    A cancel may come late, early or twice. A late one concerns batches that have passed, and is not kept.
    """

    def __init__(self) -> None:
        self.next_stream = 0
        self._known: list[tuple[int, frozenset[int]]] = []

    def add(self, message: Cancel) -> None:
        if message.before > self.next_stream:
            self._known.append((message.before, frozenset(message.nodes)))

    def surviving(self, batch: Batch) -> list[int]:
        """Indices of the batch's rows that are still to be computed."""
        if not self._known:
            return batch.alive
        nodes, alive = batch.rows.nodes, batch.alive
        for _, dead in self._known:
            alive = [row for row in alive if nodes[row] not in dead]
        return alive

    def awaited(self, batch: Batch) -> set[tuple[int, int]]:
        """(node, level) of the features that the batch's surviving rows need.

        The level is 0 where the batch names none.
        """
        if not batch.feature_nodes:
            return set()
        rows = (row for row in self.surviving(batch) if batch.feature_nodes[row])
        return {(batch.feature_nodes[row], batch.feature_levels[row] if batch.feature_levels else 0) for row in rows}

    def passed(self, stream: int) -> None:
        """The batch with this number has been computed: forget the cancels that only it and earlier ones needed."""
        self.next_stream = stream + 1
        if self._known:
            self._known = [(before, nodes) for before, nodes in self._known if before > self.next_stream]
