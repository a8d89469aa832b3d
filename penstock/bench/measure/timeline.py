"""The times at which each stage computed in one run, for the occupancy plots."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.bench.measure.meter import Meter


@dataclass(frozen=True)
class Bar:
    """A batch on a stage, in seconds after the first token. ``useful``: the target answered for some of its rows."""

    stage: int
    start: float
    end: float
    rows: int
    useful: bool


@dataclass(frozen=True)
class Timeline:
    """``commits`` are (seconds after the first token, tokens), without the first token."""

    stages: int
    bars: tuple[Bar, ...]
    commits: tuple[tuple[float, int], ...]

    @property
    def seconds(self) -> float:
        """Seconds from the first token to the last."""
        return self.commits[-1][0] if self.commits else 0.0

    def tokens_until(self, moment: float) -> int:
        return sum(tokens for at, tokens in self.commits if at <= moment)


def timeline_of(meter: Meter) -> Timeline:
    """The timeline of a run, with batches that were in flight when the first token came, or later."""
    commits = [(at, tokens) for at, tokens in meter.commits if tokens]
    start = commits[0][0]
    bars = tuple(
        Bar(span.stage, span.start - start, span.end - start, span.rows, bool(result.picks))
        for result, _ in meter.results
        for span in result.spans
        if span.rows and span.end > start
    )
    return Timeline(meter.stages, bars, tuple((at - start, tokens) for at, tokens in commits[1:]))
