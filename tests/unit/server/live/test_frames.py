"""A viewer is shown the texts of its own requests, and of no others."""

from __future__ import annotations

import json
import re

import msgspec

from penstock.server.live.routes import tree_of
from penstock.server.live.state import CommittedToken, NodeView, TreeView, View, Watcher

SECRET = "sesame"


def tree_view(number: int) -> TreeView:
    path = [CommittedToken(node=1, token=77, hit=True), CommittedToken(node=2, token=78, hit=False)]
    return TreeView(number, root=2, position=9, size=1, path=path, nodes=[NodeView(3, 2, 1, 79, "drafted")])


def view(*numbers: int) -> View:
    return View(1, [], [], {number: tree_view(number) for number in numbers}, [])


def test_texts_are_for_the_requests_owner_only() -> None:
    mine = tree_of(view(4, 5), Watcher(own={5}), lambda token: SECRET)
    assert mine is not None
    assert (mine.request, mine.own) == (5, True)
    assert [step.text for step in mine.path] == [SECRET, SECRET]
    others = tree_of(view(4, 5), Watcher(own={6}), lambda token: SECRET)
    assert others is not None
    assert (others.request, others.own) == (4, False)
    told = json.dumps(msgspec.to_builtins(others))
    assert SECRET not in told
    assert not {"77", "78", "79"} & set(re.findall(r"\d+", told)), "token ids are as good as texts"
    assert [leaf.node for leaf in others.leaves] == [3]
