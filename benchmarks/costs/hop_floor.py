"""The time that messages alone add to a step here: stages that do nothing but wait, and hand a frame on.

    python -m benchmarks.costs.hop_floor

For each of SPD's presets a ring of processes, one per stage and the engine's, carries as many frames as there are
stages. Each process takes a frame from its inbox, waits for the stage's time, and sends it to the next one. Inboxes,
waiting and sockets are those of Penstock's stages; there is no model, header, tree or drafter. The excess of a step
over the stage's time is the least that any pipeline of processes with these sockets adds on this machine.
"""

from __future__ import annotations

import os
import signal
import tempfile
import time
from itertools import product
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from statistics import median
from typing import Any

from benchmarks.shared.benchmark import show
from penstock.cluster import load_cluster, stage_timings
from penstock.emulation.stage import ENGINE, STAGE, keep_time, keeping_time
from penstock.transport.addresses import sleep_until
from penstock.transport.inbox import Inbox
from penstock.transport.outbox import Outbox, Sockets

HOW = "Measured, without a model"
PRESETS = ("spd-4", "spd-8", "spd-16")
TRANSPORTS = ("ipc", "tcp")
"""Unix-domain sockets, and tcp over loopback."""
FRAME = bytes(1024)
SESSION = "hop floor"
SECONDS = 6.0
"""Seconds for which each ring turns."""


def measured() -> list[dict[str, Any]]:
    """The stages' time, the median that messages add per step (ms) and its share, by preset and transport."""
    found = []
    for name, transport in product(PRESETS, TRANSPORTS):
        timings = stage_timings(load_cluster(name))
        seconds = max(timing.seconds(1) for timing in timings)
        more = added(len(timings), seconds, transport)
        share = seconds / (seconds + more)
        row = {"cluster": name, "transport": transport, "share": share, "step_ms": 1e3 * seconds}
        found.append({**row, "added_ms": 1e3 * more})
    return found


def added(stages: int, seconds: float, transport: str) -> float:
    """Seconds that a full ring adds to a step of ``seconds``."""
    with tempfile.TemporaryDirectory() as folder, Sockets() as sockets:
        places = [f"ipc://{folder}/{i}" if transport == "ipc" else "tcp://127.0.0.1:*" for i in range(stages + 1)]
        children = [fork(place, seconds) for place in places[1:]]
        try:
            with sockets.inbox(places[0]) as inbox, keeping_time(ENGINE):
                inbox.admit(SESSION)
                addresses = [*(pipe.recv_bytes().decode() for _, pipe in children), inbox.address]
                for (_, pipe), following in zip(children, addresses[1:], strict=True):
                    pipe.send_bytes(following.encode())
                return turn(inbox, sockets.connect(addresses[0], SESSION), stages) / stages - seconds
        finally:
            for pid, _ in children:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)


def fork(place: str, seconds: float) -> tuple[int, Connection]:
    """Start one stage. Returns its process, and a pipe on which it sends its address and receives the next stage's."""
    ours, its = Pipe()
    if pid := os.fork():
        its.close()
        return pid, ours
    try:
        keep_time(STAGE)
        with Sockets() as sockets, sockets.inbox(place) as inbox:
            inbox.admit(SESSION)
            its.send_bytes(inbox.address.encode())
            following = sockets.connect(its.recv_bytes().decode(), SESSION)
            while True:
                inbox.wait(None)
                for frames in inbox.take():
                    sleep_until(time.monotonic() + seconds)
                    following.send(*frames)
    finally:
        os._exit(1)


def turn(inbox: Inbox, entrance: Outbox, frames: int) -> float:
    """Median seconds of a frame's trip around the ring."""
    sent = {}
    trips = []
    for i in range(frames):
        sent[i] = time.monotonic()
        entrance.send(bytes([i]), FRAME)
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        inbox.wait(end)
        for number, payload in inbox.take():
            now = time.monotonic()
            trips.append(now - sent[number[0]])
            sent[number[0]] = now
            entrance.send(number, payload)
    return median(trips[len(trips) // 4 :])


if __name__ == "__main__":
    show(measured())
