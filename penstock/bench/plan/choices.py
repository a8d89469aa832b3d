"""The plans that are compared: ours, and those that people make by hand or by the paper."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final

from penstock.bench.plan.judge import Speed, simulated, staged
from penstock.bench.plan.options import PlanOptions
from penstock.cluster import Cluster
from penstock.cluster.drawn import split_by_speed
from penstock.cluster.layers import spread
from penstock.cluster.load import with_drafter_on
from penstock.cluster.memory import held_by
from penstock.cluster.spec import Device
from penstock.config import FieldError
from penstock.core import ConfigError
from penstock.planner.costs import Batch, candidates, problem_of
from penstock.planner.jupiter import layer_split
from penstock.planner.partition import Part, Problem
from penstock.planner.search import Plan, front, plan_of

PLAIN: Final = Batch(rows=1, context=512)
SPECULATIVE: Final = Batch(rows=8, context=512)
"""Rows of a batch that drafted tokens fill, and a text's length, for which the stages are balanced."""
OURS, EVEN, PROPORTIONAL, JUPITER = "penstock", "even split", "in proportion to speed", "jupiter"


@dataclass(frozen=True)
class Choice:
    """A plan under a name. ``speed`` is None where it was not simulated."""

    name: str
    plan: Plan
    cluster: Cluster
    speed: Speed | None = None

    def value(self, goal: str) -> tuple[float, ...]:
        """The larger the better."""
        if self.speed is None:
            return (-self.plan.trip_s,) if goal == "ttft" else (-self.plan.slowest_s, -self.plan.trip_s)
        if goal == "ttft":
            return (-self.speed.first_token_s,)
        served = self.speed.served_per_second
        return (-self.speed.answer_s if served is None else served,)


class Planning:
    """One cluster, its devices that may hold layers, and what they and the links take."""

    def __init__(self, cluster: Cluster, options: PlanOptions) -> None:
        self.options = options
        self.cluster = cluster
        self.devices = candidates(cluster)
        self.batch = PLAIN if cluster.drafter is None else SPECULATIVE

    @cached_property
    def problem(self) -> Problem:
        return problem_of(self.cluster, self.devices, self.batch)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(device.name for device in self.devices)

    def choice(self, name: str, plan: Plan) -> Choice:
        return Choice(name, plan, staged(self.cluster, self.names, plan.parts))

    def by_hand(self) -> Iterator[Choice]:
        """All devices in the file's order, where they hold it: evenly, by their memories' rates, as the paper does."""
        layers, count = self.problem.layers, self.problem.devices
        splits: dict[str, Sequence[int]] = {}
        if count <= layers:
            splits[EVEN] = spread(layers, count)
            splits[PROPORTIONAL] = split_by_speed(layers, [float(d.weight_bandwidth_gb_s or 0) for d in self.devices])
        paper = layer_split(list(self.problem.stage_s))
        if paper is not None:
            splits[JUPITER] = paper.counts
        for name, counts in splits.items():
            plan = plan_of(self.problem, [Part(*one) for one in enumerate(counts)])
            if math.isfinite(plan.trip_s):
                yield self.choice(name, plan)

    def ours(self) -> list[Choice]:
        return [self.choice(OURS, plan) for plan in front(self.problem)]

    def judged(self, choice: Choice) -> Choice:
        tokens, prompt = self.options.tokens, self.options.prompt_tokens
        if not tokens:
            return choice
        return replace(
            choice, speed=simulated(choice.cluster, tokens, prompt, serving=self.options.goal == "throughput")
        )

    def moved(self, choice: Choice) -> Choice | None:
        """The same stages with the drafter on the last one's device; None where it is there, or does not fit."""
        last = choice.cluster.stages[-1].devices[-1]
        if choice.cluster.drafter in (None, last):
            return None
        try:
            return replace(choice, cluster=with_drafter_on(choice.cluster, last))
        except FieldError:
            return None

    @property
    def least_slowest_s(self) -> float:
        """A bound: no stage of any plan is faster than if layers could be cut, and overheads and links took no time."""
        layers = self.problem.layers
        rates = 0.0
        for table in self.problem.stage_s:
            each = min((table[0, n] / n for n in range(1, layers + 1)), default=math.inf)
            rates += 1 / each if math.isfinite(each) else 0.0
        return layers / rates if rates else math.inf

    def with_one_more(self) -> tuple[Device, float] | None:
        """The fastest device, and what the slowest stage could take with another; None where no link to it is known."""
        fastest = max(self.devices, key=lambda device: device.weight_bandwidth_gb_s or 0.0)
        more = replace(fastest, name=f"{fastest.name}'", host=f"{fastest.host}'")
        cluster = replace(self.cluster, devices=(*self.cluster.devices, more))
        try:
            plans = front(problem_of(cluster, (*self.devices, more), self.batch))
        except FieldError:
            return None  # no link is stated to a further host
        return (fastest, plans[0].slowest_s) if plans else None


def refusal(planning: Planning) -> ConfigError:
    """What is needed, and what there is."""
    cluster, model = planning.cluster, planning.cluster.as_model
    assert model is not None
    whole = held_by(model, model.layers, cluster.kv_slots, embedding=True, head=True)
    layer = held_by(model, 1, cluster.kv_slots, embedding=False, head=False)
    have = ", ".join(f"{one.name} {one.memory_gb:g}" for one in planning.devices if one.memory_gb is not None)
    return ConfigError(
        f"cluster {cluster.name}: no plan fits: the model needs {whole.total / 1e9:.2f} GB (weights "
        f"{whole.weights / 1e9:.2f}, {cluster.kv_slots} tokens of KV {whole.cache / 1e9:.2f}), a layer "
        f"{(layer.weights + layer.cache) / 1e9:.2f}; devices have, in GB: {have}. Add devices, lower kv_slots, or take "
        "a model of fewer bits"
    )
