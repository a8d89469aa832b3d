"""The messages of the live view: ``Setup`` once, then a ``Frame`` whenever something has happened, both as JSON."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Final

import msgspec

from penstock.engine.resolve import Resolved
from penstock.engine.stats import EngineStats
from penstock.server.live.batches import BatchDone, BatchInFlight
from penstock.server.live.state import View, Watcher
from penstock.server.live.timelines import Timeline
from penstock.server.live.tree_view import TreeView
from penstock.trace import EMULATED

RUN: Final = secrets.token_hex(8)
"""Identifier of this run of the server: a page that stayed open over a restart forgets the run before."""


class StageSetup(msgspec.Struct, frozen=True):
    """A stage: its devices in the cluster, its host, and its layers from ``first`` up to, not including, ``last``.

    Both names are "" if they are unknown; ``host`` also for the stages on the engine's own host.
    """

    name: str
    host: str
    first: int
    last: int


class Setup(msgspec.Struct, frozen=True):
    """Everything that does not change while the server runs; ``run`` is another value after a restart.

    ``strategy`` is "autoregressive" where nothing is drafted; ``emulated`` says what is emulated, if anything.
    """

    run: str
    stages: list[StageSetup]
    strategy: str
    drafter: str | None
    emulated: str | None
    max_model_len: int


class PathNode(msgspec.Struct, frozen=True):
    """A committed token above or at the root. ``hit``: it had been drafted. ``text`` is None for other viewers."""

    node: int
    hit: bool
    text: str | None


class LiveNode(msgspec.Struct, frozen=True):
    """A live node, ``depth`` levels below the root. ``state`` is "drafted" (it has yet to enter), "in flight" or
    "answered" (the target's next token is known). The most probable node comes first, and parents before children.
    """

    node: int
    parent: int
    depth: int
    state: str
    text: str | None


class Tree(msgspec.Struct, frozen=True):
    """One request's draft tree: the last committed tokens, the root last, and at most 60 of the ``size`` nodes below.

    ``position`` is the root's in the text, prompt included.
    """

    request: int
    own: bool
    root: int
    position: int
    size: int
    path: list[PathNode]
    leaves: list[LiveNode]


class Frame(msgspec.Struct, frozen=True):
    """The engine at one moment, ``at`` (seconds, its clock; every time below is on it).

    ``stats`` counts since the start; a rate is the difference of two frames. ``flying`` are the batches in flight, the
    first in first; ``passed`` those that have come out since the viewer's last frame. ``tree`` is the viewer's own
    request's, else that of the one that has run longest, or None. ``own``: which of the ``requests`` are the viewer's.
    """

    at: float
    stats: EngineStats
    flying: list[BatchInFlight]
    passed: list[BatchDone]
    tree: Tree | None
    requests: list[Timeline]
    own: list[int]


def setup_of(setup: Resolved) -> Setup:
    cluster, speculation = setup.cluster, setup.speculation
    names = [", ".join(stage.devices) for stage in cluster.stages] if cluster is not None else [""] * setup.stages
    return Setup(
        run=RUN,
        stages=[
            StageSetup(name, host, first, last)
            for name, host, (first, last) in zip(names, setup.hosts, setup.layers, strict=True)
        ],
        strategy=speculation.strategy if speculation is not None else "autoregressive",
        drafter=" + ".join(speculation.methods) if speculation is not None else None,
        emulated=EMULATED if setup.emulated else None,
        max_model_len=setup.max_model_len,
    )


def frame_of(
    view: View, watcher: Watcher, stats: EngineStats, token_text: Callable[[int], str], now: float, newest: int
) -> Frame:
    """One viewer's frame. ``newest`` is the last batch that the viewer was told to have come out."""
    done = [batch for batch in view.done if batch.stream > newest]
    tree = tree_of(view, watcher, token_text)
    return Frame(now, stats, view.in_flight, done, tree, view.timelines, sorted(watcher.own))


def tree_of(view: View, watcher: Watcher, token_text: Callable[[int], str]) -> Tree | None:
    """The tree of the viewer's own request, else of the oldest one, so that the view does not jump between requests."""
    candidates = (view.trees.keys() & watcher.own) or view.trees.keys()
    if not candidates:
        return None
    # The lowest number is the oldest request's.
    number = min(candidates)
    return shown(view.trees[number], token_text, own=number in watcher.own)


def shown(tree: TreeView, token_text: Callable[[int], str], own: bool) -> Tree:
    """A tree as a viewer may see it: with the tokens' texts for its owner, without any for others."""

    def text(token: int) -> str | None:
        return token_text(token) if own else None

    path = [PathNode(one.node, one.hit, text(one.token)) for one in tree.path]
    nodes = [LiveNode(one.node, one.parent, one.depth, one.state, text(one.token)) for one in tree.nodes]
    return Tree(tree.number, own, tree.root, tree.position, tree.size, path, nodes)
