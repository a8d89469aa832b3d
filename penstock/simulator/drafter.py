"""The scripted drafter: on the target's path what the script says, elsewhere a draft of the same kind."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from penstock.drafters.base import Ask, Draft
from penstock.drafters.instant import InstantDrafter
from penstock.requests.request import Request
from penstock.simulator.script import Script
from penstock.tree import Node


class ScriptedDrafter(InstantDrafter):
    """Answers from a ``Script``; a wrapping ``EmulatedDrafter`` gives it its modelled time."""

    def __init__(self, script: Script) -> None:
        super().__init__()
        self._script = script
        self._candidates = [tuple(enumerate(chances)) for chances in script.pool]
        self._off_path: defaultdict[int, dict[int, int]] = defaultdict(dict)
        """By request and id the nodes that have been asked about off the target's path: a hash of the way there."""

    def ask(self, asks: Sequence[Ask]) -> int:
        for ask in asks:
            self._answers += [self._draft(ask.request, node, ask.count) for node in ask.nodes]
        return len(self._answers) + sum(len(ask.request.prompt) for ask in asks if ask.request.produced == 0)

    def forget(self, request: Request) -> None:
        self._off_path.pop(request.number, None)

    def _draft(self, request: Request, node: Node, count: int) -> Draft:
        return Draft(node, self._candidates[self._index(request, node)][:count])

    def _index(self, request: Request, node: Node) -> int:
        """Which of the pool's drafts is this node's."""
        if (key := self._key(request, node)) is not None:
            return key % len(self._script.pool)
        drafts, i = self._script.drafts[request.number], node.position + 1 - self._script.prompts[request.number]
        return drafts[i] if i < len(drafts) else 0

    def _key(self, request: Request, node: Node) -> int | None:
        """A hash of the tokens since the target's path was left, None on it: the same whoever asks, and when."""
        if node.parent is None:
            return None
        off_path = self._off_path[request.number]
        above = off_path.get(node.parent.id)
        if above is None and node.token == self._script.after(request.number, node.parent.position):
            return None
        key = hash((request.number if above is None else above, node.position, node.token))
        off_path[node.id] = key
        return key
