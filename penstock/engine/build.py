"""From resolved options to running parts: pipelines, drafter, loop. The only place where they are wired together."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from penstock.cluster import draft_link, draft_timing, link_timings, stage_timings
from penstock.cluster.timing import StageTiming
from penstock.config import SpeculativeConfig
from penstock.drafters.base import Drafter
from penstock.drafters.emulated import EmulatedDrafter
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


def start_pipeline(setup: Resolved, mailbox: Mailbox) -> ProcessPipeline:
    return ProcessPipeline(stage_plans(setup), mailbox)


def start_drafter(setup: Resolved, config: SpeculativeConfig, mailbox: Mailbox, answer: Answer) -> Drafter:
    """The drafter of ``config.method``, on the cluster's modelled device where there is one."""
    drafter = bare_drafter(setup, config, mailbox, answer)
    if setup.cluster is None or config.method == "ngram":
        return drafter
    timing, link = draft_timing(setup.cluster), draft_link(setup.cluster)
    return drafter if timing is None else EmulatedDrafter(drafter, timing, link, mailbox)


def bare_drafter(setup: Resolved, config: SpeculativeConfig, mailbox: Mailbox, answer: Answer) -> Drafter:
    if config.method == "ngram":
        return NgramDrafter(config.prompt_lookup_max, config.prompt_lookup_min)
    if config.method == "synthetic":
        assert config.accuracy is not None
        return SyntheticDrafter(config.accuracy, setup.checkpoint.vocab_size, config.seed, answer)
    assert setup.draft is not None
    plan = StagePlan(
        model=str(setup.draft.path),
        first=0,
        last=setup.draft.num_layers,
        capacity=setup.capacity,
        dtype=setup.options.dtype,
        device=setup.options.device,
        max_model_len=setup.max_model_len,
    )
    chunk = max(setup.options.prefill_chunk, config.width or 0)
    return SmallModelDrafter(ProcessPipeline([plan], mailbox, name="draft model"), chunk)


def make_loop(setup: Resolved, pipeline: ProcessPipeline, drafter: Drafter | None, mailbox: Mailbox) -> EngineLoop:
    options = setup.options
    pool = SlotPool(setup.kv_slots, options.speculative_slots)
    scheduler = Scheduler(pool, setup.stages, options.prefill_chunk, options.max_num_seqs, setup.max_model_len)
    return EngineLoop(pipeline, drafter, scheduler, mailbox)
