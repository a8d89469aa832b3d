"""What messages alone add to a step here: stages that do nothing but wait, and hand a frame on.

    python benchmarks/hop_floor.py

As many processes as a preset of SPD's has stages, in a ring with the engine's, and as many frames on their way: each
process takes a frame from its inbox, waits for the stage's time, and sends it to the next one. Inboxes, waiting and
sockets are those of Penstock's stages; there is no model, no header, no tree and no drafter. What a step takes beyond
the stage's time is the least that any pipeline of processes with these sockets adds on this machine.
"""

from __future__ import annotations

import os
import signal
import tempfile
import time
from statistics import median
from typing import Any

import zmq

from penstock.cluster import load_cluster, stage_timings
from penstock.pipeline.inbox import Inbox, connect, sleep_until, wake_on_time

PRESETS = ("spd-4", "spd-8", "spd-16")
FRAME = bytes(1024)
SECONDS = 6.0
"""For which each ring turns."""


def measured() -> list[dict[str, Any]]:
    """By preset: the stages' time, what messages add to it by the median trip (ms), and its share of both."""
    found = []
    for name in PRESETS:
        timings = stage_timings(load_cluster(name))
        seconds = max(timing.seconds(1) for timing in timings)
        more = added(len(timings), seconds)
        share = seconds / (seconds + more)
        found.append({"cluster": name, "share": share, "step_ms": 1e3 * seconds, "added_ms": 1e3 * more})
    return found


def added(stages: int, seconds: float) -> float:
    """Seconds that a full ring adds to a step of so many."""
    with tempfile.TemporaryDirectory() as folder:
        addresses = [f"ipc://{folder}/{i}" for i in range(stages + 1)]
        children = [fork(addresses[i], addresses[i + 1], seconds) for i in range(stages)]
        try:
            return turn(addresses[stages], addresses[0], stages) / stages - seconds
        finally:
            for pid in children:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)


def fork(own: str, following: str, seconds: float) -> int:
    """Start one stage. Returns its process."""
    if pid := os.fork():
        return pid
    try:
        wake_on_time()
        context: zmq.Context[Any] = zmq.Context()
        inbox, following_socket = Inbox(context, own), connect(context, following)
        while True:
            inbox.wait(None)
            for frames in inbox.take():
                sleep_until(time.monotonic() + seconds)
                following_socket.send_multipart(frames)
    finally:
        os._exit(1)


def turn(own: str, first: str, frames: int) -> float:
    """Median seconds of a frame's way around."""
    context: zmq.Context[Any] = zmq.Context()
    with Inbox(context, own) as inbox:
        entrance = connect(context, first)
        sent = {}
        trips = []
        for i in range(frames):
            sent[i] = time.monotonic()
            entrance.send_multipart([bytes([i]), FRAME])
        end = time.monotonic() + SECONDS
        while time.monotonic() < end:
            inbox.wait(end)
            for number, payload in inbox.take():
                now = time.monotonic()
                trips.append(now - sent[number[0]])
                sent[number[0]] = now
                entrance.send_multipart([number, payload])
        entrance.close(linger=0)
    context.destroy(linger=0)
    return median(trips[len(trips) // 4 :])


def report(row: dict[str, Any]) -> str:
    step = f"a step of {row['step_ms']:.2f} ms takes {row['added_ms']:.2f} ms more"
    return f"{row['cluster']:7}: {step}: {row['share']:.3f}"


if __name__ == "__main__":
    for row in measured():
        print(report(row))
