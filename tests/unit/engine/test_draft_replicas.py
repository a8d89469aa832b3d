"""A draft model's slots hold what they should: wrong ones would change no token, only make every draft worse."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from penstock.drafters.base import Draft
from penstock.drafters.emulated import EmulatedDrafter
from penstock.drafters.small_model import SmallModelDrafter
from penstock.requests.request import Request
from penstock.tree import Node
from tests.hash_model import digest, plain_kv
from tests.histories import History

HISTORIES = 25


class Checker:
    """An observer that compares each answer with what the hash model of one stage says after the node's whole path."""

    def __init__(self, history: History) -> None:
        self.history = history
        self.checked = 0

    def drafted(self, drafts: Sequence[Draft], *args: Any) -> None:
        for draft in drafts:
            request = self._owner(draft.node)
            if request is None or not draft.candidates:
                continue
            hidden = digest("out", 0, plain_kv(path(request, draft.node), 1)[0])
            ranked = sorted(range(self.history.vocabulary), key=lambda token: digest("rank", hidden, token))
            assert [token for token, _ in draft.candidates] == ranked[: len(draft.candidates)]
            self.checked += 1

    def _owner(self, node: Node) -> Request | None:
        """The request in whose tree the node still lives."""
        top = node
        while top.parent is not None:
            top = top.parent
        if not node.alive:
            return None
        owners = [request for request in self.history.loop.scheduler.running if top in request.certain]
        return owners[0] if owners else None

    def arrived(self, *args: Any) -> None: ...

    def submitted(self, *args: Any) -> None: ...

    def advanced(self, *args: Any) -> None: ...


def path(request: Request, node: Node) -> list[int]:
    above: list[int] = []
    while node.parent is not None:
        above.append(node.token)
        node = node.parent
    return [certain.token for certain in request.certain[: node.position + 1]] + above[::-1]


def test_every_draft_follows_from_the_nodes_own_path() -> None:
    checked = run = 0
    for seed in range(1000):
        history = History(random.Random(seed))
        if not isinstance(history.drafter, EmulatedDrafter) or not isinstance(history.drafter.inner, SmallModelDrafter):
            continue
        checker = Checker(history)
        history.loop.observers.append(checker)
        history.run()
        assert not history.drafter.inner._feed._told, "the draft model was not told that a request has ended"
        assert not history.loop.feed._told, "the stages were not told that a request has ended"
        checked, run = checked + checker.checked, run + 1
        if run == HISTORIES:
            break
    assert checked > 100
