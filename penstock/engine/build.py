"""Builds an engine's loop from its options."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Final, Protocol

from penstock.cluster.timing import BATCH_ROWS, plain_step_seconds
from penstock.core import RequestError, RequestOutput, SamplingParams
from penstock.drafters.base import Drafter, DrafterParts, SyntheticDrafter, Weights
from penstock.drafters.learned import LearnedDrafter
from penstock.emulation.cluster import drafter_emulation, off_its_device, on_its_device, stage_emulations, take_turns
from penstock.engine.completion import Job, Prompt
from penstock.engine.loop import EngineLoop
from penstock.engine.options import EngineOptions
from penstock.engine.recovery import Parts, Recovery
from penstock.engine.resolve import Resolved
from penstock.engine.scheduler import Pieces, Scheduler
from penstock.estimates.estimates import Estimates
from penstock.estimates.times import TAKEN
from penstock.files import AUTO, DTYPE_BYTES, FAST
from penstock.hosts.facts import own_uuid, usable_cores
from penstock.pipeline.base import Clock, Pipeline, SideChannel, StagePlan, TapSpec
from penstock.requests.request import Request
from penstock.requests.slots import SlotPool
from penstock.speculation import SpeculativeConfig

# -------------------------------------------------------------------------------------------------------------- answers
# Answers of plain decoding for the synthetic drafter, which has to know an answer before it drafts for the request.

PLAIN: Final = SpeculativeConfig(strategy="autoregressive")
"""Settings of a request that is decoded without drafts, whatever drafter the engine has."""


class PlainAnswers:
    """The output token ids of plain decoding, by request. The synthetic drafter calls this object to look them up."""

    def __init__(self) -> None:
        self.known: dict[Any, Sequence[int]] = {}

    def __call__(self, request: Request) -> Sequence[int]:
        return self.known[key_of(request)]

    def cover(self, job: Job) -> bool:
        """Whether the answers of all of a job's requests are known."""
        return all(key_of(request) in self.known for request in job.requests)

    def remember(self, job: Job) -> None:
        """Keep a job's outputs as answers, except those that a stop string cut short: they are incomplete."""
        for request, completion in zip(job.requests, job.completions, strict=True):
            if not isinstance(completion.output.stop_reason, str):
                self.known[key_of(request)] = completion.output.token_ids


class Engine(Protocol):
    """The part of ``LLM`` that decodes the answers; its members are those of ``LLM``."""

    @property
    def drafter(self) -> Drafter | None: ...

    def job(self, prompt: Prompt, params: SamplingParams, *, speculation: SpeculativeConfig | None = None) -> Job: ...

    def complete(self, jobs: Sequence[Job]) -> list[RequestOutput]: ...


def answers_of(engine: Engine) -> PlainAnswers | None:
    """The answers that the engine's drafter looks up; None where it is not the synthetic one."""
    drafter = off_its_device(engine.drafter)
    known = drafter.answer if isinstance(drafter, SyntheticDrafter) else None
    return known if isinstance(known, PlainAnswers) else None


def learn_answers(engine: Engine, prompts: Sequence[Prompt], params: Sequence[SamplingParams]) -> None:
    """Decode plainly the prompts that the synthetic drafter will draft for and has no answer to yet.

    Raises RequestError for a sampled request without a seed: its tokens would differ when it is decoded again.
    """
    answers = answers_of(engine)
    if answers is None:
        return
    if any(one.seed is None and one.temperature > 0 for one in params):
        raise RequestError("seed is None: with the synthetic drafter sampled requests need a fixed seed")
    # Without stop strings: the answer is the same up to them, and serves requests with other ones, too.
    jobs = [
        engine.job(prompt, replace(one, stop=()), speculation=PLAIN)
        for prompt, one in zip(prompts, params, strict=True)
    ]
    unknown = [job for job in jobs if not answers.cover(job)]
    if unknown:
        engine.complete(unknown)
    for job in unknown:
        answers.remember(job)


def key_of(request: Request) -> Any:
    """All of a request that its tokens under plain decoding depend on."""
    return tuple(request.prompt), request.sampling, request.max_tokens, request.stop_ids


# ---------------------------------------------------------------------------------------------------------------- build
# Builds from resolved options what runs: plans of stages and of a drafter's weights, the drafter, the loop.

CHUNK: Final = 128
"""Upper limit of a batch's prompt tokens where no measurement or model says what they cost. A larger one holds up other
requests' tokens for longer, with a smaller one the weights are read more often."""
GPU_CHUNK: Final = 512
"""``CHUNK`` on a GPU. On an H200 a prompt of 4,096 tokens enters Llama-3.1-8B at 7,000 tokens/s in pieces of 128, at
17,800 in pieces of 512, and at 19,000 in pieces of 2,048 (benchmarks/measured/machines/h200/gpu/prefill.json)."""


def stage_plans(setup: Resolved, drafter: Drafter | None = None) -> list[StagePlan]:
    """One plan per stage; those whose hidden states a learned drafter reads send them to it."""
    inner = off_its_device(drafter)
    learned = inner if isinstance(inner, LearnedDrafter) else None
    emulations = stage_emulations(
        setup.cluster, setup.stages, drafter, features=learned is not None, apart=any(setup.hosts)
    )
    return [
        StagePlan(
            model=str(setup.checkpoint.source),
            first=first,
            last=last,
            capacity=setup.capacity,
            dtype=setup.options.dtype,
            device=setup.devices[i],
            host=setup.hosts[i],
            gpu="" if setup.hosts[i] else own_uuid(setup.devices[i]),
            quantization=setup.quantization,
            numerics=setup.options.numerics,
            gives_back=not setup.options.enable_prefix_caching,
            threads=setup.threads[i],
            ranks=len(setup.groups[i]),
            places=setup.ranks[i] if len(set(setup.groups[i])) > 1 else (),
            max_model_len=setup.max_model_len,
            vocab_size=setup.checkpoint.vocab_size,
            tap=tap,
            emulation=emulations[i],
        )
        for i, ((first, last), tap) in enumerate(zip(setup.layers, taps(setup, learned), strict=True))
    ]


def share_device(setup: Resolved, drafter: Drafter | None, pipeline: SideChannel) -> None:
    """Have the drafter and a stage take turns on one modelled device, if the cluster places it there."""
    take_turns(setup.cluster, drafter, pipeline)


def taps(setup: Resolved, drafter: LearnedDrafter | None) -> list[TapSpec | None]:
    """The hidden states that each stage sends to a learned drafter; None for a stage that sends none."""
    if drafter is None:
        return [None] * setup.stages
    assert setup.speculator is not None
    wanted = tapped_layers(setup.layers, setup.speculator.reads)
    return [drafter.pipeline.tap(layers) if layers else None for layers in wanted]


def tapped_layers(layers: Sequence[tuple[int, int]], reads: Sequence[int]) -> list[tuple[int, ...]]:
    """The hidden states that each stage is to send, of those that a drafter ``reads``, as Hugging Face numbers them.

    State k is the output of layer k - 1, state 0 the embedding's. With L layers, state L has gone through the final
    norm, which the last stage applies; L + 1 is the same state before that norm.
    """
    total = layers[-1][1]
    # States from L on come from the last stage, whatever its layers: it alone has the final norm.
    owners = {state: len(layers) - 1 for state in reads if state >= total}
    for state in set(reads) - owners.keys():
        owners[state] = next(i for i, (first, last) in enumerate(layers) if state == 0 or first < state <= last)
    return [tuple(state for state in sorted(owners) if owners[state] == stage) for stage in range(len(layers))]


def feature_bytes(setup: Resolved) -> list[float]:
    """Bytes per row that each stage sends to the drafter, without headers; of the emulated model where there is one.

    All are 0 where no drafter reads features.
    """
    if setup.speculator is None:
        return [0.0] * setup.stages
    state = float(setup.checkpoint.hidden_size * DTYPE_BYTES[setup.options.dtype])
    if setup.cluster is not None and setup.cluster.as_model is not None:
        state = setup.cluster.as_model.row_bytes
    return [len(layers) * state for layers in tapped_layers(setup.layers, setup.speculator.reads)]


def make_drafter(
    setup: Resolved, config: SpeculativeConfig, clock: Clock, weights: Pipeline | None, answers: PlainAnswers
) -> Drafter:
    """The drafter of ``config.method``, on the cluster's device for it, with its own weights if it has any.

    Prompt lookup drafts beside it where ``config.lookup`` is set.
    """
    drafter = config.drafter_options.start(drafter_parts(setup, config, answers, weights))
    if config.drafter_options.priced_as is not Weights.NONE:
        drafter = on_its_device(setup.cluster, drafter, depth_of(setup), clock)
    return drafter if config.lookup is None else config.lookup.beside(drafter)


def depth_of(setup: Resolved) -> int | None:
    """Layers of the learned drafter; None where there is none."""
    return setup.speculator.depth if setup.speculator is not None else None


def drafter_parts(
    setup: Resolved, config: SpeculativeConfig, answers: PlainAnswers, weights: Pipeline | None = None
) -> DrafterParts:
    """The parts of this engine that a drafter starts with; ``weights`` are its own, once they have started."""
    return DrafterParts(
        vocab_size=setup.checkpoint.vocab_size,
        layers=setup.layers,
        chunk=max(chunk_of(setup.options), config.strategy_options.most_asked),
        speculator=setup.speculator,
        answer=answers,
        start_weights=lambda: started(weights),
    )


def chunk_of(options: EngineOptions) -> int:
    """Upper limit of the prompt tokens in a batch whose time has not been measured."""
    return options.prefill_chunk or (CHUNK if options.device == "cpu" else GPU_CHUNK)


def started(weights: Pipeline | None) -> Pipeline:
    """The drafter's weights, which have been started before the drafter is made."""
    assert weights is not None, "a drafter with weights is made once they have started"
    return weights


def weights_plan(setup: Resolved) -> tuple[list[StagePlan], str]:
    """The plan that loads the drafter's own weights, as a pipeline of one stage, and that pipeline's name."""
    if setup.speculator is not None:
        return [drafting_plan(setup, str(setup.speculator.path), 1, target=str(setup.checkpoint.source))], "drafter"
    assert setup.draft is not None
    return [drafting_plan(setup, str(setup.draft.source), setup.draft.num_layers)], "draft model"


def drafting_plan(setup: Resolved, model: str, layers: int, target: str = "") -> StagePlan:
    """The plan of the one stage that holds the drafter's weights, ``layers`` layers of ``model``.

    ``target`` is the target's checkpoint where the drafter reads its features, "" for a draft model.
    """
    return StagePlan(
        model=model,
        first=0,
        last=layers,
        capacity=setup.capacity,
        dtype=setup.options.dtype,
        device=setup.devices[-1],
        host=setup.drafter_host,
        gpu="" if setup.drafter_host else own_uuid(setup.devices[-1]),
        quantization=setup.draft_quantization,
        numerics=FAST if setup.options.numerics == FAST else AUTO,  # a drafter decides no token
        gives_back=not setup.options.enable_prefix_caching,
        threads=setup.threads[-1],
        max_model_len=setup.max_model_len,
        vocab_size=setup.checkpoint.vocab_size,
        target=target,
        tokenizer=str(setup.checkpoint.source),
        emulation=drafter_emulation(setup.cluster, depth_of(setup)),
    )


def make_loop(setup: Resolved, parts: Parts, clock: Clock, pieces: Pieces | None) -> EngineLoop:
    """The engine's loop over started ``parts``. ``pieces`` says how prompts are cut; None: into equal chunks."""
    options = setup.options
    pool = SlotPool(setup.kv_slots, setup.speculative_slots, options.enable_prefix_caching)
    scheduler = Scheduler(
        pool,
        chunk_of(options) if pieces is None else options.prefill_chunk or BATCH_ROWS,
        options.max_num_seqs,
        setup.max_model_len,
        options.prefill_stretch,
        pieces,
    )
    recovery = Recovery(parts, clock, options.recovery_timeout)
    return EngineLoop(
        parts.pipeline,
        parts.drafter,
        scheduler,
        clock,
        estimates=Estimates(
            contended=not setup.emulated,
            apart=parts.apart,
            stages=setup.stages,
            slowed=slowed(setup),
            modelled_plain_s=plain_step_seconds(setup.cluster) if setup.emulated and setup.cluster is not None else 0.0,
            drafts_on_stage=drafts_on_stage(setup),
        ),
        recovery=recovery,
    )


def slowed(setup: Resolved) -> float | None:
    """Assumed factor on a stage's time while others of its host compute, until it has been measured; 0 for none.

    Stages on the CPUs of a host read weights from the same memory and slow each other, and on a GPU that stages share
    the work of one waits for that of another. So the first trial of speculation has them take turns. None, for a
    drafter that answers only for nodes that have entered: it needs batches that overlap.
    """
    if setup.emulated:
        return 0.0
    if setup.speculation is not None and setup.speculation.drafter_options.needs_entered is not None:
        return None
    places = list(zip(setup.hosts, setup.devices, strict=False))  # the drafter's device, which comes last, is left out
    slow_each_other = all(device == "cpu" for _, device in places) or len(set(places)) < len(places)
    return TAKEN if slow_each_other else 0.0


def drafts_on_stage(setup: Resolved) -> bool:
    """Whether the drafter computes on the only stage's real device: on its GPU, or on cores that both have threads for.

    Several stages are left out: the times of theirs that overlap with the drafter's passes hold those passes already.
    """
    if setup.emulated or not setup.drafts or setup.stages > 1 or setup.drafter_host != setup.hosts[0]:
        return False
    stage, drafter = setup.devices[0], setup.devices[-1]
    if stage == drafter == "cpu":
        cores = shared_cores(setup)
        return cores is not None and not setup.drafter_host and cores.threads > cores.cores
    return stage == drafter


@dataclass(frozen=True)
class SharedCores:
    """The number of this host's cores, and of the threads of stages and drafter that share them."""

    threads: int
    cores: int


def shared_cores(setup: Resolved) -> SharedCores | None:
    """This host's cores and computing threads; None if stages are emulated or compute on another device."""
    if setup.emulated or setup.options.device != "cpu":
        return None
    here = [threads for threads, host in zip(setup.threads, setup.hosts, strict=False) if not host]
    # A stage on another host has its cores there; the drafter's threads are the last number.
    if setup.ranks:
        here = [place.threads for ranks in setup.ranks for place in ranks if not place.host]
    if setup.drafts:
        here.append(setup.threads[-1])
    return SharedCores(sum(here), usable_cores())


def apart(hosts: Sequence[str]) -> frozenset[int]:
    """The stages after which batches leave for another host; -1 stands for the engine, whose host is ""."""
    stops = ["", *hosts, ""]  # a batch goes from the engine through the stages and back
    return frozenset(i - 1 for i, (one, other) in enumerate(pairwise(stops)) if one != other)
