"""Members of a cluster that send invalid messages to every kind of process, while others are served.

    python -m benchmarks.load.members [MESSAGES] [SEED] [PROCESS ...]

An engine runs on two of three workers, addresses of this host that stand for hosts, with a draft model here. MESSAGES
(100,000) are sent in bursts to each PROCESS (agent, head, stage, drafter): each is a message of the protocol with a
field at the edge of its bounds or beyond, or of another type, out of order, or repeated. An agent gets them under
leases of other heads, the head under those of a worker, and stages and drafter in the name of their sessions, so that a
burst costs at most a pipeline. The engine answers between bursts, greedily and at T = 0.8, and tokens are compared.

The results are added to benchmarks/measured/load/members.json. The exit code is 1 if anything was wrong.
"""

from __future__ import annotations

import itertools
import logging
import random
import secrets
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
import psutil

from benchmarks.shared.measured import kept_figures, store
from penstock import LLM, SamplingParams, messages
from penstock.hosts import messages as control
from penstock.hosts import remote
from penstock.hosts.keys import make_cluster, security_for
from penstock.transport.outbox import Sockets
from tests.hostile import example, kinds_of, odd_structs
from tests.workers import Worker

NAME, HOW = "members", "Measured, with the demo pair, workers on addresses of one host"
MESSAGES: Final = 100_000
BURSTS: Final = {"agent": 1000, "head": 200, "stage": 50, "drafter": 10}
"""Bursts in which the messages to a process are sent: each costs a lease, a host, or a pipeline."""
DRAFTER_LOSSES: Final = 2
"""Bursts to a drafter that an engine survives with it: it is not started again after a third one within a minute."""
PROMPTS: Final = ("def fibonacci(n):", "class Stack:\n", "import os\n", "for line in open(path):\n")
PARAMS: Final = [
    SamplingParams(temperature=temperature, seed=seed, max_tokens=24, ignore_eos=True)
    for seed, temperature in enumerate((0.0, 0.8, 0.0, 0.8))
]
ANSWER_EVERY: Final = 20
"""Bursts to agent and head between two answers; stages and drafter are asked after each."""
HEARD_S: Final = 30.0
SENT_S: Final = 1.0
"""Seconds that the rest of a burst is given: whoever has lost the session reads no more of it."""
MOST_MIB: Final = 64
"""MiB by which a process may grow."""


class Cluster(NamedTuple):
    workers: list[Worker]
    keys: str
    expected: list[list[int]]

    def engine(self, **options: Any) -> Any:
        names = ",".join(one.host for one in self.workers[:2])
        speculation = {"method": "draft_model", "strategy": "continuous"}
        return LLM("demo", hosts=names, keys=self.keys, speculative_config=speculation, **options)


class Noise:
    """An endless sequence of a protocol's messages, as the bytes after the envelope."""

    def __init__(self, union: Any, rng: random.Random) -> None:
        made = [value for kind in kinds_of(union) for value in (example(kind), *odd_structs(kind))]
        self._packed = [msgspec.msgpack.encode(value) for value in made]
        self._rng = rng
        self.different = len({*self._packed})

    def burst(self, count: int) -> Iterator[bytes]:
        for _ in range(count):
            one = self._rng.choice(self._packed)
            yield one if self._rng.random() < 0.9 else one[: self._rng.randrange(len(one))] + self._rng.randbytes(4)


def tokens(llm: Any) -> list[list[int]]:
    return [one.outputs[0].token_ids for one in llm.generate(PROMPTS, PARAMS)]


class Watched:
    """How much long-lived processes have grown, and whether they are still the same at the end."""

    def __init__(self, *processes: psutil.Process) -> None:
        self._before = {one: one.memory_info().rss for one in processes}

    def problems(self) -> list[str]:
        if ended := [one.pid for one in self._before if not one.is_running()]:
            return [f"processes {ended} have ended"]
        grown = self.grown_mib
        return [f"grown by {grown} MiB"] if max(grown) > MOST_MIB else []

    @property
    def grown_mib(self) -> list[int]:
        return [(one.memory_info().rss - rss) >> 20 for one, rss in self._before.items() if one.is_running()]


def attacked(
    cluster: Cluster, bursts: int, answer_every: int, burst: Callable[[Any, int], None], **options: Any
) -> dict[str, Any]:
    """One engine that answers while bursts are sent."""
    problems: list[str] = []
    with cluster.engine(**options) as llm:
        if tokens(llm) != cluster.expected:
            problems.append("other tokens before anything was sent")
        watched = Watched(*(worker.process for worker in cluster.workers), psutil.Process())
        for number in range(bursts):
            burst(llm, number)
            if number % answer_every == answer_every - 1 and tokens(llm) != cluster.expected:
                problems.append(f"other tokens after burst {number}")
        if tokens(llm) != cluster.expected:
            problems.append("other tokens in the end")
        llm.loop.audit()
        recovery = llm.loop.recovery
        found = {"recoveries": recovery.recoveries, "drafter_losses": recovery.drafter_losses}
        return {**found, "grown_mib": watched.grown_mib, "problems": problems + watched.problems()}


def to_agent(cluster: Cluster, count: int, rng: random.Random) -> dict[str, Any]:
    """Send bursts under leases of other heads to a worker that holds a stage of the engine's."""
    noise, told = Noise(control.Message, rng), Counter[str]()
    where = cluster.workers[0].host
    with Sockets(security_for(cluster.keys, insecure=False)) as sockets, sockets.inbox("tcp://127.0.0.9:*") as inbox:

        def burst(llm: Any, number: int) -> None:
            lease = secrets.token_hex(16)
            inbox.admit(lease)
            door = sockets.connect(f"tcp://{where}", control.DOOR)
            attach = control.Attach(head=inbox.address, host=where.rpartition(":")[0])
            door.send(control.encode(attach, lease))
            opening = msgspec.msgpack.encode((lease, None))[:-1]
            for one in noise.burst(count):
                door.send(opening + one, *([b"noise"] if rng.random() < 0.1 else []))
            told["ended with a reason"] += heard(inbox, lease, control.LeaseEnded)
            inbox.dismiss(lease)
            sockets.disconnect(door)

        found = attacked(cluster, BURSTS["agent"], ANSWER_EVERY, burst)
    return {"different": noise.different, **told, **found}


def heard(inbox: Any, lease: str, kind: type) -> bool:
    """Whether a message of a kind comes in time."""
    deadline = time.monotonic() + HEARD_S
    while time.monotonic() < deadline:
        inbox.wait(min(deadline, time.monotonic() + 1))
        for frames in inbox.take():
            found, raw = control.lease_of(frames)
            if found == lease and isinstance(control.decode(raw, frames[1:]), kind):
                return True
    return False


def to_head(cluster: Cluster, count: int, rng: random.Random) -> dict[str, Any]:
    """Send bursts as a worker that the head has attached to, and attaches to again whenever it is lost."""
    noise, told = Noise(control.Message, rng), Counter[str]()
    remote.TRY_AGAIN_S, remote.LOSSES_WITHIN_S = 0.0, 0.0  # type: ignore[misc]
    with Sockets(security_for(cluster.keys, insecure=False)) as sockets, sockets.inbox("tcp://127.0.0.9:*") as inbox:
        inbox.admit(control.DOOR)

        def burst(llm: Any, number: int) -> None:
            fleet = llm.host.fleet
            own = inbox.address.removeprefix("tcp://")
            if own not in fleet.hosts:
                fleet._welcome(control.Join(host=own))
            attach, lease = asked(inbox)
            back = sockets.connect(attach.head, lease)
            opening = msgspec.msgpack.encode((lease, None))[:-1]
            facts = next(iter(fleet.living.values()))
            back.send(control.encode(control.Attached(facts=msgspec.structs.replace(facts, incarnation=lease)), lease))
            for one in noise.burst(count):
                back.send(opening + one, *([b"noise"] if rng.random() < 0.1 else []))
            deadline = time.monotonic() + HEARD_S
            host = fleet.hosts[own]
            while host.lease == lease and host.attached and time.monotonic() < deadline:
                time.sleep(0.001)
            told["lost with a reason"] += "makes no sense" in host.cause or "is the same host" in host.cause
            sockets.disconnect(back)

        found = attacked(cluster, BURSTS["head"], ANSWER_EVERY, burst)
    return {"different": noise.different, **told, **found}


def asked(inbox: Any) -> tuple[control.Attach, str]:
    """The first message of the next head that comes, and its lease."""
    deadline = time.monotonic() + HEARD_S
    while time.monotonic() < deadline:
        inbox.wait(deadline)
        for frames in inbox.take():
            lease, raw = control.lease_of(frames)
            message = control.decode(raw, frames[1:])
            if isinstance(message, control.Attach):
                return message, lease
    raise TimeoutError("no head has come")


def send_burst(keys: str, address: str, session: str, count: int, seed: int) -> None:
    """Send noise in a session's name. A process of its own calls it, whose memory holds what nobody has read yet."""
    with Sockets(security_for(keys, insecure=False)) as sockets:
        outbox = sockets.connect(address, session)
        for one in Noise(messages.Message, random.Random(seed)).burst(count):
            outbox.send(messages.opening(session) + one)
        outbox.close(SENT_S)


def in_a_session(cluster: Cluster, count: int, rng: random.Random, drafter: bool) -> dict[str, Any]:
    """To the stages of the engine, or to its drafter, and from them to the engine, in the name of their session."""
    with ProcessPoolExecutor(1, get_context("spawn")) as sender:

        def burst(llm: Any, number: int) -> None:
            parts = llm.loop.recovery.parts
            pipeline = parts._weights if drafter else parts._pipeline
            if pipeline is None:
                return
            addresses = [*(one.address for one in pipeline.started.values()), llm.host.inbox.address]
            address, seed = addresses[number % len(addresses)], rng.randrange(1 << 32)
            sender.submit(send_burst, cluster.keys, address, pipeline._session, count, seed).result()

        bursts = BURSTS["drafter" if drafter else "stage"]
        different = Noise(messages.Message, rng).different
        if not drafter:
            return {"different": different, **attacked(cluster, bursts, 1, burst)}
        each = [attacked(cluster, DRAFTER_LOSSES, 1, burst) for _ in range(bursts // DRAFTER_LOSSES)]
    losses = sum(one["drafter_losses"] for one in each)
    problems = list(itertools.chain.from_iterable(one["problems"] for one in each))
    grown_mib = [max(grown) for grown in zip(*(one["grown_mib"] for one in each), strict=True)]
    return {"different": different, "drafter_losses": losses, "grown_mib": grown_mib, "problems": problems}


PROCESSES: Final[dict[str, Callable[[Cluster, int, random.Random], dict[str, Any]]]] = {
    "agent": to_agent,
    "head": to_head,
    "stage": lambda cluster, count, rng: in_a_session(cluster, count, rng, drafter=False),
    "drafter": lambda cluster, count, rng: in_a_session(cluster, count, rng, drafter=True),
}


@contextmanager
def cluster() -> Iterator[Cluster]:
    with LLM("demo") as llm:
        expected = tokens(llm)
    with tempfile.TemporaryDirectory() as folder:
        keys = Path(folder) / "keys"
        make_cluster(keys, "head")
        workers = [Worker(f"127.0.0.{2 + i}:0", "--keys", str(keys)) for i in range(3)]
        try:
            yield Cluster(workers, str(keys), expected)
        finally:
            for one in workers:
                one.close()


def main(count: int = MESSAGES, seed: int = 0, *, names: Sequence[str] = ()) -> int:
    logging.disable()
    found = {}
    with cluster() as made:
        for name in names or PROCESSES:
            begun = time.monotonic()
            one = PROCESSES[name](made, count // BURSTS[name], random.Random(seed))
            found[name] = {"messages": count, "bursts": BURSTS[name], "seconds": round(time.monotonic() - begun), **one}
            print(name, found[name], flush=True)
    store(NAME, HOW, (["python -m benchmarks.load.members"], kept_figures(NAME) | found))
    return 1 if any(one["problems"] for one in found.values()) else 0


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:3]), names=sys.argv[3:]))
