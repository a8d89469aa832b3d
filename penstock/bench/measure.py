"""Strategies against each other: interleaved runs of the same prompts on the same stages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Any

from penstock.bench.meter import Meter
from penstock.cluster import link_timings, stage_timings
from penstock.config import SpeculativeConfig
from penstock.core import RequestOutput, SamplingParams
from penstock.engine.loop import Observer

if TYPE_CHECKING:
    from penstock.engine.llm import LLM, Prompt

MAX_OVERRUNS = 0.05
"""Above this share of overruns an emulated figure is not valid."""


@dataclass
class StrategyRun:
    """What one strategy did over all prompts, decoding only: from the first token of each completion on.

    ``seconds`` and ``tokens`` leave out the first token, whose time is the prompt's. ``tokens_per_stage_time`` counts
    tokens per time of the slowest stage at one row, the paper's measure of a full pipeline. Shares are between 0 and 1.
    """

    strategy: str
    tokens: int
    seconds: float
    tokens_per_second: float
    tokens_per_stage_time: float
    mean_acceptance_length: float
    stage_busy: list[float]
    rows_computed: int
    rows_cancelled: int
    looping_outputs: int
    overrun_fraction: float
    overhead_per_hop_ms: float
    overhead_per_loop_ms: float
    identical_to_autoregressive: bool
    emulated: bool
    synthetic: bool
    outputs: list[RequestOutput] = field(repr=False, default_factory=list)

    @property
    def valid(self) -> bool:
        """Whether the host was fast enough for the emulation to mean something."""
        return self.overrun_fraction <= MAX_OVERRUNS

    def as_dict(self) -> dict[str, Any]:
        fields = asdict(self)
        del fields["outputs"]
        return {**fields, "valid": self.valid}


Named = tuple[str, SpeculativeConfig | None]


def measure(
    llm: LLM,
    prompts: Sequence[Prompt],
    params: Sequence[SamplingParams],
    strategies: Sequence[Named],
    warm_up: bool = True,
    observer: Observer | None = None,
    on_progress: Callable[[str, int, int], None] | None = None,
) -> list[StrategyRun]:
    """Run every prompt alone through every strategy, strategy after strategy within each prompt.

    Interleaving spreads whatever disturbs the host over all strategies alike. The outputs of the autoregressive run
    (added where ``strategies`` lacks it) are the reference for identity. ``observer`` watches every run too.
    """
    named = list(strategies)
    if not any(is_plain(config) for _, config in named):
        named.insert(0, ("autoregressive", None))
    if warm_up:
        for _, config in named:
            llm.run(prompts[:1], [short(params[0])], config)
            llm.loop.drain()
    meters: dict[str, list[Meter]] = {name: [] for name, _ in named}
    outputs: dict[str, list[RequestOutput]] = {name: [] for name, _ in named}
    if observer is not None:
        llm.observe(observer)
    for i, (prompt, one) in enumerate(zip(prompts, params, strict=True)):
        for name, config in named:
            if on_progress is not None:
                on_progress(name, i, len(prompts))
            meter = Meter(llm.setup.stages, llm.drafter)
            llm.observe(meter)
            outputs[name] += llm.run([prompt], [one], config)
            llm.loop.drain()
            llm.loop.observers.remove(meter)
            meter.stop()
            meters[name].append(meter)
    if observer is not None:
        llm.loop.observers.remove(observer)
    plain = next(name for name, config in named if is_plain(config))
    return [summarise(llm, name, config, meters[name], outputs[name], outputs[plain]) for name, config in named]


def is_plain(config: SpeculativeConfig | None) -> bool:
    return config is None or config.strategy == "autoregressive"


def short(params: SamplingParams) -> SamplingParams:
    """The same request, ended after a few tokens."""
    return SamplingParams(temperature=params.temperature, seed=params.seed, max_tokens=4, ignore_eos=True)


def summarise(
    llm: LLM,
    name: str,
    config: SpeculativeConfig | None,
    meters: Sequence[Meter],
    outputs: list[RequestOutput],
    plain: Sequence[RequestOutput],
) -> StrategyRun:
    cluster = llm.setup.cluster
    emulated = cluster is not None and cluster.emulated
    completions = [completion for output in outputs for completion in output.outputs]
    tokens = sum(len(completion.token_ids) - 1 for completion in completions)
    seconds = sum((c.seconds or 0.0) - (c.first_token_seconds or 0.0) for c in completions)
    links = None
    step = median(meter.stage_seconds for meter in meters)
    if emulated:
        assert cluster is not None
        links = link_timings(cluster)
        step = max(timing.seconds(1) for timing in stage_timings(cluster))
    late, all_batches = map(sum, zip(*(meter.overruns for meter in meters), strict=True))
    straight = [c for c in completions if not is_looping(c.token_ids)]
    accepted = sum(c.metrics.accepted for c in straight)
    drafts = sum(c.metrics.drafts for c in straight)
    busy = [sum(shares) / len(meters) for shares in zip(*(meter.stage_busy for meter in meters), strict=True)]
    return StrategyRun(
        strategy=name,
        tokens=tokens,
        seconds=seconds,
        tokens_per_second=tokens / seconds if seconds else 0.0,
        tokens_per_stage_time=tokens / seconds * step if seconds else 0.0,
        mean_acceptance_length=1 + accepted / drafts if drafts else 1.0,
        stage_busy=busy,
        rows_computed=sum(meter.rows_computed for meter in meters),
        rows_cancelled=sum(meter.rows_cancelled for meter in meters),
        looping_outputs=len(completions) - len(straight),
        overrun_fraction=late / all_batches if all_batches else 0.0,
        overhead_per_hop_ms=1e3 * median(meter.overhead_per_hop(links) for meter in meters),
        overhead_per_loop_ms=1e3 * median(meter.overhead_per_loop() for meter in meters),
        identical_to_autoregressive=all(same_tokens(a, b) for a, b in zip(outputs, plain, strict=True)),
        emulated=emulated,
        synthetic=config is not None and config.method == "synthetic",
        outputs=outputs,
    )


def same_tokens(one: RequestOutput, other: RequestOutput) -> bool:
    return [c.token_ids for c in one.outputs] == [c.token_ids for c in other.outputs]


def is_looping(token_ids: Sequence[int], longest: int = 16, times: int = 3) -> bool:
    """Whether the output ends in one phrase of at most ``longest`` tokens, repeated ``times`` times or more.

    At least twelve tokens must repeat, so that a row of equal signs or blanks does not count.
    """
    for length in range(1, longest + 1):
        count = max(times, -(-12 // length))
        tail = list(token_ids[-length * count :])
        if len(tail) == length * count and tail == tail[:length] * count:
            return True
    return False
