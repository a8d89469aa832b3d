"""The demo's tree, drawn from what enters, commits and dies."""

from __future__ import annotations

import random

import pytest

from penstock.core import FinishReason
from penstock.engine.loop import Observer
from penstock.engine.scheduler import Advance
from penstock.lab.race import DRAFTED, FADING, HIT, LABEL, MISS, GrowingTree, shown, tree_table
from penstock.messages import Batch
from penstock.requests.request import Request
from tests.histories import History
from tests.unit.lab.demo.drawing import batch, node, plain


def grown() -> GrowingTree:
    """A tree with a prompt of three tokens and two levels of drafts."""
    tree = GrowingTree(keep=2)
    tree.submitted(batch(0, {0: [1], 1: [2], 2: [3]}, wanted=[3]))
    tree.submitted(batch(1, {3: [4, 5, 6]}))
    tree.submitted(batch(2, {4: [7, 8]}))
    return tree


def picture(tree: GrowingTree, now: float = 0.0, above: int = 2, below: int = 2, width: int = 40) -> list[str]:
    return [line[LABEL - 3 :] for line in plain(tree_table(tree, now, width, above, below, "green"))]


def test_levels_below_the_root_show_a_node_each_and_how_many() -> None:
    assert picture(grown()) == ["", "", "  ▸     ●", " +1   3 ○○○", " +2   2 ○○", ""]


def test_nothing_is_drawn_before_anything_has_entered() -> None:
    assert "".join(picture(GrowingTree(keep=2))) == ""


def test_a_hit_moves_the_root_to_its_child_and_what_died_fades() -> None:
    tree = grown()
    tree.advanced(Advance(committed=[node(5, 3)], hits=1, dead=[node(4, 3), node(6, 3), node(7, 4)]), " def", at=10.0)
    assert picture(tree, now=10.1) == ["", "        ●", "def     ×●×", " +1   1 ×○", "", ""]
    assert picture(tree, now=10.0 + 2 * FADING)[2:4] == ["def     ·●·", " +1   1 ·○"]


def test_a_miss_starts_anew_beside_what_it_pruned() -> None:
    tree = grown()
    dead = [node(one, 3) for one in (4, 5, 6)] + [node(one, 4) for one in (7, 8)]
    tree.advanced(Advance(committed=[node(9, 3)], hits=0, dead=dead), "x", at=10.0)
    tree.submitted(batch(3, {3: [9]}))
    assert picture(tree, now=10.1)[2] == "▸ x     ◆×××", "the new root enters once, and is drawn once"
    assert picture(tree, now=10.1)[3] == " +1     ××"
    tree.submitted(batch(4, {4: [10, 11, 12]}))
    assert picture(tree, now=10.1)[3] == " +1   3 ○○○", "what was pruned as a whole makes room"


def test_several_tokens_may_become_certain_at_once() -> None:
    tree = grown()
    dead = [node(5, 3), node(6, 3), node(8, 4)]
    tree.advanced(Advance(committed=[node(4, 3), node(7, 4)], hits=2, dead=dead), "a b", at=1.0)
    assert tree.root == 4
    assert picture(tree, now=1.0) == ["        ●", "        ●××", "a b     ●×", "", "", ""]


def test_a_hit_may_have_yet_to_enter() -> None:
    tree = grown()
    tree.advanced(Advance(committed=[node(4, 3), node(9, 4)], hits=2, dead=[]), "x", at=1.0)
    assert picture(tree, now=1.0)[2] == "▸ x   2 ●○○"


def test_what_has_left_the_picture_is_forgotten() -> None:
    tree = GrowingTree(keep=1)
    for position in range(50):
        tree.submitted(batch(position, {position: [position]}))
        tree.advanced(Advance(committed=[node(position + 1, position + 1)]), "t", at=0.0)
    assert set(tree._levels) == {49, 50}
    assert set(tree._leaves) == {49, 50}


def test_levels_too_deep_or_too_wide_are_summed_up() -> None:
    tree = GrowingTree(keep=2)
    tree.submitted(batch(0, {0: [1], 1: range(100, 160), 2: [2, 3], 3: [4]}))
    lines = picture(tree, above=0, below=1, width=40)
    assert lines[1].endswith("60 " + "○" * 25 + "…")
    assert lines[2].endswith("3 nodes on 2 levels below")
    tree.advanced(Advance(committed=[node(159, 1)], hits=1), "z", at=0.0)
    assert picture(tree, above=0, below=1, width=40)[0].endswith("○" * 25 + HIT), "the certain one stays in sight"


def test_a_tokens_text_stays_on_one_line() -> None:
    assert shown(" self") == "self"
    assert shown("\n    ") == "↵"
    assert shown("   ") == "␣"
    assert shown("") == ""


class Compared(Observer):
    """Follows a request with a ``GrowingTree`` and compares it with the engine's own tree after every walk."""

    def __init__(self) -> None:
        self.tree = GrowingTree(keep=2)
        self.walks = 0

    def submitted(self, batch: Batch, at: float) -> None:
        self.tree.submitted(batch)

    def advanced(self, request: Request, done: Advance, at: float) -> None:
        self.tree.advanced(done, "", at)
        self.walks += 1
        root = request.tree.root
        drawn = {leaf.id for level in self.tree._levels.values() for leaf in level.leaves if leaf.glyph == DRAFTED}
        assert drawn == {node.id for node in request.tree.nodes() if node.entered and node is not root}
        (certain,) = [leaf for leaf in self.tree.level(root.position).leaves if leaf.glyph in (HIT, MISS)]
        assert (self.tree.root, certain.id) == (root.position, root.id)


@pytest.mark.parametrize("seed", range(30))
def test_the_drawn_tree_is_the_engines(seed: int) -> None:
    history = History(random.Random(seed))
    del history.requests[1:]
    compared = Compared()
    history.loop.observers.append(compared)
    history.run()
    assert compared.walks or history.requests[0].finished is FinishReason.ABORT
