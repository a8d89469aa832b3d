"""The replicas' reports on themselves, and the choice of one of them for a request.

The choice depends on nothing but the knowledge of the replicas: it reads no clock.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

from penstock.engine.replicas.router import USUAL_ANSWER, Load, cost
from penstock.engine.stats import EngineStats, following, summed
from penstock.requests.slots import BLOCK, block_hashes

NOTHING: Final = replace(summed(()), resting=True)
"""The figures of no replicas: everything rests until a request comes."""


@dataclass(frozen=True)
class Report:
    """A replica's state: its engine's figures, and the hashes of the blocks in its prefix cache."""

    stats: EngineStats
    blocks: frozenset[int] = frozenset()

    def as_dict(self) -> dict[str, Any]:
        """The report as a table, the form in which Ray Serve carries routing statistics."""
        return {"stats": asdict(self.stats), "blocks": sorted(self.blocks)}

    @classmethod
    def of(cls, found: Mapping[str, Any]) -> Report | None:
        """The report in a replica's routing statistics; None if it has not made any yet."""
        if "stats" not in found:
            return None
        return cls(EngineStats(**found["stats"]), frozenset(found["blocks"]))


class Reports:
    """The last report of every replica. The router's thread writes them, and the server's thread reads them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._current: dict[str, EngineStats] = {}
        self._gone = NOTHING
        """The counters of replicas that have ended: sums must never fall, or Prometheus would see a restart."""

    def update(self, found: Mapping[str, Report | None]) -> None:
        """Take the reports of all present replicas, by their ids; None for a replica that has not made any yet."""
        with self._lock:
            gone = summed([stats for name, stats in self._current.items() if name not in found])
            self._gone = replace(following(self._gone, gone), stage_busy_seconds=[])
            # A replica without a new report keeps its old one; a new replica counts as resting.
            known = {name: report.stats for name, report in found.items() if report is not None}
            kept = {name: self._current.get(name, NOTHING) for name in found}
            self._current = kept | known

    def summed(self) -> EngineStats:
        """The sum over all replicas, those that have ended included."""
        with self._lock:
            now = summed(list(self._current.values()))
            return replace(following(self._gone, now), resting=not self._current)


MOST_SENT: Final = 4096
"""Most hashes of blocks sent to a replica since its report that are remembered; the oldest are forgotten. A report has
no more (``application.MOST_BLOCKS``)."""


@dataclass
class Known:
    """A replica as one router knows it: its last report, and the requests sent since."""

    report: Report | None = None
    sent: int = 0
    """Requests of this router that have been sent there and have not ended."""
    reported: int = 0
    """``sent`` at the time of the report: these requests are among those that it counts."""

    def __post_init__(self) -> None:
        # A dict as an ordered set: a block that is sent again moves to the end, where it is forgotten last.
        self._blocks: dict[int, None] = {}

    def note_report(self, report: Report | None) -> None:
        """Take a report, unless it is the last one again."""
        if report is not None and report != self.report:
            self.report, self.reported = report, self.sent

    def note_sent(self, blocks: Sequence[int]) -> None:
        """Count a request, whose blocks will be in the replica's prefix cache before the next report."""
        self.sent += 1
        for block in blocks:
            self._blocks.pop(block, None)
            self._blocks[block] = None
        while len(self._blocks) > MOST_SENT:
            del self._blocks[next(iter(self._blocks))]

    def note_ended(self) -> None:
        """Count a request's end."""
        self.sent -= 1

    @property
    def load(self) -> int:
        """Requests that run or wait there; other routers' requests as of the last report."""
        if self.report is None:
            return self.sent
        # The report counts every router's requests; this router's own are known up to now.
        stats = self.report.stats
        return max(self.sent, stats.running + stats.waiting + self.sent - self.reported)

    def cached_tokens(self, blocks: Sequence[int]) -> int:
        """Tokens at the beginning of a prompt, given as the hashes of its blocks, that the replica has in its cache."""
        held = self.report.blocks if self.report is not None else frozenset()
        count = 0
        for block in blocks:
            if block not in held and block not in self._blocks:
                break
            count += BLOCK
        return count


def ranked(prompt: Sequence[int], known: Mapping[str, Known]) -> list[str]:
    """The names of the replicas, the best first: the cheapest in prompt tokens to compute and load, then in load alone.

    A prefix that many prompts share spreads by itself: as soon as the replica that has it is loaded so much that
    computing the prefix elsewhere is cheaper.
    """
    # Chained hashes: a block's hash stands for all tokens up to its end, so that equal hashes mean equal prefixes.
    blocks = list(block_hashes(prompt))

    def least(name: str) -> tuple[float, int]:
        one = known[name]
        load = Load(one.cached_tokens(blocks), 0, one.load)
        return cost(len(prompt), load, USUAL_ANSWER), one.load

    return sorted(known, key=least)


REPORTS: Final = Reports()
"""The reports in this process, which the router writes and the engine of the server reads."""
