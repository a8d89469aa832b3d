"""A host that reaches the hub takes its layers from there; what the hub does not send, the head does."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.hosts.fetching import Fetch, Offer, WeightCache, spans
from penstock.hosts.weights import PIECE, Held, HubSource, bounds_of, hub_source
from penstock.transport.addresses import LinkSecurity
from tests.agents import NotingServer, agent, fleet, name_of
from tests.hub import COMMIT, REPO, StandIn, serving

LAYERS = 5
MIDDLE = (1, 3)
HELD = Held(*MIDDLE)


@pytest.fixture
def checkpoint(target: Path, tmp_path: Path) -> Path:
    """A checkpoint at the path that it has in the hub's cache."""
    return Path(shutil.copytree(target, tmp_path / f"models--{REPO.replace('/', '--')}" / "snapshots" / COMMIT))


@pytest.fixture
def hub(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    monkeypatch.setattr(Fetch, "_proved_here", lambda fetch: "there is none")
    with serving(checkpoint, monkeypatch) as server:
        yield server


def from_the_head(
    security: LinkSecurity, checkpoint: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> list[tuple[str, int]]:
    """The pieces that the head is asked for until a host has its layers; these are checked."""
    wanted: list[tuple[str, int]] = []
    read = Offer.read

    def counted(offer: Offer, file: str, piece: int) -> bytes:
        wanted.append((file, piece))
        return read(offer, file, piece)

    monkeypatch.setattr(Offer, "read", counted)
    offer = Offer(checkpoint, LAYERS)
    with agent(security, cache=WeightCache(cache, 1 << 30)) as one, fleet(one, security=security) as made:
        wanted.clear()
        made.provide(offer, {name_of(one): [HELD]})
    copy = cache / offer.question([HELD], 0).asked.digest
    for part in offer.question([HELD], 0).asked.files:
        for piece in part.needed:
            start, end = bounds_of(part.size, piece)
            assert (checkpoint / part.name).read_bytes()[start:end] == (copy / part.name).read_bytes()[start:end]
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
    hub.sent.clear()
    wanted = from_the_head(security, checkpoint, tmp_path / "cache", monkeypatch)
    assert {file for file, _ in wanted} >= {"config.json", "model.safetensors"}


def test_what_the_hub_sends_is_proved_like_anything_else(
    server: NotingServer,
    security: LinkSecurity,
    checkpoint: Path,
    hub: StandIn,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its bytes are others than the head's, as long as they are: the head sends all of them."""
    offered = Path(shutil.copytree(checkpoint, tmp_path / "own" / checkpoint.relative_to(tmp_path)))
    changed = bytearray((offered / "model.safetensors").read_bytes())
    for place in range(0, len(changed), PIECE):
        changed[place + PIECE // 2 if place + PIECE // 2 < len(changed) else -1] ^= 1
    (checkpoint / "model.safetensors").write_bytes(changed)
    wanted = from_the_head(security, offered, tmp_path / "cache", monkeypatch)
    assert {file for file, _ in wanted} == {"model.safetensors"}
    assert hub.sent


def test_a_folder_of_the_hubs_cache_says_where_it_came_from(tmp_path: Path) -> None:
    folder = tmp_path / "models--Qwen--Qwen3-0.6B" / "snapshots" / COMMIT
    assert hub_source(folder) == HubSource(repo="Qwen/Qwen3-0.6B", revision=COMMIT)
    assert hub_source(tmp_path / "models--gpt2" / "snapshots" / COMMIT) == HubSource(repo="gpt2", revision=COMMIT)
    assert hub_source(tmp_path / "models--gpt2" / "snapshots" / "main") is None
    assert hub_source(tmp_path / "Qwen3-0.6B") is None


def test_pieces_that_touch_are_asked_for_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.hosts.fetching.SPAN", 3 * PIECE)
    missing = [("a", 0), ("a", 1), ("a", 3), ("b", 4), *(("b", piece) for piece in range(5, 9))]
    assert list(spans(missing)) == [("a", [0, 1]), ("a", [3]), ("b", [4, 5, 6]), ("b", [7, 8])]
    assert list(spans([])) == []
