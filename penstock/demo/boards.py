"""The boards of the demo, a line each: the batch on the board, how many of its rows, and their depth in the tree."""

from __future__ import annotations

import bisect
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Final

from rich.table import Table
from rich.text import Text

from penstock.cluster import Cluster, link_timings, stage_timings

if TYPE_CHECKING:
    from penstock.messages import Batch, Result, Rows

FULL_BAR: Final = 32
"""Rows that fill a board's bar: the width of a layer in PipeDec."""
FIGURES: Final = (8, 6)
"""Columns of a line's figures: rows, like ``24 of 32``, and their level in the tree."""


@dataclass(frozen=True)
class Load:
    """The rows on a board: live ones, their ``first`` and ``last`` position in the text, and dead ones."""

    live: int = 0
    dead: int = 0
    first: int = 0
    last: int = 0


@dataclass
class BatchInFlight:
    """A batch that has entered and has not come out."""

    entered: float
    rows: Rows


class Boards:
    """Locates rows on boards: the engine tells which entered and which are dead, the modelled times how far they are.

    ``delays`` are the seconds from entering until each stage begins. A batch never overtakes the one before it.
    """

    def __init__(self, delays: Sequence[float]) -> None:
        self._delays = list(delays)
        self._in_flight: dict[int, BatchInFlight] = {}
        self._dead: set[int] = set()

    def submitted(self, batch: Batch, at: float) -> None:
        self._in_flight[batch.stream] = BatchInFlight(at, batch.rows)

    def arrived(self, result: Result) -> None:
        self._in_flight.pop(result.stream, None)

    def died(self, nodes: Collection[int]) -> None:
        self._dead.update(nodes)

    def clear(self) -> None:
        self._in_flight.clear()
        self._dead.clear()

    def loads(self, now: float) -> list[Load]:
        """The rows on each board. Called from the drawing thread, so it works on copies."""
        found = [Load()] * len(self._delays)
        ahead = len(self._delays)
        for batch in list(self._in_flight.values()):
            # A batch is at least one board behind the one that entered before it.
            ahead = min(ahead - 1, bisect.bisect_right(self._delays, now - batch.entered) - 1)
            if ahead < 0:
                break
            found[ahead] = self._load(batch.rows)
        return found

    def _load(self, rows: Rows) -> Load:
        dead = self._dead.intersection(rows.nodes)
        live = [position for node, position in zip(rows.nodes, rows.positions, strict=True) if node not in dead]
        return Load(len(live), len(dead), min(live), max(live)) if live else Load(0, len(dead))


def modelled_delays(cluster: Cluster) -> list[float]:
    """Seconds from the engine until each stage begins on a batch that nothing holds up."""
    links, stages = link_timings(cluster), stage_timings(cluster)
    steps = [link.seconds(1) + stage.seconds(1) for link, stage in zip(links[1:], stages, strict=True)]
    return [links[0].seconds(1) + passed for passed in accumulate(steps[:-1], initial=0.0)]


# -------------------------------------------------------------------------------------------------------------- drawing


def boards_table(names: Sequence[str], loads: Sequence[Load], root: int | None, width: int, style: str) -> Table:
    """A line per board; ``root`` is the position of the tree's root (None: the prompt is in flight)."""
    longest = max(map(len, names))
    bar_width = max(0, min(FULL_BAR, width - longest - sum(FIGURES) - 3))
    table = Table.grid(padding=(0, 1, 0, 0), pad_edge=False)
    for columns in (longest, bar_width):
        table.add_column(width=columns, no_wrap=True)
    for columns in FIGURES:
        table.add_column(width=columns, justify="right", no_wrap=True)
    table.add_row(*(Text(heading, "dim") for heading in ("board", "", "rows", "level")))
    for name, load in zip(names, loads, strict=True):
        table.add_row(
            Text(name, "bold" if load.live else "dim"), bar(load, bar_width, style), rows_of(load), level_of(load, root)
        )
    return table


def bar(load: Load, width: int, style: str) -> Text:
    """A bar of live rows, pruned ones (dimmed), and dots up to a full layer."""
    scale = width / FULL_BAR
    live = min(width, round(load.live * scale) or (load.live > 0))
    gone = min(width - live, round(load.dead * scale))
    return Text.assemble(("█" * live, style), ("▒" * gone, "dim"), ("·" * (width - live - gone), "dim"))


def rows_of(load: Load) -> Text:
    """The number of live rows, and of all that entered."""
    if not load.live + load.dead:
        return Text("idle", "dim")
    return Text(f"{load.live} of {load.live + load.dead}" if load.dead else str(load.live))


def level_of(load: Load, root: int | None) -> str:
    """The levels below the root of a board's live rows."""
    if not load.live:
        return ""
    if root is None or load.first < root:
        return "prompt"
    first, last = load.first - root, load.last - root
    if first == last:
        return f"+{last}" if last else "root"
    return f"+{first}-{last}"
