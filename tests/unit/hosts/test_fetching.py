"""A host that lacks the checkpoint is sent its layers, once, and believes nothing that is not proved."""

from __future__ import annotations

import os
import queue
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.checkpoint.checkpoint import open_checkpoint
from penstock.core import CheckpointChanged, ConfigError
from penstock.hosts.fetching import MOST_TRIES, ON_THEIR_WAY, Courier, Fetch, Offer, Proved, Question, WeightCache
from penstock.hosts.fleet import Fleet
from penstock.hosts.messages import FindCheckpoint, Message, Piece, Progress, WantPiece
from penstock.hosts.weights import PIECE, Held
from penstock.messages import MalformedMessage
from penstock.models.loader import load_module
from penstock.transport.addresses import LinkSecurity
from tests.agents import NotingServer, agent, fleet, name_of, reports, soon, spec
from tests.unit.hosts.parts import part_of, parts_of

LAYERS = 5
MIDDLE = (1, 3)
HELD = Held(*MIDDLE)


@pytest.fixture(scope="module")
def target(wide: Path) -> Path:
    return wide


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Every piece that a head reads for a host; no host has any checkpoint."""
    monkeypatch.setattr(Fetch, "_proved_here", lambda fetch: "there is none")
    wanted: list[tuple[str, int]] = []
    read = Offer.read

    def counted(offer: Offer, file: str, piece: int) -> bytes:
        wanted.append((file, piece))
        return read(offer, file, piece)

    monkeypatch.setattr(Offer, "read", counted)
    return wanted


@contextmanager
def provided(offer: Offer, security: LinkSecurity, cache: WeightCache, sent: list[tuple[str, int]]) -> Iterator[Fleet]:
    with agent(security, cache=cache) as one, fleet(one, security=security) as made:
        sent.clear()
        made.provide(offer, {name_of(one): [HELD]})
        yield made


def weights(checkpoint: Path) -> dict[str, torch.Tensor]:
    return load_module(open_checkpoint(str(checkpoint)), *MIDDLE, "float32", "cpu").state_dict()  # type: ignore[no-any-return]


def test_layers_come_once_and_are_those_of_the_head(
    server: NotingServer, security: LinkSecurity, target: Path, tmp_path: Path, sent: list[tuple[str, int]]
) -> None:
    cache, offer = WeightCache(tmp_path, 1 << 30), Offer(target, LAYERS)
    copy = tmp_path / offer.question([HELD], 0).asked.digest
    with provided(offer, security, cache, sent):
        weight_pieces = -(-(target / "model.safetensors").stat().st_size // PIECE)
        assert sum(file == "model.safetensors" for file, _ in sent) < weight_pieces
        mine, its = weights(target), weights(copy)
        assert mine.keys() == its.keys()
        assert all(torch.equal(mine[name], its[name]) for name in mine)
    with provided(offer, security, cache, sent):
        assert sent == []
    damaged = copy / "config.json"
    damaged.write_text(damaged.read_text().replace("{", "[", 1))
    with provided(offer, security, cache, sent):
        assert sent == [("config.json", 0)]


def test_a_head_hears_how_far_it_is(
    server: NotingServer,
    security: LinkSecurity,
    target: Path,
    tmp_path: Path,
    sent: list[tuple[str, int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("penstock.hosts.fetching.TELL_EVERY", 0.0)
    offer = Offer(target, LAYERS)
    needed = sum(file.needed_bytes for file in offer.question([HELD], 0).asked.files)
    with agent(security, cache=WeightCache(tmp_path, 1 << 30)) as one, fleet(one, security=security) as made:
        told: list[int] = []
        take = made.hosts[name_of(one)].take

        def noted(message: Message) -> None:
            if isinstance(message, Progress):
                told.append(message.held)
            take(message)

        made.hosts[name_of(one)].take = noted  # type: ignore[method-assign]
        made.provide(offer, {name_of(one): [HELD]})
    assert told == sorted(told)
    assert told[-1] == needed


def plan_of(target: Path, process: str, layers: tuple[int, int]) -> Any:
    fitting = spec(process)
    plan = msgspec.structs.replace(fitting.plan, model=str(target), first=layers[0], last=layers[1])
    return msgspec.structs.replace(fitting, plan=plan)


def test_a_stage_loads_what_was_sent_and_no_other_layers(
    server: NotingServer,
    security: LinkSecurity,
    target: Path,
    tmp_path: Path,
    sent: list[tuple[str, int]],
    pipe: tuple[int, int],
) -> None:
    offer = Offer(target, LAYERS)
    with provided(offer, security, WeightCache(tmp_path, 1 << 30), sent) as made:
        (host,) = made.hosts.values()
        host.listen("s", pipe[1])
        host.start(plan_of(target, "s", MIDDLE))
        soon(lambda: bool(server.started))
        assert server.started[0].plan.model == str(tmp_path / offer.question([HELD], 0).asked.digest)
        host.listen("t", pipe[1])
        host.start(plan_of(target, "t", (1, 4)))
        (told,) = reports(pipe[0])
        assert (told["process"], told["cause"]) == ("t", "layers 1-3 have not been asked for, or sent to this host")


@pytest.mark.parametrize("is_there", [False, True], ids=["sent", "found"])
def test_a_search_may_be_over_before_the_thread_that_began_it_goes_on(
    server: NotingServer,
    security: LinkSecurity,
    target: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    is_there: bool,
) -> None:
    """Its first pieces may come, and its end may be told, at any moment from its beginning on."""
    if not is_there:
        monkeypatch.setattr(Fetch, "_proved_here", lambda fetch: "there is none")
    start = Fetch.start

    def awaited(fetch: Fetch) -> None:
        start(fetch)
        fetch.join()

    monkeypatch.setattr(Fetch, "start", awaited)
    offer = Offer(target, LAYERS)
    with agent(security, cache=WeightCache(tmp_path, 1 << 30)) as one, fleet(one, security=security) as made:
        made.provide(offer, {name_of(one): [HELD]})
        assert made.hold(offer, {name_of(one): [HELD]})


def test_other_layers_are_sent_when_they_are_asked_for(
    server: NotingServer, security: LinkSecurity, target: Path, tmp_path: Path, sent: list[tuple[str, int]]
) -> None:
    offer = Offer(target, LAYERS)
    with provided(offer, security, WeightCache(tmp_path, 1 << 30), sent) as made:
        (name,) = made.hosts
        sent.clear()
        made.provide(offer, {name: [HELD]})
        assert sent == []
        made.provide(offer, {name: [Held(1, 4)]})
        assert {file for file, _ in sent} == {"model.safetensors"}
        assert made.hosts[name].holds(offer, [Held(1, 4)])


def test_a_host_that_keeps_nothing_says_so(
    server: NotingServer, security: LinkSecurity, target: Path, tmp_path: Path, sent: list[tuple[str, int]]
) -> None:
    full = tmp_path / "file"
    full.write_text("")
    cache = WeightCache(tmp_path, 1 << 30)
    with agent(security, cache=cache) as one, fleet(one, security=security) as made:
        cache.folder = full
        with pytest.raises(ConfigError, match="its layers cannot be kept"):
            made.provide(Offer(target, LAYERS), {name_of(one): [HELD]})


# ------------------------------------------------------------------------------------------ files that change meanwhile


def test_files_that_changed_since_they_were_checked_are_checked_again(
    server: NotingServer, security: LinkSecurity, target: Path, tmp_path: Path, pipe: tuple[int, int]
) -> None:
    """Stamps are compared at every start of a stage: the same bytes pass, others are refused with the reason."""
    here = tmp_path / "here"
    here.mkdir()
    for file in target.iterdir():
        (here / file.name).write_bytes(file.read_bytes())
    with agent(security) as one, fleet(one, security=security) as made:
        made.provide(Offer(here, LAYERS), {name_of(one): [HELD]})
        (host,) = made.hosts.values()
        os.utime(here / "config.json", (1, 1))
        host.listen("s", pipe[1])
        host.start(plan_of(here, "s", MIDDLE))
        soon(lambda: [one.process for one in server.started] == ["s"])
        (here / "model.safetensors").write_bytes(bytes((here / "model.safetensors").stat().st_size))
        host.listen("t", pipe[1])
        host.start(plan_of(here, "t", MIDDLE))
        (told,) = reports(pipe[0])
        assert told["process"] == "t"
        assert "is another one: model.safetensors differs" in told["cause"]
        assert [one.process for one in server.started] == ["s"]


def test_a_head_whose_checkpoint_has_changed_offers_it_no_more(target: Path, tmp_path: Path) -> None:
    for file in target.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    offer = Offer(tmp_path, LAYERS)
    offer.check()
    assert offer.read("config.json", 0) == (target / "config.json").read_bytes()
    (tmp_path / "config.json").write_text("{}")
    for use in (offer.check, lambda: offer.read("config.json", 0)):
        with pytest.raises(
            CheckpointChanged, match=r"config\.json has changed since the engine started; start it again"
        ):
            use()


def extra(folder: Path) -> None:
    (folder / "adapter_config.json").write_text("{}")


def missing(folder: Path) -> None:
    (folder / "generation_config.json").unlink(missing_ok=True)
    (folder / "config.json").unlink()


def piped(folder: Path) -> None:
    (folder / "config.json").unlink()
    os.mkfifo(folder / "config.json")


def longer(folder: Path) -> None:
    with (folder / "model.safetensors").open("ab") as file:
        file.write(b"\0")


def flipped(folder: Path) -> None:
    content = bytearray((folder / "model.safetensors").read_bytes())
    content[9] ^= 1
    (folder / "model.safetensors").write_bytes(content)


@pytest.mark.parametrize("change", [extra, missing, piped, longer, flipped])
def test_a_hosts_own_files_are_used_only_if_they_are_the_same(
    server: NotingServer, security: LinkSecurity, target: Path, tmp_path: Path, change: Callable[[Path], None]
) -> None:
    for file in target.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    offer = Offer(tmp_path, LAYERS)
    offer.prepare([Held(0, 5)])
    with agent(security) as one, fleet(one, security=security) as made:
        made.provide(offer, {name_of(one): [HELD]})
        change(tmp_path)
        with pytest.raises(ConfigError, match=rf"host {name_of(one)}: .*(another one|no checkpoint)"):
            made.provide(offer, {name_of(one): [Held(0, 5)]})


# -------------------------------------------------------------------------------------------------- what a head may say


WHOLE = random.Random(3).randbytes(11 * PIECE + 77)
CONFIG = b"{}"
FILES, DIGESTS = parts_of(part_of("config.json", CONFIG, [(0, 1)]), part_of("w.safetensors", WHOLE, [(0, 7), (9, 12)]))
PIECES = [("config.json", 0), *(("w.safetensors", piece) for piece in (*range(7), 9, 10, 11))]


def content_of(file: str, piece: int) -> bytes:
    return CONFIG if file == "config.json" else WHOLE[piece * PIECE : (piece + 1) * PIECE]


class Head:
    """Asks a fetch for the checkpoint above, and notes what it says."""

    def __init__(self, cache: Path, number: int = 1) -> None:
        from penstock.hosts.weights import digest_of

        asked = FindCheckpoint(
            number=number, path="/nowhere", digest=digest_of(FILES), is_folder=True, layers=[MIDDLE], files=FILES
        )
        self.wanted: queue.SimpleQueue[WantPiece] = queue.SimpleQueue()
        self.ended: queue.SimpleQueue[Proved | str] = queue.SimpleQueue()
        self.fetch = Fetch(
            asked, DIGESTS, WeightCache(cache, 1 << 30), set, self._hear, lambda fetch, found: self.ended.put(found)
        )
        self.fetch.start()

    def _hear(self, message: Progress | WantPiece) -> None:
        if isinstance(message, WantPiece):
            self.wanted.put(message)

    def answer(self, wanted: WantPiece, content: bytes | None = None) -> bool:
        whole = content_of(wanted.file, wanted.piece) if content is None else content
        return self.fetch.take(Piece(number=wanted.number, file=wanted.file, piece=wanted.piece), whole)


FAULTS = ("right", "right", "right", "dropped", "swapped", "repeated", "corrupt", "short", "zeros", "other_question")


@settings(max_examples=40, deadline=None)
@given(st.lists(st.sampled_from(FAULTS), max_size=60), st.randoms(use_true_random=False))
def test_pieces_that_are_lost_swapped_repeated_or_changed_are_refused(
    tmp_path_factory: pytest.TempPathFactory, faults: list[str], rng: random.Random
) -> None:
    """In any order: the copy is complete only once every piece is right, and holds nothing else."""
    head = Head(tmp_path_factory.mktemp("cache"))
    left, held, tries = list(faults), dict[tuple[str, int], bool](), dict[tuple[str, int], int]()
    waiting: list[WantPiece] = []
    while head.ended.empty() and len([one for one in held if held[one]]) < len(PIECES):
        try:
            waiting.append(head.wanted.get(timeout=10 if not waiting else 0.01))
        except queue.Empty:
            if not waiting:
                break
        wanted = waiting.pop(rng.randrange(len(waiting)))
        fault = left.pop() if left else "right"
        right = content_of(wanted.file, wanted.piece)
        if tries.get((wanted.file, wanted.piece), 0) == MOST_TRIES - 1:
            fault = "right"
        if fault == "dropped":
            waiting.append(wanted)
            continue
        if fault == "other_question":
            assert not head.fetch.take(Piece(number=7, file=wanted.file, piece=wanted.piece), right)
            waiting.append(wanted)
            continue
        if fault == "swapped":
            content = content_of(*rng.choice([one for one in PIECES if one != (wanted.file, wanted.piece)]))
        elif fault == "corrupt":
            content = bytes([right[0] ^ 1]) + right[1:]
        elif fault == "short":
            content = right[:-1]
        elif fault == "zeros":
            content = bytes(len(right))
        else:
            content = right
        assert head.answer(wanted, content)
        if fault == "repeated":
            assert not head.answer(wanted)
        if content == right:
            held[wanted.file, wanted.piece] = True
        else:
            tries[wanted.file, wanted.piece] = tries.get((wanted.file, wanted.piece), 0) + 1
    found = head.ended.get(timeout=10)
    assert isinstance(found, Proved)
    copy = head.fetch.asked.digest
    assert found.place.name == copy
    whole = (found.place / "w.safetensors").read_bytes()
    assert all(whole[piece * PIECE : (piece + 1) * PIECE] == content_of(file, piece) for file, piece in PIECES[1:])
    assert whole[7 * PIECE : 9 * PIECE] == bytes(2 * PIECE)  # nobody asked for them


def test_a_piece_that_never_comes_right_ends_the_search(tmp_path: Path) -> None:
    head = Head(tmp_path)
    seen = dict[tuple[str, int], int]()
    while head.ended.empty():
        try:
            wanted = head.wanted.get(timeout=0.2)
        except queue.Empty:
            continue
        seen[wanted.file, wanted.piece] = seen.get((wanted.file, wanted.piece), 0) + 1
        head.answer(wanted, b"wrong" if (wanted.file, wanted.piece) == PIECES[4] else None)
    assert head.ended.get() == f"piece 3 of w.safetensors came {MOST_TRIES} times with other bytes than its digest says"
    assert seen[PIECES[4]] == MOST_TRIES


def test_a_search_that_is_stopped_ends_without_a_word_and_goes_on_later(tmp_path: Path) -> None:
    head = Head(tmp_path)
    for _ in range(4):
        assert head.answer(head.wanted.get(timeout=10))
    first = [head.wanted.get(timeout=10) for _ in range(ON_THEIR_WAY - 1)]
    head.fetch.stop()
    head.fetch.join()
    assert head.ended.empty()
    again = Head(tmp_path, number=2)
    asked: list[WantPiece] = []
    while again.ended.empty():
        try:
            asked.append(again.wanted.get(timeout=0.2))
        except queue.Empty:
            continue
        again.fetch.take(Piece(number=1, file=asked[-1].file, piece=asked[-1].piece), b"of the question before")
        again.answer(asked[-1])
    assert isinstance(again.ended.get(), Proved)
    assert len(asked) == len(PIECES) - 4
    assert {(one.file, one.piece) for one in first} <= {(one.file, one.piece) for one in asked}


def test_whatever_goes_wrong_in_a_search_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> str:
        raise KeyError("a fault of ours")

    monkeypatch.setattr(Fetch, "_filled", broken)
    assert Head(tmp_path).ended.get(timeout=10) == "its layers cannot be had: KeyError: 'a fault of ours'"


# ------------------------------------------------------------------------------------------------- what a host may want


class Kept:
    """The part of an outbox that a courier uses; its receiver takes in all that it is sent."""

    def __init__(self) -> None:
        self.sent: list[bytes] = []
        self.may_leave = threading.Event()

    def drain(self, most: int) -> None:
        self.may_leave.wait()

    def send(self, header: bytes, content: bytes) -> None:
        self.sent.append(content)


def courier_of(target: Path, faults: list[str]) -> tuple[Courier, Kept, Question]:
    offer, outbox = Offer(target, LAYERS), Kept()
    question = offer.question([HELD], 4)
    return Courier(offer, question, outbox, "lease", faults.append), outbox, question  # type: ignore[arg-type]


def test_a_head_brings_nothing_but_what_is_needed(target: Path) -> None:
    courier, outbox, question = courier_of(target, [])
    outbox.may_leave.set()
    needed = {(file.name, piece) for file in question.asked.files for piece in file.needed}
    for file, piece in (
        ("../secret", 0),
        ("/etc/passwd", 0),
        ("config.json", 1),
        ("model.safetensors", max(piece for name, piece in needed if name == "model.safetensors") + 1),
    ):
        with pytest.raises(MalformedMessage, match="which it does not need, or has had"):
            courier.want(WantPiece(number=4, file=file, piece=piece))
    courier.want(WantPiece(number=3, file="../of an earlier question", piece=0))
    for _ in range(MOST_TRIES):
        courier.want(WantPiece(number=4, file="config.json", piece=0))
    soon(lambda: len(outbox.sent) == MOST_TRIES)
    with pytest.raises(MalformedMessage, match="has had"):
        courier.want(WantPiece(number=4, file="config.json", piece=0))
    courier.stop()


def test_pieces_wait_in_no_memory_for_a_host_that_takes_none(target: Path) -> None:
    courier, outbox, question = courier_of(target, [])
    needed = [(file.name, piece) for file in question.asked.files for piece in file.needed]
    for file, piece in needed[: 2 * ON_THEIR_WAY]:
        courier.want(WantPiece(number=4, file=file, piece=piece))
    soon(lambda: courier._wanted.qsize() == 2 * ON_THEIR_WAY - 1)  # it has taken the first one
    courier.want(WantPiece(number=4, file=needed[-1][0], piece=needed[-1][1]))
    with pytest.raises(MalformedMessage, match=f"more than {2 * ON_THEIR_WAY} pieces at a time"):
        courier.want(WantPiece(number=4, file=needed[-1][0], piece=needed[-1][1]))
    assert outbox.sent == []
    outbox.may_leave.set()
    courier.stop()


def test_a_piece_that_cannot_be_read_is_a_fault(target: Path, tmp_path: Path) -> None:
    for file in target.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    faults: list[str] = []
    courier, outbox, _ = courier_of(tmp_path, faults)
    (tmp_path / "config.json").unlink()
    outbox.may_leave.set()
    courier.want(WantPiece(number=4, file="config.json", piece=0))
    soon(lambda: bool(faults))
    assert "config.json has changed since the engine started" in faults[0]
