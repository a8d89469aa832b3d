"""Runs to measure: one request on an engine of exact stage times, and results made up for the tables."""

from __future__ import annotations

from penstock.cluster.timing import DeviceTiming, StageTiming
from penstock.drafters.base import SyntheticDrafter
from penstock.emulation.stage import StageEmulation, emulated_driver
from penstock.engine.loop import EngineLoop
from penstock.engine.scheduler import Scheduler
from penstock.lab.bench.meter import Meter
from penstock.lab.bench.summary import StrategyRun
from penstock.lab.simulator import Timed
from penstock.messages import Sampling
from penstock.pipeline.base import VirtualClock
from penstock.pipeline.engine_end import InProcessPipeline
from penstock.requests.request import Request
from penstock.requests.slots import SlotPool
from penstock.stage.driver import StageCore
from penstock.strategies.base import Strategy
from tests.hash_model import HashLayers, plain_decode

VOCABULARY = 8
PROMPT = [1, 2, 3, 4, 5]


def one_request(stages: int, strategy: Strategy, accuracy: list[float], tokens: int) -> tuple[Meter, Request, float]:
    """A request watched from its start to its end, and the seconds from its first token to its last.

    Every stage takes one second for any batch; links, drafting and the engine take no time.
    """
    clock, pool = VirtualClock(), SlotPool(200, 200)
    second = StageEmulation(timing=StageTiming(devices=(DeviceTiming(1.0, 0.0, 0.0),)))
    cores = [StageCore(HashLayers(i, pool.total, VOCABULARY), pool.total, i == stages - 1) for i in range(stages)]
    drivers = [emulated_driver(i, core, clock.now, second) for i, core in enumerate(cores)]
    answer = plain_decode(PROMPT, stages, VOCABULARY, 0, tokens, frozenset())
    drafter = SyntheticDrafter(accuracy, VOCABULARY, 0, lambda _: answer)
    loop = EngineLoop(InProcessPipeline(drivers, clock), drafter, Scheduler(pool, 16, 1, 200), clock)
    meter, timed = Meter(stages, drafter), Timed()
    loop.observers.append(meter)
    request = Request(0, PROMPT, Sampling(), tokens, frozenset(), strategy, timed)
    loop.add(request)
    while loop.busy:
        loop.step()
    loop.drain()
    return meter, request, timed.moments[-1] - timed.moments[0]


def a_run(strategy: str, speed: float, **other: object) -> StrategyRun:
    fields: dict[str, object] = {
        "strategy": strategy,
        "tokens": 10,
        "seconds": 10 / speed,
        "tokens_per_second": speed,
        "tokens_per_stage_time": 0.5,
        "mean_acceptance_length": 2.0,
        "stage_busy": [0.5],
        "rows_computed": 1,
        "rows_cancelled": 0,
        "looping_outputs": 0,
        "overrun_fraction": 0.0,
        "overhead_per_hop_ms": 0.1,
        "overhead_per_loop_ms": 0.1,
        "identical_to_autoregressive": True,
        "emulated": True,
        "synthetic": False,
        "prompt_set": "chat",
        "requests": [a_request(0, speed), a_request(1, speed)],
    }
    return StrategyRun(**{**fields, **other})  # type: ignore[arg-type]


def a_request(number: int, speed: float) -> dict[str, object]:
    """A request in the form of ``Sample.as_dict``: ten tokens at ``speed`` tokens per second."""
    return {
        "prompt": number,
        "prompt_sha256": f"{number:016x}",
        "seed": number,
        "tokens": 10,
        "seconds": 10 / speed,
        "timesteps": 20,
        "ttft_ms": 5.0,
        "e2el_ms": 5.0 + 1e4 / speed,
    }
