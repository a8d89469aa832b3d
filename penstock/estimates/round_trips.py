"""Estimates when a batch's result is due, and the seconds it takes beyond stages and links."""

from __future__ import annotations

from penstock.estimates.pipeline_times import PipelineTimes
from penstock.estimates.running_mean import running_mean
from penstock.messages import Result


class RoundTrips:
    """Measures the lag: seconds that results take beyond the pipeline's latency, on the way from and to the engine and
    waiting."""

    def __init__(self, pipeline: PipelineTimes) -> None:
        self._pipeline = pipeline
        self._lag = 0.0
        """Mean lag in seconds; a running mean."""
        self._waiting = 0.0
        """Part of the lag that batches wait in the stages' buffers: seconds, a running mean."""
        self._expected: dict[int, float] = {}
        """Time at which each batch in flight would come out without any lag, by stream number."""
        self._entered: dict[int, float] = {}
        """Time at which each batch in flight entered, by stream number."""
        self._alone: dict[int, float] = {}
        """Time at which batches of one row entered that have had the stages to themselves so far, by stream number."""
        self.alone_s = 0.0
        """Mean seconds of a round trip of one row while nothing else is in flight, as in plain decoding; a running
        mean, 0 while none was seen."""

    def record_entered(self, stream: int, rows: int, now: float, in_flight: int) -> float:
        """Record that a batch of ``rows`` enters while ``in_flight`` others are under way. Returns when its result is
        due."""
        if in_flight:
            self._alone.pop(stream - 1, None)
        elif rows == 1:
            self._alone[stream] = now
        self._entered[stream] = now
        self._expected[stream] = expected = now + self._pipeline.latency_s(rows)
        return expected + self._lag

    def record_result(self, result: Result, now: float) -> None:
        """Record that a batch has come out.

        Its lag is counted from the time at which it would have come out without any lag. Counted from the expected time
        instead, a lag that is known by now would be corrected again by every batch that had entered before, and would
        oscillate where many are in flight.
        """
        self._pipeline.record_round_trip(result.spans, now - self._entered.pop(result.stream))
        expected, entered = self._expected.pop(result.stream), self._alone.pop(result.stream, None)
        if not result.picks:  # all of its rows had died
            return
        if entered is not None:
            self.alone_s = running_mean(self.alone_s or now - entered, now - entered)
        waits = [span.start - span.received for span in result.spans]
        self._lag = max(0.0, running_mean(self._lag, now - expected))
        self._waiting = max(0.0, running_mean(self._waiting, sum(waits)))

    def round_trip_s(self, rows: int) -> float:
        """Seconds from the engine through all stages and back, if the batch waits for no other."""
        return self._pipeline.latency_s(rows) + max(0.0, self._lag - self._waiting)
