"""The figures of a bench's runs: of one request, of a setting, by the papers' theory, and where nothing was timed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

from penstock.cluster import Cluster, link_timings, stage_timings
from penstock.cluster.timing import MAX_OVERRUNS, LinkTiming
from penstock.core import CompletionOutput, PenstockError, RequestOutput
from penstock.drafters.base import Weights
from penstock.emulation.cluster import drafter_pass
from penstock.engine.completion import Prompt, ended_at_once, why_empty
from penstock.engine.resolve import Resolved
from penstock.lab.bench.meter import HitCounts, Meter, Timeline
from penstock.lab.grid import PLAIN, Question, Setting
from penstock.lab.report import is_looping, paired_ratio
from penstock.speculation import SpeculativeConfig, values_of
from penstock.strategies.pipedec import StaticTreeOptions

if TYPE_CHECKING:
    from penstock.engine.llm import LLM


# --------------------------------------------------------------------------------------------------------------- sample
# The figures of one strategy's run of one question that remain when its events are dropped.


@dataclass(frozen=True)
class Sample:
    """One strategy's run of one question. Times are seconds.

    They count from the request's start, except ``seconds``, which like ``tokens`` counts from the first token.
    ``overruns``: (how many, of how many). ``stage_busy``: shares, 0 to 1, by stage.
    """

    question: Question
    output: RequestOutput
    tokens: int
    seconds: float
    latency_seconds: float
    first_token_seconds: float
    timesteps: int
    hits: HitCounts
    stage_busy: list[float]
    stage_seconds: float
    rows_computed: int
    rows_cancelled: int
    feature_bytes: float
    overruns: tuple[int, int]
    overhead_per_hop: float
    overhead_per_loop: float

    @property
    def completion(self) -> CompletionOutput:
        return self.output.outputs[0]

    @property
    def speed(self) -> float | None:
        """Tokens per second; None unless a later result than the first token's brought another token."""
        return self.tokens / self.seconds if self.timesteps else None

    @property
    def looping(self) -> bool:
        return is_looping(self.completion.token_ids)

    def as_dict(self) -> dict[str, Any]:
        """The figures by which another bench of the same questions is compared."""
        return {
            "prompt": self.question.number,
            "prompt_sha256": self.question.prompt_sha256,
            "seed": self.question.params.seed,
            "tokens": self.tokens,
            "seconds": self.seconds,
            "timesteps": self.timesteps,
            "ttft_ms": 1e3 * self.first_token_seconds,
            "e2el_ms": 1e3 * self.latency_seconds,
        }


def sample_of(question: Question, output: RequestOutput, meter: Meter, links: Sequence[LinkTiming] | None) -> Sample:
    """The figures of a watched request. ``links``: the modelled hops; None if nothing is emulated."""
    completion = output.outputs[0]
    latency, first = completion.seconds or 0.0, completion.first_token_seconds or 0.0
    return Sample(
        question=question,
        output=output,
        tokens=len(completion.token_ids) - 1,
        seconds=latency - first,
        latency_seconds=latency,
        first_token_seconds=first,
        timesteps=meter.lockstep.timesteps,
        hits=meter.hits,
        stage_busy=meter.stage_busy,
        stage_seconds=meter.stage_seconds,
        rows_computed=meter.rows_computed,
        rows_cancelled=meter.rows_cancelled,
        feature_bytes=meter.feature_bytes,
        overruns=meter.overruns,
        overhead_per_hop=meter.overhead_per_hop(links),
        overhead_per_loop=meter.overhead_per_loop(),
    )


# -------------------------------------------------------------------------------------------------------------- latency
# PipeDec's formulas for the time per token (Yin et al., section 2.4), with the prices of an emulated cluster.
#
#     plain          sum of T_c + sum of T_t                      every stage and every hop, one after the other
#     speculating    max(T_draft, C x max of T_c + max of T_t)    a step, which gives a token where every draft hits
#
# T_c is a stage's time for a batch, T_t that of a hop between two stages, T_draft that of a pass of the drafter. C,
# which the paper leaves to the hardware, is the time of a batch with the strategy's widest layer over that of one row.


def formula_ms(setup: Resolved, config: SpeculativeConfig | None) -> float | None:
    """Milliseconds per token; None if nothing is emulated, or if whole trees are drafted before they are sent."""
    cluster = setup.cluster
    if cluster is None or not cluster.emulated or (config is not None and config.strategy_options.drafts_whole_trees):
        return None
    rows = max(1, config.strategy_options.most_rows) if config is not None else 1
    stages = [timing.seconds(rows) for timing in stage_timings(cluster)]
    # The first and the last link connect the engine, and are no hops between stages.
    hops = [timing.seconds(rows) for timing in link_timings(cluster)[1:-1]]
    if config is None or not config.strategy_options.drafts:
        return 1e3 * (sum(stages) + sum(hops))
    return 1e3 * max(draft_seconds(setup, cluster, config, rows), max(stages) + max(hops, default=0.0))


def draft_seconds(setup: Resolved, cluster: Cluster, config: SpeculativeConfig, rows: int) -> float:
    """Seconds of a drafter's pass over ``rows`` rows; 0 if its answers take no time."""
    if config.drafter_options.priced_as is Weights.NONE:
        return 0.0
    timing = drafter_pass(cluster, setup.speculator.depth if setup.speculator is not None else None)
    return timing.seconds(rows) if timing is not None else 0.0


# --------------------------------------------------------------------------------------------------------------- theory
# SPD's theoretical speed-ups (Wang et al., Speculative Pipeline Decoding, section 4.2), for all strategies.
#
# With N tokens in K pipeline steps over n stages the equivalent acceptance length is L' = n N / K (equation 4), where
# bubbles count as steps (``meter.Lockstep``). Plain decoding has 1, and a tree verified in one batch its acceptance
# length. L' is the theoretical speed-up if drafting takes place beside the stages' steps. For a target with L layers
# and a drafter with L_s layers of the same kind:
#
#     S_spd   = L' x min(1, L / (L_s n))  drafts from the tokens' states, at the beginning of a step
#     S_ppsd  = L' x L / (L_s n + L)      drafts from their states at the end of a step, and every step waits for it
#     S_eagle = L' x L / (L_s m + L)      drafts m levels one after the other, while the stages wait
#
# The paper prints S_spd = L', under the condition of its section 3.4 that L_s is at most L / n. A drafter with more
# layers takes longer than a stage, and every step waits for it.


def drafting_factor(setup: Resolved, config: SpeculativeConfig | None) -> float:
    """The theoretical speed-up over L': below 1 if the stages have to wait for a learned drafter.

    The paper has no formula for other drafters, and their time is left out. L is the number of layers of the model
    whose times are emulated, if any are, else of the target.
    """
    if config is None or setup.speculator is None:
        return 1.0
    model = setup.cluster.as_model if setup.cluster is not None else None
    target = model.layers if model is not None else setup.checkpoint.num_layers
    own, passes = setup.speculator.depth, waits(setup, config)
    return target / (own * passes + target) if passes else target / max(target, own * setup.stages)


def waits(setup: Resolved, config: SpeculativeConfig) -> int:
    """The number of the drafter's passes per trip that begin only after the stages' steps: n, m or 0."""
    assert setup.speculator is not None
    if isinstance(config.strategy_options, StaticTreeOptions):
        return config.strategy_options.tree_depth
    return setup.stages if config.drafter_options.needs_entered is not None else 0


# -------------------------------------------------------------------------------------------------------------- summary
# A strategy's figures in a setting, from its samples, as tables and reports show them.


@dataclass
class StrategyRun:
    """The figures of one strategy on all questions of one setting, for decoding only: from each first token on.

    ``seconds`` and ``tokens`` leave out the first token, whose time belongs to the prompt. ``tokens_per_stage_time``:
    tokens per time that the slowest stage takes for one row, the paper's measure of a full pipeline. Shares are from 0
    to 1. Lists by depth begin with the layer below the root (``meter.HitCounts``). A figure is None if there is nothing
    to divide by, as the acceptance of drafts in plain decoding.
    """

    strategy: str
    """The entry as written."""
    tokens: int
    seconds: float
    tokens_per_second: float
    tokens_per_stage_time: float
    mean_acceptance_length: float
    """1 + accepted tokens / drafts (trees), as vLLM defines it; AL in the report. Looping outputs are left out, as in
    the next three fields."""
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
    """The strategy's own options, those that have their defaults included."""
    draft_acceptance_rate: float | None = None
    """Accepted drafted tokens / drafted rows that entered, as vLLM defines it; AR in the report."""
    decided_by_depth: list[int] = field(default_factory=list)
    hit_by_depth: list[int] = field(default_factory=list)
    mean_ttft_ms: float = 0.0
    """Mean milliseconds to the first token, named as in vLLM's bench."""
    mean_e2el_ms: float = 0.0
    """Mean milliseconds from a request's start to its last token, named as in vLLM's bench."""
    wall_clock_speedup: float | None = None
    """Speed in proportion to plain decoding of the same question: the geometric mean of the pairs."""
    wall_clock_speedup_interval: list[float] | None = None
    """95% bounds of the speed-up (``report.paired_ratio``); None for a single pair."""
    equivalent_acceptance_length: float | None = None
    """SPD's L' = n N / K: stages x tokens / timesteps of ideal lockstep (``meter.Lockstep``), geometric mean."""
    theoretical_speedup: float | None = None
    """L' reduced by the stages' waiting for drafts, by SPD's formulas (``drafting_factor``)."""
    efficiency: float | None = None
    """Wall-clock / theoretical speed-up: above 1 if links weigh most, since only plain decoding waits for them."""
    formula_ms_per_token: float | None = None
    """Milliseconds per token if every draft hit, by PipeDec's latency formula (``formula_ms``); None if it has none."""
    feature_bytes_per_token: float = 0.0
    """Bytes of hidden states per token that the stages sent to a learned drafter, without those of the prompt."""
    requests: list[dict[str, Any]] = field(default_factory=list)
    outputs: list[RequestOutput] = field(repr=False, default_factory=list)
    timeline: Timeline | None = field(repr=False, default=None)
    """The first question's timeline, in the runs of the first setting only."""

    @property
    def valid(self) -> bool:
        """Whether the host was fast enough for emulated times."""
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
    """The figures of a strategy's samples in one setting; ``plain``: plain decoding's samples of the same questions."""
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
    """The figures about drafts, by field of StrategyRun. Looping outputs are left out: they flatter every drafter."""
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
    """L', wall-clock and theoretical speed-up, and the ratio of the last two, by field of StrategyRun.

    All are geometric means over the questions whose completions have at least two tokens.
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
    """Whether two outputs have the same tokens in all their completions."""
    return [c.token_ids for c in one.outputs] == [c.token_ids for c in other.outputs]


def emulated_cluster(llm: LLM) -> Cluster | None:
    """The engine's cluster if it is emulated, else None."""
    cluster = llm.setup.cluster
    return cluster if cluster is not None and cluster.emulated else None


# -------------------------------------------------------------------------------------------------------------- silence
# Requests that leave nothing to time, and the error in place of a row of zeros.


class NothingToTime(PenstockError):
    """Every request of a setting ended before a token could be timed: the first that is timed is the second one."""


def silent_settings(llm: LLM, runs: Sequence[StrategyRun], questions: Sequence[Question]) -> dict[Setting, str]:
    """The settings in which no request has a second token, each with the reason in words."""
    prompts = {question.setting: question.prompt for question in questions}
    found = {}
    for run in runs:
        if run.strategy == PLAIN and not run.tokens:
            found[run.setting] = f"{run.setting}: nothing to time; {reason(llm, run, prompts[run.setting])}"
    return found


def reason(llm: LLM, run: StrategyRun, prompt: Prompt) -> str:
    """Why the requests of a run have no second token, in words."""
    completion = run.outputs[0].outputs[0]
    if not ended_at_once(completion):
        return f"no request has more than {len(completion.token_ids)} token (it ended with {completion.stop_reason!r})"
    token = completion.token_ids[0]
    requests = "the request" if len(run.outputs) == 1 else f"all {len(run.outputs)} requests"
    return f"{requests}: {why_empty(token, llm.get_tokenizer(), plain_text=isinstance(prompt, str))}"


def first_token_remark(setting: Setting, runs: Sequence[StrategyRun]) -> str | None:
    """A remark about requests that are missing from the speed-ups; None if there are none."""
    silent = sum(not request["tokens"] for request in runs[0].requests)
    if not silent:
        return None
    of = len(runs[0].requests)
    return f"{setting}: {silent} of {of} requests ended with their first token, left out of the speed-ups."
