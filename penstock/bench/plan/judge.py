"""Judges a plan by simulation: the engine's own decisions on its stages, in virtual time."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from penstock.bench.grid import WARM_UP
from penstock.cluster.spec import Cluster, Stage
from penstock.planner.partition import Part
from penstock.simulator.run import simulate, simulate_serving
from penstock.simulator.script import DEMO_ACCURACY, Script, profile_script
from penstock.speculation import SpeculativeConfig

REQUESTS: Final = 2
SEED: Final = 1
AT_A_TIME: Final = 2
"""Requests per stage that are simulated for throughput."""


@dataclass(frozen=True, kw_only=True)
class Speed:
    """The result of a simulation. ``tokens_per_second``: after the first token. ``answer_s``: seconds of a request, its
    prompt included. ``served_per_second``: tokens per second of all requests, where several ran together, else None."""

    tokens_per_second: float
    first_token_s: float
    answer_s: float
    served_per_second: float | None = None


def staged(cluster: Cluster, names: tuple[str, ...], parts: tuple[Part, ...]) -> Cluster:
    """The cluster with these stages; ``names`` are the devices' names by number."""
    stages = tuple(Stage(devices=(names[part.device],), layers=(part.layers,)) for part in parts)
    return replace(cluster, stages=stages)


def simulated(cluster: Cluster, tokens: int, prompt: int, *, serving: bool) -> Speed:
    """Simulate ``auto`` with a drafter like the demo pair's, or plain decoding where the cluster names no drafter."""
    config = SpeculativeConfig(strategy="auto") if cluster.drafter is not None else None
    script = script_of(REQUESTS, tokens, prompt)
    runs = simulate(cluster, script, config, min(WARM_UP, tokens))
    return Speed(
        tokens_per_second=sum(run.tokens - 1 for run in runs) / sum(run.seconds for run in runs),
        first_token_s=sum(run.first_token_seconds for run in runs) / len(runs),
        answer_s=sum(run.first_token_seconds + run.seconds for run in runs) / len(runs),
        served_per_second=served_per_second(cluster, config, tokens, prompt) if serving else None,
    )


def served_per_second(cluster: Cluster, config: SpeculativeConfig | None, tokens: int, prompt: int) -> float:
    """Tokens per second of ``AT_A_TIME`` requests for each stage, from the first request's start."""
    together = AT_A_TIME * len(cluster.stages)
    runs = simulate_serving(cluster, script_of(together, tokens, prompt), config, together)
    return sum(len(run.moments) for run in runs) / max(run.moments[-1] for run in runs)


def script_of(requests: int, tokens: int, prompt: int) -> Script:
    return profile_script(DEMO_ACCURACY, requests, tokens, SEED, prompt=prompt)
