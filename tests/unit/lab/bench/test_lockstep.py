"""Timesteps of the ideal pipeline, from made-up events and from an engine whose stages all take one second."""

from __future__ import annotations

import pytest

from penstock.lab.bench.meter import Lockstep
from penstock.strategies.base import Autoregressive, Strategy
from penstock.strategies.pipedec import PipeDec, StaticTree
from tests.unit.lab.bench.runs import one_request

GOOD = [0.8, 0.9, 0.95]


def test_plain_decoding_takes_a_trip_per_token() -> None:
    lockstep = Lockstep(3)
    for stream in range(4):
        lockstep.submitted(stream)
        lockstep.arrived(stream, picks=True)
        lockstep.committed()
    assert lockstep.timesteps == 3 * 3, "four tokens, the first of which is the prompt's"


def test_a_full_pipeline_takes_a_timestep_per_token() -> None:
    lockstep = Lockstep(3)
    for stream in range(3):
        lockstep.submitted(stream)
    for stream in range(3, 9):
        lockstep.arrived(stream - 3, picks=True)
        lockstep.committed()
        lockstep.submitted(stream)
    assert lockstep.timesteps == 5


def test_a_batch_waits_for_what_the_engine_knew_when_it_entered() -> None:
    """After a miss the pipeline drains: streams 1 and 2 were useless, stream 3 waited for result 0."""
    lockstep = Lockstep(3)
    for stream in range(3):
        lockstep.submitted(stream)
    lockstep.arrived(0, picks=True)
    lockstep.committed()
    lockstep.submitted(3)
    for stream in (1, 2):
        lockstep.arrived(stream, picks=False)
    lockstep.submitted(4)
    lockstep.arrived(3, picks=True)
    lockstep.committed()
    assert lockstep.timesteps == 3, "result 0 at 3, stream 3 enters at 3, its result is there at 6"
    lockstep.arrived(4, picks=True)
    lockstep.committed()
    assert lockstep.timesteps == 4, "stream 4 did not wait for the batches whose rows were dropped"


def test_a_request_of_one_token_takes_none() -> None:
    lockstep = Lockstep(2)
    assert lockstep.timesteps == 0
    lockstep.submitted(7)
    lockstep.arrived(7, picks=True)
    lockstep.committed()
    assert lockstep.timesteps == 0


@pytest.mark.parametrize("stages", [1, 2, 5])
@pytest.mark.parametrize("accuracy", [[0.0], GOOD, [1.0]])
def test_plain_decoding_is_the_unit(stages: int, accuracy: list[float]) -> None:
    meter, _, seconds = one_request(stages, Autoregressive(), accuracy, tokens=12)
    assert meter.lockstep.timesteps == stages * 11
    assert seconds == pytest.approx(stages * 11)


@pytest.mark.parametrize("strategy", [PipeDec(4, 4, 3), PipeDec(4, 1, 1), StaticTree(6, 3, 3)], ids=["4", "1", "tree"])
def test_where_nothing_but_the_stages_takes_time_a_timestep_is_a_stage_time(strategy: Strategy) -> None:
    meter, _, seconds = one_request(4, strategy, GOOD, tokens=40)
    assert meter.lockstep.timesteps == pytest.approx(seconds)
    assert meter.lockstep.timesteps < 4 * 39


@pytest.mark.parametrize("stages", [2, 5])
def test_a_tree_verified_in_one_batch_has_its_acceptance_length(stages: int) -> None:
    """SPD's L' = n N / K is then EAGLE's acceptance length, whatever n is."""
    meter, request, _ = one_request(stages, StaticTree(6, 3, 3), GOOD, tokens=40)
    rounds = meter.lockstep.timesteps / stages
    assert rounds == len([tokens for _, tokens in meter.commits if tokens]) - 1
    assert 39 - rounds <= request.metrics.accepted < 39, "drafts that were not sent may be right, too"
