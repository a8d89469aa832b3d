"""Hosts lost in every way a network has, each a network namespace with a clock of its own: tokens are compared.

    python -m benchmarks.load.networks [SCENARIO ...]

Four requests run at once, at T = 0.8, over `penstock worker` on two of three hosts of a cluster with keys; the third
host is a spare. During the answers a host's link goes down, or one direction of the link between two stages is cut, or
all of its processes or only a stage's are stopped for 30 s. ``head`` and ``head-cut`` kill an engine on a host of its
own, the latter after its link went down. ``cycles`` kills a worker's agent twenty times, and lets it return each time.
``fuzz`` sends 100,000 invalid messages to an agent, and connects to every other port. ``slow`` sends at 20 Mbit/s for
ten minutes. ``small-packets`` has all hosts send packets of at most 576 bytes, ``flapping`` pulls a host's cable and
plugs it in again and again, and ``two-heads`` runs two engines on the same workers, of which one is killed. ``keys``
connects to every port with keys of every wrong kind, and with an honest connection's bytes once more; ``crowds`` holds
hundreds of connections to each port that say nothing, half of something, or nonsense; ``versions`` has a worker and an
engine of other versions; ``full`` has a cache that is full, becomes full, or cannot be written. It needs root.

The results are added to benchmarks/measured/load/networks.json. The exit code is 1 if anything was wrong.
"""

from __future__ import annotations

import logging
import random
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any, Final, NamedTuple

import psutil

from benchmarks.load.attacking.strangers import CROWD, crowd, kinds, opened, outcome, replayed, with_keys, wrong_keys
from benchmarks.load.attacking.strangers import PATIENCE_S as REFUSED_S
from benchmarks.load.killing.workers import HIDDEN
from benchmarks.shared.measured import kept_figures, store
from penstock import LLM, SamplingParams
from penstock.core import ConfigError
from penstock.engine.recovery import Recovery
from penstock.hosts import messages, remote
from penstock.hosts.fleet import Fleet
from penstock.hosts.keys import join, make_cluster, security_for
from penstock.transport.addresses import LinkSecurity, token_of
from penstock.transport.inbox import Inbox
from penstock.transport.outbox import Sockets
from tests.happening import AfterResults
from tests.namespaces import Namespace, network
from tests.workers import Worker, ended

NAME, HOW = "networks", "Measured, with the demo target, hosts as network namespaces"
DAY: Final = 86_400.0
PROMPTS: Final = ("def fibonacci(n):", "class Stack:\n", "import os\n", "for line in open(path):\n")
TOKENS: Final = 120
PARAMS: Final = [SamplingParams(temperature=0.8, seed=seed, max_tokens=TOKENS, ignore_eos=True) for seed in range(4)]
AT: Final = 25
"""Number of the result at which something happens."""
STOPPED_S: Final = 30.0
GONE_S: Final = 20.0
HEARD_S: Final = 60.0
CYCLES: Final = 20
ROUNDS: Final = 5
"""Times that an engine is asked for all answers."""
FRAMES: Final = 100_000
STRANGERS: Final = 500
"""Connections to each port by somebody who has keys but knows no session."""
SPARE_DESCRIPTORS: Final = 4
"""Descriptors that a process may have more of: a log, a pool's sockets."""
MOST_MIB: Final = 32
"""MiB by which a process may grow meanwhile."""
SMALL_PACKET: Final = 576
"""Bytes that every host of the internet has to take in one packet (RFC 791)."""
USUAL_PACKET: Final = 1500
FLAPS: Final = 12
DOWN_S: Final = (0.1, 3.0)
"""Fewest and most seconds for which the cable is pulled; a host is lost after about two."""
UP_S: Final = (0.5, 4.0)
NARROW: Final = "8mbit"
"""A rate at which a stage of the demo model arrives within some ten seconds."""
SLOW: Final = "20mbit"
SLOW_S: Final = 600.0
HEAD: Final = """
import sys
from penstock import LLM, SamplingParams
with LLM("demo", hosts=sys.argv[1], keys=sys.argv[2]) as llm:
    print("started", flush=True)
    while True:
        llm.generate("x", SamplingParams(max_tokens=64, ignore_eos=True))
"""


class Cluster(NamedTuple):
    """The hosts with workers, the one on which an engine may be killed, and the right tokens."""

    hosts: Sequence[Namespace]
    head: Namespace
    workers: list[Worker]
    keys: str
    expected: list[list[int]]

    @property
    def own(self) -> str:
        """The address of this process on the hosts' network."""
        return f"{self.head.address.rpartition('.')[0]}.1"

    def engine(self, count: int = 3) -> LLM:
        names = ",".join(one.host for one in self.workers[:count])
        return LLM("demo", hosts=names, keys=self.keys, pipeline_parallel_size=2)


class Noticed(logging.Handler):
    """Records when the engine first reported a loss, and the message."""

    def __init__(self) -> None:
        super().__init__()
        self.at = 0.0
        self.said = ""

    def emit(self, record: logging.LogRecord) -> None:
        if not self.at and "was lost" in (said := record.getMessage()):
            self.at, self.said = time.monotonic(), said


def tokens(llm: LLM) -> list[list[int]]:
    return [one.outputs[0].token_ids for one in llm.generate(PROMPTS, PARAMS)]


def audited(llm: LLM) -> Recovery:
    """The engine's recovery with its counts, once all slots have been accounted for. Raises PenstockError."""
    llm.loop.audit()
    recovery = llm.loop.recovery
    assert recovery is not None
    return recovery


def lost(cluster: Cluster, happens: Callable[[], object], ends: Callable[[], object]) -> dict[str, Any]:
    """Let an event happen during answers and end after them; then ask for other answers."""
    noticed, happening = Noticed(), AfterResults(AT, happens)
    logging.getLogger("penstock").addHandler(noticed)
    problems = []
    try:
        with closing(cluster.engine()) as llm:
            try:
                with llm.observing(happening):
                    if tokens(llm) != cluster.expected:
                        problems.append("other tokens")
                    paused = time.monotonic() - happening.at
            finally:
                ends()
            if tokens(llm) != cluster.expected:
                problems.append("other tokens afterwards")
            recovery = audited(llm)
            found = {"recoveries": recovery.recoveries, "recovery_s": round(recovery.recovery_seconds, 2)}
    finally:
        logging.getLogger("penstock").removeHandler(noticed)
    after = round(noticed.at - happening.at, 2) if noticed.at else None
    return {"noticed_s": after, "said": noticed.said, "answered_s": round(paused, 2), **found, "problems": problems}


def link_down(cluster: Cluster) -> dict[str, Any]:
    host = cluster.hosts[1]
    return lost(cluster, lambda: host.link("down"), lambda: host.link("up"))


def one_way(cluster: Cluster, source: int, to: int) -> dict[str, Any]:
    cut = cluster.hosts[source].without_way_to(cluster.hosts[to])
    return lost(cluster, cut.__enter__, lambda: cut.__exit__(None, None, None))


def stopped(cluster: Cluster, find: Callable[[], list[psutil.Process]]) -> dict[str, Any]:
    """Stop processes for a while, and let them go on during or after the answers."""
    found: list[psutil.Process] = []
    waker: list[subprocess.Popen[bytes]] = []

    def stop() -> None:
        found.extend(find())
        for one in found:
            one.send_signal(signal.SIGSTOP)
        numbers = " ".join(str(one.pid) for one in found)
        waker.append(subprocess.Popen(["sh", "-c", f"sleep {STOPPED_S}; kill -CONT {numbers}"]))

    return lost(cluster, stop, lambda: waker[0].wait())


def whole_host(worker: Worker) -> list[psutil.Process]:
    return [worker.process, *worker.process.children(recursive=True)]


def head_dies(cluster: Cluster, cut: bool) -> dict[str, Any]:
    names = ",".join(one.host for one in cluster.workers[:2])
    command = [*cluster.head.before, sys.executable, "-c", HEAD, names, cluster.keys]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as head:
        assert head.stdout is not None
        head.stdout.readline()
        stages = [stage for worker in cluster.workers[:2] for stage in worker.stages()]
        if cut:
            cluster.head.link("down")
        died = time.monotonic()
        head.kill()  # `unshare --kill-child` kills the engine with it
    gone = ended(stages, GONE_S)
    after = time.monotonic() - died
    if cut:
        cluster.head.link("up")
    problems = [] if gone and len(stages) == 2 else [f"{len(stages)} stages; gone: {gone}"]
    return {"gone_s": round(after, 2), "stages": len(stages), "problems": problems}


def emptied(cluster: Cluster) -> dict[str, Any]:
    """The same with workers that are sent their layers, at first and whenever they return."""
    with tempfile.TemporaryDirectory() as folder:
        caches = [Path(folder) / str(number) for number in range(len(cluster.workers))]
        for number, worker in enumerate(cluster.workers):
            worker.close()
            cluster.workers[number] = worker_on(cluster.hosts[number], cluster.keys, caches[number])
        try:
            return cycles(cluster, caches)
        finally:
            for number, worker in enumerate(cluster.workers):
                worker.close()
                cluster.workers[number] = worker_on(cluster.hosts[number], cluster.keys)


def cycles(cluster: Cluster, caches: Sequence[Path] = ()) -> dict[str, Any]:
    """Kill a host's agent during answers and let it return, again and again; none is left alone for ten
    minutes here."""
    remote.LOSSES_WITHIN_S = 1.0  # type: ignore[misc]
    workers, own, problems = list(cluster.workers), psutil.Process(), []
    held: list[tuple[int, int]] = []
    with closing(cluster.engine()) as llm:
        for cycle in range(CYCLES):
            used = [i for i, one in enumerate(workers) if one.stages()]
            victim = used[cycle % len(used)]
            with llm.observing(AfterResults(AT, workers[victim].kill)):
                if tokens(llm) != cluster.expected:
                    problems.append(f"cycle {cycle}: other tokens")
            llm.loop.audit()
            workers[victim].close()
            if caches:
                shutil.rmtree(caches[victim])
            workers[victim] = worker_on(cluster.hosts[victim], cluster.keys, caches[victim] if caches else None)
            there_again(llm, workers[victim].host)
            held.append((own.memory_info().rss >> 20, own.num_fds()))
        recoveries = audited(llm).recoveries
    cluster.workers[:] = workers
    return {"cycles": CYCLES, "recoveries": recoveries, "mib_and_descriptors": held, "problems": problems}


def there_again(llm: LLM, host: str) -> None:
    deadline = time.monotonic() + 60
    while host not in llm.host.fleet.living:  # type: ignore[attr-defined]
        if time.monotonic() > deadline:
            raise TimeoutError(f"{host} has not come back")
        time.sleep(0.1)


def slow_link(cluster: Cluster) -> dict[str, Any]:
    host, problems, answers = cluster.hosts[1], [], 0
    host.send_at(SLOW)
    try:
        with closing(cluster.engine(2)) as llm:
            begun = time.monotonic()
            while time.monotonic() - begun < SLOW_S:
                if tokens(llm) != cluster.expected:
                    problems.append("other tokens")
                answers += len(PROMPTS)
            recovery = audited(llm)
            return {"answers": answers, "recoveries": recovery.recoveries, "problems": problems}
    finally:
        host.unlimited()


def small_packets(cluster: Cluster) -> dict[str, Any]:
    problems, answers = [], 0
    for host in cluster.hosts:
        host.largest_packet(SMALL_PACKET)
    try:
        with closing(cluster.engine()) as llm:
            for _ in range(ROUNDS):
                if tokens(llm) != cluster.expected:
                    problems.append("other tokens")
                answers += len(PROMPTS)
            recovery = audited(llm)
            return {"answers": answers, "recoveries": recovery.recoveries, "problems": problems}
    finally:
        for host in cluster.hosts:
            host.largest_packet(USUAL_PACKET)


def flapping(cluster: Cluster) -> dict[str, Any]:
    """Pull a host's cable and plug it in again, for random times, while one answer follows the other."""
    rng, host, problems, answers = random.Random(9), cluster.hosts[1], [], 0

    def flap() -> None:
        try:
            for _ in range(FLAPS):
                host.link("down")
                time.sleep(rng.uniform(*DOWN_S))
                host.link("up")
                time.sleep(rng.uniform(*UP_S))
        finally:
            host.link("up")

    with closing(cluster.engine()) as llm:
        flaps = threading.Thread(target=flap)
        flaps.start()
        try:
            while flaps.is_alive():
                if tokens(llm) != cluster.expected:
                    problems.append("other tokens")
                answers += len(PROMPTS)
        finally:
            flaps.join()
        if tokens(llm) != cluster.expected:
            problems.append("other tokens afterwards")
        recovery = audited(llm)
        return {"flaps": FLAPS, "answers": answers, "recoveries": recovery.recoveries, "problems": problems}


def two_heads(cluster: Cluster) -> dict[str, Any]:
    """Run two engines on the same workers in turn; then kill a worker amid an answer of the first."""
    problems, answers = [], 0
    with closing(cluster.engine()) as one, closing(cluster.engine()) as other:
        for _ in range(ROUNDS):
            for name, llm in (("first", one), ("second", other)):
                if tokens(llm) != cluster.expected:
                    problems.append(f"other tokens of the {name} engine")
                answers += len(PROMPTS)
        with one.observing(AfterResults(AT, cluster.workers[1].kill)):
            if tokens(one) != cluster.expected:
                problems.append("other tokens of the first engine after a loss")
        if tokens(other) != cluster.expected:
            problems.append("other tokens of the second engine after a loss")
        recoveries = [audited(llm).recoveries for llm in (one, other)]
    cluster.workers[1].close()
    cluster.workers[1] = worker_on(cluster.hosts[1], cluster.keys)
    return {"answers": answers + 2 * len(PROMPTS), "recoveries": recoveries, "problems": problems}


def fuzz(cluster: Cluster) -> dict[str, Any]:
    """Send invalid messages to an agent, and strangers' frames to every other port, while an engine answers."""
    rng, worker, problems = random.Random(8), cluster.workers[0], []
    security = security_for(cluster.keys, insecure=False)
    with closing(cluster.engine(2)) as llm, Sockets(security) as sockets:
        host: Any = llm.host
        pipeline: Any = llm.loop.pipeline
        watched = [worker.process, *worker.stages(), psutil.Process()]
        before = [one.memory_info().rss for one in watched]
        door = sockets.connect(f"tcp://{worker.host}", messages.DOOR)
        for _ in range(FRAMES):
            door.send(*wrong_words(rng))
        for address in (pipeline.started[0].address, host.inbox.address, host.fleet._inbox.address):
            for _ in range(STRANGERS):
                stranger = sockets.connect(address, secrets.token_hex(16))
                stranger.send(*wrong_words(rng))
                sockets.disconnect(stranger)
        if tokens(llm) != cluster.expected:
            problems.append("other tokens")
        llm.loop.audit()
        door.close(HEARD_S)
        grown = [round((one.memory_info().rss - rss) / 2**20, 1) for one, rss in zip(watched, before, strict=True)]
        refused = sum("refused a message" in line for line in worker.said)
    with closing(cluster.engine(2)) as llm:
        if tokens(llm) != cluster.expected:
            problems.append("other tokens of the next engine")
    if max(grown[:2]) > MOST_MIB:
        problems.append(f"grown by {grown} MiB")
    return {"frames": FRAMES, "refused": refused, "strangers": 3 * STRANGERS, "grown_mib": grown, "problems": problems}


def wrong_words(rng: random.Random) -> list[bytes]:
    """A message to an agent with some bytes changed, cut off, or with an unknown lease; or mere noise."""
    said = rng.choice(
        [
            messages.Beat(sent=rng.random()),
            messages.Attach(head="tcp://127.0.0.1:1", host="x"),
            messages.KillStage(process="p"),
            messages.WantPiece(number=1, file="passwd", piece=0),
            messages.FindCheckpoint(number=1, path="/etc", digest="0" * 64, is_folder=True, layers=[(0, 1)], files=[]),
        ]
    )
    whole = bytearray(messages.encode(said, rng.randbytes(16).hex()))
    kind = rng.randrange(4)
    if kind == 0 and not isinstance(said, messages.Attach):
        return [bytes(whole)]
    if kind == 1:
        return [rng.randbytes(rng.randrange(200))]
    for _ in range(rng.randrange(1, 5)):
        whole[rng.randrange(len(whole))] = rng.randrange(256)
    cut = bytes(whole[: rng.randrange(len(whole))]) if kind == 2 or isinstance(said, messages.Attach) else bytes(whole)
    return [cut, rng.randbytes(rng.randrange(2000))] if rng.random() < 0.2 else [cut]


@contextmanager
def enrolling(cluster: Cluster) -> Iterator[tuple[psutil.Process, str]]:
    """``penstock keys add`` for a host called "new", as a process, and the token that it prints."""
    command = [sys.executable, "-m", "penstock.cli", "keys", "add", "new", "--listen", cluster.own, "--minutes", "60"]
    with subprocess.Popen([*command, "--keys", cluster.keys], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            token = next(line.split()[-1] for line in process.stdout if "--token" in line)
            yield psutil.Process(process.pid), token
        finally:
            process.kill()


def ports(cluster: Cluster, llm: LLM) -> dict[str, tuple[str, str]]:
    """The address of every port of the cluster, and the session that it admits where strangers may know it."""
    host: Any = llm.host
    pipeline: Any = llm.loop.pipeline
    unknown = secrets.token_hex(16)
    return {
        "agent": (f"tcp://{cluster.workers[0].host}", messages.DOOR),
        "stage": (pipeline.started[0].address, unknown),
        "engine": (host.inbox.address, unknown),
        "head": (host.fleet._inbox.address, unknown),
    }


def keys_of_every_kind(cluster: Cluster) -> dict[str, Any]:
    """Connect to every port with each kind of wrong keys, and have a head meet a worker that shows them."""
    problems = []
    member = security_for(cluster.keys, insecure=False)
    assert member is not None
    with tempfile.TemporaryDirectory() as folder, closing(cluster.engine(2)) as llm:
        wrong = wrong_keys(Path(cluster.keys), Path(folder))
        with ThreadPoolExecutor(1) as stranger:
            trying = stranger.submit(refusals, wrong, ports(cluster, llm), member)
            while not trying.done():  # the engine's own port is served while it computes
                if tokens(llm) != cluster.expected:
                    problems.append("other tokens")
        refused, faults = trying.result()
        problems += faults
        llm.loop.audit()
        for kind, security in wrong.items():
            if kind == "for listening":
                continue
            with Sockets(security) as sockets, closing(sockets.inbox(f"tcp://{cluster.own}:*")) as inbox:
                name = inbox.address.removeprefix("tcp://")
                listener = threading.Thread(target=accept, args=(inbox,), daemon=True)
                listener.start()
                try:
                    Fleet([name], member).close()
                    problems.append(f"a head took a worker with {kind}")
                except ConfigError as error:
                    refused += 1
                    if name not in str(error) or "certificate" not in str(error):
                        problems.append(f"a worker with {kind}: {error}")
    return {"kinds": len(wrong) + 1, "refused": refused, "problems": problems}


def refusals(
    wrong: dict[str, LinkSecurity], places: dict[str, tuple[str, str]], member: LinkSecurity
) -> tuple[int, list[str]]:
    """How many connections with wrong keys, or with bytes that came before, were refused, and which were not."""
    became = {}
    for port, (address, session) in places.items():
        for kind, security in wrong.items():
            if kind == "for connecting":  # as a client it is right
                continue
            send = with_keys(security.for_connecting(), token_of(session))
            became[f"{kind} at {port}"] = outcome(opened(address, send), REFUSED_S)
        became[f"a connection once more at {port}"] = replayed(address, member, session)
    faults = [f"{name}: {what}" for name, what in became.items() if what != "refused"]
    return len(became) - len(faults), faults


def accept(inbox: Inbox) -> None:
    """Take connections for a while, as a worker that nobody knows."""
    until = time.monotonic() + REFUSED_S
    while time.monotonic() < until and inbox._listener.fileno() >= 0:
        with suppress(OSError, ValueError):
            inbox.wait(time.monotonic() + 0.05)
            inbox.take()


def crowds(cluster: Cluster) -> dict[str, Any]:
    """Hold hundreds of connections of each kind to each port, while an engine answers and another one starts."""
    problems: list[str] = []
    found: dict[str, dict[str, dict[str, int]]] = {}
    member = security_for(cluster.keys, insecure=False)
    assert member is not None
    with enrolling(cluster) as (adding, token), closing(cluster.engine(2)) as llm:
        worker = cluster.workers[0]
        watched = {"agent": worker.process, "stage": worker.stages()[0], "engine": psutil.Process(), "keys add": adding}
        before = {name: (one.memory_info().rss, one.num_fds()) for name, one in watched.items()}
        places = {**ports(cluster, llm), "keys add": (f"tcp://{token.rpartition('/')[0]}", "")}
        for port, (address, session) in places.items():
            for kind in kinds(member, session):
                with crowd(cluster.head.enter, address, cluster.keys, kind, session) as strangers:
                    made = False
                    while not made:  # the engine's own port is served while it computes
                        made = strangers.made.is_set()
                        if tokens(llm) != cluster.expected:
                            problems.append(f"{kind} at {port}: other tokens")
                    if port == "agent":
                        with closing(cluster.engine(2)) as other:
                            if tokens(other) != cluster.expected:
                                problems.append(f"{kind} at {port}: other tokens of an engine that started meanwhile")
                    became = found.setdefault(port, {})[kind] = strangers.end()
                    if became["answered"]:
                        problems.append(f"{kind} at {port}: {became}")
        llm.loop.audit()
        grown = {}
        for name, one in watched.items():
            rss, fds = before[name]
            deadline = time.monotonic() + HEARD_S
            while one.num_fds() > fds + SPARE_DESCRIPTORS and time.monotonic() < deadline:
                time.sleep(0.1)
            grown[name] = (round((one.memory_info().rss - rss) / 2**20, 1), one.num_fds() - fds)
            if grown[name][0] > MOST_MIB or grown[name][1] > SPARE_DESCRIPTORS:
                problems.append(f"{name} grew by (MiB, descriptors) {grown[name]}")
        with tempfile.TemporaryDirectory() as folder:
            join(Path(folder) / "new", token, "new")  # raises ConfigError if the token works no more
    return {"connections": CROWD, "became": found, "grown": grown, "problems": problems}


OTHER: Final = {
    "Penstock": "import penstock.core as core; core.__version__ = '0.0.9'",
    "protocol": "import penstock.messages as messages; messages.PROTOCOL += 1",
}
"""Python that makes a program one of another version, by what differs."""
RUN: Final = "import sys; from penstock.cli.app import main; sys.exit(main())"


def versions(cluster: Cluster) -> dict[str, Any]:
    """Have an engine meet a worker of another version, and a worker an engine of another version."""
    problems, said = [], []
    names = ",".join(one.host for one in cluster.workers[:2])
    for what, change in OTHER.items():
        address, host = f"{cluster.hosts[2].address}:7701", cluster.hosts[2]
        other = Worker(address, "--keys", cluster.keys, before=host.before, program=["-c", f"{change}; {RUN}"])
        try:
            LLM("demo", hosts=f"{cluster.workers[0].host},{other.host}", keys=cluster.keys).close()
            problems.append(f"a worker with another {what} was taken")
        except ConfigError as error:
            said.append(str(error))
            if other.host not in str(error):
                problems.append(f"a worker with another {what}: {error}")
        finally:
            other.close()
        head = [sys.executable, "-c", f"{change}\n{HEAD}", names, cluster.keys]
        done = subprocess.run(head, capture_output=True, text=True, timeout=HEARD_S, check=False)
        said.append(done.stderr.strip().splitlines()[-1])
        if not done.returncode or "ConfigError" not in said[-1]:
            problems.append(f"an engine with another {what}: {said[-1]}")
    with closing(cluster.engine()) as llm:
        if tokens(llm) != cluster.expected:
            problems.append("other tokens afterwards")
        llm.loop.audit()
    return {"said": said, "problems": problems}


@contextmanager
def small_disk(size: str) -> Iterator[Path]:
    """A folder that holds no more than ``size`` ("1m")."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "none", folder], check=True)
        try:
            yield Path(folder)
        finally:
            subprocess.run(["umount", "--lazy", folder], check=True)


def full_caches(cluster: Cluster) -> dict[str, Any]:
    """Let a worker that has to be sent its layers find no room for them, lose it meanwhile, or have no right to it.

    An engine that names the worker is refused, and one that loses it goes on without it.
    """
    problems, said = [], []
    host = cluster.hosts[1]
    for case, size in {"full": "64k", "filled meanwhile": ROOM, "not to be written": ROOM}.items():
        cluster.workers[1].close()
        with small_disk(size) as cache, ThreadPoolExecutor(1) as filling:
            if case == "not to be written":
                subprocess.run(["mount", "-o", "remount,ro", str(cache)], check=True)
            cluster.workers[1] = worker_on(host, cluster.keys, cache)
            filled = filling.submit(fill, cache) if case == "filled meanwhile" else None
            host.receive_at(NARROW)  # else the layers are there before the disk is full
            try:
                cluster.engine(2).close()
                problems.append(f"{case}: an engine started")
            except ConfigError as error:
                said.append(str(error).replace(str(cache), "CACHE"))
                if cluster.workers[1].host not in str(error):
                    problems.append(f"{case}: {error}")
            host.receives_unlimited()
            if filled is not None:
                filled.result()
            cluster.workers[1].close()
            cluster.workers[1] = worker_on(host, cluster.keys)
            with closing(cluster.engine()) as llm:
                cluster.workers[1].kill()  # it returns without its checkpoint, and with that cache
                if tokens(llm) != cluster.expected:
                    problems.append(f"{case}: other tokens after a loss")
                cluster.workers[1].close()
                cluster.workers[1] = worker_on(host, cluster.keys, cache)
                for _ in range(ROUNDS):
                    if tokens(llm) != cluster.expected:
                        problems.append(f"{case}: other tokens after its return")
                llm.loop.audit()
            if case != "not to be written":  # there is room again
                subprocess.run(["mount", "-o", f"remount,size={2 * int(ROOM[:-1])}m", str(cache)], check=True)
                (cache / FILLER).unlink(missing_ok=True)
                with closing(cluster.engine(2)) as llm:
                    if tokens(llm) != cluster.expected:
                        problems.append(f"{case}: other tokens once there is room")
            cluster.workers[1].close()
    cluster.workers[1] = worker_on(host, cluster.keys)
    return {"said": said, "problems": problems}


ROOM: Final = "1200m"
"""A disk on which the demo model fits beside what workers leave free."""
FILLER: Final = "filler"


def fill(cache: Path) -> None:
    """Write into the folder until nothing fits, as soon as anything of a checkpoint is there."""
    deadline = time.monotonic() + HEARD_S
    while not any(one.stat().st_blocks for one in cache.rglob("*.safetensors*")) and time.monotonic() < deadline:
        time.sleep(0.001)
    with suppress(OSError), open(cache / FILLER, "wb", buffering=0) as file:
        while True:
            file.write(bytes(1 << 16))


def stage_of(worker: Worker) -> list[psutil.Process]:
    return worker.stages()[:1]


SCENARIOS: Final[dict[str, Callable[[Cluster], dict[str, Any]]]] = {
    "link-down": link_down,
    "one-way": lambda cluster: one_way(cluster, 0, 1),
    "other-way": lambda cluster: one_way(cluster, 1, 0),
    "stopped-host": lambda cluster: stopped(cluster, lambda: whole_host(cluster.workers[1])),
    "stopped-stage": lambda cluster: stopped(cluster, lambda: stage_of(cluster.workers[1])),
    "head": lambda cluster: head_dies(cluster, cut=False),
    "head-cut": lambda cluster: head_dies(cluster, cut=True),
    "cycles": cycles,
    "emptied": emptied,
    "fuzz": fuzz,
    "small-packets": small_packets,
    "flapping": flapping,
    "two-heads": two_heads,
    "keys": keys_of_every_kind,
    "crowds": crowds,
    "versions": versions,
    "full": full_caches,
    "slow": slow_link,
}


def worker_on(host: Namespace, keys: str, cache: Path | None = None) -> Worker:
    """A worker that finds the checkpoint where the head has it or, with a ``cache``, is sent its layers into that."""
    if cache is None:
        return Worker(f"{host.address}:7700", "--keys", keys, before=host.before)
    return Worker(f"{host.address}:7700", "--keys", keys, "--cache", str(cache), before=[*host.before, *HIDDEN])


@contextmanager
def cluster() -> Iterator[Cluster]:
    with LLM("demo") as llm:
        expected = tokens(llm)
    with tempfile.TemporaryDirectory() as folder, network(10 * DAY, 20 * DAY, 30 * DAY, 40 * DAY) as hosts:
        keys = Path(folder) / "keys"
        make_cluster(keys, "head")
        workers: list[Worker] = []
        try:
            for host in hosts[:3]:
                workers.append(worker_on(host, str(keys)))
            yield Cluster(hosts[:3], hosts[3], workers, str(keys), expected)
        finally:
            for worker in workers:
                worker.close()


def main(*names: str) -> int:
    found = {}
    with cluster() as made:
        for name in names or SCENARIOS:
            found[name] = SCENARIOS[name](made)
            print(name, found[name], flush=True)
            store(NAME, HOW, (["python -m benchmarks.load.networks"], kept_figures(NAME) | found))
    return 1 if any(one["problems"] for one in found.values()) else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
