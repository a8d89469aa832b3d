"""From resolved options to running parts: pipelines, drafter, loop. The only place where they are wired together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from penstock.config import SpeculativeConfig
from penstock.drafters.base import Drafter
from penstock.drafters.depths import Depths, levels_after
from penstock.drafters.learned import FollowingDrafter, LearnedDrafter
from penstock.drafters.ngram import NgramDrafter
from penstock.drafters.small_model import SmallModelDrafter
from penstock.drafters.spd import SpdDrafter
from penstock.drafters.synthetic import SyntheticDrafter
from penstock.emulation.cluster import drafter_emulation, off_its_device, on_its_device, stage_emulations, take_turns
from penstock.engine.answers import PlainAnswers
from penstock.engine.loop import EngineLoop
from penstock.engine.resolve import Resolved
from penstock.engine.scheduler import Scheduler
from penstock.pipeline.base import Host, Pipeline
from penstock.pipeline.plan import StagePlan, TapSpec
from penstock.requests.slots import SlotPool

if TYPE_CHECKING:
    from penstock.models.speculators.base import SpeculatorCheckpoint


def stage_plans(setup: Resolved, drafter: Drafter | None = None) -> list[StagePlan]:
    """One plan per stage; those whose hidden states a learned drafter reads send them to it."""
    inner = off_its_device(drafter)
    learned = inner if isinstance(inner, LearnedDrafter) else None
    emulations = stage_emulations(setup.cluster, setup.stages, drafter, features=learned is not None)
    return [
        StagePlan(
            model=str(setup.checkpoint.path),
            first=first,
            last=last,
            capacity=setup.capacity,
            dtype=setup.options.dtype,
            device=setup.devices[i],
            max_model_len=setup.max_model_len,
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
    drafter = bare_drafter(setup, config, host)
    return drafter if config.method == "ngram" else on_its_device(setup.cluster, drafter, depth_of(setup), host)


def depth_of(setup: Resolved) -> int | None:
    """Layers of the learned drafter; None where there is none."""
    return setup.speculator.depth if setup.speculator is not None else None


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
    return EngineLoop(pipeline, drafter, scheduler, host)
