"""The race of the demo: two pipelines on emulated boards, and the tree between them."""

from __future__ import annotations

import bisect
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING, Final, cast

from rich.columns import Columns
from rich.console import Console, Group, RenderableType
from rich.containers import Lines
from rich.panel import Panel
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from penstock.cluster import Cluster, link_timings, stage_timings
from penstock.engine.loop import Observer
from penstock.engine.stats import DEAD, LoggedBatch, RunLog
from penstock.trace import EMULATED

if TYPE_CHECKING:
    from penstock.engine.completion import Completion
    from penstock.engine.scheduler import Advance
    from penstock.messages import Batch, Result
    from penstock.requests.request import Request

# --------------------------------------------------------------------------------------------------------------- boards
# The boards of the demo, a line each: the batch on the board, how many of its rows, and their depth in the tree.

FULL_BAR: Final = 32
"""Rows that fill a board's bar: the width of a layer in PipeDec."""
FIGURES: Final = (8, 6)
"""Columns of a line's figures: rows, like ``24 of 32``, and their level in the tree."""


@dataclass(frozen=True)
class BoardRows:
    """The rows on a board: live ones, their ``first`` and ``last`` position in the text, and dead ones."""

    live: int = 0
    dead: int = 0
    first: int = 0
    last: int = 0


def rows_on_boards(log: RunLog, boards: int, now: float) -> list[BoardRows]:
    """The rows on each board, where the log puts them; batches in front of the first board are not seen."""
    found = [BoardRows()] * boards
    for batch, board in log.placed(now):
        if board >= 0:
            found[board] = rows_of_batch(batch)
    return found


def rows_of_batch(batch: LoggedBatch) -> BoardRows:
    rows, fates = batch.rows, batch.fates
    live = [position for node, position in zip(rows.nodes, rows.positions, strict=True) if fates[node] != DEAD]
    dead = len(rows) - len(live)
    return BoardRows(len(live), dead, min(live), max(live)) if live else BoardRows(0, dead)


def modelled_delays(cluster: Cluster) -> list[float]:
    """Seconds from the engine until each stage begins on a batch that nothing holds up."""
    links, stages = link_timings(cluster), stage_timings(cluster)
    steps = [link.seconds(1) + stage.seconds(1) for link, stage in zip(links[1:], stages, strict=True)]
    return [links[0].seconds(1) + passed for passed in accumulate(steps[:-1], initial=0.0)]


# -------------------------------------------------------------------------------------------------------------- drawing


def boards_table(names: Sequence[str], loads: Sequence[BoardRows], root: int | None, width: int, style: str) -> Table:
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


def bar(load: BoardRows, width: int, style: str) -> Text:
    """A bar of live rows, pruned ones (dimmed), and dots up to a full layer."""
    scale = width / FULL_BAR
    live = min(width, round(load.live * scale) or (load.live > 0))
    gone = min(width - live, round(load.dead * scale))
    return Text.assemble(("█" * live, style), ("▒" * gone, "dim"), ("·" * (width - live - gone), "dim"))


def rows_of(load: BoardRows) -> Text:
    """The number of live rows, and of all that entered."""
    if not load.live + load.dead:
        return Text("idle", "dim")
    return Text(f"{load.live} of {load.live + load.dead}" if load.dead else str(load.live))


def level_of(load: BoardRows, root: int | None) -> str:
    """The levels below the root of a board's live rows."""
    if not load.live:
        return ""
    if root is None or load.first < root:
        return "prompt"
    first, last = load.first - root, load.last - root
    if first == last:
        return f"+{last}" if last else "root"
    return f"+{first}-{last}"


# ----------------------------------------------------------------------------------------------------------------- tree
# The draft tree of the demo, a line per level: committed, drafted and pruned tokens.
#
#               def      ●××××××·······    committed: the target's token was the first draft
#                 f      ××●×××××          here the third
#               ▸ (      ●                 the root: the last committed token
#                +1   8  ○○○○○○○○          its drafted children
#                +2   9  ○○○××○○○○○○×      and theirs, best first; what dies fades
#
# A level appears when its nodes enter the first stage, and moves up a line with every token that is committed.

FADING: Final = 0.4
"""Seconds for which a pruned node is shown as a cross; then it is a dot."""
HIT, MISS, DRAFTED, PRUNED, FADED = "●", "◆", "○", "×", "·"
LEGEND: Final = f"{HIT} hit  {MISS} miss  {DRAFTED} drafted  {PRUNED} pruned"
LABEL: Final = 9
"""Columns of a line's label: a token's text, or its level below the root."""
COUNT: Final = 3
"""Columns of the number of drafted nodes on a line."""
NARROW: Final = LABEL + 32 + COUNT + 2
"""Columns that PipeDec's width of 32 needs."""


@dataclass
class Leaf:
    """A node of the tree, as it is drawn."""

    id: int
    glyph: str = DRAFTED
    died_at: float = 0.0

    def at(self, now: float) -> str:
        return FADED if self.glyph == PRUNED and now - self.died_at > FADING else self.glyph


@dataclass
class Level:
    """The nodes of one position in the order in which they entered, and the committed token's text once
    there is one."""

    leaves: list[Leaf] = field(default_factory=list)
    text: str = ""

    @property
    def drafted(self) -> int:
        return sum(leaf.glyph == DRAFTED for leaf in list(self.leaves))


class GrowingTree:
    """Follows the tree of one request by what enters, commits and dies. A drawing thread only reads it."""

    def __init__(self, keep: int) -> None:
        self.root: int | None = None
        self._keep = keep
        self._levels: dict[int, Level] = {}
        self._leaves: dict[int, Leaf] = {}

    def clear(self) -> None:
        self.root = None
        self._levels, self._leaves = {}, {}

    def submitted(self, batch: Batch) -> None:
        """Add the rows whose successor is asked for, including the root; all other rows are the prompt's."""
        for row in batch.wanted:
            node, position = batch.rows.nodes[row], batch.rows.positions[row]
            if self.root is None:
                self.root = position
            if node not in self._leaves:
                self._add(position, Leaf(node, HIT if position == self.root else DRAFTED))

    def advanced(self, done: Advance, text: str, at: float) -> None:
        """``text`` is the text that the committed tokens added to the output."""
        for node in done.dead:
            if (leaf := self._leaves.get(node.id)) is not None:
                leaf.glyph, leaf.died_at = PRUNED, at
        for i, node in enumerate(done.committed):
            self.root = node.position
            if node.id not in self._leaves:  # it has yet to enter
                self._leaves[node.id] = Leaf(node.id)
                self._level(node.position).leaves.insert(0, self._leaves[node.id])
            self._leaves[node.id].glyph = HIT if i < done.hits else MISS
        if done.committed:
            self._level(done.committed[-1].position).text = text
            self._forget()

    def level(self, position: int) -> Level:
        return self._levels.get(position) or Level()

    def below(self, position: int) -> list[int]:
        """Numbers of drafted nodes on every level below a position that has any."""
        counts = [level.drafted for at, level in list(self._levels.items()) if at > position]
        return [count for count in counts if count]

    def _add(self, position: int, leaf: Leaf) -> None:
        """Add a drafted node to its level, replacing the level if all of it was pruned."""
        level = self._level(position)
        if all(other.glyph != DRAFTED for other in level.leaves):
            self._drop(level)
        self._leaves[leaf.id] = leaf
        level.leaves.append(leaf)

    def _level(self, position: int) -> Level:
        return self._levels.setdefault(position, Level())

    def _forget(self) -> None:
        """Drop the levels that have left the picture at its top."""
        assert self.root is not None
        for position in [position for position in self._levels if position < self.root - self._keep]:
            self._drop(self._levels.pop(position))

    def _drop(self, level: Level) -> None:
        for leaf in level.leaves:
            del self._leaves[leaf.id]
        level.leaves = []


# -------------------------------------------------------------------------------------------------------------- drawing


def tree_table(tree: GrowingTree, now: float, width: int, above: int, below: int, style: str) -> Table:
    """``above`` lines above the root and ``below`` lines under it, and one for all deeper levels."""
    across = width - LABEL - COUNT - 2
    table = Table.grid(padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column(width=LABEL, justify="right", no_wrap=True)
    table.add_column(width=COUNT, justify="right", no_wrap=True)
    table.add_column(width=across, no_wrap=True)
    root = tree.root or 0
    for offset in range(-above, below + 1):
        level = tree.level(root + offset)
        table.add_row(label_of(level, offset), str(level.drafted or ""), leaves_of(level, now, across, style))
    deeper = tree.below(root + below)
    levels = f"{len(deeper)} level{'s' * (len(deeper) != 1)}"
    table.add_row("", "", Text(f"{sum(deeper)} nodes on {levels} below" if deeper else "", "dim"))
    return table


def label_of(level: Level, offset: int) -> Text:
    """The committed token's text, marked at the root; below the root, the distance from it."""
    if offset > 0:
        return Text(f"+{offset}" if level.leaves else "", "dim")
    mark = "▸ " if level.leaves and not offset else ""
    label = Text((mark + shown(level.text)).rstrip(), "" if offset else "bold")
    label.truncate(LABEL, overflow="ellipsis")
    return label


def leaves_of(level: Level, now: float, width: int, style: str) -> Text:
    """A glyph per node; where they do not all fit, the committed one stays in sight."""
    glyphs = [leaf.at(now) for leaf in list(level.leaves)]
    if len(glyphs) > width:
        # The last column shows the committed node where that would be cut off.
        committed = next((glyph for glyph in glyphs[width - 1 :] if glyph in (HIT, MISS)), "…")
        glyphs = [*glyphs[: width - 1], committed]
    styles = {HIT: f"bold {style}", MISS: "bold yellow", DRAFTED: style, PRUNED: "dim red"}
    return Text.assemble(*((glyph, styles.get(glyph, "dim")) for glyph in glyphs))


def shown(text: str) -> str:
    """A token's text on one line, without blanks around it unless it is blank."""
    return text.replace("\n", "↵").strip(" ") or "␣" * bool(text)


# ----------------------------------------------------------------------------------------------------------------- race
# The live picture of the demo: two growing texts, the boards with their rows, and the draft tree.
#
# The runs take place one after the other, so that neither disturbs the other. While Penstock runs, the plain run of the
# same prompt is replayed beside it at its own pace: the race is shown as one, but measured in two runs.

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
"""The most and the fewest lines of the growing texts."""
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
        """Tokens and tokens per second at that time, and the run's own time once it is over.

        The first token's time belongs to the prompt.
        """
        marks = self.until(seconds)
        tokens = marks[-1].tokens if marks else 0
        decoding = (min(seconds, self.seconds) if self.finished else seconds) - marks[0].seconds if marks else 0.0
        rate = f" · {(tokens - 1) / decoding:.1f} tokens/s" if tokens > 1 and decoding > 0 else ""
        done = f" in {self.seconds:.1f} s" if self.finished and seconds >= self.seconds else ""
        return f"{tokens} token{'s' * (tokens != 1)}{done}{rate}"


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
        self._log = RunLog(len(cluster.stages), modelled_delays(cluster))
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
        self._log.clear()
        self._tree.clear()
        self._runs[strategy] = Run(strategy, time.monotonic())

    def waits(self) -> None:
        self._log.settle()

    def submitted(self, batch: Batch, at: float) -> None:
        self._log.submitted(batch, at)
        self._tree.submitted(batch)

    def arrived(self, result: Result, at: float) -> None:
        self._log.arrived(result)

    def advanced(self, request: Request, done: Advance, at: float) -> None:
        self._log.advanced(done)
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
            self._log.clear()

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
        status = self._status(run, self._elapsed(now))
        return Group(*head, self._panels(now, text_lines), status, self._pipeline(now, run, levels))

    def texts(self) -> RenderableType:
        """The two texts and the clock, which stay when the race is over."""
        now = time.monotonic()
        return Group(self._panels(now, None), Text(f"Both after {self._elapsed(now):.1f} s.", "dim"))

    def _elapsed(self, now: float) -> float:
        """Seconds on the race's one clock: a replayed run is shown as it was after that time."""
        run = self._current
        if run is None:
            return 0.0
        return run.seconds if run.finished else now - run.started

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
        elapsed = self._elapsed(now)
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
            subtitle = run.pace(elapsed)
        return Panel(
            Text("\n").join(lines),
            title=Text(title, style=f"bold {style}"),
            subtitle=subtitle,
            border_style=style,
            height=height + 2,
            padding=(0, 1),
        )

    def _status(self, run: Run | None, elapsed: float) -> RenderableType:
        accepted, misses = self._accepted
        words = self._heading + (f" · {elapsed:.1f} s" if run is not None else "")
        if run is not None and run.strategy != PLAIN and accepted + misses:
            words += f" · {accepted} drafted tokens accepted, {misses} miss{'es' * (misses != 1)}"
        return Columns([self._spinner if run is None or not run.finished else Text("✓", "green"), Text(words)])

    def _pipeline(self, now: float, run: Run | None, levels: tuple[int, int]) -> RenderableType:
        """The boards, and beside them the tree whose rows are on them."""
        names = [", ".join(stage.devices) for stage in self._cluster.stages]
        style = STYLES[run.strategy] if run is not None else ""
        narrow = self._console.width - NARROW - GAP
        boards = boards_table(names, rows_on_boards(self._log, len(names), now), self._tree.root, narrow, style)
        width = self._console.width - self._console.measure(boards).maximum - GAP
        legend = NO_DRAFTS if run is not None and run.strategy == PLAIN else LEGEND
        grid = Table.grid(padding=(0, GAP, 0, 0), pad_edge=False)
        grid.add_row(boards, Group(Text(legend, "dim"), tree_table(self._tree, now, width, *levels, style)))
        return grid
