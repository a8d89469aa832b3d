"""From resolved options to running parts: pipelines, drafter, loop. The only place where they are wired together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

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
from penstock.drafters.learned import LearnedDrafter
from penstock.drafters.ngram import NgramDrafter
from penstock.drafters.small_model import SmallModelDrafter
from penstock.drafters.synthetic import SyntheticDrafter
from penstock.engine.loop import EngineLoop
from penstock.engine.options import Resolved
from penstock.engine.scheduler import Scheduler
from penstock.pipeline.processes import Mailbox, ProcessPipeline, StagePlan
from penstock.requests.request import Request
from penstock.requests.slots import SlotPool

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


def start_pipeline(setup: Resolved, mailbox: Mailbox, drafter: Drafter | None) -> ProcessPipeline:
    """The target's stages; those whose hidden states a learned drafter reads send them to it."""
    plans = stage_plans(setup)
    inner = drafter.inner if isinstance(drafter, EmulatedDrafter) else drafter
    if isinstance(inner, LearnedDrafter):
        plans = with_taps(setup, plans, inner)
    return ProcessPipeline(plans, mailbox)


def with_taps(setup: Resolved, plans: list[StagePlan], drafter: LearnedDrafter) -> list[StagePlan]:
    assert setup.speculator is not None
    assert isinstance(drafter.pipeline, ProcessPipeline)
    emulated = setup.cluster is not None and setup.cluster.emulated
    links = feature_links(setup.cluster) if setup.cluster is not None and emulated else [None] * len(plans)
    taps = [
        drafter.pipeline.tap(layers, link) if layers else None
        for layers, link in zip(tapped_layers(setup.layers, setup.speculator.reads), links, strict=True)
    ]
    return [replace(plan, tap=tap) for plan, tap in zip(plans, taps, strict=True)]


def tapped_layers(layers: Sequence[tuple[int, int]], reads: Sequence[int]) -> list[tuple[int, ...]]:
    """Which of the hidden states that a drafter reads each stage is to send, as Hugging Face numbers them.

    State k is what layer k - 1 gives, 0 the embedding; the last one is normed, which the last stage does.
    """
    total = layers[-1][1]
    owners = {state: len(layers) - 1 for state in reads if state == total}
    for state in set(reads) - {total}:
        owners[state] = next(i for i, (first, last) in enumerate(layers) if state == 0 or first < state <= last)
    return [tuple(state for state in sorted(owners) if owners[state] == stage) for stage in range(len(layers))]


def start_drafter(setup: Resolved, config: SpeculativeConfig, mailbox: Mailbox, answer: Answer) -> Drafter:
    """The drafter of ``config.method``, on the cluster's modelled device where there is one."""
    drafter = bare_drafter(setup, config, mailbox, answer)
    if setup.cluster is None or config.method == "ngram":
        return drafter
    timing, link = draft_timing(setup.cluster), draft_link(setup.cluster)
    if config.method in LEARNED:
        timing = speculator_timing(setup.cluster)
    return drafter if timing is None else EmulatedDrafter(drafter, timing, link, mailbox)


def bare_drafter(setup: Resolved, config: SpeculativeConfig, mailbox: Mailbox, answer: Answer) -> Drafter:
    if config.method == "ngram":
        return NgramDrafter(config.prompt_lookup_max, config.prompt_lookup_min)
    if config.method == "synthetic":
        assert config.accuracy is not None
        return SyntheticDrafter(config.accuracy, setup.checkpoint.vocab_size, config.seed, answer)
    chunk = max(setup.options.prefill_chunk, config.width or 0)
    if setup.speculator is not None:
        plan = drafting_plan(setup, str(setup.speculator.path), 1, target=str(setup.checkpoint.path))
        return LearnedDrafter(ProcessPipeline([plan], mailbox, name="drafter"), chunk)
    assert setup.draft is not None
    plan = drafting_plan(setup, str(setup.draft.path), setup.draft.num_layers)
    return SmallModelDrafter(ProcessPipeline([plan], mailbox, name="draft model"), chunk)


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
    )


def make_loop(setup: Resolved, pipeline: ProcessPipeline, drafter: Drafter | None, mailbox: Mailbox) -> EngineLoop:
    options = setup.options
    pool = SlotPool(setup.kv_slots, setup.speculative_slots)
    scheduler = Scheduler(pool, setup.stages, options.prefill_chunk, options.max_num_seqs, setup.max_model_len)
    return EngineLoop(pipeline, drafter, scheduler, mailbox)
