"""The live picture of the demo: two growing texts, the boards with their rows, and the draft tree.

The runs take place one after the other, so that neither disturbs the other. While Penstock runs, the plain run of the
same prompt is replayed beside it at its own pace: the race is shown as one, but measured in two runs.
"""

from __future__ import annotations

import bisect
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, cast

from rich.columns import Columns
from rich.console import Console, Group, RenderableType
from rich.containers import Lines
from rich.panel import Panel
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from penstock.cluster import Cluster
from penstock.demo.boards import Boards, boards_table, modelled_delays
from penstock.demo.tree import LEGEND, NARROW, GrowingTree, tree_table
from penstock.engine.loop import Observer
from penstock.trace import EMULATED

if TYPE_CHECKING:
    from penstock.engine.commit import Advance
    from penstock.engine.completion import Completion
    from penstock.messages import Batch, Result
    from penstock.requests.request import Request

PLAIN: Final = "autoregressive"
PENSTOCK: Final = "auto"
TITLES: Final = {PLAIN: "plain pipeline", PENSTOCK: "Penstock"}
STYLES: Final = {PLAIN: "yellow", PENSTOCK: "green"}
PAUSE: Final = 1.5
"""Seconds that a finished race stays on the screen before the next prompt."""
NO_DRAFTS: Final = "one token at a time: nothing is drafted"
GAP: Final = 2
"""Blanks between the boards and the tree."""
MOST_TEXT_LINES: Final = 20
LEAST_TEXT_LINES: Final = 4
FRAME_AND_STATUS: Final = 3
"""Lines for the texts' frame above and below, and for the status."""
OTHER_TREE_LINES: Final = 3
"""Lines for the legend, the tree's root, and the levels below the picture."""
TALL: Final = 32
"""Lines of a terminal from which on more of the tree is shown, and the models' names."""
LEVELS, TALL_LEVELS = (2, 3), (4, 6)
"""Levels of the tree that are shown above its root, already committed, and below it."""


# -------------------------------------------------------------------------------------------------------------- texts


@dataclass(frozen=True)
class Mark:
    """Progress at ``seconds`` after the start: number of tokens, and length of the text in characters."""

    seconds: float
    tokens: int
    length: int
    drafted: bool


@dataclass
class Run:
    """One strategy's run of one prompt, recorded so that it can be replayed at its own pace."""

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
        """Seconds from the start to the last token so far."""
        return self.marks[-1].seconds if self.marks else 0.0

    def until(self, seconds: float) -> list[Mark]:
        """The progress up to ``seconds`` after the start."""
        return self.marks[: bisect.bisect_right(self.marks, seconds, key=lambda mark: mark.seconds)]

    def styled(self, seconds: float) -> Text:
        """The text at that time; tokens that had been drafted before the target picked them stand out."""
        text, done = Text(), 0
        for mark in self.until(seconds):
            text.append(printable(self.text[done : mark.length]), STYLES[PENSTOCK] if mark.drafted else "")
            done = mark.length
        return text

    def pace(self, seconds: float) -> str:
        """Tokens and tokens per second at that time. The first token's time belongs to the prompt."""
        marks = self.until(seconds)
        tokens = marks[-1].tokens if marks else 0
        decoding = (min(seconds, self.seconds) if self.finished else seconds) - marks[0].seconds if marks else 0.0
        rate = f" · {(tokens - 1) / decoding:.1f} tokens/s" if tokens > 1 and decoding > 0 else ""
        return f"{tokens} token{'s' * (tokens != 1)}{rate}"


def printable(text: str) -> str:
    """The text without control characters, which would move the cursor (Python's sources have form feeds)."""
    return "".join(character for character in text if character == "\n" or character.isprintable())


# --------------------------------------------------------------------------------------------------------- the picture


class Race(Observer):
    """Watches all runs of the demo and is drawn whenever rich asks for it (``__rich__``)."""

    def __init__(self, console: Console, cluster: Cluster, prompts: Sequence[str], words: str) -> None:
        """``words`` name the models that write and draft."""
        self._console = console
        self._cluster = cluster
        self._prompts = prompts
        self._words = words
        self._boards = Boards(modelled_delays(cluster))
        self._tree = GrowingTree(keep=TALL_LEVELS[0])
        self._heading = f"Starting {len(cluster.stages)} stages ..."
        self._prompt = prompts[0]
        self._runs: dict[str, Run] = {}
        self._accepted = (0, 0)
        self._spinner = Spinner("dots")

    def begin(self, strategy: str, index: int, total: int) -> None:
        """A run begins. A prompt's first run clears the screen."""
        if strategy in self._runs:
            time.sleep(PAUSE)
            self._runs = {}
        self._heading = f"Prompt {index + 1} of {total}: {TITLES[strategy]}"
        self._prompt = self._prompts[index]
        self._accepted = (0, 0)
        self._boards.clear()
        self._tree.clear()
        self._runs[strategy] = Run(strategy, time.monotonic())

    def submitted(self, batch: Batch, at: float) -> None:
        self._boards.submitted(batch, at)
        self._tree.submitted(batch)

    def arrived(self, result: Result, at: float) -> None:
        self._boards.arrived(result)

    def advanced(self, request: Request, done: Advance, at: float) -> None:
        self._boards.died([node.id for node in done.dead])
        run = self._current
        assert run is not None
        completion = cast("Completion", request.output)
        completion.detokenize_pending()
        text = completion.output.text
        self._tree.advanced(done, printable(text[len(run.text) :]), at)
        if not done.committed:
            return
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
        head = self._head()
        levels = TALL_LEVELS if self._console.height >= TALL else LEVELS
        others = len(head) + FRAME_AND_STATUS + sum(levels) + OTHER_TREE_LINES
        text_lines = max(LEAST_TEXT_LINES, min(MOST_TEXT_LINES, self._console.height - others))
        return Group(*head, self._panels(now, text_lines), self._status(run), self._pipeline(now, run, levels))

    def texts(self) -> RenderableType:
        """The two texts alone, which stay when the race is over."""
        return self._panels(time.monotonic(), None)

    def _head(self) -> list[Text]:
        title = Text.assemble(("Penstock demo", "bold"), (f" · {EMULATED}", "italic"))
        lines = [self._cluster.description, *[self._words] * (self._console.height >= TALL)]
        return [
            line
            for text in (title, *(Text(one, "dim") for one in lines))
            for line in text.wrap(self._console, self._console.width)
        ]

    def _panels(self, now: float, height: int | None) -> RenderableType:
        """The texts side by side, in ``height`` lines each; None: as many lines as they need."""
        run = self._current
        elapsed = 0.0 if run is None else run.seconds if run.finished else now - run.started
        contents = {strategy: self._lines(strategy, elapsed) for strategy in STYLES}
        height = height or min(MOST_TEXT_LINES, max(map(len, contents.values())))
        grid = Table.grid(expand=True, padding=0)
        for _ in STYLES:
            grid.add_column(ratio=1)
        grid.add_row(*(self._panel(strategy, elapsed, lines[-height:], height) for strategy, lines in contents.items()))
        return grid

    def _lines(self, strategy: str, elapsed: float) -> Lines:
        """Prompt and text at that time, wrapped to the panel."""
        content = Text().append(printable(self._prompt), "dim")
        if (run := self._runs.get(strategy)) is not None:
            content.append_text(run.styled(elapsed))
        return content.wrap(self._console, self._console.width // 2 - 4, overflow="fold")

    def _panel(self, strategy: str, elapsed: float, lines: Sequence[Text], height: int) -> Panel:
        run, style = self._runs.get(strategy), STYLES[strategy]
        title, subtitle = TITLES[strategy], None
        if run is not None:
            title += " (replay)" if run is not self._current else ""
            subtitle = f"{run.pace(elapsed)} · {elapsed:.1f} s"
        return Panel(
            Text("\n").join(lines),
            title=Text(title, style=f"bold {style}"),
            subtitle=subtitle,
            border_style=style,
            height=height + 2,
            padding=(0, 1),
        )

    def _status(self, run: Run | None) -> RenderableType:
        accepted, misses = self._accepted
        words = self._heading
        if run is not None and run.strategy != PLAIN and accepted + misses:
            words += f" · {accepted} drafted tokens accepted, {misses} miss{'es' * (misses != 1)}"
        return Columns([self._spinner if run is None or not run.finished else Text("✓", "green"), Text(words)])

    def _pipeline(self, now: float, run: Run | None, levels: tuple[int, int]) -> RenderableType:
        """The boards, and beside them the tree whose rows are on them."""
        names = [", ".join(stage.devices) for stage in self._cluster.stages]
        style = STYLES[run.strategy] if run is not None else ""
        narrow = self._console.width - NARROW - GAP
        boards = boards_table(names, self._boards.loads(now), self._tree.root, narrow, style)
        width = self._console.width - self._console.measure(boards).maximum - GAP
        legend = NO_DRAFTS if run is not None and run.strategy == PLAIN else LEGEND
        grid = Table.grid(padding=(0, GAP, 0, 0), pad_edge=False)
        grid.add_row(boards, Group(Text(legend, "dim"), tree_table(self._tree, now, width, *levels, style)))
        return grid
