"""A draft model's slots hold what they should: wrong ones would change no token, only make every draft worse."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from penstock.drafters.base import Draft
from penstock.drafters.learned import FollowingDrafter, SmallModelDrafter
from penstock.engine.loop import Observer
from penstock.requests.request import Request
from penstock.tree import Node
from tests.hash_model import HashReader, digest, plain_kv
from tests.histories import History

HISTORIES = 25


class Checker(Observer):
    """Compares each answer with what the hash model of one stage says after the node's whole path."""

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
        owners = [request for request in self.history.loop.scheduler.running if top in request.committed]
        return owners[0] if owners else None


def path(request: Request, node: Node) -> list[int]:
    above: list[int] = []
    while node.parent is not None:
        above.append(node.token)
        node = node.parent
    return [committed.token for committed in request.committed[: node.position + 1]] + above[::-1]


def test_every_draft_follows_from_the_nodes_own_path() -> None:
    checked = run = 0
    for seed in range(1000):
        history = History(random.Random(seed))
        if type(history.drafter.inner) is not SmallModelDrafter or history.loop.drafter is not history.drafter:
            continue  # prompt lookup beside it says other things
        checker = Checker(history)
        history.loop.observers.append(checker)
        history.run()
        assert not history.drafter.inner._builder._told, "the draft model was not told that a request has ended"
        assert not history.loop.builder._told, "the stages were not told that a request has ended"
        checked, run = checked + checker.checked, run + 1
        if run == HISTORIES:
            break
    assert checked > 100


def test_what_is_certain_is_computed_with_the_targets_features() -> None:
    """Features are used by the time the drafter is next asked; until then rows below the root do without."""
    with_features = without = seed = 0
    while min(with_features, without) < 200:
        history, seed = History(random.Random(seed)), seed + 1
        if not isinstance(history.drafter.inner, FollowingDrafter):
            continue
        checker = Refreshed(history)
        history.loop.observers.append(checker)
        history.run()
        with_features, without = with_features + checker.with_features, without + checker.without


class Refreshed(Observer):
    """After each answer: the rows up to the root that the drafter was asked for have had their parents' features."""

    def __init__(self, history: History) -> None:
        self.history = history
        self.with_features = self.without = 0

    def drafted(self, drafts: Sequence[Draft], *args: Any) -> None:
        drafter = self.history.drafter.inner
        assert isinstance(drafter, FollowingDrafter)
        reader = drafter.pipeline.drivers[0].core.layers  # type: ignore[attr-defined]
        assert isinstance(reader, HashReader)
        for request in self.history.loop.scheduler.running:
            for node in request.committed[1 : drafter._final.get(request.number, 0)]:
                assert reader.read[node.id], "computed anew once its parent's features were on their way"
                self.with_features += 1
        self.without += sum(not reader.read[draft.node.id] for draft in drafts if draft.node.id in reader.read)
