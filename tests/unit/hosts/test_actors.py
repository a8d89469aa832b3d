"""A node says whether Ray there obeys whoever reaches it."""

from __future__ import annotations

import pytest

pytest.importorskip("ray", reason="Ray is not installed")

from ray._private.authentication import authentication_utils

from penstock.hosts import ray


@pytest.mark.parametrize(
    ("address", "guarded", "expected"),
    [("10.0.0.2", False, "10.0.0.2"), ("10.0.0.2", True, ""), ("127.0.0.1", False, "")],
)
def test_without_a_token_only_loopback_is_closed(
    monkeypatch: pytest.MonkeyPatch, address: str, guarded: bool, expected: str
) -> None:
    monkeypatch.setattr(ray.ray.util, "get_node_ip_address", lambda: address)
    monkeypatch.setattr(authentication_utils, "is_token_auth_enabled", lambda: guarded)
    agent = object.__new__(ray.NodeAgent)
    assert agent.open_to_anybody() == expected
