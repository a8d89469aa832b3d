"""The emulated parts of an engine by its cluster file, and the host that they are on."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from penstock.cluster import (
    Cluster,
    draft_link,
    draft_timing,
    feature_links,
    link_timings,
    speculator_timing,
    stage_timings,
)
from penstock.cluster.timing import StageTiming
from penstock.core import ConfigError
from penstock.drafters.base import Drafter, Weights
from penstock.drafters.merged import MergedDrafter
from penstock.emulation.drafter import DeviceTurns, EmulatedDrafter
from penstock.emulation.stage import StageEmulation
from penstock.pipeline.base import Clock, SideChannel, StagePlan
from penstock.pipeline.processes import ProcessExecutor, ProcessPipeline
from penstock.speculation import SpeculativeConfig

# -------------------------------------------------------------------------------------------------------------- cluster
# The emulated parts of an engine by its cluster file: stages, links and the drafter. Everything else is real.


def stage_emulations(
    cluster: Cluster | None,
    stages: int,
    drafter: Drafter | None = None,
    *,
    features: bool = False,
    apart: bool = False,
) -> list[StageEmulation | None]:
    """One entry per stage, None where nothing is emulated.

    ``features``: whether the stages send features to a learned drafter. ``apart``: whether stages are on several hosts.
    Raises ConfigError where the cluster file lacks a link.
    """
    if cluster is None or not cluster.emulated:
        return [None] * stages
    links, shared = link_timings(cluster), shared_stage(cluster, drafter)
    to_drafter = feature_links(cluster) if features else [None] * stages
    return [
        StageEmulation(
            timing=timing,
            up=links[i],
            down=links[i + 1],
            to_drafter=to_drafter[i],
            shared=i == shared,
            apart=apart,
        )
        for i, timing in enumerate(stage_timings(cluster))
    ]


def check_drafter(cluster: Cluster, speculation: SpeculativeConfig | None) -> None:
    """Raise ConfigError unless the emulated cluster says how long drafting takes."""
    priced_as = speculation.drafter_options.priced_as if speculation is not None else Weights.NONE
    if priced_as is Weights.SPECULATOR:
        if cluster.drafter is None:
            raise ConfigError(f"cluster {cluster.name} names no drafter: what drafting takes there is unknown")
        feature_links(cluster)  # refuses a cluster in which a stage and the drafter are not joined
    if priced_as is Weights.DRAFT_MODEL and cluster.draft_as_model is None:
        raise ConfigError(
            f"cluster {cluster.name} names no drafter and no draft_as_model: what drafting takes there is unknown"
        )


def drafter_pass(cluster: Cluster | None, depth: int | None) -> StageTiming | None:
    """The time of one pass on the cluster's modelled device for the drafter; None where there is none.

    ``depth`` is how many layers a learned drafter has, None for a draft model.
    """
    if cluster is None:
        return None
    return draft_timing(cluster) if depth is None else speculator_timing(cluster, depth)


def drafter_emulation(cluster: Cluster | None, depth: int | None) -> StageEmulation | None:
    """The emulation of the drafter's process, which adds no times of its own: ``on_its_device`` does."""
    return None if drafter_pass(cluster, depth) is None else StageEmulation()


def on_its_device(cluster: Cluster | None, drafter: Drafter, depth: int | None, clock: Clock) -> Drafter:
    """The drafter on the cluster's modelled device, or unchanged if there is none. ``depth``: see ``drafter_pass``."""
    timing = drafter_pass(cluster, depth)
    if cluster is None or timing is None:
        return drafter
    return EmulatedDrafter(drafter, timing, draft_link(cluster), clock)


def off_its_device(drafter: Drafter | None) -> Drafter | None:
    """Undo ``on_its_device``: the drafter without its modelled device and without prompt lookup beside it."""
    modelled = modelled_drafter(drafter)
    return modelled.inner if modelled is not None else without_lookup(drafter)


def modelled_drafter(drafter: Drafter | None) -> EmulatedDrafter | None:
    """The drafter on its modelled device, if it has one. Prompt lookup beside it runs on no device."""
    own = without_lookup(drafter)
    return own if isinstance(own, EmulatedDrafter) else None


def without_lookup(drafter: Drafter | None) -> Drafter | None:
    return drafter.inner if isinstance(drafter, MergedDrafter) else drafter


def take_turns(cluster: Cluster | None, drafter: Drafter | None, pipeline: SideChannel) -> None:
    """Let the drafter and a stage take turns on one modelled device, if the cluster places the drafter there."""
    stage, modelled = shared_stage(cluster, drafter), modelled_drafter(drafter)
    if stage is not None and modelled is not None:
        modelled.share(DeviceTurns(pipeline, stage))


def shared_stage(cluster: Cluster | None, drafter: Drafter | None) -> int | None:
    """The stage whose modelled device the drafter uses, too; None if the drafter has a device of its own."""
    return cluster.drafting_stage if cluster is not None and modelled_drafter(drafter) is not None else None


# ----------------------------------------------------------------------------------------------------------------- host
# Stage processes that keep their modelled times at real-time priority, for benches.


class RealTimeExecutor(ProcessExecutor):
    """Starts emulated stages ahead of everything else on this host, where Linux permits it: see priority.py."""

    def begin(self, plans: Sequence[StagePlan], name: str = "stage") -> ProcessPipeline:
        return super().begin([in_real_time(plan) for plan in plans], name)


def in_real_time(plan: StagePlan) -> StagePlan:
    """The plan with real-time priority if its stage is emulated; a real stage has no modelled times to keep."""
    if plan.emulation is None:
        return plan
    return replace(plan, emulation=replace(plan.emulation, real_time=True))
