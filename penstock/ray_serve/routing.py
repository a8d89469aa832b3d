"""The replicas' reports on themselves, and the choice of one of them for a request.

The choice is a pure function of what is known of the replicas, without a clock.
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


MOST_SENT: Final = 4096
"""Hashes of blocks that were sent to a replica and are remembered beside its report; the oldest are forgotten."""


@dataclass
class Known:
    """A replica as one router knows it: its last report, and what was sent since."""

    report: Report | None = None
    sent: int = 0
    """Requests sent by this router that have not ended."""
    reported: int = 0
    """``sent`` when the report came, which includes those."""

    def __post_init__(self) -> None:
        self._blocks: dict[int, None] = {}

    def note_report(self, report: Report | None) -> None:
        if report is not None and report != self.report:
            self.report, self.reported = report, self.sent

    def note_sent(self, blocks: Sequence[int]) -> None:
        """Note a request with these blocks: they will be in the replica's prefix cache before the next report."""
        self.sent += 1
        for block in blocks:
            self._blocks.pop(block, None)
            self._blocks[block] = None
        while len(self._blocks) > MOST_SENT:
            del self._blocks[next(iter(self._blocks))]

    def note_ended(self) -> None:
        self.sent -= 1

    @property
    def load(self) -> int:
        """Requests that run or wait there, other routers' as of the last report."""
        if self.report is None:
            return self.sent
        stats = self.report.stats
        return max(self.sent, stats.running + stats.waiting + self.sent - self.reported)

    def cached_tokens(self, blocks: Sequence[int]) -> int:
        """How many of a prompt's first tokens the replica need not compute."""
        held = self.report.blocks if self.report is not None else frozenset()
        count = 0
        for block in blocks:
            if block not in held and block not in self._blocks:
                break
            count += BLOCK
        return count


def ranked(prompt: Sequence[int], known: Mapping[str, Known]) -> list[str]:
    """The replicas, the best first: where prompt tokens to compute and load cost least, then where the load is least.

    A prefix that many prompts share spreads by itself, once the load of the replica that has it outweighs the rest.
    """
    blocks = list(block_hashes(prompt))

    def least(name: str) -> tuple[float, int]:
        one = known[name]
        load = Load(one.cached_tokens(blocks), 0, one.load)
        return cost(len(prompt), load, USUAL_ANSWER), one.load

    return sorted(known, key=least)


REPORTS: Final = Reports()
"""The last report of every replica."""
