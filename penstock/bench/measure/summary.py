"""A strategy's figures in a setting, computed from its samples, as tables and reports show them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import fmean, median
from typing import TYPE_CHECKING, Any, Final

from penstock.bench.grid import Setting
from penstock.bench.intervals import paired_ratio
from penstock.bench.measure.latency import formula_ms
from penstock.bench.measure.sample import Sample
from penstock.bench.measure.theory import drafting_factor
from penstock.bench.measure.timeline import Timeline
from penstock.cluster import Cluster, stage_timings
from penstock.core import RequestOutput
from penstock.speculation import SpeculativeConfig, values_of

if TYPE_CHECKING:
    from penstock.engine.llm import LLM

MAX_OVERRUNS: Final = 0.05
"""Largest fraction of overruns at which an emulated figure is valid."""


@dataclass
class StrategyRun:
    """Figures of one strategy on all questions of one setting, for decoding only: from each first token on.

    ``seconds`` and ``tokens`` leave out the first token, whose time belongs to the prompt. ``tokens_per_stage_time`` is
    tokens per time of the slowest stage at one row, the paper's measure of a full pipeline. Shares are between 0 and 1.
    Lists by depth begin with the layer below the root (``hits.HitCounts``). A figure is None where there is nothing to
    divide by, as the acceptance of drafts in plain decoding.
    """

    strategy: str
    """The entry as written."""
    tokens: int
    seconds: float
    tokens_per_second: float
    tokens_per_stage_time: float
    mean_acceptance_length: float
    """1 + accepted tokens / drafts (trees): vLLM's figure, and AL in the report. Like the next three fields it leaves
    out looping outputs."""
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
    prompt_set: str = ""
    temperature: float = 0.0
    options: dict[str, Any] = field(default_factory=dict)
    """The strategy's own options that were in force."""
    draft_acceptance_rate: float | None = None
    """Accepted drafted tokens / drafted rows that entered: vLLM's figure, and AR in the report."""
    decided_by_depth: list[int] = field(default_factory=list)
    hit_by_depth: list[int] = field(default_factory=list)
    mean_ttft_ms: float = 0.0
    """Mean milliseconds to the first token, named as in vLLM's bench."""
    mean_e2el_ms: float = 0.0
    """Mean milliseconds from a request's start to its last token, named as in vLLM's bench."""
    wall_clock_speedup: float | None = None
    """Speed over that of plain decoding on the same question: geometric mean of the pairs."""
    wall_clock_speedup_interval: list[float] | None = None
    """95% bounds of the speed-up (``intervals.paired_ratio``); None for a single pair."""
    equivalent_acceptance_length: float | None = None
    """SPD's L' = n N / K: stages x tokens / timesteps of ideal lockstep (``lockstep.Lockstep``), geometric mean."""
    theoretical_speedup: float | None = None
    """L' reduced by the stages' waiting for drafts according to SPD's formulas (``theory``)."""
    efficiency: float | None = None
    """Wall-clock / theoretical speed-up: above 1 where links weigh most, since only plain decoding waits for them."""
    formula_ms_per_token: float | None = None
    """Milliseconds per token if every draft hit, by PipeDec's latency formula (``latency``); None where it does not
    apply."""
    feature_bytes_per_token: float = 0.0
    """Bytes of hidden states per token that the stages sent to a learned drafter, without those of the prompt."""
    requests: list[dict[str, Any]] = field(default_factory=list)
    outputs: list[RequestOutput] = field(repr=False, default_factory=list)
    timeline: Timeline | None = field(repr=False, default=None)
    """The first question's timeline, kept for the first setting only."""

    @property
    def valid(self) -> bool:
        """Whether the host was fast enough for the emulation to be valid."""
        return self.overrun_fraction <= MAX_OVERRUNS

    @property
    def setting(self) -> Setting:
        return Setting(self.prompt_set, self.temperature)

    def as_dict(self) -> dict[str, Any]:
        fields = asdict(replace(self, outputs=[], timeline=None))
        del fields["outputs"], fields["timeline"]
        return {**fields, "valid": self.valid}


def summarise(
    llm: LLM,
    name: str,
    config: SpeculativeConfig | None,
    samples: Sequence[Sample],
    plain: Sequence[Sample],
) -> StrategyRun:
    """The figures of a strategy's samples in one setting; ``plain`` are the plain samples of the same questions."""
    emulated = emulated_cluster(llm)
    tokens, seconds = sum(sample.tokens for sample in samples), sum(sample.seconds for sample in samples)
    step = median(sample.stage_seconds for sample in samples)
    if emulated:
        step = max(timing.seconds(1) for timing in stage_timings(emulated))
    late, modelled = map(sum, zip(*(sample.overruns for sample in samples), strict=True))
    setting = samples[0].question.setting
    return StrategyRun(
        strategy=name,
        tokens=tokens,
        seconds=seconds,
        tokens_per_second=tokens / seconds if seconds else 0.0,
        tokens_per_stage_time=tokens / seconds * step if seconds else 0.0,
        stage_busy=[fmean(shares) for shares in zip(*(sample.stage_busy for sample in samples), strict=True)],
        rows_computed=sum(sample.rows_computed for sample in samples),
        rows_cancelled=sum(sample.rows_cancelled for sample in samples),
        feature_bytes_per_token=sum(sample.feature_bytes for sample in samples) / tokens if tokens else 0.0,
        looping_outputs=sum(sample.looping for sample in samples),
        overrun_fraction=late / modelled if modelled else 0.0,
        overhead_per_hop_ms=1e3 * median(sample.overhead_per_hop for sample in samples),
        overhead_per_loop_ms=1e3 * median(sample.overhead_per_loop for sample in samples),
        identical_to_autoregressive=all(same_tokens(a.output, b.output) for a, b in zip(samples, plain, strict=True)),
        emulated=emulated is not None,
        synthetic=config is not None and config.method == "synthetic",
        prompt_set=setting.prompt_set,
        temperature=setting.temperature,
        options=values_of(config.strategy_options) if config else {},
        formula_ms_per_token=formula_ms(llm.setup, config),
        mean_ttft_ms=1e3 * fmean(sample.first_token_seconds for sample in samples),
        mean_e2el_ms=1e3 * fmean(sample.latency_seconds for sample in samples),
        requests=[sample.as_dict() for sample in samples],
        outputs=[sample.output for sample in samples],
        **acceptance(samples),
        **speedups(llm.setup.stages, drafting_factor(llm.setup, config), samples, plain),
    )


def acceptance(samples: Sequence[Sample]) -> dict[str, Any]:
    """The figures on drafts, by field of StrategyRun. Looping outputs, which flatter every drafter, are left out."""
    straight = [sample for sample in samples if not sample.looping]
    accepted = sum(sample.completion.metrics.accepted for sample in straight)
    drafts = sum(sample.completion.metrics.drafts for sample in straight)
    rows = sum(sample.hits.entered for sample in straight)
    decided: Counter[int] = sum((sample.hits.decided for sample in straight), Counter())
    hit: Counter[int] = sum((sample.hits.hit for sample in straight), Counter())
    depths = range(1, max(decided, default=0) + 1)
    return {
        "mean_acceptance_length": 1 + accepted / drafts if drafts else 1.0,
        "draft_acceptance_rate": sum(sample.hits.accepted for sample in straight) / rows if rows else None,
        "decided_by_depth": [decided[depth] for depth in depths],
        "hit_by_depth": [hit[depth] for depth in depths],
    }


def speedups(stages: int, drafting_factor: float, samples: Sequence[Sample], plain: Sequence[Sample]) -> dict[str, Any]:
    """L', wall-clock and theoretical speed-up, and the quotient of the last two, by field of StrategyRun.

    All are geometric means over the questions whose completions have a second token.
    """
    pairs = [(one, base) for one, base in zip(samples, plain, strict=True) if one.speed and base.speed]
    wall = paired_ratio([one.speed / base.speed for one, base in pairs if one.speed and base.speed])
    length = paired_ratio([stages * one.tokens / one.timesteps for one, _ in pairs])
    theory = length.mean * drafting_factor if length else None
    return {
        "wall_clock_speedup": wall.mean if wall else None,
        "wall_clock_speedup_interval": wall.bounds if wall else None,
        "equivalent_acceptance_length": length.mean if length else None,
        "theoretical_speedup": theory,
        "efficiency": wall.mean / theory if wall and theory else None,
    }


def same_tokens(one: RequestOutput, other: RequestOutput) -> bool:
    return [c.token_ids for c in one.outputs] == [c.token_ids for c in other.outputs]


def emulated_cluster(llm: LLM) -> Cluster | None:
    cluster = llm.setup.cluster
    return cluster if cluster is not None and cluster.emulated else None
