"""A host that lacks the checkpoint is sent its layers, once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
import torch

from penstock.core import ConfigError
from penstock.hosts import agent as agents
from penstock.hosts.control import WantPiece
from penstock.hosts.fleet import Fleet
from penstock.hosts.weights.cache import WeightCache
from penstock.hosts.weights.offering import Offer
from penstock.messages import MalformedMessage
from penstock.models.checkpoint import open_checkpoint
from penstock.models.loader import load_module
from penstock.transport.security import LinkSecurity
from tests.agents import NotingServer, agent, fleet, name_of, reports, soon, spec

LAYERS = 5
MIDDLE = (1, 3)


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[WantPiece]:
    """Every piece that a head is asked for; no host has any checkpoint."""
    monkeypatch.setattr(agents, "problem_of", lambda asked: "there is none")
    wanted: list[WantPiece] = []
    read = Offer.read

    def counted(offer: Offer, piece: WantPiece) -> bytes:
        wanted.append(piece)
        return read(offer, piece)

    monkeypatch.setattr(Offer, "read", counted)
    return wanted


@contextmanager
def provided(
    target: Path, security: LinkSecurity, cache: WeightCache, layers: tuple[int, int] = MIDDLE
) -> Iterator[Fleet]:
    with agent(security, cache=cache) as one, fleet(one, security=security) as made:
        made.provide(Offer(target, LAYERS), {name_of(one): [layers]})
        yield made


def weights(checkpoint: Path) -> dict[str, torch.Tensor]:
    return load_module(open_checkpoint(str(checkpoint)), *MIDDLE, "float32", "cpu").state_dict()  # type: ignore[no-any-return]


def test_layers_come_once_and_are_those_of_the_head(
    server: NotingServer, security: LinkSecurity, target: Path, tmp_path: Path, sent: list[WantPiece]
) -> None:
    cache = WeightCache(tmp_path, 1 << 30)
    with provided(target, security, cache):
        (copy,) = tmp_path.iterdir()
        assert sum(piece.end - piece.start for piece in sent) < (target / "model.safetensors").stat().st_size
        mine, its = weights(target), weights(copy)
        assert mine.keys() == its.keys()
        assert all(torch.equal(mine[name], its[name]) for name in mine)
    sent.clear()
    with provided(target, security, cache):
        assert sent == []
    damaged = copy / "config.json"
    damaged.write_text(damaged.read_text().replace("{", "[", 1))
    with provided(target, security, cache):
        assert [piece.file for piece in sent] == ["config.json"]


def test_a_head_hears_how_far_it_is(
    server: NotingServer,
    security: LinkSecurity,
    target: Path,
    tmp_path: Path,
    sent: list[WantPiece],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("penstock.hosts.weights.fetching.TELL_EVERY", 0.0)
    with agent(security, cache=WeightCache(tmp_path, 1 << 30)) as one, fleet(one, security=security) as made:
        told: list[tuple[str, int, int]] = []
        made.on_fetched = lambda *said: told.append(said)
        made.provide(Offer(target, LAYERS), {name_of(one): [MIDDLE]})
    needed = sum(piece.end - piece.start for piece in sent)
    assert [held for _, held, _ in told] == sorted(held for _, held, _ in told)
    assert told[-1] == (name_of(one), needed, needed)
    assert len(told) == len(sent)


def test_a_stage_loads_what_was_sent_and_no_other_layers(
    server: NotingServer,
    security: LinkSecurity,
    target: Path,
    tmp_path: Path,
    sent: list[WantPiece],
    pipe: tuple[int, int],
) -> None:
    with provided(target, security, WeightCache(tmp_path, 1 << 30)) as made:
        (host,) = made.hosts.values()
        (copy,) = tmp_path.iterdir()
        host.listen("s", pipe[1])
        fitting = spec("s")
        plan = msgspec.structs.replace(fitting.plan, model=str(target), first=MIDDLE[0], last=MIDDLE[1])
        host.start(msgspec.structs.replace(fitting, plan=plan))
        soon(lambda: bool(server.started))
        assert server.started[0].plan.model == str(copy)
        host.listen("t", pipe[1])
        other = msgspec.structs.replace(fitting, process="t", plan=msgspec.structs.replace(plan, last=4))
        host.start(other)
        (told,) = reports(pipe[0])
        assert (told["process"], told["cause"]) == ("t", "layers 1-3 have not been sent to its host")


def test_other_layers_are_sent_when_they_are_asked_for(
    server: NotingServer, security: LinkSecurity, target: Path, tmp_path: Path, sent: list[WantPiece]
) -> None:
    with provided(target, security, WeightCache(tmp_path, 1 << 30)) as made:
        (name,) = made.hosts
        sent.clear()
        made.provide(Offer(target, LAYERS), {name: [MIDDLE]})
        assert sent == []
        made.provide(Offer(target, LAYERS), {name: [(1, 4)]})
        assert {piece.file for piece in sent} == {"model.safetensors"}
        assert made.hosts[name].has(str(target), [(1, 4)])


def test_a_host_that_keeps_nothing_says_so(
    server: NotingServer, security: LinkSecurity, target: Path, tmp_path: Path, sent: list[WantPiece]
) -> None:
    full = tmp_path / "file"
    full.write_text("")
    with (
        pytest.raises(ConfigError, match="its layers cannot be kept"),
        provided(target, security, WeightCache(full, 1 << 30)),
    ):
        pass


@pytest.mark.parametrize(
    ("file", "start", "end"), [("../secret", 0, 1), ("config.json", 5, 5), ("config.json", 0, 1 << 30), ("/x", 0, 1)]
)
def test_a_head_sends_nothing_but_pieces_of_the_checkpoint(target: Path, file: str, start: int, end: int) -> None:
    with pytest.raises(MalformedMessage, match="is no piece of"):
        Offer(target, LAYERS).read(WantPiece(path=str(target), file=file, start=start, end=end))
