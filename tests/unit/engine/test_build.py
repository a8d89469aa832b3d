"""What an engine's parts are told of each other."""

from __future__ import annotations

import pytest

from penstock.engine.build import apart


@pytest.mark.parametrize(
    ("hosts", "expected"),
    [
        (("", ""), set()),
        (("a", "b"), {-1, 0, 1}),
        (("", "a", "a"), {0, 2}),
        (("a", "a", ""), {-1, 1}),
    ],
)
def test_hops_between_hosts(hosts: tuple[str, ...], expected: set[int]) -> None:
    """The engine, at both ends, is on the host without a name."""
    assert apart(hosts) == expected
