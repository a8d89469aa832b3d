"""Batches of one text for stages that serve nobody else: tokens that stay, and rows that are only tried."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from penstock.messages import NO_SLOT, Batch, CommittedSlots, Opened, Rows, Sampling

REQUEST: Final = 1


class MeasuredText:
    """A text that repeats the ``given`` tokens, or has arbitrary ones below ``vocab_size``; slots are its positions.

    ``advance`` and ``attempt`` give batches, which have to be submitted in the order in which they were asked for.
    """

    def __init__(self, vocab_size: int, given: Sequence[int] = ()) -> None:
        self.tokens = 0
        """Tokens that have entered for good."""
        self._vocab_size = vocab_size
        self._given = given
        self._told = 0
        self._stream = 0
        self._nodes = 0

    def advance(self, rows: int) -> Batch:
        """A batch of the text's next tokens. No token is picked, as for all pieces of a prompt but the last."""
        batch = self._batch(rows)
        self.tokens += rows
        return batch

    def attempt(self, rows: int) -> Batch:
        """A batch of drafted rows behind the text, each the next one's parent, with a pick for every one. The next
        batch takes their slots."""
        batch = self._batch(rows)
        batch.wanted = list(range(rows))
        return batch

    def _batch(self, count: int) -> Batch:
        batch = Batch(stream=self._stream, rows=Rows(), alive=list(range(count)))
        if not self._stream:
            batch.opened.append(Opened(REQUEST, Sampling()))
        if self._told < self.tokens:
            batch.committed.append(CommittedSlots(REQUEST, list(range(self._told, self.tokens))))
            self._told = self.tokens
        for position in range(self.tokens, self.tokens + count):
            self._nodes += 1
            token = self._given[position % len(self._given)] if self._given else 31 * self._nodes % self._vocab_size
            batch.rows.append(REQUEST, self._nodes, position, position - 1 if position else NO_SLOT, position, token)
        self._stream += 1
        return batch
