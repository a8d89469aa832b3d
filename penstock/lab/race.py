"""The picture of the demo's race: two texts that grow, the boards with their rows, and the draft tree."""

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
# The boards of the demo, a line each: how many rows of a batch are on the board, and their levels in the tree.

FULL_BAR: Final = 32
"""Rows that fill a board's bar: the width of a layer of PipeDec's tree."""
FIGURES: Final = (8, 6)
"""Columns of a line's figures: rows, like ``24 of 32``, and their levels in the tree."""


@dataclass(frozen=True)
class BoardRows:
    """The rows on a board: the number of live and of dead ones, and the first and last position of the live ones."""

    live: int = 0
    dead: int = 0
    first: int = 0
    last: int = 0


def rows_on_boards(log: RunLog, boards: int, now: float) -> list[BoardRows]:
    """The rows on each board, as the log estimates it; batches that have not reached the first board are left out."""
    found = [BoardRows()] * boards
    for batch, board in log.placed(now):
        if board >= 0:
            found[board] = rows_of_batch(batch)
    return found


def rows_of_batch(batch: LoggedBatch) -> BoardRows:
    """The rows of a batch."""
    rows, fates = batch.rows, batch.fates
    live = [position for node, position in zip(rows.nodes, rows.positions, strict=True) if fates[node] != DEAD]
    dead = len(rows) - len(live)
    return BoardRows(len(live), dead, min(live), max(live)) if live else BoardRows(0, dead)


def modelled_delays(cluster: Cluster) -> list[float]:
    """Seconds from the engine to the beginning of each stage's work on a batch that has to wait for nothing."""
    links, stages = link_timings(cluster), stage_timings(cluster)
    steps = [link.seconds(1) + stage.seconds(1) for link, stage in zip(links[1:], stages, strict=True)]
    return [links[0].seconds(1) + passed for passed in accumulate(steps[:-1], initial=0.0)]


# -------------------------------------------------------------------------------------------------------------- drawing
# The boards as a table.


def boards_table(names: Sequence[str], loads: Sequence[BoardRows], root: int | None, width: int, style: str) -> Table:
    """A line for each board. ``root``: the position of the tree's root; None: no row but the prompt's has entered."""
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
    """A bar of ``width`` characters: live rows, dead ones (dimmed), and dots up to a full layer."""
    scale = width / FULL_BAR
    # A live row is always seen, even if it is less than half a character.
    live = min(width, round(load.live * scale) or (load.live > 0))
    gone = min(width - live, round(load.dead * scale))
    return Text.assemble(("█" * live, style), ("▒" * gone, "dim"), ("·" * (width - live - gone), "dim"))


def rows_of(load: BoardRows) -> Text:
    """The number of live rows, and of all that entered, if some have died."""
    if not load.live + load.dead:
        return Text("idle", "dim")
    return Text(f"{load.live} of {load.live + load.dead}" if load.dead else str(load.live))


def level_of(load: BoardRows, root: int | None) -> str:
    """The levels of a board's live rows below the root: ``+3-5``, ``root``, or ``prompt``."""
    if not load.live:
        return ""
    if root is None or load.first < root:
        return "prompt"
    first, last = load.first - root, load.last - root
    if first == last:
        return f"+{last}" if last else "root"
    return f"+{first}-{last}"


# ----------------------------------------------------------------------------------------------------------------- tree
# The draft tree of the demo, a line for each level: committed, drafted and pruned tokens.
#
#               def      ●××××××·······    committed: the target's token was the first draft
#                 f      ××●×××××          committed: here it was the third
#               ▸ (      ●                 the root: the last committed token
#                +1   8  ○○○○○○○○          the root's drafted children
#                +2   9  ○○○××○○○○○○×      and their children, best first; pruned ones fade
#
# A level appears when its nodes enter the first stage, and moves up a line with every token that is committed.

FADING: Final = 0.4
"""Seconds for which a pruned node is a cross; then it is a dot. Shorter crosses are overlooked, longer ones lie over
the nodes that follow."""
HIT, MISS, DRAFTED, PRUNED, FADED = "●", "◆", "○", "×", "·"
"""The glyphs of nodes: committed as drafted, committed without a draft, drafted, pruned, and pruned long ago."""
LEGEND: Final = f"{HIT} hit  {MISS} miss  {DRAFTED} drafted  {PRUNED} pruned"
"""The line above the tree that explains the glyphs."""
LABEL: Final = 9
"""Columns of a line's label: the committed token's text, or the level below the root."""
COUNT: Final = 3
"""Columns of the number of drafted nodes on a line."""
NARROW: Final = LABEL + 32 + COUNT + 2
"""Columns of a tree as wide as PipeDec's, 32 nodes."""


@dataclass
class Leaf:
    """A node of the tree, as it is drawn. ``died_at``: seconds of the monotonic clock."""

    id: int
    glyph: str = DRAFTED
    died_at: float = 0.0

    def at(self, now: float) -> str:
        """The glyph at the time ``now``."""
        return FADED if self.glyph == PRUNED and now - self.died_at > FADING else self.glyph


@dataclass
class Level:
    """The nodes of one position, in the order in which they entered, and the text of its committed token, if any."""

    leaves: list[Leaf] = field(default_factory=list)
    text: str = ""

    @property
    def drafted(self) -> int:
        return sum(leaf.glyph == DRAFTED for leaf in list(self.leaves))


class GrowingTree:
    """The tree of one request, built of what enters, commits and dies. The engine's thread writes, another one draws.

    ``keep``: levels above the root that stay, as they can be seen.
    """

    def __init__(self, keep: int) -> None:
        self.root: int | None = None
        self._keep = keep
        self._levels: dict[int, Level] = {}
        self._leaves: dict[int, Leaf] = {}

    def clear(self) -> None:
        """Forget the tree, for another request."""
        self.root = None
        self._levels, self._leaves = {}, {}

    def submitted(self, batch: Batch) -> None:
        """Add the rows after which a token is wanted, the root included; all other rows are the prompt's."""
        for row in batch.wanted:
            node, position = batch.rows.nodes[row], batch.rows.positions[row]
            if self.root is None:
                self.root = position
            if node not in self._leaves:
                self._add(position, Leaf(node, HIT if position == self.root else DRAFTED))

    def advanced(self, done: Advance, text: str, at: float) -> None:
        """Move the root along the committed tokens, whose ``text`` was added to the output, and mark dead nodes."""
        for node in done.dead:
            if (leaf := self._leaves.get(node.id)) is not None:
                leaf.glyph, leaf.died_at = PRUNED, at
        for i, node in enumerate(done.committed):
            self.root = node.position
            if node.id not in self._leaves:  # its row has not entered yet
                self._leaves[node.id] = Leaf(node.id)
                self._level(node.position).leaves.insert(0, self._leaves[node.id])
            self._leaves[node.id].glyph = HIT if i < done.hits else MISS
        if done.committed:
            self._level(done.committed[-1].position).text = text
            self._forget()

    def level(self, position: int) -> Level:
        """The level of a position; empty if there is none."""
        return self._levels.get(position) or Level()

    def below(self, position: int) -> list[int]:
        """The number of drafted nodes on each level below a position, without levels that have none."""
        counts = [level.drafted for at, level in list(self._levels.items()) if at > position]
        return [count for count in counts if count]

    def _add(self, position: int, leaf: Leaf) -> None:
        """Add a drafted node to its level. A level whose nodes were all pruned makes room for it."""
        level = self._level(position)
        if all(other.glyph != DRAFTED for other in level.leaves):
            self._drop(level)
        self._leaves[leaf.id] = leaf
        level.leaves.append(leaf)

    def _level(self, position: int) -> Level:
        """The level of a position, made if there is none."""
        return self._levels.setdefault(position, Level())

    def _forget(self) -> None:
        """Drop the levels that have left the picture at the top."""
        assert self.root is not None
        for position in [position for position in self._levels if position < self.root - self._keep]:
            self._drop(self._levels.pop(position))

    def _drop(self, level: Level) -> None:
        """Remove a level's nodes."""
        for leaf in level.leaves:
            del self._leaves[leaf.id]
        level.leaves = []


# -------------------------------------------------------------------------------------------------------------- drawing
# The tree as a table.


def tree_table(tree: GrowingTree, now: float, width: int, above: int, below: int, style: str) -> Table:
    """``above`` lines above the root, the root, ``below`` lines under it, and a line about all deeper levels."""
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
    """The committed token's text, with a mark at the root; below the root the distance from it."""
    if offset > 0:
        return Text(f"+{offset}" if level.leaves else "", "dim")
    mark = "▸ " if level.leaves and not offset else ""
    label = Text((mark + shown(level.text)).rstrip(), "" if offset else "bold")
    label.truncate(LABEL, overflow="ellipsis")
    return label


def leaves_of(level: Level, now: float, width: int, style: str) -> Text:
    """A glyph for each node. If they do not all fit, the committed one is shown nevertheless."""
    glyphs = [leaf.at(now) for leaf in list(level.leaves)]
    if len(glyphs) > width:
        # The last column shows the committed node where that would be cut off.
        committed = next((glyph for glyph in glyphs[width - 1 :] if glyph in (HIT, MISS)), "…")
        glyphs = [*glyphs[: width - 1], committed]
    styles = {HIT: f"bold {style}", MISS: "bold yellow", DRAFTED: style, PRUNED: "dim red"}
    return Text.assemble(*((glyph, styles.get(glyph, "dim")) for glyph in glyphs))


def shown(text: str) -> str:
    """A token's text on one line, without blanks around it unless it is all blank."""
    return text.replace("\n", "↵").strip(" ") or "␣" * bool(text)


# ----------------------------------------------------------------------------------------------------------------- race
# The live picture of the demo: two growing texts, the boards with their rows, and the draft tree.
#
# The runs take place one after the other, so that neither disturbs the other. While Penstock runs, the plain run of the
# same prompt is replayed beside it at the speed that it had: it is shown as one race, and measured in two runs.

PLAIN: Final = "autoregressive"
PENSTOCK: Final = "auto"
TITLES: Final = {PLAIN: "plain pipeline", PENSTOCK: "Penstock"}
STYLES: Final = {PLAIN: "yellow", PENSTOCK: "green"}
"""The two strategies, their titles and their colours."""
PAUSE: Final = 1.5
"""Seconds for which a finished race stays on the screen before the next prompt. It is time to read the result."""
NO_DRAFTS: Final = "one token at a time: nothing is drafted"
"""The words in place of the legend while plain decoding runs."""
GAP: Final = 2
"""Blank columns between the boards and the tree."""
MOST_TEXT_LINES: Final = 20
LEAST_TEXT_LINES: Final = 4
"""The most and the fewest lines of the growing texts."""
FRAME_AND_STATUS: Final = 3
"""Lines for the texts' frame above and below, and for the status."""
OTHER_TREE_LINES: Final = 3
"""Lines for the legend, the tree's root, and the levels below the picture."""
TALL: Final = 32
"""Lines of a terminal from which on more levels of the tree are shown, and the models' names."""
LEVELS, TALL_LEVELS = (2, 3), (4, 6)
"""Levels of the tree shown above its root, which are committed, and below it: on any terminal, and on a tall one."""


# -------------------------------------------------------------------------------------------------------------- texts
# The texts, as they grew.


@dataclass(frozen=True)
class Mark:
    """The state ``seconds`` after the start: the number of tokens, and the length of their text in characters.

    ``drafted``: whether all tokens of the last commit had been drafted.
    """

    seconds: float
    tokens: int
    length: int
    drafted: bool


@dataclass
class Run:
    """One strategy's run of one prompt, recorded so that it can be replayed; ``started`` in the clock's seconds."""

    strategy: str
    started: float
    text: str = ""
    marks: list[Mark] = field(default_factory=list)
    finished: bool = False

    def add(self, at: float, tokens: int, text: str, drafted: bool) -> None:
        """Note a commit: the tokens and the text so far."""
        self.text = text
        self.marks.append(Mark(at - self.started, tokens, len(text), drafted))

    @property
    def seconds(self) -> float:
        """Seconds from the start to the last token so far."""
        return self.marks[-1].seconds if self.marks else 0.0

    def until(self, seconds: float) -> list[Mark]:
        """The states up to ``seconds`` after the start."""
        return self.marks[: bisect.bisect_right(self.marks, seconds, key=lambda mark: mark.seconds)]

    def styled(self, seconds: float) -> Text:
        """The text at that time; tokens that were drafted before the target picked them are coloured."""
        text, done = Text(), 0
        for mark in self.until(seconds):
            text.append(printable(self.text[done : mark.length]), STYLES[PENSTOCK] if mark.drafted else "")
            done = mark.length
        return text

    def pace(self, seconds: float) -> str:
        """The tokens and tokens per second at that time, and the run's seconds if it is over.

        Speed counts from the first token: the time before belongs to the prompt.
        """
        marks = self.until(seconds)
        tokens = marks[-1].tokens if marks else 0
        decoding = (min(seconds, self.seconds) if self.finished else seconds) - marks[0].seconds if marks else 0.0
        rate = f" · {(tokens - 1) / decoding:.1f} tokens/s" if tokens > 1 and decoding > 0 else ""
        done = f" in {self.seconds:.1f} s" if self.finished and seconds >= self.seconds else ""
        return f"{tokens} token{'s' * (tokens != 1)}{done}{rate}"


def printable(text: str) -> str:
    """The text without control characters, which would move the cursor (sources of Python have form feeds)."""
    return "".join(character for character in text if character == "\n" or character.isprintable())


# --------------------------------------------------------------------------------------------------------- the picture
# The whole picture.


class Race(Observer):
    """Follows all runs of the demo, and is drawn whenever rich asks for it (``__rich__``), by another thread."""

    def __init__(self, console: Console, cluster: Cluster, prompts: Sequence[str], words: str) -> None:
        """``words`` name the models that write and that draft."""
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
        """Note that a run begins. The first run of a prompt clears the screen."""
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
        # The text is wanted now, not when the output is next read.
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
        """The two texts and the clock, which stay on the terminal after the race."""
        now = time.monotonic()
        return Group(self._panels(now, None), Text(f"Both after {self._elapsed(now):.1f} s.", "dim"))

    def _elapsed(self, now: float) -> float:
        """Seconds of the race's one clock: the plain run is replayed as it was after that time."""
        run = self._current
        if run is None:
            return 0.0
        return run.seconds if run.finished else now - run.started

    def _head(self) -> list[Text]:
        """The title, the cluster and the models, wrapped to the terminal's width."""
        title = Text.assemble(("Penstock demo", "bold"), (f" · {EMULATED}", "italic"))
        lines = [self._cluster.description, *[self._words] * (self._console.height >= TALL)]
        return [
            line
            for text in (title, *(Text(one, "dim") for one in lines))
            for line in text.wrap(self._console, self._console.width)
        ]

    def _panels(self, now: float, height: int | None) -> RenderableType:
        """The texts side by side, in ``height`` lines each; None: in as many lines as the longer one needs."""
        elapsed = self._elapsed(now)
        contents = {strategy: self._lines(strategy, elapsed) for strategy in STYLES}
        height = height or min(MOST_TEXT_LINES, max(map(len, contents.values())))
        grid = Table.grid(expand=True, padding=0)
        for _ in STYLES:
            grid.add_column(ratio=1)
        grid.add_row(*(self._panel(strategy, elapsed, lines[-height:], height) for strategy, lines in contents.items()))
        return grid

    def _lines(self, strategy: str, elapsed: float) -> Lines:
        """The prompt and the text at that time, wrapped to a panel's width."""
        content = Text().append(printable(self._prompt), "dim")
        if (run := self._runs.get(strategy)) is not None:
            content.append_text(run.styled(elapsed))
        return content.wrap(self._console, self._console.width // 2 - 4, overflow="fold")

    def _panel(self, strategy: str, elapsed: float, lines: Sequence[Text], height: int) -> Panel:
        """One text in its frame, with its speed below."""
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
        """The line about the present run."""
        accepted, misses = self._accepted
        words = self._heading + (f" · {elapsed:.1f} s" if run is not None else "")
        if run is not None and run.strategy != PLAIN and accepted + misses:
            words += f" · {accepted} drafted tokens accepted, {misses} miss{'es' * (misses != 1)}"
        return Columns([self._spinner if run is None or not run.finished else Text("✓", "green"), Text(words)])

    def _pipeline(self, now: float, run: Run | None, levels: tuple[int, int]) -> RenderableType:
        """The boards, and beside them the tree whose rows are on the boards."""
        names = [", ".join(stage.devices) for stage in self._cluster.stages]
        style = STYLES[run.strategy] if run is not None else ""
        narrow = self._console.width - NARROW - GAP
        boards = boards_table(names, rows_on_boards(self._log, len(names), now), self._tree.root, narrow, style)
        width = self._console.width - self._console.measure(boards).maximum - GAP
        legend = NO_DRAFTS if run is not None and run.strategy == PLAIN else LEGEND
        grid = Table.grid(padding=(0, GAP, 0, 0), pad_edge=False)
        grid.add_row(boards, Group(Text(legend, "dim"), tree_table(self._tree, now, width, *levels, style)))
        return grid
