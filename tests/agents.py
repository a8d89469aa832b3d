"""Agents on threads, with a fork server that only notes what it is told, and the fleets of their heads."""

from __future__ import annotations

import json
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from penstock.hosts.fetching import Offer, WeightCache
from penstock.hosts.fleet import Fleet
from penstock.hosts.weights import Held
from penstock.hosts.worker import HostAgent
from penstock.pipeline.base import StagePlan, StageSpec
from penstock.transport.addresses import LinkSecurity

SOON: Final = 60.0
_folder = tempfile.TemporaryDirectory(prefix="penstock-tests-")
CHECKPOINT: Final = Path(_folder.name)
"""A checkpoint of one layer without weights: as much of a checkpoint as an agent looks at."""
(CHECKPOINT / "config.json").write_text("{}")
OFFER: Final = Offer(CHECKPOINT, 1)
LAYER: Final = (0, 1)
HELD: Final = Held(*LAYER)
PLAN: Final = StagePlan(
    model=str(CHECKPOINT), first=0, last=1, capacity=1, dtype="float32", device="cpu", max_model_len=1, vocab_size=2
)


class NotingServer:
    """A fork server that starts nothing and notes what it is told."""

    def __init__(self) -> None:
        self.started: list[StageSpec] = []
        self.killed: list[str] = []
        self.pipes: dict[str, int] = {}

    def listen(self, process: str, pipe: int) -> None:
        self.pipes[process] = pipe

    def forget(self, process: str) -> None:
        del self.pipes[process]

    def start(self, spec: StageSpec) -> None:
        self.started.append(spec)

    def kill(self, process: str) -> None:
        self.killed.append(process)


@contextmanager
def agent(
    security: LinkSecurity | None, address: str = "tcp://127.0.0.2:*", cache: WeightCache | None = None
) -> Iterator[HostAgent]:
    with HostAgent(address, security, cache=cache) as made:
        thread = threading.Thread(target=made.serve)
        thread.start()
        try:
            yield made
        finally:
            made.stop()
            thread.join()


@contextmanager
def fleet(*members: HostAgent, security: LinkSecurity | None) -> Iterator[Fleet]:
    """Every host holds the checkpoint of ``PLAN``."""
    made = Fleet([name_of(one) for one in members], security)
    try:
        made.provide(OFFER, {name: [HELD] for name in made.hosts})
        yield made
    finally:
        made.close()


def name_of(one: HostAgent) -> str:
    return one.address.removeprefix("tcp://")


def soon(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SOON
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def spec(process: str) -> StageSpec:
    return StageSpec(process=process, session="s", index=0, stages=2, bind="", engine="tcp://127.0.0.1:1", plan=PLAN)


def reports(pipe: int) -> list[dict[str, Any]]:
    return [json.loads(line) for line in os.read(pipe, 65536).splitlines()]
