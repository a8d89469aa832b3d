"""The plans that are compared: ours, and those that people make by hand or by Jupiter's method."""

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
from penstock.config import FieldError
from penstock.core import ConfigError
from penstock.planner.costs import Batch, candidates, problem_of, shortage
from penstock.planner.jupiter import layer_split
from penstock.planner.partition import Part, Problem
from penstock.planner.search import Plan, front, plan_of

PLAIN: Final = Batch(rows=1, context=512)
SPECULATIVE: Final = Batch(rows=8, context=512)
"""The batch for which stages are balanced: rows filled by drafted tokens, and the text's length in tokens."""
OURS, EVEN, PROPORTIONAL, JUPITER = "penstock", "even split", "in proportion to speed", "jupiter"


@dataclass(frozen=True)
class Choice:
    """A plan under a name. ``speed`` is None where it was not simulated."""

    name: str
    plan: Plan
    cluster: Cluster
    speed: Speed | None = None

    def value(self, goal: str) -> tuple[float, ...]:
        """The plan's value, the larger the better. First tokens equal to three digits are decided by
        the answer's end."""
        if self.speed is None:
            return (-self.plan.trip_s,) if goal == "ttft" else (-self.plan.slowest_s, -self.plan.trip_s)
        if goal == "ttft":
            return -float(f"{self.speed.first_token_s:.3g}"), -self.speed.answer_s
        served = self.speed.served_per_second
        return (-self.speed.answer_s if served is None else served,)


class Planning:
    """One cluster, its devices that may hold layers, and the times of devices and links."""

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
        """Plans with all devices in the file's order, where they fit: evenly, by memory bandwidth, and by the paper."""
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
        """The same stages with the drafter on the last one's device; None where it is there already or does not fit.

        On real hosts the drafter always runs on the engine's.
        """
        last = choice.cluster.stages[-1].devices[-1]
        if self.options.real or choice.cluster.drafter in (None, last):
            return None
        try:
            return replace(choice, cluster=with_drafter_on(choice.cluster, last))
        except FieldError:
            return None

    def elsewhere(self, choice: Choice) -> Choice:
        """The better of a judged plan and the same plan with the drafter moved."""
        moved = self.moved(choice)
        if moved is None:
            return choice
        return max(choice, self.judged(moved), key=lambda one: one.value(self.options.goal))

    @property
    def least_slowest_s(self) -> float:
        """Lower bound of a plan's slowest stage in seconds, as if layers could be cut and overheads and links took no
        time."""
        layers = self.problem.layers
        rates = 0.0
        for table in self.problem.stage_s:
            each = min((table[0, n] / n for n in range(1, layers + 1)), default=math.inf)
            # Layers per second add up over devices if layers can be cut anywhere.
            rates += 1 / each if math.isfinite(each) else 0.0
        return layers / rates if rates else math.inf

    def with_one_more(self, chosen: Choice) -> Choice | None:
        """The best plan with one more device like the fastest, named after it; None where no link to it is known.

        Simulated plans have at most one stage more: further ones seldom pay, and take long to simulate.
        """
        fastest = max(self.devices, key=lambda device: device.weight_bandwidth_gb_s or 0.0)
        more = replace(fastest, name=f"{fastest.name}'", host=f"{fastest.host}'")
        further = Planning(replace(self.cluster, devices=(*self.cluster.devices, more)), self.options)
        try:
            plans = further.ours()
        except FieldError:
            return None  # the cluster file has no link to a further host
        if self.options.tokens:
            most = len(chosen.plan.parts) + 1
            plans = [one for one in plans if len(one.plan.parts) <= most] or plans[-1:]
        judged = [further.judged(one) for one in plans]
        best = max(judged, key=lambda one: one.value(self.options.goal), default=None)
        if best is not None and chosen.cluster.drafter != self.cluster.drafter:
            best = further.elsewhere(best)
        return best if best is None else replace(best, name=fastest.name)


def refusal(planning: Planning) -> ConfigError:
    """The error where no plan fits, with the memory needed and the memory there is."""
    cluster = planning.cluster
    return ConfigError(
        f"cluster {cluster.name}: no plan fits: {shortage(cluster, planning.devices)}. Add devices, lower kv_slots, or "
        "take a model of fewer bits"
    )
