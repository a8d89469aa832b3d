"""Joins points that are generated side by side into one text: each in its turn, as far as it has come."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace

from penstock.core import CompletionOutput, FinishReason, OutlineOutput, RequestOutput, SpeculationMetrics
from penstock.engine.completion import CompletionDelta


class Joined:
    """The whole answer: ``push`` takes new output of any point, ``take`` gives new output of the whole.

    The whole ends with its last point, or where a stop string or stop token of the request ends a point, or where a
    point is aborted or fails: later points are left out. Its finish reason is "length" if any point's is.
    """

    def __init__(self, headings: Sequence[str]) -> None:
        self._headings = headings
        self._new: list[CompletionDelta | None] = [None] * len(headings)
        self._current = 0
        self._opened = False
        self._cut = False
        self.ended = False

    def push(self, number: int, delta: CompletionDelta) -> None:
        before = self._new[number]
        self._new[number] = delta if before is None else before.followed_by(delta)

    def take(self) -> CompletionDelta | None:
        """The whole's output since the last call; None if there is none."""
        found: CompletionDelta | None = None
        while not self.ended and (piece := self._piece()) is not None:
            found = piece if found is None else found.followed_by(piece)
        return found

    def _piece(self) -> CompletionDelta | None:
        """The new output of the point whose turn it is; None if there is none."""
        delta, self._new[self._current] = self._new[self._current], None
        if delta is None:
            return None
        heading = "" if self._opened else self._headings[self._current]
        piece = replace(delta, index=0, text=heading + delta.text, finish_reason=None)
        self._opened = True
        if delta.finish_reason is not None:
            self._cut |= delta.finish_reason is FinishReason.LENGTH
            piece.finish_reason = self._end(delta)
            self._current, self._opened = self._current + 1, False
            self.ended = piece.finish_reason is not None
        return piece

    def _end(self, last: CompletionDelta) -> FinishReason | None:
        """Why the whole ends with this end of a point; None where it goes on."""
        assert last.finish_reason is not None
        if last.finish_reason in (FinishReason.ABORT, FinishReason.ERROR) or last.stop_reason is not None:
            return last.finish_reason
        if self._current + 1 < len(self._headings):
            return None
        return FinishReason.LENGTH if self._cut else FinishReason.STOP


def timed(output: CompletionOutput, report: OutlineOutput, parts: Sequence[RequestOutput]) -> None:
    """Set the times and counts of the whole, from its parts and the steps before them.

    These steps ran one after the other, the parts side by side. Parts that nobody waited for have no end time and do
    not count in the time.
    """
    before = sum(guide.outputs[0].seconds or 0.0 for guide in report.guides)
    first, told = parts[0].outputs[0], [part.outputs[0] for part in parts]
    ends = [one.seconds for one in told if one.seconds is not None]
    output.first_token_seconds = None if first.first_token_seconds is None else before + first.first_token_seconds
    output.seconds = None if output.finish_reason is None else before + max(ends, default=0.0)
    everything = [one.metrics for request in (*report.guides, *parts) for one in request.outputs]
    for field in fields(SpeculationMetrics):
        setattr(output.metrics, field.name, sum(getattr(one, field.name) for one in everything))
