"""From resolved options to running parts: pipelines, drafter, loop. The only place where they are wired together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from penstock.cluster import (
    draft_link,
    draft_timing,
    feature_links,
    link_timings,
    speculator_timing,
    stage_timings,
)
from penstock.cluster.timing import StageTiming
from penstock.config import LEARNED, SpeculativeConfig
from penstock.drafters.base import Drafter
from penstock.drafters.emulated import EmulatedDrafter
from penstock.drafters.learned import FollowingDrafter, LearnedDrafter
from penstock.drafters.ngram import NgramDrafter
from penstock.drafters.small_model import SmallModelDrafter
from penstock.drafters.spd import Depths, SpdDrafter
from penstock.drafters.synthetic import SyntheticDrafter
from penstock.engine.loop import EngineLoop
from penstock.engine.options import Resolved
from penstock.engine.scheduler import Scheduler
from penstock.pipeline.base import Host, Pipeline
from penstock.pipeline.processes import StagePlan
from penstock.requests.request import Request
from penstock.requests.slots import SlotPool

if TYPE_CHECKING:
    from penstock.models.speculators.base import SpeculatorCheckpoint

Answer = Callable[[Request], Sequence[int]]
"""What plain decoding gives for a request; only the synthetic drafter asks."""


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
            device=setup.options.device,
            max_model_len=setup.max_model_len,
            timing=timings[i],
            up=links[i],
            down=links[i + 1],
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


def start_drafter(setup: Resolved, config: SpeculativeConfig, host: Host, answer: Answer) -> Drafter:
    """The drafter of ``config.method``, on the cluster's modelled device where there is one."""
    drafter = bare_drafter(setup, config, host, answer)
    if setup.cluster is None or config.method == "ngram":
        return drafter
    timing, link = draft_timing(setup.cluster), draft_link(setup.cluster)
    if config.method in LEARNED:
        assert setup.speculator is not None
        timing = speculator_timing(setup.cluster, setup.speculator.depth)
    return drafter if timing is None else EmulatedDrafter(drafter, timing, link, host)


def bare_drafter(setup: Resolved, config: SpeculativeConfig, host: Host, answer: Answer) -> Drafter:
    if config.method == "ngram":
        return NgramDrafter(config.prompt_lookup_max, config.prompt_lookup_min)
    if config.method == "synthetic":
        assert config.accuracy is not None
        return SyntheticDrafter(config.accuracy, setup.checkpoint.vocab_size, config.seed, answer)
    chunk = max(setup.options.prefill_chunk, config.width or 0)
    if setup.speculator is not None:
        plan = drafting_plan(setup, str(setup.speculator.path), 1, target=str(setup.checkpoint.path))
        return learned_drafter(setup, config, host.pipeline([plan], "drafter"), chunk)
    assert setup.draft is not None
    plan = drafting_plan(setup, str(setup.draft.path), setup.draft.num_layers)
    return SmallModelDrafter(host.pipeline([plan], "draft model"), chunk)


def learned_drafter(setup: Resolved, config: SpeculativeConfig, pipeline: Pipeline, chunk: int) -> LearnedDrafter:
    """What asks the learned drafter behind ``pipeline``."""
    assert setup.speculator is not None
    if not setup.speculator.levels:
        return FollowingDrafter(pipeline, chunk)
    return SpdDrafter(pipeline, chunk, depths(setup.layers, setup.speculator, config.feature_lag, config.post_state))


def depths(
    layers: Sequence[tuple[int, int]], speculator: SpeculatorCheckpoint, lag: int = 0, post_state: bool = False
) -> Depths:
    """Which level of SPD's module a token has that has passed 0, 1, ... of these stages.

    Each is the deepest that reads no state further on; a module for one number of stages has a level for each.
    """
    total, stages = layers[-1][1], len(layers)
    # The normed states leave the last stage, which may hold no layer.
    done = [0, *(min(last, total - 1) for _, last in layers[:-1]), total + 1]
    levels = speculator.levels
    found = [max([0, *(i for i, reads in enumerate(levels) if reads[-1] <= reached)]) for reached in done]
    memory = speculator.stages is not None
    return Depths(
        list(range(stages + 1)) if memory else found,
        frozenset(i for i, reads in enumerate(levels) if any(reads)),
        lag,
        speculator.asking if memory else int(post_state),
        memory,
    )


def drafting_plan(setup: Resolved, model: str, layers: int, target: str = "") -> StagePlan:
    return StagePlan(
        model=model,
        first=0,
        last=layers,
        capacity=setup.capacity,
        dtype=setup.options.dtype,
        device=setup.options.device,
        max_model_len=setup.max_model_len,
        target=target,
        tokenizer=str(setup.checkpoint.path),
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
