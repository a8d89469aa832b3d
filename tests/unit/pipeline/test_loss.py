"""The choice among several reports of one loss."""

from __future__ import annotations

import pytest

from penstock.core import PipelineLost
from penstock.pipeline.loss import GRACE_S, Loss, Source

SOURCES = list(Source)


def due(loss: Loss, now: float) -> str | None:
    try:
        loss.raise_if_due(now)
    except PipelineLost as error:
        return str(error)
    return None


@pytest.mark.parametrize("source", SOURCES)
def test_a_report_is_told_after_its_grace(source: Source) -> None:
    loss = Loss()
    assert due(loss, 1e9) is None
    loss.report(source, PipelineLost("gone"), 10.0)
    assert loss.at == 10.0 + GRACE_S[source]
    assert due(loss, loss.at) == "gone"
    assert due(loss, loss.at - 1e-3) is None


@pytest.mark.parametrize("first", SOURCES)
@pytest.mark.parametrize("second", SOURCES)
def test_the_first_counts_unless_the_next_says_more_in_time(first: Source, second: Source) -> None:
    loss = Loss()
    loss.report(first, PipelineLost("first"), 10.0)
    loss.report(second, PipelineLost("second"), 10.0)
    assert due(loss, 99.0) == ("second" if second > first else "first")


def test_what_comes_later_changes_nothing() -> None:
    loss = Loss()
    loss.report(Source.PROCESS, PipelineLost("first"), 10.0)
    loss.report(Source.STAGE, PipelineLost("second"), 11.0)
    assert due(loss, 12.0) == "first"
