"""The replicas' reports on themselves, as the process has them that sends the requests."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

from penstock.engine.stats import EngineStats, following, summed

NOTHING: Final = replace(summed(()), resting=True)
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
        """The counters of replicas that have ended: none ever goes down, as Prometheus wants it."""

    def update(self, found: Mapping[str, Report | None]) -> None:
        """Take the reports of the replicas that there are, by their ids; None of one that has made none yet."""
        with self._lock:
            gone = summed([stats for name, stats in self._current.items() if name not in found])
            self._gone = replace(following(self._gone, gone), stage_busy_seconds=[])
            known = {name: report.stats for name, report in found.items() if report is not None}
            kept = {name: self._current.get(name, NOTHING) for name in found}
            self._current = kept | known

    def summed(self) -> EngineStats:
        """The sum over all replicas, also of what those that have ended had counted."""
        with self._lock:
            now = summed(list(self._current.values()))
            return replace(following(self._gone, now), resting=not self._current)
