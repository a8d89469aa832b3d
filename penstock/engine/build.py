"""From resolved options to running parts: pipelines, drafter, loop. The only place where they are wired together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from msgspec.structs import replace

from penstock.cluster import (
    draft_link,
    draft_timing,
    feature_links,
    link_timings,
    speculator_timing,
    stage_timings,
)
from penstock.cluster.timing import StageTiming
from penstock.config import SpeculativeConfig
from penstock.drafters.base import Drafter
from penstock.drafters.depths import Depths, levels_after
from penstock.drafters.emulated import EmulatedDrafter
from penstock.drafters.learned import FollowingDrafter, LearnedDrafter
from penstock.drafters.ngram import NgramDrafter
from penstock.drafters.small_model import SmallModelDrafter
from penstock.drafters.spd import SpdDrafter
from penstock.drafters.synthetic import SyntheticDrafter
from penstock.engine.answers import PlainAnswers
from penstock.engine.loop import EngineLoop
from penstock.engine.resolve import Resolved
from penstock.engine.scheduler import Scheduler
from penstock.pipeline.base import Host, Pipeline
from penstock.pipeline.plan import StagePlan
from penstock.requests.slots import SlotPool

if TYPE_CHECKING:
    from penstock.models.speculators.base import SpeculatorCheckpoint


def stage_plans(setup: Resolved) -> list[StagePlan]:
    """One plan per stage, with modelled times where the cluster is emulated."""
    stages = len(setup.layers)
    timings: Sequence[StageTiming | None] = [None] * stages
    links = [None] * (stages + 1)
    if setup.cluster is not None and setup.cluster.emulated:
        timings, links = stage_timings(setup.cluster), list(link_timings(setup.cluster))  # type: ignore[arg-type]
    return [
        StagePlan(
            model=str(setup.checkpoint.path),
            first=first,
            last=last,
            capacity=setup.capacity,
            dtype=setup.options.dtype,
            device=setup.devices[i],
            max_model_len=setup.max_model_len,
            timing=timings[i],
            up=links[i],
            down=links[i + 1],
            background=timings[i] is not None,
        )
        for i, (first, last) in enumerate(setup.layers)
    ]


def start_pipeline(setup: Resolved, host: Host, drafter: Drafter | None) -> Pipeline:
    """The target's stages; those whose hidden states a learned drafter reads send them to it."""
    plans = stage_plans(setup)
    inner = drafter.inner if isinstance(drafter, EmulatedDrafter) else drafter
    if isinstance(inner, LearnedDrafter):
        plans = with_taps(setup, plans, inner)
    stage = setup.cluster.drafting_stage if setup.cluster is not None else None
    if stage is None or not isinstance(drafter, EmulatedDrafter):
        return host.pipeline(plans)
    plans[stage] = replace(plans[stage], shared=True)
    pipeline = host.pipeline(plans)
    drafter.share(pipeline, stage)
    return pipeline


def with_taps(setup: Resolved, plans: list[StagePlan], drafter: LearnedDrafter) -> list[StagePlan]:
    assert setup.speculator is not None
    emulated = setup.cluster is not None and setup.cluster.emulated
    links = feature_links(setup.cluster) if setup.cluster is not None and emulated else [None] * len(plans)
    taps = [
        drafter.pipeline.tap(layers, link) if layers else None
        for layers, link in zip(tapped_layers(setup.layers, setup.speculator.reads), links, strict=True)
    ]
    return [replace(plan, tap=tap) for plan, tap in zip(plans, taps, strict=True)]


def tapped_layers(layers: Sequence[tuple[int, int]], reads: Sequence[int]) -> list[tuple[int, ...]]:
    """Which of the hidden states that a drafter reads each stage is to send, as Hugging Face numbers them.

    State k is what layer k - 1 gives, 0 the embedding; the last one is normed, which the last stage does, and one more
    is the same before its norm.
    """
    total = layers[-1][1]
    owners = {state: len(layers) - 1 for state in reads if state >= total}
    for state in set(reads) - owners.keys():
        owners[state] = next(i for i, (first, last) in enumerate(layers) if state == 0 or first < state <= last)
    return [tuple(state for state in sorted(owners) if owners[state] == stage) for stage in range(len(layers))]


def start_drafter(setup: Resolved, config: SpeculativeConfig, host: Host) -> Drafter:
    """The drafter of ``config.method``, on the cluster's modelled device where there is one."""
    drafter = bare_drafter(setup, config, host)
    if setup.cluster is None or config.method == "ngram":
        return drafter
    timing = modelled_pass(setup)
    return drafter if timing is None else EmulatedDrafter(drafter, timing, draft_link(setup.cluster), host)


def modelled_pass(setup: Resolved) -> StageTiming | None:
    """One pass of the drafter on the cluster's modelled device; None where there is none."""
    if setup.cluster is None:
        return None
    if setup.speculator is not None:
        return speculator_timing(setup.cluster, setup.speculator.depth)
    return draft_timing(setup.cluster)


def bare_drafter(setup: Resolved, config: SpeculativeConfig, host: Host) -> Drafter:
    if config.method == "ngram":
        return NgramDrafter(config.prompt_lookup_max, config.prompt_lookup_min)
    if config.method == "synthetic":
        assert config.accuracy is not None
        return SyntheticDrafter(config.accuracy, setup.checkpoint.vocab_size, config.seed, PlainAnswers())
    chunk = max(setup.options.prefill_chunk, config.width or 0)
    if setup.speculator is not None:
        plan = drafting_plan(setup, str(setup.speculator.path), 1, target=str(setup.checkpoint.path))
        return learned_drafter(setup.layers, setup.speculator, config, host.pipeline([plan], "drafter"), chunk)
    assert setup.draft is not None
    plan = drafting_plan(setup, str(setup.draft.path), setup.draft.num_layers)
    return SmallModelDrafter(host.pipeline([plan], "draft model"), chunk)


def learned_drafter(
    layers: Sequence[tuple[int, int]],
    speculator: SpeculatorCheckpoint,
    config: SpeculativeConfig,
    pipeline: Pipeline,
    chunk: int,
) -> LearnedDrafter:
    """What asks the learned drafter behind ``pipeline`` about a target whose stages hold ``layers``."""
    if not speculator.levels:
        return FollowingDrafter(pipeline, chunk)
    return SpdDrafter(pipeline, chunk, depths(layers, speculator, config))


def depths(layers: Sequence[tuple[int, int]], speculator: SpeculatorCheckpoint, config: SpeculativeConfig) -> Depths:
    """What SPD's module sees of a token under way; one for a single number of stages has a level for each depth."""
    memory = speculator.stages is not None
    return Depths(
        range(len(layers) + 1) if memory else levels_after(layers, speculator.levels),
        frozenset(i for i, reads in enumerate(speculator.levels) if any(reads)),
        config.feature_lag,
        speculator.asking if memory else int(config.post_state),
        memory,
    )


def drafting_plan(setup: Resolved, model: str, layers: int, target: str = "") -> StagePlan:
    return StagePlan(
        model=model,
        first=0,
        last=layers,
        capacity=setup.capacity,
        dtype=setup.options.dtype,
        device=setup.devices[-1],
        max_model_len=setup.max_model_len,
        target=target,
        tokenizer=str(setup.checkpoint.path),
        background=modelled_pass(setup) is not None,
    )


def make_loop(setup: Resolved, pipeline: Pipeline, drafter: Drafter | None, host: Host) -> EngineLoop:
    options = setup.options
    pool = SlotPool(setup.kv_slots, setup.speculative_slots, options.enable_prefix_caching)
    scheduler = Scheduler(
        pool,
        options.prefill_chunk,
        options.max_num_seqs,
        setup.max_model_len,
        options.prefill_stretch,
    )
    return EngineLoop(pipeline, drafter, scheduler, host)
