"""The draft tree of the demo, a line per level: committed, drafted and pruned tokens.

              def      ●××××××·······    committed: the target's token was the first draft
                f      ××●×××××          here the third
              ▸ (      ●                 the root: the last committed token
               +1   8  ○○○○○○○○          its drafted children
               +2   9  ○○○××○○○○○○×      and theirs, best first; what dies fades

A level appears when its nodes enter the first stage, and moves up a line with every token that is committed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from penstock.engine.commit import Advance
    from penstock.messages import Batch

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
        certain = next((glyph for glyph in glyphs[width - 1 :] if glyph in (HIT, MISS)), "…")
        glyphs = [*glyphs[: width - 1], certain]
    styles = {HIT: f"bold {style}", MISS: "bold yellow", DRAFTED: style, PRUNED: "dim red"}
    return Text.assemble(*((glyph, styles.get(glyph, "dim")) for glyph in glyphs))


def shown(text: str) -> str:
    """A token's text on one line, without blanks around it unless it is blank."""
    return text.replace("\n", "↵").strip(" ") or "␣" * bool(text)
