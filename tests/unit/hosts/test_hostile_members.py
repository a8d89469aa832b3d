"""Members with valid keys that say what nobody says: they lose their own lease, with a reason, and nobody else does."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec import inspect

from penstock.hosts import lease, messages
from penstock.hosts import worker as agents
from penstock.hosts.facts import HostFacts, own_facts
from penstock.hosts.fetching import Fetch, Offer, WeightCache
from penstock.hosts.fleet import Fleet
from penstock.hosts.messages import DOOR, Attach, Attached, Beat, BeatAnswer, FindCheckpoint, LeaseEnded, Message
from penstock.hosts.weights import digest_of
from penstock.transport.addresses import LinkSecurity
from penstock.transport.outbox import Outbox, Sockets
from tests.agents import HELD, LAYER, NotingServer, agent, fleet, name_of, reports, soon, spec
from tests.hostile import example, fits, kinds_of, odd_structs
from tests.unit.hosts.parts import part_of, parts_of

KINDS = kinds_of(messages.Message)
LARGE_FRAME = bytes(1 << 16)


class Member:
    """A member of the cluster that sends whatever it is told to, with an inbox of its own."""

    def __init__(self, sockets: Sockets, address: str) -> None:
        self.sockets = sockets
        self.inbox = sockets.inbox(address)
        self.heard: list[Message] = []
        self.lease = ""
        self.other: Outbox | None = None

    def say(self, message: Any, *contents: bytes, secret: str | None = None) -> None:
        assert self.other is not None
        self.other.send(msgspec.msgpack.encode((self.lease if secret is None else secret, message)), *contents)

    def listen(self, seconds: float = 0.0) -> list[Message]:
        """Wait up to ``seconds`` for messages and return all that have come so far."""
        self.inbox.wait(time.monotonic() + seconds)
        for frames in self.inbox.take():
            self.lease, raw = messages.lease_of(frames)
            self.heard.append(messages.decode(raw, frames[1:]))
        return self.heard

    def hears(self, kind: type) -> Any:
        """The first message of a kind that has come since the last time."""
        soon(lambda: any(isinstance(one, kind) for one in self.listen(0.01)))
        found = next(one for one in self.heard if isinstance(one, kind))
        self.heard.clear()
        return found


class HostileHead(Member):
    """A hostile head that attaches to an agent."""

    def attach(self, to: str, secret: str) -> HostileHead:
        self.inbox.admit(secret)
        self.lease = secret
        self.other = self.sockets.connect(to, DOOR)
        self.say(Attach(head=self.inbox.address, host=to.removeprefix("tcp://").rpartition(":")[0]))
        self.hears(Attached)
        return self


class HostileWorker(Member):
    """A hostile worker to which a head attaches."""

    def __init__(self, sockets: Sockets, address: str) -> None:
        super().__init__(sockets, address)
        self.inbox.admit(DOOR)
        self.attached = 0

    def serve(self, facts: HostFacts) -> None:
        """Answer the next head."""
        asked: Attach = self.hears(Attach)
        self.other = self.sockets.connect(asked.head, self.lease)
        self.say(Attached(facts=facts))


@contextmanager
def hostile_head(security: LinkSecurity, to: str, secret: str = "h" * 32) -> Iterator[HostileHead]:
    with Sockets(security) as sockets:
        head = HostileHead(sockets, "tcp://127.0.0.9:*")
        try:
            yield head.attach(to, secret)
        finally:
            head.inbox.close()


@contextmanager
def victim(one: Any, security: LinkSecurity, server: NotingServer, pipe: tuple[int, int]) -> Iterator[Fleet]:
    """A head with a stage, whose lease and stage are there at the end, too."""
    with fleet(one, security=security) as made:
        host = made.hosts[name_of(one)]
        host.listen("s", pipe[1])
        host.start(spec("s"))
        soon(lambda: [one.process for one in server.started] == ["s"])
        secret = host.lease
        yield made
        assert host.alive
        assert host.lease == secret
        assert server.killed == []
        made.provide(Offer(Path(spec("s").plan.model), 1), {host.name: [HELD]})  # it still answers


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.cls.__name__)
def test_a_head_that_sends_nonsense_ends_its_own_lease_alone(
    server: NotingServer, security: LinkSecurity, pipe: tuple[int, int], kind: inspect.StructType, tmp_path: Path
) -> None:
    """Each message with each field beyond its bounds, one lease after the other."""
    wrong = [value for value in odd_structs(kind) if not fits(kind, value)]
    contents = [b""] if kind.cls in messages.WITH_CONTENT else []
    with agent(security, cache=WeightCache(tmp_path, 1 << 30)) as one, victim(one, security, server, pipe):
        for number, value in enumerate(wrong[:: max(1, len(wrong) // 6)]):
            with hostile_head(security, one.address, f"{number:032}") as head:
                head.say(value, *contents)
                assert "message does not decode" in head.hears(LeaseEnded).cause
                head.say(Beat(sent=1.0))  # of a lease that has ended
        soon(lambda: len(one._leases) == 1)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.cls is not Beat], ids=lambda kind: kind.cls.__name__)
def test_messages_of_the_other_side_twice_and_out_of_order_end_that_lease_at_most(
    server: NotingServer, security: LinkSecurity, pipe: tuple[int, int], kind: inspect.StructType
) -> None:
    contents = [b""] if kind.cls in messages.WITH_CONTENT else []
    with agent(security) as one, victim(one, security, server, pipe), hostile_head(security, one.address) as head:
        for _ in range(3):
            head.say(example(kind), *contents)
            head.say(example(kind), *contents, LARGE_FRAME)
        assert head.hears(LeaseEnded).cause


def question(path: Path, number: int = 1) -> tuple[FindCheckpoint, bytes]:
    files, digests = parts_of(part_of("config.json", b"{}", [(0, 1)]))
    asked = FindCheckpoint(
        number=number, path=str(path), digest=digest_of(files), is_folder=True, layers=[LAYER], files=files
    )
    return asked, digests


@pytest.mark.parametrize(
    ("file", "piece", "cause"),
    [
        ("model.safetensors", 0, "it sends piece 0 of 'model.safetensors', which its question does not list"),
        ("config.json", 1, "it sends piece 1 of 'config.json', which its question does not list"),
        ("generation_config.json", 0, "it sends piece 0 of 'generation_config.json', which its question does not list"),
        ("../config.json", 0, "message does not decode"),
        ("/tmp/config.json", 0, "message does not decode"),
        ("..", 0, "message does not decode"),
    ],
)
def test_a_piece_that_is_not_listed_ends_the_lease_and_is_written_nowhere(
    server: NotingServer,
    security: LinkSecurity,
    pipe: tuple[int, int],
    tmp_path: Path,
    file: str,
    piece: int,
    cause: str,
) -> None:
    """The listing has two files, of one of which nothing is needed."""
    needed, unneeded = part_of("config.json", b"{}", [(0, 1)]), part_of("generation_config.json", b"{}", [])
    files, digests = parts_of(needed, unneeded)
    asked = FindCheckpoint(
        number=1, path="/nowhere", digest=digest_of(files), is_folder=True, layers=[LAYER], files=files
    )
    with (
        agent(security, cache=WeightCache(tmp_path / "cache", 1 << 30)) as one,
        victim(one, security, server, pipe),
        hostile_head(security, one.address) as head,
    ):
        head.say(asked, digests)
        assert head.hears(messages.WantPiece).file == "config.json"
        head.say(messages.Piece(number=1, file=file, piece=piece), b"[]")
        assert cause in head.hears(LeaseEnded).cause
        copy = tmp_path / "cache" / asked.digest
        assert [path for path in tmp_path.rglob("*") if path.is_file()] == [copy / "config.json"]
        assert (copy / "config.json").read_bytes() == bytes(2), "only its length was set"


def test_an_agents_beats_go_on_while_it_hashes_and_waits(
    server: NotingServer, security: LinkSecurity, pipe: tuple[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While questions keep their thread busy, the agent still answers beats, and each lease is kept."""
    may_go_on = threading.Event()
    monkeypatch.setattr(Fetch, "_proved_here", lambda fetch: "there is none" if may_go_on.wait(60) else "")
    with agent(security) as one, hostile_head(security, one.address) as head:
        for number in range(3):
            asked, digests = question(tmp_path, number)
            head.say(asked, digests)
        for sent in range(5):
            head.say(Beat(sent=float(sent)))
            assert head.hears(BeatAnswer).sent == float(sent)
        may_go_on.set()


def test_what_is_slow_to_tell_of_itself_holds_up_nobody(
    server: NotingServer, security: LinkSecurity, pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A driver that takes long to answer (`nvidia-smi`) for the second head: the first one keeps its lease."""
    with agent(security) as one, victim(one, security, server, pipe) as made:
        may_go_on = threading.Event()
        own = own_facts("x")
        monkeypatch.setattr(agents, "own_facts", lambda incarnation: [may_go_on.wait(60), own][1])
        with Sockets(security) as sockets:
            door = sockets.connect(one.address, DOOR)
            door.send(messages.encode(Attach(head="tcp://127.0.0.9:9", host="127.0.0.2"), "slow" * 8))
            soon(lambda: len(one._leases) == 2)
            host = made.hosts[name_of(one)]
            before = len(host.offsets._round_trips)
            soon(lambda: len(host.offsets._round_trips) > before + 1)
            may_go_on.set()


def test_a_pipe_in_a_checkpoint_is_no_file_of_it(
    server: NotingServer, security: LinkSecurity, pipe: tuple[int, int], tmp_path: Path
) -> None:
    os.mkfifo(tmp_path / "config.json")
    with agent(security) as one, victim(one, security, server, pipe), hostile_head(security, one.address) as head:
        asked, digests = question(tmp_path)
        head.say(asked, digests)
        assert "not a regular file" in head.hears(messages.CheckpointFound).problem


@pytest.mark.parametrize(
    ("changes", "cause"),
    [
        ({"device": "meta:99"}, "there is no device 'meta:99'; this host has cpu"),
        ({"model": "/etc"}, "have not been asked for, or sent to this host"),
        ({"tokenizer": "/etc"}, "the tokenizer at /etc has not been asked for"),
        ({"target": "/etc"}, "have not been asked for, or sent to this host"),
        ({"last": 2}, "have not been asked for, or sent to this host"),
    ],
)
def test_a_stage_is_started_from_what_was_proved_alone(
    server: NotingServer,
    security: LinkSecurity,
    pipe: tuple[int, int],
    changes: dict[str, Any],
    cause: str,
) -> None:
    with agent(security) as one, fleet(one, security=security) as made:
        host = made.hosts[name_of(one)]
        host.listen("s", pipe[1])
        plan = msgspec.structs.replace(spec("s").plan, **changes)
        host.start(msgspec.structs.replace(spec("s"), plan=plan))
        (told,) = reports(pipe[0])
        assert cause in told["cause"]
        assert server.started == []
        assert host.alive


def test_too_much_at_once_ends_the_lease(
    server: NotingServer, security: LinkSecurity, pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease, "MOST_STAGES", 3)
    with agent(security) as one, victim(one, security, server, pipe), hostile_head(security, one.address) as head:
        asked, digests = question(Path(spec("s").plan.model))
        head.say(asked, digests)
        assert head.hears(messages.CheckpointFound).problem == ""
        for number in range(4):
            head.say(messages.StartStage(spec=msgspec.structs.replace(spec(f"mine {number}"))))
        assert "starts a stage twice, or more than 3" in head.hears(LeaseEnded).cause
        soon(lambda: sorted(server.killed) == ["mine 0", "mine 1", "mine 2"])
        server.killed.clear()


def test_a_stage_that_waits_for_its_files_is_killed_and_counts(
    server: NotingServer,
    security: LinkSecurity,
    pipe: tuple[int, int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    go_on, hashed = threading.Event(), lease.Fetch._proved_here

    def hashing_long(fetch: lease.Fetch) -> Any:
        if fetch.asked.path == str(tmp_path):
            assert go_on.wait(60)
        return hashed(fetch)

    with agent(security) as one, victim(one, security, server, pipe), hostile_head(security, one.address) as head:
        monkeypatch.setattr(lease.Fetch, "_proved_here", hashing_long)
        try:
            asked, digests = question(tmp_path)
            head.say(asked, digests)
            plan = msgspec.structs.replace(spec("s").plan, model=asked.path)
            waiting = [msgspec.structs.replace(spec(name), plan=plan) for name in ("first", "second", "first")]
            head.say(messages.StartStage(spec=waiting[0]))
            head.say(messages.StartStage(spec=waiting[1]))
            head.say(messages.KillStage(process="second"))
            ended = head.hears(messages.StageEnded)
            assert (ended.process, ended.cause) == ("second", "it was killed before its files were here")
            head.say(messages.StartStage(spec=waiting[2]))
            assert "starts a stage twice" in head.hears(LeaseEnded).cause
        finally:
            go_on.set()


def test_a_head_that_asks_for_many_checkpoints_is_refused(
    server: NotingServer, security: LinkSecurity, pipe: tuple[int, int], tmp_path: Path
) -> None:
    with agent(security) as one, victim(one, security, server, pipe), hostile_head(security, one.address) as head:
        for number in range(lease.MOST_CHECKPOINTS + 1):
            asked, digests = question(tmp_path / str(number), number)
            head.say(asked, digests)
        assert "more than 4 checkpoints" in head.hears(LeaseEnded).cause


@pytest.mark.parametrize("host", ["0.0.0.0", "127.0.0.1", "[::]", "10.1.2.3"])
def test_a_stage_listens_where_its_agent_does(server: NotingServer, security: LinkSecurity, host: str) -> None:
    with agent(security) as one, Sockets(security) as sockets:
        head = HostileHead(sockets, "tcp://127.0.0.9:*")
        head.inbox.admit("s" * 32)
        head.lease = "s" * 32
        head.other = sockets.connect(one.address, DOOR)
        head.say(Attach(head=head.inbox.address, host=host))
        assert "for this host's address, which listens at 127.0.0.2" in head.hears(LeaseEnded).cause
        head.inbox.close()


def test_a_fault_of_our_own_ends_one_lease_with_a_reason(
    server: NotingServer, security: LinkSecurity, pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise KeyError("a fault of ours")

    monkeypatch.setattr(lease.Lease, "_start_probe", broken)
    with agent(security) as one, victim(one, security, server, pipe), hostile_head(security, one.address) as head:
        head.say(messages.StartProbe(name="p", session="s", head="tcp://127.0.0.1:9"))
        assert head.hears(LeaseEnded).cause == "KeyError: 'a fault of ours'"


# ---------------------------------------------------------------------------------------------------- workers and heads


@contextmanager
def beside(security: LinkSecurity, server: NotingServer) -> Iterator[tuple[Fleet, str, HostileWorker]]:
    """A fleet of an honest host and of a hostile one, which has attached."""
    with agent(security) as one, Sockets(security) as sockets:
        worker = HostileWorker(sockets, "tcp://127.0.0.9:*")
        serving = threading.Thread(target=worker.serve, args=(own_facts("hostile"),))
        serving.start()
        made = Fleet([name_of(one), worker.inbox.address.removeprefix("tcp://")], security)
        try:
            serving.join()
            yield made, name_of(one), worker
        finally:
            made.close()
            worker.inbox.close()


@pytest.mark.parametrize("times", [1, pytest.param(3, marks=pytest.mark.whole)])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.cls.__name__)
def test_a_worker_that_sends_nonsense_is_lost_alone(
    server: NotingServer,
    security: LinkSecurity,
    kind: inspect.StructType,
    times: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A value of each kind, of fields in turn; `make test-all` sends several, one attachment after the other.

    It is the codec that knows which values no message takes (tests/unit/test_message_bounds.py).
    """
    monkeypatch.setattr("penstock.hosts.remote.TRY_AGAIN_S", 0.0)
    monkeypatch.setattr("penstock.hosts.remote.MOST_LOSSES", 1 << 20)
    wrong = [value for value in odd_structs(kind) if not fits(kind, value)]
    contents = [b""] if kind.cls in messages.WITH_CONTENT else []
    with beside(security, server) as (made, honest, worker):
        host = made.hosts[worker.inbox.address.removeprefix("tcp://")]
        step = max(1, len(wrong) // times)
        for value in wrong[KINDS.index(kind) % step :: step]:
            soon(lambda: host.alive)
            secret = host.lease
            worker.say(value, *contents)
            soon(lambda: host.lease != secret or not host.attached)  # noqa: B023
            assert "it has sent a message that makes no sense" in host.cause
            worker.heard.clear()
            worker.serve(own_facts("hostile"))
        assert honest in made.living
        assert made.hosts[honest].alive


def test_a_fault_at_the_head_loses_hosts_and_ends_no_thread(
    server: NotingServer, security: LinkSecurity, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fault in the head's own code loses the hosts that it concerned, with a reason, and they come back."""
    monkeypatch.setattr("penstock.hosts.remote.TRY_AGAIN_S", 0.0)

    def broken(*_: object) -> None:
        raise RuntimeError("a fault of ours")

    with agent(security) as one, fleet(one, security=security) as made:
        host = made.hosts[name_of(one)]
        with monkeypatch.context() as faulty:
            faulty.setattr(Fleet, "_look", broken)
            soon(lambda: "RuntimeError at this host: a fault of ours" in host.cause)
        soon(lambda: host.alive)


def test_a_host_that_only_says_that_it_is_busy_is_lost(
    server: NotingServer, security: LinkSecurity, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It says that it is fetching, and sends beats; but only bytes that move renew the deadline."""
    monkeypatch.setattr("penstock.hosts.remote.ANSWER_S", 1.5)
    (tmp_path / "config.json").write_text("{}")
    with beside(security, server) as (made, honest, worker):
        name = worker.inbox.address.removeprefix("tcp://")
        stopped = threading.Event()

        def lie() -> None:
            number = None
            while not stopped.is_set():
                for one in worker.listen(0.05):
                    if isinstance(one, Beat):
                        worker.say(BeatAnswer(sent=one.sent, received=1.0, answered=1.0))
                    elif isinstance(one, FindCheckpoint):
                        number = one.number
                worker.heard.clear()
                if number is not None:
                    worker.say(messages.Progress(number=number, held=0, fetched=True))

        lying = threading.Thread(target=lie)
        lying.start()
        try:
            with pytest.raises(Exception, match=f"host {name} was lost: it has not come nearer to holding its layers"):
                made.provide(Offer(tmp_path, 1), {honest: [HELD], name: [HELD]})
        finally:
            stopped.set()
            lying.join()
        assert list(made.living) == [honest]


def test_an_answer_to_another_question_is_none(server: NotingServer, security: LinkSecurity, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    offer = Offer(tmp_path, 1)
    with beside(security, server) as (made, _, worker):
        name = worker.inbox.address.removeprefix("tcp://")
        host = made.hosts[name]
        made.ask(offer, {name: [HELD]})
        asked: FindCheckpoint = worker.hears(FindCheckpoint)
        for number in (asked.number - 1, asked.number + 1):
            worker.say(messages.CheckpointFound(number=number))
        worker.say(messages.Progress(number=asked.number, held=1))
        soon(lambda: host.progress is None and [one.held for one in host._searches.values()] == [1])
        assert host.searching
        made.ask(offer, {name: [HELD]})  # the same question is not asked twice
        worker.say(messages.CheckpointFound(number=asked.number))
        soon(lambda: made.hold(offer, {name: [HELD]}))
        assert not any(isinstance(one, FindCheckpoint) for one in worker.listen(0.1))


def test_hosts_that_never_answer_take_nobodys_place(
    server: NotingServer, security: LinkSecurity, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A member says that workers have come from addresses where none is."""
    monkeypatch.setattr("penstock.hosts.remote.ANSWER_S", 3.0)
    with agent(security) as one, Sockets(security) as sockets:
        made = Fleet([name_of(one)], security, door="127.0.0.77:0")
        try:
            door = sockets.connect(f"tcp://{made.door}", messages.HEAD_DOOR)
            for port in range(1, 9):
                door.send(messages.encode(messages.Join(host=f"127.0.0.9:{port}"), messages.HEAD_DOOR))
            soon(lambda: len(made.hosts) > 1)
            soon(lambda: len(made.hosts) == 1)
            assert list(made.living) == [name_of(one)]
        finally:
            made.close()
