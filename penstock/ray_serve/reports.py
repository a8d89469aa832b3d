"""The replicas' reports on themselves, as the process has them that sends the requests."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Final

from penstock.engine.stats import EngineStats

COUNTS: Final[dict[str, Any]] = {field.name: 0 for field in fields(EngineStats) if field.type == "int"}
NOTHING: Final = EngineStats(
    **COUNTS,
    recovery_seconds=0.0,
    stage_busy_seconds=[],
    stage_heard_seconds_ago=[],
    last_step_seconds_ago=None,
    recovering=None,
    resting=True,
    ended=None,
)
"""The sum of no reports: nothing runs until a request comes."""


@dataclass(frozen=True)
class Report:
    """A replica's state: its engine's figures, and hashes of the blocks that its prefix cache holds."""

    stats: EngineStats
    blocks: frozenset[int] = frozenset()

    def as_dict(self) -> dict[str, Any]:
        """The report as Ray Serve carries routing statistics."""
        return {"stats": asdict(self.stats), "blocks": sorted(self.blocks)}

    @classmethod
    def of(cls, found: Mapping[str, Any]) -> Report | None:
        """The report in routing statistics; None where a replica has made none yet."""
        if "stats" not in found:
            return None
        return cls(EngineStats(**found["stats"]), frozenset(found["blocks"]))


class Reports:
    """The last report of every replica. The router's thread writes, that of the server reads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._current: dict[str, EngineStats] = {}
        self._gone = NOTHING
        """Sums of replicas that have ended: counters never go down, as Prometheus wants it."""

    def update(self, found: Mapping[str, Report | None]) -> None:
        """Take the reports of the replicas that there are, by their ids; None of one that has made none yet."""
        with self._lock:
            gone = [stats for name, stats in self._current.items() if name not in found]
            self._gone = counters_of([self._gone, *gone])
            known = {name: report.stats for name, report in found.items() if report is not None}
            kept = {name: self._current.get(name, NOTHING) for name in found}
            self._current = kept | known

    def summed(self) -> EngineStats:
        """The sum over all replicas, also of what those that have ended had counted."""
        with self._lock:
            return summed([self._gone, *self._current.values()], resting=not self._current)


STATES: Final = {
    "running",
    "waiting",
    "kv_slots",
    "kv_used",
    "kv_cached",
    "speculative_slots",
    "speculative_used",
    "batches_in_flight",
    "rows_in_flight",
}
"""Figures of the present moment, which a replica takes with it; all other numbers count since its start."""


def summed(found: Iterable[EngineStats], resting: bool) -> EngineStats:
    """The sum of several engines' figures. Stages are listed one engine after the other."""
    all_of = list(found)
    numbers = {
        field.name: sum(getattr(one, field.name) for one in all_of)
        for field in fields(EngineStats)
        if field.type in ("int", "float")
    }
    steps = [one.last_step_seconds_ago for one in all_of if one.last_step_seconds_ago is not None]
    return EngineStats(
        **numbers,
        finished={
            reason: sum(one.finished.get(reason, 0) for one in all_of) for one in all_of for reason in one.finished
        },
        stage_busy_seconds=[seconds for one in all_of for seconds in one.stage_busy_seconds],
        stage_heard_seconds_ago=[seconds for one in all_of for seconds in one.stage_heard_seconds_ago],
        last_step_seconds_ago=min(steps, default=None),
        recovering=next((one.recovering for one in all_of if one.recovering is not None), None),
        resting=resting,
        ended=None,
    )


def counters_of(found: Iterable[EngineStats]) -> EngineStats:
    """The sum of what several engines have counted, without the figures of the moment."""
    total = asdict(summed(found, resting=True))
    total |= dict.fromkeys(STATES, 0)
    total |= {"stage_busy_seconds": [], "stage_heard_seconds_ago": []}  # the stages have gone, too
    total |= {"last_step_seconds_ago": None, "recovering": None}
    return EngineStats(**total)
