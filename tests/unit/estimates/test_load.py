"""The load of a batch or round that is being composed."""

from __future__ import annotations

import math

import pytest

from penstock.estimates.estimates import Load
from tests.unit.test_tree import make_tree


def test_rows_count_by_their_chance_below_the_root() -> None:
    tree = make_tree()
    child = tree.extend(tree.root, 1, math.log(0.5))
    grandchild = tree.extend(child, 2, math.log(0.5))
    load = Load(requests=3).with_rows(tree, [tree.root, child]).with_rows(tree, [grandchild])
    assert (load.requests, load.rows, load.asked) == (3, 3, 0)
    assert load.expected_tokens == pytest.approx(1.75)


def test_what_is_added_leaves_the_load_before_as_it_was() -> None:
    tree, before = make_tree(), Load()
    after = before.with_rows(tree, [tree.root]).with_asked(4).with_asked(1)
    assert (after.rows, after.expected_tokens, after.asked) == (1, 1.0, 5)
    assert before == Load()
