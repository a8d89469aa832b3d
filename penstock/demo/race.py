"""The live picture of the demo: two texts that grow, and the boards with the rows on them.

The runs happen one after the other, so that neither disturbs the other. While Penstock runs, the plain run of the same
prompt is shown again beside it at the pace at which it went: a race that is run twice and measured once.
"""

from __future__ import annotations

import bisect
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING, Final, cast

from rich.columns import Columns
from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from penstock.cluster import Cluster, link_timings, stage_timings
from penstock.trace import EMULATED, Watcher

if TYPE_CHECKING:
    from penstock.engine.commit import Advance
    from penstock.engine.llm import Completion
    from penstock.messages import Batch, Result
    from penstock.requests.request import Request

PLAIN: Final = "autoregressive"
PENSTOCK: Final = "pipedec"
TITLES: Final = {PLAIN: "plain pipeline", PENSTOCK: "Penstock"}
STYLES: Final = {PLAIN: "yellow", PENSTOCK: "green"}
PAUSE: Final = 1.5
"""Seconds that a finished race stays on the screen before the next prompt."""
FULL_BAR: Final = 32
"""Rows that fill a board's bar: PipeDec's width of a layer."""
OTHER_LINES: Final = 9
"""Lines of the picture below its heading that are not text: frames, status, boards, the shell's own."""
MOST_TEXT_LINES: Final = 20
LEAST_TEXT_LINES: Final = 4


# -------------------------------------------------------------------------------------------------------------- texts


@dataclass(frozen=True)
class Mark:
    """So many seconds after the start there were so many tokens and characters."""

    seconds: float
    tokens: int
    length: int
    drafted: bool


@dataclass
class Run:
    """One strategy's run of one prompt, recorded so that it can be shown again at its own pace."""

    strategy: str
    started: float
    text: str = ""
    marks: list[Mark] = field(default_factory=list)
    finished: bool = False

    def add(self, at: float, tokens: int, text: str, drafted: bool) -> None:
        self.text = text
        self.marks.append(Mark(at - self.started, tokens, len(text), drafted))

    @property
    def seconds(self) -> float:
        """From the start to the last token so far."""
        return self.marks[-1].seconds if self.marks else 0.0

    def until(self, seconds: float) -> list[Mark]:
        """What had happened by then."""
        return self.marks[: bisect.bisect_right(self.marks, seconds, key=lambda mark: mark.seconds)]

    def styled(self, seconds: float) -> Text:
        """The text as of then; tokens that had been drafted before the target named them stand out."""
        text, done = Text(), 0
        for mark in self.until(seconds):
            text.append(printable(self.text[done : mark.length]), STYLES[PENSTOCK] if mark.drafted else "")
            done = mark.length
        return text

    def pace(self, seconds: float) -> str:
        """Tokens and tokens per second as of then. The first token's time is the prompt's."""
        marks = self.until(seconds)
        tokens = marks[-1].tokens if marks else 0
        decoding = (min(seconds, self.seconds) if self.finished else seconds) - marks[0].seconds if marks else 0.0
        rate = f" · {(tokens - 1) / decoding:.1f} tokens/s" if tokens > 1 and decoding > 0 else ""
        return f"{tokens} token{'s' * (tokens != 1)}{rate}"


def printable(text: str) -> str:
    """Without control characters, which would move the cursor (Python's sources hold form feeds)."""
    return "".join(character for character in text if character == "\n" or character.isprintable())


# ------------------------------------------------------------------------------------------------------------- boards


@dataclass
class Flying:
    """A batch on its way."""

    entered: float
    nodes: list[int]


class Boards:
    """Which rows are where. The engine knows what entered and what is dead; the modelled times say how far it is.

    ``delays`` are the seconds from entering until each stage begins. A batch never overtakes the one before it.
    """

    def __init__(self, delays: Sequence[float]) -> None:
        self._delays = list(delays)
        self._flying: dict[int, Flying] = {}
        self._dead: set[int] = set()

    def submitted(self, batch: Batch, at: float) -> None:
        self._flying[batch.stream] = Flying(at, batch.rows.nodes)

    def arrived(self, result: Result) -> None:
        self._flying.pop(result.stream, None)

    def died(self, nodes: Collection[int]) -> None:
        self._dead.update(nodes)

    def clear(self) -> None:
        self._flying.clear()
        self._dead.clear()

    def rows(self, now: float) -> list[tuple[int, int]]:
        """Live and dead rows on each board. Called from the drawing thread: works on copies."""
        found = [(0, 0)] * len(self._delays)
        ahead = len(self._delays)
        for batch in list(self._flying.values()):
            ahead = min(ahead - 1, bisect.bisect_right(self._delays, now - batch.entered) - 1)
            if ahead < 0:
                break
            dead = len(self._dead.intersection(batch.nodes))
            found[ahead] = (len(batch.nodes) - dead, dead)
        return found


def modelled_delays(cluster: Cluster) -> list[float]:
    """Seconds from the engine until each stage begins on a batch that nothing holds up."""
    links, stages = link_timings(cluster), stage_timings(cluster)
    steps = [link.seconds(1) + stage.seconds(1) for link, stage in zip(links[1:], stages, strict=True)]
    return [links[0].seconds(1) + passed for passed in accumulate(steps[:-1], initial=0.0)]


def board(name: str, live: int, dead: int, width: int, style: str) -> Text:
    """Three lines: the board's name, a bar of its live and (dimmed) its pruned rows, and the same in words."""
    scale = width / FULL_BAR
    bar = min(width, round(live * scale) or (live > 0))
    gone = min(width - bar, round(dead * scale))
    words = "idle" if not live + dead else f"{live} row{'s' * (live != 1)}" + (f", {dead} pruned" if dead else "")
    return Text.assemble(
        (f"{name}\n", "bold" if live else "dim"),
        ("█" * bar, style),
        ("▒" * gone, "dim"),
        ("·" * (width - bar - gone) + "\n", "dim"),
        (words[:width], "" if live else "dim"),
    )


# --------------------------------------------------------------------------------------------------------- the picture


class Race(Watcher):
    """Watches all runs of the demo and draws itself whenever rich asks for it (``__rich__``)."""

    def __init__(self, console: Console, cluster: Cluster, prompts: Sequence[str]) -> None:
        self._console = console
        self._cluster = cluster
        self._prompts = prompts
        self._boards = Boards(modelled_delays(cluster))
        self._heading = f"Starting {len(cluster.stages)} stages and the draft model ..."
        self._prompt = ""
        self._runs: dict[str, Run] = {}
        self._accepted = (0, 0)
        self._spinner = Spinner("dots")

    def begin(self, strategy: str, index: int, total: int) -> None:
        """A run begins. A prompt's first one clears the screen."""
        if strategy in self._runs:
            time.sleep(PAUSE)
            self._runs = {}
        self._heading = f"Prompt {index + 1} of {total}: {TITLES[strategy]}"
        self._prompt = self._prompts[index]
        self._accepted = (0, 0)
        self._boards.clear()
        self._runs[strategy] = Run(strategy, time.monotonic())

    def submitted(self, batch: Batch, at: float) -> None:
        self._boards.submitted(batch, at)

    def arrived(self, result: Result, at: float) -> None:
        self._boards.arrived(result)

    def advanced(self, request: Request, done: Advance, at: float) -> None:
        self._boards.died([node.id for node in done.dead])
        if not done.committed:
            return
        run = self._current
        assert run is not None
        text = cast("Completion", request.output).output.text
        run.add(at, request.produced, text, drafted=done.hits == len(done.committed))
        self._accepted = (request.metrics.accepted, request.metrics.misses)
        if done.finished is not None:
            run.finished = True
            self._boards.clear()

    @property
    def _current(self) -> Run | None:
        return list(self._runs.values())[-1] if self._runs else None

    # ------------------------------------------------------------------------------------------------------- drawing

    def __rich__(self) -> RenderableType:
        now = time.monotonic()
        run = self._current
        elapsed = 0.0 if run is None else run.seconds if run.finished else now - run.started
        head = self._head()
        return Group(*head, self._panels(elapsed, self._text_lines(len(head))), *self._picture(now, run))

    def _text_lines(self, head_lines: int) -> int:
        """What the terminal's height leaves for the texts."""
        return max(LEAST_TEXT_LINES, min(MOST_TEXT_LINES, self._console.height - head_lines - OTHER_LINES))

    def _head(self) -> list[Text]:
        title = Text.assemble(("Penstock demo", "bold"), (f" · {EMULATED}", "italic"))
        described = Text(self._cluster.description, "dim")
        return [line for text in (title, described) for line in text.wrap(self._console, self._console.width)]

    def _panels(self, elapsed: float, height: int) -> RenderableType:
        grid = Table.grid(expand=True, padding=0)
        for _ in STYLES:
            grid.add_column(ratio=1)
        grid.add_row(*(self._panel(strategy, elapsed, height) for strategy in STYLES))
        return grid

    def _panel(self, strategy: str, elapsed: float, height: int) -> Panel:
        """The end of prompt and text, as many lines as fit."""
        run, style = self._runs.get(strategy), STYLES[strategy]
        content = Text(printable(self._prompt), "dim")
        title, subtitle = TITLES[strategy], None
        if run is not None:
            content.append_text(run.styled(elapsed))
            title += " (replay)" if run is not self._current else ""
            subtitle = f"{run.pace(elapsed)} · {elapsed:.1f} s"
        lines = content.wrap(self._console, self._console.width // 2 - 4, overflow="fold")[-height:]
        return Panel(
            Text("\n").join(lines),
            title=Text(title, style=f"bold {style}"),
            subtitle=subtitle,
            border_style=style,
            height=height + 2,
            padding=(0, 1),
        )

    def _picture(self, now: float, run: Run | None) -> list[RenderableType]:
        """What is going on, and the boards in a row."""
        names = [", ".join(stage.devices) for stage in self._cluster.stages]
        width = self._console.width // len(names) - 3
        style = STYLES[run.strategy] if run is not None else ""
        cells: list[RenderableType] = []
        for name, (live, dead) in zip(names, self._boards.rows(now), strict=True):
            cells += [Text("\n→" if cells else "\n ", "dim"), board(name, live, dead, width, style)]
        boards = Table.grid(padding=(0, 1))
        boards.add_row(*cells)
        busy = self._spinner if run is None or not run.finished else Text("✓", "green")
        return [Columns([busy, Text(self._status(run))]), Text(), boards]

    def _status(self, run: Run | None) -> str:
        accepted, misses = self._accepted
        if run is None or run.strategy == PLAIN or not accepted + misses:
            return self._heading
        return f"{self._heading} · {accepted} drafted tokens accepted, {misses} misses"
