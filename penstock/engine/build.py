"""From resolved options to running parts: pipelines, drafter, loop. The only place where they are wired together."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import pairwise

from penstock.drafters.base import Drafter
from penstock.drafters.learned import LearnedDrafter
from penstock.drafters.options import DrafterParts, Weights
from penstock.emulation.cluster import drafter_emulation, off_its_device, on_its_device, stage_emulations, take_turns
from penstock.engine.answers import PlainAnswers
from penstock.engine.loop import EngineLoop
from penstock.engine.resolve import Resolved
from penstock.engine.scheduler import Scheduler
from penstock.pipeline.base import Host, Pipeline
from penstock.pipeline.plan import StagePlan, TapSpec
from penstock.requests.slots import SlotPool
from penstock.speculation import SpeculativeConfig


def stage_plans(setup: Resolved, drafter: Drafter | None = None) -> list[StagePlan]:
    """One plan per stage; those whose hidden states a learned drafter reads send them to it."""
    inner = off_its_device(drafter)
    learned = inner if isinstance(inner, LearnedDrafter) else None
    emulations = stage_emulations(setup.cluster, setup.stages, drafter, features=learned is not None)
    return [
        StagePlan(
            model=str(setup.checkpoint.source),
            first=first,
            last=last,
            capacity=setup.capacity,
            dtype=setup.options.dtype,
            device=setup.devices[i],
            host=setup.hosts[i],
            quantization=setup.quantization,
            threads=setup.threads[i],
            max_model_len=setup.max_model_len,
            vocab_size=setup.checkpoint.vocab_size,
            tap=tap,
            emulation=emulations[i],
        )
        for i, ((first, last), tap) in enumerate(zip(setup.layers, taps(setup, learned), strict=True))
    ]


def start_pipeline(setup: Resolved, host: Host, drafter: Drafter | None) -> Pipeline:
    """The target's stages."""
    pipeline = host.pipeline(stage_plans(setup, drafter))
    take_turns(setup.cluster, drafter, pipeline)
    return pipeline


def taps(setup: Resolved, drafter: LearnedDrafter | None) -> list[TapSpec | None]:
    """What each stage sends a learned drafter."""
    if drafter is None:
        return [None] * setup.stages
    assert setup.speculator is not None
    wanted = tapped_layers(setup.layers, setup.speculator.reads)
    return [drafter.pipeline.tap(layers) if layers else None for layers in wanted]


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
    """The drafter of ``config.method``, on the cluster's device for it."""
    drafter = config.drafter_options.start(drafter_parts(setup, config, host))
    if config.drafter_options.priced_as is Weights.NONE:
        return drafter
    return on_its_device(setup.cluster, drafter, depth_of(setup), host)


def depth_of(setup: Resolved) -> int | None:
    """Layers of the learned drafter; None where there is none."""
    return setup.speculator.depth if setup.speculator is not None else None


def drafter_parts(setup: Resolved, config: SpeculativeConfig, host: Host) -> DrafterParts:
    return DrafterParts(
        vocab_size=setup.checkpoint.vocab_size,
        layers=setup.layers,
        chunk=max(setup.options.prefill_chunk, config.strategy_options.most_asked),
        speculator=setup.speculator,
        answer=PlainAnswers(),
        start_weights=partial(start_weights, setup, host),
    )


def start_weights(setup: Resolved, host: Host) -> Pipeline:
    """The drafter's own weights, as a pipeline of one stage."""
    if setup.speculator is not None:
        plan = drafting_plan(setup, str(setup.speculator.path), 1, target=str(setup.checkpoint.source))
        return host.pipeline([plan], "drafter")
    assert setup.draft is not None
    plan = drafting_plan(setup, str(setup.draft.source), setup.draft.num_layers, setup.draft_quantization)
    return host.pipeline([plan], "draft model")


def drafting_plan(setup: Resolved, model: str, layers: int, quantization: str = "none", target: str = "") -> StagePlan:
    return StagePlan(
        model=model,
        first=0,
        last=layers,
        capacity=setup.capacity,
        dtype=setup.options.dtype,
        device=setup.devices[-1],
        quantization=quantization,
        threads=setup.threads[-1],
        max_model_len=setup.max_model_len,
        vocab_size=setup.checkpoint.vocab_size,
        target=target,
        tokenizer=str(setup.checkpoint.source),
        emulation=drafter_emulation(setup.cluster, depth_of(setup)),
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
    emulated = setup.cluster is not None and setup.cluster.emulated
    return EngineLoop(pipeline, drafter, scheduler, host, contended=not emulated, apart=apart(setup.hosts))


def apart(hosts: Sequence[str]) -> frozenset[int]:
    """The stages behind which batches leave for another host; -1 stands for the engine, whose host is ""."""
    stops = ["", *hosts, ""]
    return frozenset(i - 1 for i, (one, other) in enumerate(pairwise(stops)) if one != other)
