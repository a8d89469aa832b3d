"""FlowSpec against the paper's text: trees are computed here as sets of paths, without nodes or segments in between."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest

from penstock.strategies.base import NOW, ON_EVENT
from penstock.strategies.flowspec import FlowSpec, FlowSpecOptions
from penstock.tree import Node, TokenTree
from tests.contexts import context
from tests.unit.test_tree import Numbered

Path = tuple[int, ...]
Scored = tuple[float, Path]

STAGES, SIZE, DEPTH, SEGMENT, CHILDREN, EXPANSION = 3, 14, 3, 5, 3, 2


class Drafts:
    """A drafter's candidates as a function of the path alone, drawn at random."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def after(self, path: Path) -> list[tuple[int, float]]:
        rng = random.Random(repr((self.seed, path)))
        weights = sorted((rng.random() + 0.05 for _ in range(CHILDREN)), reverse=True)
        tokens = rng.sample(range(50), CHILDREN)
        return [(token, math.log(w / sum(weights) / 1.1)) for token, w in zip(tokens, weights, strict=True)]


class Equal(Drafts):
    """Candidates that tie with each other and, where the chance is 1, with their parent."""

    def after(self, path: Path) -> list[tuple[int, float]]:
        return [(token, 0.0 if len(path) == 2 else -1.0) for token in range(CHILDREN)]


class Learning(Drafts):
    """Candidates that change with every token that has been accepted: a drafter that reads the target's states."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.known = 0

    def after(self, path: Path) -> list[tuple[int, float]]:
        rng = random.Random(repr((self.seed, path, self.known)))
        tokens = [token for token, _ in super().after(path)]
        mixed = [*tokens[:-1], 50 + rng.randrange(3)]  # some are named again, with another chance; one is another
        rng.shuffle(mixed)
        weights = sorted((rng.random() + 0.05 for _ in mixed), reverse=True)
        return [(token, math.log(w / sum(weights) / 1.1)) for token, w in zip(mixed, weights, strict=True)]


class Chain(Drafts):
    """A drafter with one candidate for each node."""

    def after(self, path: Path) -> list[tuple[int, float]]:
        return super().after(path)[:1]


def base_tree(drafts: Drafts, root: Path, depth: int) -> list[Scored]:
    """Section 3.2, T_base without its root in the order of creation: k candidates of the k best nodes of each layer."""
    selected: list[Scored] = [(0.0, root)]
    found: list[Scored] = []
    for _ in range(depth):
        layer = [(score + chance, (*path, token)) for score, path in selected for token, chance in drafts.after(path)]
        found += layer
        selected = by_score(layer)[:CHILDREN]
    return found


def by_score(nodes: list[Scored]) -> list[Scored]:
    """Python's sort is stable: ties stay in the order of creation."""
    return sorted(nodes, key=lambda node: -node[0])


def best(drafts: Drafts, root: Path, depth: int, size: int = SIZE) -> list[Path]:
    """The refined tree T of ``size`` nodes in score order, its root first."""
    return [root, *(path for _, path in by_score(base_tree(drafts, root, depth))[: size - 1])]


class Round:
    """One request under FlowSpec with a drafter that answers at once; rows are reported as paths."""

    def __init__(self, drafts: Drafts, room: int = 1000, **options: Any) -> None:
        settings = {"tree_size": SIZE, "tree_depth": DEPTH, "segment": SEGMENT, "children": CHILDREN}
        switches = {"expansion_depth": EXPANSION, "expand": True, "score_order": True}
        self.strategy = FlowSpec(STAGES, FlowSpecOptions(**{**settings, **switches, **options}))
        self.drafts = drafts
        self.source = Counted(room)
        self.committed: Path = (7,)
        self.tree = TokenTree(Node(0, 7, 0, 0), self.source)
        self.sent: set[Path] = set()
        self.asked: list[Path] = []
        self.context = context(redrafts=isinstance(drafts, Learning))

    def path(self, node: Node) -> Path:
        above: list[int] = []
        while node is not self.tree.root:
            above.append(node.token)
            assert node.parent is not None
            node = node.parent
        return (*self.committed, *reversed(above))

    def draft(self) -> None:
        while nodes := self.strategy.ask(self.tree, self.context):
            self.asked += [self.path(node) for node in nodes]
            for node in nodes:
                node.asked, node.candidates = True, self.drafts.after(self.path(node))

    def enter(self) -> list[Path]:
        """The next batch."""
        self.draft()
        assert self.strategy.ready_at(self.tree, self.context) == NOW
        nodes = self.strategy.enter(self.tree, self.context)
        assert nodes, "no batch is empty"
        rows = []
        for node in nodes:
            assert node.alive
            assert not node.entered
            assert node.parent is None or node.parent.entered, "parents enter first"
            node.entered = True
            rows.append(self.path(node))
        self.sent.update(rows)
        return rows

    def enter_round(self) -> list[list[Path]]:
        return [self.enter() for _ in range(STAGES + 1)]

    @property
    def ready(self) -> bool:
        self.draft()
        return self.strategy.ready_at(self.tree, self.context) == NOW

    def commit(self, token: int) -> None:
        """The target has picked this token after the root."""
        assert self.tree.root.entered
        hit, _ = self.tree.commit(token)
        self.committed = (*self.committed, token)
        if isinstance(self.drafts, Learning):
            self.drafts.known += 1
        if hit is None:
            self.tree.restart(self.source.speculative(token, len(self.committed) - 1))


class Counted(Numbered):
    """A node source that has room for this many nodes."""

    def __init__(self, room: int) -> None:
        super().__init__()
        self.room = room

    def speculative(self, token: int, position: int) -> Node:
        self.room -= 1
        return super().speculative(token, position)


def within(path: Path, root: Path) -> bool:
    return path[: len(root)] == root


@pytest.mark.parametrize("seed", range(5))
def test_a_round_sends_the_best_nodes_of_the_base_tree_in_score_order(seed: int) -> None:
    run = Round(Drafts(seed))
    segments = run.enter_round()
    assert [path for segment in segments for path in segment] == best(run.drafts, (7,), DEPTH)


@pytest.mark.parametrize("seed", range(5))
def test_without_score_order_the_same_nodes_follow_the_layers(seed: int) -> None:
    run = Round(Drafts(seed), score_order=False)
    sent = [path for segment in run.enter_round() for path in segment]
    chosen = set(best(run.drafts, (7,), DEPTH))
    assert sent == [(7,), *(path for _, path in base_tree(run.drafts, (7,), DEPTH) if path in chosen)]
    assert [len(path) for path in sent] == sorted(len(path) for path in sent)


def test_ties_go_to_the_node_created_first_so_that_parents_precede_their_children() -> None:
    run = Round(Equal(0))
    sent = [path for segment in run.enter_round() for path in segment]  # ``enter`` checks that parents come first
    assert sent == best(run.drafts, (7,), DEPTH)
    assert sent[:4] == [(7,), (7, 0), (7, 1), (7, 2)]
    assert sent[4:7] == [(7, 0, 0), (7, 0, 1), (7, 0, 2)], "committed children tie with nodes of the layer above"


@pytest.mark.parametrize(
    ("size", "segment", "lengths"),
    [
        (16, 16, [4, 4, 4, 4]),  # N + 1 equal segments
        (14, 16, [3, 4, 3, 4]),  # equal but for a row
        (3, 16, [1, 1, 1]),  # not as many nodes as segments
        (16, 3, [2, 3, 3, 2, 3, 3]),  # L_max is the stronger bound
    ],
)
def test_segments_are_n_plus_one_and_at_most_l_max(size: int, segment: int, lengths: list[int]) -> None:
    run = Round(Drafts(1), tree_size=size, segment=segment, expand=False)
    found = []
    while run.ready:
        found.append(run.enter())
    assert [len(rows) for rows in found] == lengths
    assert [path for rows in found for path in rows] == best(run.drafts, (7,), DEPTH, size)


def test_nothing_enters_before_the_base_tree_is_drafted() -> None:
    run = Round(Drafts(2))
    for layer in range(DEPTH):
        assert run.strategy.ready_at(run.tree, context()) == ON_EVENT
        nodes = run.strategy.ask(run.tree, context())
        assert len(nodes) == (CHILDREN if layer else 1), "the k best of a layer are drafted from"
        for node in nodes:
            node.asked, node.candidates = True, run.drafts.after(run.path(node))
    assert run.strategy.ask(run.tree, context()) == []
    assert run.strategy.ready_at(run.tree, context()) == NOW


def test_the_prompts_last_token_does_not_enter_again() -> None:
    run = Round(Drafts(3))
    run.draft()
    run.tree.root.entered = True  # with the prompt, while its tree was drafted
    sent = []
    while len(sent) < SIZE - 1:
        sent += run.enter()
    assert sent == best(run.drafts, (7,), DEPTH)[1:]


def test_a_miss_begins_a_new_round() -> None:
    run = Round(Drafts(4))
    run.enter()
    run.commit(99)
    segments = run.enter_round()
    assert [path for segment in segments for path in segment] == best(run.drafts, (7, 99), DEPTH)


def test_a_hit_on_a_node_that_was_not_chosen_begins_a_new_round() -> None:
    """The continuous condition asks for a node of T; the base tree's others were never sent."""
    run = Round(Drafts(5), tree_size=3)
    for _ in range(3):
        run.enter()
    left = next(path for _, path in base_tree(run.drafts, (7,), 1) if path not in run.sent)
    assert left[-1] in run.tree.root.children, "a node, for the drafter alone"
    run.commit(left[-1])
    assert [path for _ in range(3) for path in run.enter()] == best(run.drafts, left, DEPTH, 3)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("sent", [1, 2, STAGES + 1])
def test_context_aware_expansion_appends_what_is_new_as_one_segment(seed: int, sent: int) -> None:
    """A new tree from the new root, merged by path: first come the pruned segments, then the rest in its own order."""
    run = Round(Drafts(seed))
    plan = best(run.drafts, (7,), DEPTH)
    first = [run.enter() for _ in range(sent)]
    root = first[0][1]
    run.commit(root[-1])
    kept = [path for path in plan if within(path, root)]
    expansion = [path for path in best(run.drafts, root, EXPANSION) if path not in kept]
    waiting = [path for path in kept if path not in run.sent]
    found = []
    while len(found) < len(waiting):
        found += run.enter()
    assert found == waiting
    assert run.enter() == expansion


def test_the_tree_is_expanded_again_after_every_hit() -> None:
    run = Round(Drafts(6))
    run.enter_round()
    chosen = set(run.sent)
    for _ in range(4):
        root = next(path for path in best(run.drafts, run.committed, 1) if path in chosen and path != run.committed)
        run.commit(root[-1])
        chosen = {path for path in chosen if within(path, root)}
        new = [path for path in best(run.drafts, root, EXPANSION) if path not in chosen]
        assert run.enter() == new
        chosen.update(new)


@pytest.mark.parametrize("seed", range(8))
def test_context_aware_expansion_drafts_anew_what_was_drafted_with_less_context(seed: int) -> None:
    """Every node of the new base tree; what was sent stays in the tree, whatever the new answers say of it."""
    run = Round(Learning(seed))
    run.enter_round()
    chosen, no_longer_named = set(run.sent), 0
    for _ in range(4):
        run.asked.clear()
        root = next(path for path in sorted(chosen, key=len) if path[:-1] == run.committed)
        run.commit(root[-1])
        chosen = {path for path in chosen if within(path, root)}
        new = [path for path in best(run.drafts, root, EXPANSION) if path not in chosen]
        assert run.enter() == new
        drafted = base_tree(run.drafts, root, EXPANSION)
        first_layer = by_score([node for node in drafted if len(node[1]) == len(root) + 1])
        assert run.asked == [root, *(path for _, path in first_layer[:CHILDREN])]
        no_longer_named += len({path for path in chosen if len(path) == len(root) + 1} - {path for _, path in drafted})
        assert chosen <= {run.path(node) for node in run.tree.nodes()}, "what was sent"
        chosen.update(new)
    assert no_longer_named > 0


def test_an_answer_to_a_question_from_before_the_new_root_is_not_taken_for_a_new_one() -> None:
    run = Round(Learning(4))
    run.enter_round()
    one = run.tree.root.children[best(run.drafts, (7,), 1)[1][-1]]
    run.commit(one.token)
    assert run.strategy.ask(run.tree, run.context) == [one]
    one.asked, one.candidates = True, run.drafts.after(run.path(one))
    late = run.strategy.ask(run.tree, run.context)
    two = next(node for node in late if node.entered)
    run.commit(two.token)  # while they are being drafted
    for node in late:
        node.asked, node.candidates = True, [(99, -0.1)]
    assert run.strategy.ask(run.tree, run.context) == [two], "asked again"


@pytest.mark.parametrize("run", [Round(Drafts(6)), Round(Learning(6), redraft=False)])
def test_where_nothing_new_can_be_known_or_is_wanted_each_node_is_asked_about_once(run: Round) -> None:
    run.enter_round()
    for _ in range(3):
        root = next(path for path in sorted(run.sent, key=len) if path[:-1] == run.committed)
        run.commit(root[-1])
        run.enter()
    assert len(run.asked) == len(set(run.asked))


def test_a_new_root_ends_the_expansion_that_was_being_drafted() -> None:
    run = Round(Drafts(7))
    run.enter_round()
    one = run.tree.root.children[best(run.drafts, (7,), 1)[1][-1]]
    two = max(one.children.values(), key=lambda node: node.score)
    run.commit(one.token)
    assert run.strategy.ask(run.tree, context()), "layers of the expansion from the first new root"
    run.commit(two.token)
    root = run.committed
    kept = {path for path in run.sent if within(path, root)}
    assert run.enter() == [path for path in best(run.drafts, root, EXPANSION) if path not in kept]


@pytest.mark.parametrize("seed", range(8))
def test_score_aware_expansion_deepens_the_kept_base_tree(seed: int) -> None:
    """While no token is accepted: a layer more, and the best nodes that are not in the tree, a segment of them."""
    run = Round(Drafts(seed))
    chosen = {path for segment in run.enter_round() for path in segment}
    for deeper in range(1, 4):
        base = by_score(base_tree(run.drafts, (7,), DEPTH + deeper))
        expected = [path for _, path in base if path not in chosen][: run.strategy.segment]
        assert run.enter() == expected
        chosen.update(expected)


def test_score_aware_expansion_adds_one_layer_at_a_time() -> None:
    run = Round(Chain(0), children=1)
    sent = [run.enter() for _ in range(DEPTH + 4)]
    assert [len(rows) for rows in sent] == [1] * (DEPTH + 4), "a chain: the root, the layers, then a node a step"


def test_score_aware_expansion_passes_over_what_an_earlier_one_sent() -> None:
    """After several expansions the pruned tree holds more than the new one's best: those are not sent again."""
    found = 0
    for seed in range(20):
        run = Round(Drafts(seed), tree_size=5, expansion_depth=4)
        for _ in range(12):
            run.enter()
        root = best(run.drafts, (7,), 1)[1]
        run.commit(root[-1])
        held = {path for path in run.sent if within(path, root)}
        new = set(best(run.drafts, root, 4, 5)) - held
        if new:
            assert set(run.enter()) == new
        chosen, depth = held | new, 5
        expected: list[Path] = []
        while not expected:  # a layer that brings nothing new is followed by the next
            base = by_score(base_tree(run.drafts, root, depth))
            expected = [path for _, path in base if path not in chosen][: run.strategy.segment]
            depth += 1
        assert run.enter() == expected
        left = {path for _, path in base_tree(run.drafts, root, 4)} & held
        found += len(left) > len(best(run.drafts, root, 4, 5))
    assert found > 0, "none of these trees showed it"


@pytest.mark.parametrize("drafts", [Drafts(8), Learning(3)], ids=["drafted once", "drafted anew"])
def test_score_aware_expansion_goes_on_from_the_base_tree_of_the_last_new_root(drafts: Drafts) -> None:
    run = Round(drafts)
    run.enter_round()
    root = best(run.drafts, (7,), DEPTH)[1]
    run.commit(root[-1])
    run.enter()
    chosen = {path for path in run.sent if within(path, root)}
    base = by_score(base_tree(run.drafts, root, EXPANSION + 1))
    assert run.enter() == [path for _, path in base if path not in chosen][: run.strategy.segment]


def test_pruned_segments_are_passed_over_and_keep_their_order() -> None:
    run = Round(Drafts(9), expand=False, segment=1)  # one node a segment, so that whole segments die
    plan = best(run.drafts, (7,), DEPTH)
    first = [run.enter() for _ in range(3)]
    root = first[-1][0]
    assert len(root) == 2, "the second best child of the root"
    run.commit(root[-1])
    left = [path for path in plan if within(path, root) and path not in run.sent]
    assert len(left) < len(plan) - 3, "some have died"
    found = []
    while run.ready:
        found += run.enter()
    assert found == left


def test_pruned_pp_drafts_nothing_until_the_round_is_over() -> None:
    run = Round(Drafts(10), expand=False)
    segments = run.enter_round()
    assert not run.ready
    run.commit(segments[0][1][-1])
    assert run.strategy.ask(run.tree, context()) == []
    assert not run.ready
    run.commit(99)
    assert run.enter()[0] == run.committed


def test_without_room_the_root_enters_alone() -> None:
    run = Round(Drafts(11), room=0)
    assert run.enter() == [(7,)]
    assert not run.ready
    run.commit(99)
    assert run.enter() == [(7, 99)]


@pytest.mark.parametrize("room", range(1, 12))
def test_a_round_stays_within_the_trees_room(room: int) -> None:
    run = Round(Drafts(12), room=room)
    for _ in range(6):
        if run.ready:
            run.enter()  # checks parents
    assert run.source.room >= 0
    assert run.tree.size <= room + 1


def test_a_root_that_entered_with_the_prompt_before_anything_was_asked_begins_a_round() -> None:
    """Not an expansion, and not nothing: without expansion the first tree would never grow. Nor does a second tree."""
    strategy = FlowSpec(
        4, FlowSpecOptions(tree_size=20, tree_depth=3, segment=5, children=4, expansion_depth=3, expand=False)
    )
    for number in range(2):
        tree = TokenTree(Node(100 * number + 1, 7, 0, 0, entered=True), Numbered())
        assert strategy.ask(tree, context()) == [tree.root]
        tree.root.asked, tree.root.candidates = True, [(1, -0.1), (2, -0.5)]
        assert [node.token for node in strategy.ask(tree, context())] == [1, 2]
