"""``/health`` and ``/metrics`` of an engine that replaces what it has lost."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from penstock.core import PipelineError
from penstock.engine.stats import EngineStats, ReplicaState, ReplicaStats
from penstock.server.app import about_router
from penstock.server.http.serving import Gate
from penstock.server.metrics import ServerMetrics
from tests.unit.server.live.test_routes import stats

LOST = "stage 1 (layers 3-4) was lost: killed by signal 9 (SIGKILL)"
FINE = stats()


class Engine:
    def __init__(self, found: EngineStats, problem: str = "") -> None:
        self._found = found
        self._problem = problem

    def stats(self) -> EngineStats:
        return self._found

    def replicas(self) -> list[ReplicaStats]:
        state = ReplicaState.UP if self._found.ended is None else ReplicaState.DOWN
        return [ReplicaStats(0, state, self._found.ended, self._found)]

    moving = False

    async def rebalance(self) -> bool:
        return self.moving

    async def check_health(self) -> None:
        if self._problem:
            raise PipelineError(self._problem)


def replies(engine: Any, gate: Gate | None = None) -> tuple[Any, str]:
    app = FastAPI()
    app.include_router(about_router(engine, gate or Gate(), ServerMetrics(engine, "m").registry))
    client = TestClient(app)
    return client.get("/health"), client.get("/metrics").text


@pytest.mark.parametrize(
    ("engine", "status", "word", "reason"),
    [
        (Engine(FINE), 200, "ok", None),
        (Engine(replace(FINE, recovering=LOST)), 200, "recovering", LOST),
        (Engine(replace(FINE, resting=True)), 200, "idle", "the weights are freed until a request comes"),
        (Engine(replace(FINE, ended="it was lost"), "it was lost"), 503, "unavailable", "it was lost"),
    ],
    ids=["fine", "recovering", "idle", "ended"],
)
def test_health_says_what_is_lost_and_whether_that_will_pass(
    engine: Engine, status: int, word: str, reason: str | None
) -> None:
    health, _ = replies(engine)
    assert (health.status_code, health.json()["status"], health.json()["reason"]) == (status, word, reason)


@pytest.mark.parametrize("moving", [False, True])
def test_a_server_says_whether_stages_move(moving: bool) -> None:
    engine = Engine(FINE)
    engine.moving = moving
    app = FastAPI()
    app.include_router(about_router(engine, Gate(), ServerMetrics(engine, "m").registry))  # type: ignore[arg-type]
    assert TestClient(app).post("/rebalance", json={}).json() == {"moving": moving}


def test_a_server_that_leaves_says_so_first() -> None:
    gate = Gate()
    gate.draining = True
    health, _ = replies(Engine(replace(FINE, recovering=LOST)), gate)
    assert (health.status_code, health.json()["status"]) == (503, "draining")


def test_recoveries_are_counted_with_their_seconds() -> None:
    _, text = replies(Engine(replace(FINE, recovering=LOST, recoveries=3, recovery_seconds=4.5, drafter_losses=2)))
    for line in (
        'penstock:recoveries_total{engine="0",model_name="m"} 3.0',
        'penstock:recovery_seconds_total{engine="0",model_name="m"} 4.5',
        'penstock:drafter_losses_total{engine="0",model_name="m"} 2.0',
        'penstock:engine_recovering{engine="0",model_name="m"} 1.0',
        'penstock:engine_resting{engine="0",model_name="m"} 0.0',
        'penstock:engine_up{engine="0",model_name="m"} 1.0',
    ):
        assert line in text
