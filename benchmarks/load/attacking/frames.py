"""Hostile frames to a live pipeline: from strangers, who change nothing, and from insiders, who change no token.

Insiders know the secret. Their frames either end the pipeline with an error or leave the requests of others unchanged:
the insiders' own requests have numbers that the engine never uses.
"""

from __future__ import annotations

import random
import socket
import tempfile
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, Final, Literal

import msgspec

from benchmarks.load.attacking.mutations import mutate
from benchmarks.load.attacking.trying import Ended, Fault, deadline
from benchmarks.load.soaking.cases import Case, drawn_cases, params_of, prompt_of
from benchmarks.shared.certificates import only_host
from penstock import LLM, PipelineError
from penstock.engine.loop import Observer
from penstock.messages import (
    PROTOCOL,
    Batch,
    Cancel,
    ConnectNeighbours,
    DeviceReserved,
    Failed,
    Features,
    ForgetGrammar,
    GrammarPrepared,
    Heartbeat,
    HeartbeatAck,
    Loading,
    Message,
    Opened,
    PrepareGrammar,
    Ready,
    ReserveDevice,
    Result,
    Rows,
    SampledToken,
    Sampling,
    Started,
    Stop,
    encode,
    opening,
)
from penstock.pipeline.processes import ProcessExecutor, ProcessPipeline
from penstock.transport.addresses import FRAME, LinkSecurity, place_of
from penstock.transport.outbox import Sockets

CASES: Final = 40
TOGETHER: Final = 4
"""Requests that run at the same time."""
LATEST: Final = 20
"""Connections of strangers that stay open until others have come."""
HUNG: Final = 60.0
"""Seconds after which requests count as hanging."""
OWN: Final = range(10**6, 10**6 + 40)
"""Numbers of the insider's requests and nodes."""
WILD: Final = 0.1
"""Fraction of attempts in which an insider also sends something that may end the pipeline."""

Who = Literal["strangers", "insiders"]


@cache
def cases() -> list[Case]:
    """Cases with the answers of a plain engine of one stage."""
    return drawn_cases(CASES, seed=0)


@dataclass(frozen=True)
class Target:
    """An inbox and the secret that it requires."""

    address: str
    session: str


def targets_of(llm: LLM) -> list[Target]:
    """The inboxes of engine, stages and drafter, the engine's first. Only the host knows them."""
    host = llm.host
    assert isinstance(host, ProcessExecutor)
    found = []
    for session, owner in host._owners.items():
        pipeline = getattr(owner, "__self__", None)
        assert isinstance(pipeline, ProcessPipeline)
        found.append(Target(host.inbox.address, session))
        found += [Target(started.address, session) for started in pipeline.started.values()]
    return found


class Sender(Observer):
    """Sends a number of frames between any two results. ``stream`` is the batch that left last."""

    def __init__(self, send: Callable[[], None], count: int) -> None:
        self._send, self._left, self._count = send, count, count
        self.stream = 0

    def submitted(self, batch: Batch, at: float) -> None:
        self.stream = batch.stream

    def arrived(self, *told: object) -> None:
        for _ in range(min(self._left, 1 + self._count // 20)):
            self._left -= 1
            self._send()


class Frames:
    def __init__(self, who: Who, llm: LLM, sockets: Sockets, security: LinkSecurity | None) -> None:
        self._who = who
        self._llm = llm
        self._security = security
        self._strangers: deque[Sockets] = deque()
        self._targets = targets_of(llm)
        self._outboxes = [sockets.connect(target.address, target.session) for target in self._targets]
        self._stream = 0

    def attempt(self, rng: random.Random) -> str:
        chosen = rng.sample(cases(), TOGETHER)
        sender = Sender(partial(self._send, rng), rng.choice((10, 100, 400)))
        try:
            with deadline(HUNG, self._who), self._llm.observing(sender):
                self._check(chosen)
                self._stream = sender.stream
                if self._who == "insiders" and rng.random() < WILD:
                    self._provoke(rng)
                    self._check(chosen)
                    return "unmoved by wild ones"
        except PipelineError as error:
            if self._who == "strangers":
                raise Fault(f"a stranger has ended the pipeline: {error}") from error
            raise Ended("ended") from error
        return "unmoved"

    def _check(self, chosen: Sequence[Case]) -> None:
        """Check that requests give the same tokens as alone. Raises Fault, and PipelineError if the
        pipeline has ended."""
        prompts = [prompt_of(self._llm, case.body) for case in chosen]
        outputs = self._llm.generate(prompts, [params_of(case.body) for case in chosen])
        for output, case in zip(outputs, chosen, strict=True):
            found = [list(one.token_ids) for one in output.outputs]
            if found != (right := [choice.token_ids for choice in case.choices]):
                raise Fault(f"wrong tokens {found}, alone {right}: {case.body}")

    def _provoke(self, rng: random.Random) -> None:
        """Send something that may end the pipeline, before requests that then have to be right, or fail."""
        for _ in range(rng.randint(1, 3)):
            number = rng.randrange(len(self._targets))
            self._outboxes[number].send(*wild(self._targets[number].session, self._stream, rng))

    def _send(self, rng: random.Random) -> None:
        number = rng.randrange(len(self._targets))
        target, outbox = self._targets[number], self._outboxes[number]
        if self._who == "insiders":
            outbox.send(encode(harmless(rng, target.address == self._targets[0].address), target.session))
        elif rng.random() < 0.3:
            raw(target, rng)
        else:  # a wrong frame closes its connection, so each has one of its own
            own = Sockets(self._security)
            stranger = own.connect(target.address, rng.choice((target.session, rng.randbytes(16).hex())))
            stranger.send(*strange(target.session, self._stream, rng))
            self._strangers.append(own)
            if len(self._strangers) > LATEST:
                self._strangers.popleft().close()


@contextmanager
def attacked(who: Who, transport: str, tls: bool = False) -> Iterator[Frames]:
    """Attack as a stranger or an insider. Over tcp with TLS strangers have certificates, too, but not the secret."""
    cases()
    speculation = {"method": "draft_model", "model": "demo"}
    with tempfile.TemporaryDirectory() as folder:
        security = only_host(Path(folder)) if tls else None
        host = ProcessExecutor(transport, security=security)
        with (
            LLM("demo", pipeline_parallel_size=2, host=host, speculative_config=speculation) as llm,
            Sockets(security) as sockets,
        ):
            yield Frames(who, llm, sockets, security)


# -------------------------------------------------------------------------------------------------------- strangers


def strange(session: str, stream: int, rng: random.Random) -> list[bytes]:
    """Frames without the secret, or with all of it except the end."""
    nobody = rng.randbytes(16).hex() if rng.random() < 0.5 else session[:-1] + "x"
    header = encode(any_message(stream, rng), nobody)
    kind = rng.randrange(6)
    if kind == 0:
        return [rng.randbytes(rng.choice((0, 1, 10, 1000, 100_000)))]
    if kind == 1:
        return [header, *[rng.randbytes(rng.randrange(50)) for _ in range(rng.randrange(5))]]
    if kind == 2:
        return [b""] * rng.choice((1, 2, 500))
    if kind == 3:
        return [header[: rng.randrange(len(header))]]
    if kind == 4:
        return [msgspec.msgpack.encode((PROTOCOL + 1, session, None))]
    return [b"", encode(any_message(stream, rng), session)]


def raw(target: Target, rng: random.Random) -> None:
    """Send bytes that need not be frames, over a connection that may be dropped at once."""
    place = place_of(target.address)
    announced = FRAME.pack(rng.choice((0, 1, 2**20, 2**30, 2**32 - 1)), rng.random() < 0.5)
    data = rng.choice(
        (rng.randbytes(rng.randrange(300)), announced, announced + rng.randbytes(60), b"GET / HTTP/1.1\r\n\r\n")
    )
    with socket.socket(place.family) as connection:
        connection.settimeout(1)
        try:
            connection.connect(place.where)
            connection.sendall(data)
        except OSError:  # the receiver may close the connection
            return


# --------------------------------------------------------------------------------------------------------- insiders


def harmless(rng: random.Random, to_engine: bool) -> Message:
    """A message that its receiver accepts, about requests and nodes that nobody else has."""
    own = rng.choice(OWN)
    if to_engine:
        return rng.choice((Heartbeat(stage=0), GrammarPrepared(request=own)))
    return rng.choice(
        (
            HeartbeatAck(),
            Cancel(before=rng.choice((0, 1, 10**6, 2**40)), nodes=rng.choices(OWN, k=rng.randrange(20))),
            Cancel(before=2**40, nodes=[own]),
        )
    )


def any_message(stream: int, rng: random.Random) -> Message:
    """A valid message of any kind; batches and results have numbers around ``stream``."""
    stream += rng.choice((0, 1, 1, 2, 5))
    own, small = rng.choice(OWN), rng.randrange(4)
    rows = Rows([own], [own], [rng.randrange(600)], [rng.choice((-1, *range(600)))], [rng.randrange(9)], [small])
    return rng.choice(
        (
            Batch(stream=stream, opened=[Opened(own, Sampling())], rows=rows, wanted=[0], alive=[0]),
            Batch(stream=stream, rows=Rows(), closed=[own, small]),
            Features(layers=[1], nodes=[own], slots=[small], dtype="float32", width=4),
            Result(stream=stream, picks=[SampledToken(own, small)]),
            Cancel(before=2**40, nodes=[own]),
            Cancel(before=stream, nodes=list(range(2000))),
            Ready(stage=small),
            ReserveDevice(seconds=0.01),
            DeviceReserved(stage=small, start=0.0, end=1.0),
            PrepareGrammar(request=own, grammar='{"grammars": [{"lark_grammar": "start: /a*/"}]}'),
            GrammarPrepared(request=own),
            ForgetGrammar(request=own),
            Loading(stage=small, read=small, total=own),
            Started(stage=small, address="ipc:///nowhere", kv_bytes=1, weight_bytes=1),
            ConnectNeighbours(upstream="ipc:///nowhere", downstream="ipc:///nowhere"),
            Heartbeat(stage=small),
            Failed(stage=small, cause="none"),
            Stop(),
        )
    )


def wild(session: str, stream: int, rng: random.Random) -> list[bytes]:
    """Any message of the session, perhaps changed, perhaps with a tensor."""
    message: Any = msgspec.to_builtins(any_message(stream, rng))
    if rng.random() < 0.2:
        message = {"type": "delivery", "message": message, "arrives": rng.choice((-1.0, 1.0, 1e300, float("nan")))}
    for _ in range(rng.randrange(3)):
        message = mutate(message, ("arrives", "message", "type"), lambda options, _: rng.choice(options))
    try:
        header = opening(session) + msgspec.msgpack.encode(message)
    except (OverflowError, UnicodeEncodeError):  # more than msgpack's 64 bits, or half a character
        header = opening(session) + b"\xc0"
    return [header, *[rng.randbytes(rng.choice((0, 4, 16, 1024))) for _ in range(rng.choice((0, 0, 1, 2)))]]
