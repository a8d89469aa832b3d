"""Helpers about replicas for tests and benchmarks: killing or signalling their stages, and waiting for states."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable

from penstock import Replicas
from penstock.engine.replicas.stream import Replica
from penstock.engine.stats import ReplicaState
from penstock.pipeline.forkserver import shared_fork_server


def lose(replica: Replica, stages: int) -> None:
    """Kill the first or all stages of a replica."""
    assert replica.engine is not None
    for process in replica.engine.llm.loop.pipeline._processes[:stages]:  # type: ignore[attr-defined]
        shared_fork_server().kill(process.name)


def signal_stage(replica: Replica, stage: int, number: int) -> None:
    assert replica.engine is not None
    process = replica.engine.llm.loop.pipeline._processes[stage]  # type: ignore[attr-defined]
    signal.pidfd_send_signal(shared_fork_server()._stages[process.name], number)


async def until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    """Wait for something that a replica reaches by itself. Raises TimeoutError."""

    async def look() -> None:
        while not condition():
            await asyncio.sleep(0.01)

    await asyncio.wait_for(look(), seconds)


def all_up(engine: Replicas) -> bool:
    return all(one.state is ReplicaState.UP for one in engine.replicas())
