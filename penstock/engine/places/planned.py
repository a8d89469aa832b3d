"""``layer_split="auto"``: plans the stages that suit the hosts at hand, from measured times."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import replace
from typing import Final

from penstock.cluster.measured import LayerTimes
from penstock.config import FieldError
from penstock.core import ConfigError
from penstock.drafters.options import Weights
from penstock.engine.options import AUTO, EngineOptions
from penstock.engine.profile.cluster import cluster_of_hosts
from penstock.engine.profile.hosts import HostsProfile, completed, known_profile
from penstock.engine.profile.measure import OnStep
from penstock.hosts.host import FleetHost
from penstock.hosts.placement import asked_hosts
from penstock.planner.costs import Batch, candidates, problem_of, shortage
from penstock.planner.search import front
from penstock.speculation import SpeculativeConfig

log = logging.getLogger(__name__)

ALIKE: Final = 1.1
"""Devices whose speeds are within this factor count as alike: an even split is as good."""
PLAIN: Final = Batch(rows=1, context=512)
SPECULATIVE: Final = Batch(rows=8, context=512)
LOOKED_UP, DRAFTED = 0.25, 0.6
"""Share of a text's tokens that are assumed to come one batch after another, with prompt lookup and with a drafter that
has weights. Each other token costs a trip of one row, since ``auto`` decodes plainly where drafts do not pay."""


def planned(options: EngineOptions, host: FleetHost) -> EngineOptions:
    """The options with the planned layers, and hosts in the planned order. The log says what was decided.

    "auto" measures what has not been measured. Without ``layer_split`` there is a plan only if the hosts have been
    measured and differ; else they share the layers evenly. Hosts that play an emulated cluster are not planned for.
    Raises ConfigError if the model fits in no way.
    """
    asked = options.layer_split == AUTO
    if options.hosts is None or options.cluster is not None or not (asked or may_be_planned(options)):
        return options
    try:
        profile = known_profile(options, host)
    except FieldError:  # there is no plan for such hosts
        if asked:
            raise
        return options
    if asked:
        profile = completed(profile, host, reporting)
    elif profile.missing:
        log.warning("layers are split evenly: `penstock profile` has not measured %s", profile.missing)
        return options
    elif alike(profile.times.values()):
        return options
    return decided(options, profile)


def reporting(what: str) -> OnStep:
    """A callback for progress that logs, once, that ``what`` is being measured."""

    def on_step(done: int, total: int) -> None:
        if done == 1:
            log.warning("measuring %s, to split the layers", what)

    return on_step


def may_be_planned(options: EngineOptions) -> bool:
    """Whether the options leave the layers of stages open, and give each host one stage."""
    assert options.hosts is not None
    names = asked_hosts(options.hosts).names
    return options.layer_split is None and len(names) > 1 and options.pipeline_parallel_size in (None, len(names))


def alike(times: Iterable[LayerTimes]) -> bool:
    """Whether the devices take about the same time for a layer, with one row and with many."""
    found = list(times)
    for row in (0, -1):
        each = [one.layer_ms[row][0] for one in found]
        if max(each) > ALIKE * min(each):
            return False
    return True


def decided(options: EngineOptions, profile: HostsProfile) -> EngineOptions:
    found, hits = profile.candidates, hits_of(options)
    cluster = cluster_of_hosts(profile, drafts=hits == DRAFTED)  # a drafter with weights is held here, and needs room
    devices = candidates(cluster)
    plain, drafted = (problem_of(cluster, devices, batch) for batch in (PLAIN, SPECULATIVE))
    plans = [plan.parts for problem in (plain, drafted) for plan in front(problem)]
    if not plans:
        problem = f"layer_split: no plan fits: {shortage(cluster, devices)}"
        raise ConfigError(f"{problem}. Add hosts, lower kv_slots, or quantize the model")
    # The least expected time per token: a hit comes with the next batch, any other token after a trip.
    best = min(plans, key=lambda parts: hits * drafted.slowest_s(parts) + (1 - hits) * plain.trip_s(parts))
    used = [devices[part.device] for part in best]
    order, held = [device.host for device in used], {device.name for device in used}
    spares = [one.name for label, one in found.devices.items() if label not in held]
    split = ",".join(str(part.layers) for part in best)
    log.warning(
        "layers are split %s over %s%s: a row takes %.1f ms through all, and %.1f ms in the slowest stage",
        split,
        ", ".join(order),
        f", and {', '.join(spares)} kept as spares" if spares else "",
        1e3 * plain.trip_s(best),
        1e3 * plain.slowest_s(best),
    )
    return replace(options, hosts=",".join([*order, *spares]), pipeline_parallel_size=len(order), layer_split=split)


def hits_of(options: EngineOptions) -> float:
    """The share of tokens that need not wait for a trip."""
    config = options.speculative_config
    if not isinstance(config, SpeculativeConfig) or not config.drafts:
        return 0.0
    return LOOKED_UP if config.drafter_options.weights is Weights.NONE else DRAFTED
