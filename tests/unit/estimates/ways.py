"""A batch's way through a pipeline of known times."""

from __future__ import annotations

from penstock.estimates.times import SIZES, PipelineTimes
from penstock.messages import Span


def spans(start: float, stages: list[float], link: float, rows: int = 1) -> list[Span]:
    """A batch's way through stages of so many seconds each."""
    found, at = [], start
    for stage, seconds in enumerate(stages):
        found.append(Span(stage, at, at, at + seconds, seconds, seconds, rows))
        at += seconds + link
    return found


def record_all_sizes(times: PipelineTimes, stages: list[float], link: float) -> None:
    for rows in SIZES:
        times.record_spans(spans(0.0, stages, link, rows))
