"""A drafter that follows a script on the target's path, and drafts alike off it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from penstock.drafters.base import Draft, DraftRequest
from penstock.drafters.instant import InstantDrafter
from penstock.requests.request import Request
from penstock.simulator.script import Script
from penstock.tree import Node


class ScriptedDrafter(InstantDrafter):
    """Answers from a ``Script``; a wrapping ``EmulatedDrafter`` adds its modelled time."""

    def __init__(self, script: Script) -> None:
        super().__init__()
        self._script = script
        self._candidates = [tuple(enumerate(chances)) for chances in script.pool]
        self._off_path: defaultdict[int, dict[int, int]] = defaultdict(dict)
        """A hash of the way from the target's path to each node off it that has been asked about, by request and node
        id."""

    def ask(self, asks: Sequence[DraftRequest]) -> int:
        for ask in asks:
            self._answers += [self._draft(ask.request, node, ask.count) for node in ask.nodes]
        return len(self._answers) + sum(len(ask.request.prompt) for ask in asks if ask.request.produced == 0)

    def forget(self, request: Request) -> None:
        self._off_path.pop(request.number, None)

    def _draft(self, request: Request, node: Node, count: int) -> Draft:
        """The draft of a node from the script's pool: by position on the target's path, else by a hash of the way to
        it.

        The hash is over the tokens since the path was left, so that it does not depend on who asks, and when.
        """
        number, script = request.number, self._script
        if node.parent is not None:
            off_path = self._off_path[number]
            above = off_path.get(node.parent.id)
            if above is not None or node.token != script.after(number, node.parent.position):
                off_path[node.id] = key = hash((number if above is None else above, node.position, node.token))
                return Draft(node, self._candidates[key % len(script.pool)][:count])
        drafts, i = script.drafts[number], node.position + 1 - script.prompts[number]
        return Draft(node, self._candidates[drafts[i] if i < len(drafts) else 0][:count])
