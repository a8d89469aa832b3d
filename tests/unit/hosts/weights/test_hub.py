"""A host that reaches the hub takes its layers from there; what the hub does not send, the head does."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.hosts import agent as agents
from penstock.hosts.control import WantPiece
from penstock.hosts.weights.cache import WeightCache
from penstock.hosts.weights.fetching import spans
from penstock.hosts.weights.hub import HubSource, hub_source
from penstock.hosts.weights.offering import Offer
from penstock.transport.security import LinkSecurity
from tests.agents import NotingServer, agent, fleet, name_of
from tests.hub import COMMIT, REPO, StandIn, serving

LAYERS = 5
MIDDLE = (1, 3)


@pytest.fixture
def checkpoint(target: Path, tmp_path: Path) -> Path:
    """As the hub's cache has it."""
    return Path(shutil.copytree(target, tmp_path / f"models--{REPO.replace('/', '--')}" / "snapshots" / COMMIT))


@pytest.fixture
def hub(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    monkeypatch.setattr(agents, "problem_of", lambda asked: "there is none")
    with serving(checkpoint, monkeypatch) as server:
        yield server


def from_the_head(
    security: LinkSecurity, checkpoint: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> list[WantPiece]:
    """What the head is asked for until a host has its layers; these are checked."""
    wanted: list[WantPiece] = []
    read = Offer.read

    def counted(offer: Offer, piece: WantPiece) -> bytes:
        wanted.append(piece)
        return read(offer, piece)

    monkeypatch.setattr(Offer, "read", counted)
    offer = Offer(checkpoint, LAYERS)
    with agent(security, cache=WeightCache(cache, 1 << 30)) as one, fleet(one, security=security) as made:
        made.provide(offer, {name_of(one): [MIDDLE]})
    (copy,) = cache.iterdir()
    for part in offer.request([MIDDLE]).files:
        whole, held = (checkpoint / part.name).read_bytes(), (copy / part.name).read_bytes()
        assert all(whole[start:end] == held[start:end] for start, end in part.ranges)
    return wanted


def test_the_hub_sends_what_the_head_would(
    server: NotingServer,
    security: LinkSecurity,
    checkpoint: Path,
    hub: StandIn,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert from_the_head(security, checkpoint, tmp_path / "cache", monkeypatch) == []
    assert all(asked is not None for _, asked in hub.sent)
    once = len(hub.sent)
    assert from_the_head(security, checkpoint, tmp_path / "cache", monkeypatch) == []
    assert len(hub.sent) == once


@pytest.mark.parametrize(("status", "lacks"), [(404, 0), (200, 0), (206, 1)])
def test_what_the_hub_does_not_send_the_head_does(
    server: NotingServer,
    security: LinkSecurity,
    checkpoint: Path,
    hub: StandIn,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    status: int,
    lacks: int,
) -> None:
    hub.status, hub.lacks = status, lacks
    wanted = from_the_head(security, checkpoint, tmp_path / "cache", monkeypatch)
    assert {piece.file for piece in wanted} >= {"config.json", "model.safetensors"}
    assert len(hub.sent) == 1


def test_a_folder_of_the_hubs_cache_says_where_it_came_from(tmp_path: Path) -> None:
    folder = tmp_path / "models--Qwen--Qwen3-0.6B" / "snapshots" / COMMIT
    assert hub_source(folder) == HubSource(repo="Qwen/Qwen3-0.6B", revision=COMMIT)
    assert hub_source(tmp_path / "models--gpt2" / "snapshots" / COMMIT) == HubSource(repo="gpt2", revision=COMMIT)
    assert hub_source(tmp_path / "models--gpt2" / "snapshots" / "main") is None
    assert hub_source(tmp_path / "Qwen3-0.6B") is None


def test_pieces_that_touch_are_asked_for_together() -> None:
    missing = [("a", (0, 5)), ("a", (5, 9)), ("a", (10, 12)), ("b", (12, 13))]
    assert list(spans(missing)) == [("a", [(0, 5), (5, 9)]), ("a", [(10, 12)]), ("b", [(12, 13)])]
    assert list(spans([])) == []
