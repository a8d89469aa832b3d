"""When a batch's result is expected, and what it takes beyond the stages and the links between them."""

from __future__ import annotations

from penstock.estimates.pipeline_times import PipelineTimes
from penstock.estimates.running_mean import running_mean
from penstock.messages import Result


class RoundTrips:
    """The lag: what results take beyond the pipeline's latency. It is the way from and to the engine, and waiting."""

    def __init__(self, pipeline: PipelineTimes) -> None:
        self._pipeline = pipeline
        self._lag = 0.0
        """Seconds; a running mean."""
        self._waiting = 0.0
        """The lag's part that batches wait in the stages' buffers: seconds, a running mean."""
        self._expected: dict[int, float] = {}
        """By stream number, when each batch in flight would be out if there were no lag."""
        self._entered: dict[int, float] = {}
        """By stream number, when each batch in flight has entered."""
        self._alone: dict[int, float] = {}
        """By stream number, when those of one row entered that had the stages to themselves, as far as is known."""
        self.alone_s = 0.0
        """Seconds of a round trip of one row while nothing else is in flight, as every one of plain decoding is; a
        running mean, 0 while none was seen."""

    def record_entered(self, stream: int, rows: int, now: float, in_flight: int) -> float:
        """A batch of so many rows enters, beside so many in flight. Returns when its result is expected."""
        if in_flight:
            self._alone.pop(stream - 1, None)
        elif rows == 1:
            self._alone[stream] = now
        self._entered[stream] = now
        self._expected[stream] = expected = now + self._pipeline.latency_s(rows)
        return expected + self._lag

    def record_result(self, result: Result, now: float) -> None:
        """A batch has come out.

        Its lag is counted from when it would have been out without any. If it were counted from when the result was
        expected, a lag that is known by now would be corrected once more by every batch that had entered before, and
        swing where many are in flight.
        """
        self._pipeline.record_round_trip(result.spans, now - self._entered.pop(result.stream))
        expected, entered = self._expected.pop(result.stream), self._alone.pop(result.stream, None)
        if not result.picks:  # every row of it had died
            return
        if entered is not None:
            self.alone_s = running_mean(self.alone_s or now - entered, now - entered)
        waits = [span.start - span.received for span in result.spans]
        self._lag = max(0.0, running_mean(self._lag, now - expected))
        self._waiting = max(0.0, running_mean(self._waiting, sum(waits)))

    def round_trip_s(self, rows: int) -> float:
        """Seconds from the engine through all stages and back, if the batch waits for no other."""
        return self._pipeline.latency_s(rows) + max(0.0, self._lag - self._waiting)
