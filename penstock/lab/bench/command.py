"""``penstock bench``: its plan, the engines that it starts, and what it prints and writes."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.progress import Progress

from penstock.cluster import Cluster, load_cluster
from penstock.config import FieldError
from penstock.core import SamplingParams
from penstock.engine.options import EngineOptions
from penstock.engine.resolve import check_options
from penstock.environment import PLOTS, require
from penstock.lab.bench.comparison import (
    SmallModel,
    asked_once,
    measure_all,
    measured_small_model,
    modelled_small_model,
    on_time,
    questions_of,
)
from penstock.lab.bench.peer_worker import check_peers, needs_of
from penstock.lab.bench.peers import PeerRun, peers_beside
from penstock.lab.bench.report import SMALL_MODEL, page_of, report_of
from penstock.lab.bench.summary import NothingToTime, StrategyRun, silent_settings
from penstock.lab.grid import (
    DEFAULT_PROMPTS,
    PLACED,
    PLAIN,
    BenchOptions,
    Conversation,
    Named,
    Question,
    Setting,
    conversations_of,
    is_plain,
    parse_entries,
    read_prompt_sets,
    strategy_of,
    with_plain,
)
from penstock.lab.record import check_record, record
from penstock.lab.report import consoles, prepare, settings_of, this_host
from penstock.pipeline.forkserver import fork_from_here
from penstock.speculation import SpeculativeConfig, with_drafter
from penstock.terminal import progress_bar

if TYPE_CHECKING:
    from penstock.engine.resolve import Resolved


@dataclass(frozen=True)
class BenchPlan:
    """The bench that the options describe.

    ``drafting`` configures the engine: the drafter of all entries, and as many slots as the widest entry needs; None if
    nothing speculates.
    """

    strategies: list[Named]
    conversations: list[Conversation]
    clusters: dict[str, Cluster | None]
    """Clusters by the drafter's place; only one, under "", where no place was given."""
    drafting: SpeculativeConfig | None
    peers: tuple[str, ...] = ()

    @property
    def cluster(self) -> Cluster | None:
        """Any of the clusters, which differ only in the drafter's place."""
        return next(iter(self.clusters.values()))

    @property
    def measures_small_model(self) -> bool:
        """Whether a draft model is measured by itself; where devices are emulated its speed is modelled instead."""
        emulated = self.cluster is not None and self.cluster.emulated
        return not emulated and self.drafting is not None and self.drafting.method == "draft_model"

    def total(self, questions: Sequence[Question]) -> int:
        """The number of requests that will be decoded."""
        small = len(asked_once(questions)) if self.measures_small_model else 0
        return len(questions) * (len(self.strategies) * len(self.clusters) + len(self.peers)) + small


@dataclass
class Measured:
    """The results of a bench. ``silent``: why nothing could be timed, for each setting without runs."""

    setup: Resolved
    questions: list[Question]
    runs: list[StrategyRun]
    silent: dict[Setting, str]
    peers: list[PeerRun] = field(default_factory=list)
    small: list[SmallModel] = field(default_factory=list)


def run_bench(options: BenchOptions, console: Console | None = None) -> list[StrategyRun]:
    """Run the bench, print its tables, write JSON file and report. Raises ConfigError before anything starts."""
    plan = checked(options)
    if options.report is not None:
        prepare(options.report)
    console, out = consoles(console)
    fork_from_here()
    with progress_bar(console) as progress:
        found = measured(options, plan, Ticker(progress, plan))
    if found.runs:
        show(options, plan, found, out)
    if found.silent:
        raise NothingToTime("; ".join(found.silent.values()))
    return found.runs


def checked(options: BenchOptions) -> BenchPlan:
    """The plan, if the bench can begin; the model is fetched if it is not here.

    Raises ConfigError for files, options or a model that cannot be used, and for a program that is not installed.
    """
    plan = plan_of(options)
    if options.record is not None:
        check_record(options.record, plan.drafting)
    require([*needs_of(plan.peers), *([PLOTS] if options.report is not None else [])])
    for place in plan.clusters:
        check_options(engine_options(options, plan, place), options.max_tokens)
    return plan


def show(options: BenchOptions, plan: BenchPlan, found: Measured, console: Console) -> None:
    """Print tables and remarks, and write the files that were asked for."""
    runs, small, peers = found.runs, found.small, found.peers
    said = [*turns_remark(options, plan, found), *seeds_remark(options, plan)]
    report = report_of(all_settings(options, found.setup.stages), runs, small, peers, said)
    report.deliver(console, options.json)
    if options.report is not None:
        report.write_folder(options.report, "bench", "Strategies compared", page_of(options.report, runs, small, peers))
    if options.record is not None:
        for file in record_runs(options.record, found.setup, runs, found.questions):
            console.print(f"recorded: {file}", highlight=False, markup=False)


def plan_of(options: BenchOptions) -> BenchPlan:
    """The plan of the options, checked as far as that needs no checkpoint.

    Raises ConfigError for a strategy, prompt file, cluster or peer that cannot be used.
    """
    strategies = with_plain(parse_entries(options.strategies, options.speculative_config or {}, options.model))
    configs = [config for _, config in strategies if config is not None and not is_plain(config)]
    drafting = max(configs, key=lambda config: config.strategy_options.most_rows, default=None)
    sets = read_prompt_sets(options.prompts, options.num_prompts)
    params = SamplingParams(top_p=options.top_p, top_k=options.top_k, seed=options.seed, max_tokens=options.max_tokens)
    seeds_at_zero = options.seeds if is_synthetic(drafting) else 1
    conversations = conversations_of(sets, options.temperature, options.seeds, params, seeds_at_zero)
    if options.drafter_on and (drafting is None or drafting.method == "ngram"):
        raise FieldError("drafter_on", "means nothing where no device drafts; remove it")
    clusters = {place: cluster_of(options, place) for place in options.drafter_on or ("",)}
    if options.data_parallel_size > 1 and is_synthetic(drafting):
        raise FieldError("speculative_config", "method 'synthetic' has to know every answer: it measures one engine")
    plan = BenchPlan(strategies, conversations, clusters, drafting, options.peer)
    check_peers(options.peer, options.model, plan.cluster)
    return plan


def cluster_of(options: BenchOptions, place: str) -> Cluster | None:
    """The named cluster with the options' changes and the drafter in its place, or None.

    Raises ConfigError for one that cannot be loaded, and FieldError for a change where no cluster is named.
    """
    given = {name: getattr(options, name) for name in ("time_scale", "bandwidth_gbit_s")}
    changes: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    if place and options.cluster is not None:
        changes["drafter_on"] = place
    if options.cluster is None:
        if changes:
            raise FieldError(next(iter(changes)), "changes modelled times: it needs an emulated cluster")
        return None
    return load_cluster(options.cluster, **changes)


def is_synthetic(drafting: SpeculativeConfig | None) -> bool:
    """Whether drafts depend on the seed even where the text does not."""
    return drafting is not None and drafting.method == "synthetic"


def engine_options(options: BenchOptions, plan: BenchPlan, place: str) -> EngineOptions:
    """The engine's options with the drafter at ``place``; "" leaves the drafter where it is."""
    return EngineOptions(
        model=options.model,
        cluster=plan.clusters[place],
        drafter_on=place or None,
        hosts=options.hosts,
        keys=options.keys,
        insecure=options.insecure,
        pipeline_parallel_size=options.pipeline_parallel_size,
        data_parallel_size=options.data_parallel_size,
        speculative_config=plan.drafting,
        dtype=options.dtype,
        threads=options.threads,
        quantization=options.quantization,
        speculative_slots=options.speculative_slots,
        enable_prefix_caching=False,  # so that every strategy computes every prompt
    )


def measured(options: BenchOptions, plan: BenchPlan, ticker: Ticker) -> Measured:
    """Measure every strategy with the drafter at each place, then the small model.

    An engine is started for each place. Raises ConfigError and PipelineError.
    """
    from penstock.emulation.cluster import RealTimeExecutor
    from penstock.engine.llm import LLM
    from penstock.engine.opening import open_executor

    found: Measured | None = None
    for place, cluster in plan.clusters.items():
        engine = engine_options(options, plan, place)
        emulated = cluster is not None and cluster.emulated
        with LLM(**vars(engine), host=RealTimeExecutor() if emulated else open_executor(engine)) as llm:
            questions = questions_of(llm, plan.conversations, options.raw) if found is None else found.questions
            ticker.begin(questions)
            with on_time(llm), peers_beside(plan.peers, llm, ticker.peer_begins) as peers:
                peers.warm_up(questions[0])
                runs = measure_all(
                    llm, questions, plan.strategies, on_progress=ticker.strategy_begins, on_answered=peers.answer
                )
            if found is None:
                found = Measured(llm.setup, questions, [], silent_settings(llm, runs, questions))
                found.peers = peers.runs([run for run in runs if run.setting not in found.silent])
        found.runs += placed(runs, place, first=not found.runs) if place else runs
    assert found is not None
    found.runs = [run for run in found.runs if run.setting not in found.silent]
    if not plan.measures_small_model:
        found.small = modelled_small_model(found.setup, found.questions)
        return found
    assert found.setup.draft is not None
    with LLM(
        found.setup.draft.source,
        pipeline_parallel_size=1,
        dtype=options.dtype,
        quantization=options.quantization,
        speculative_config=None,
        enable_prefix_caching=False,
    ) as small:
        found.small = measured_small_model(small, asked_once(found.questions), ticker.small_model_begins)
    return found


def placed(runs: Sequence[StrategyRun], place: str, *, first: bool) -> list[StrategyRun]:
    """The runs, whose names say where their drafter ran. Plain decoding has none, and stays in the first runs only."""
    for run in runs:
        if strategy_of(run.strategy) != PLAIN:
            run.strategy += f"{PLACED}{place}"
    return [run for run in runs if first or strategy_of(run.strategy) != PLAIN]


# ----------------------------------------------------------------------------------------------------------- progress
# The progress bar.


class Ticker:
    """Advances the progress bar by one step whenever a request begins."""

    def __init__(self, progress: Progress, plan: BenchPlan) -> None:
        self._progress = progress
        self._plan = plan
        self._questions: Sequence[Question] = ()
        self._task = progress.add_task("starting, and answering first turns", total=None)
        self._done = itertools.count()

    def begin(self, questions: Sequence[Question]) -> None:
        """Show the number of requests, which is known now, while each strategy warms up."""
        self._questions = questions
        self._progress.update(self._task, description="warming up", total=self._plan.total(questions))

    def strategy_begins(self, name: str, index: int, total: int) -> None:
        """Note that a strategy begins with a question."""
        self._move_on(f"{self._questions[index].setting}: {name}")

    def peer_begins(self, name: str, question: Question) -> None:
        """Note that a peer begins with a question."""
        self._move_on(f"{question.setting}: {name}")

    def small_model_begins(self) -> None:
        """Note that the small model begins with a question."""
        self._move_on(SMALL_MODEL)

    def _move_on(self, what: str) -> None:
        """Advance by one request, and show what begins."""
        # Entries have brackets, which rich would read as markup.
        self._progress.update(self._task, description=escape(what), completed=next(self._done))


# ----------------------------------------------------------------------------------------------------------- settings
# What a reader has to know of the bench's settings.


def turns_remark(options: BenchOptions, plan: BenchPlan, found: Measured) -> list[str]:
    """A remark about how prompts were given to the model, if there was a choice."""
    if not isinstance(found.questions[0].prompt, str):
        followed = any(question.turn for question in found.questions)
        later = "; later turns follow plain decoding's answers to those before" if followed else ""
        return [f"The chat template was applied{later}. --raw continues the prompts as they stand."]
    if all(len(conversation.turns) == 1 for conversation in plan.conversations):
        return []
    why = "--raw" if options.raw else "the model is no chat model"
    return [f"Of each conversation the first turn alone was asked, as it stands: {why}."]


def seeds_remark(options: BenchOptions, plan: BenchPlan) -> list[str]:
    """A remark if fewer seeds ran than were asked for."""
    if options.seeds == 1 or 0.0 not in options.temperature or is_synthetic(plan.drafting):
        return []
    return [f"T = 0 is greedy, every seed gives the same text: one seed was run, not {options.seeds}."]


def all_settings(options: BenchOptions, stages: int) -> dict[str, Any]:
    """Everything that is needed to repeat the run, and the versions and the host on which it ran."""
    speculation = options.speculative_config
    if any(strategy_of(entry) != PLAIN for entry in options.strategies):
        speculation = with_drafter(speculation or {}, options.model)
    settings = settings_of(
        options,
        without=("json", "report", "record"),
        packages=["torch", "transformers"],
        prompts=["package" if path == DEFAULT_PROMPTS else path.name for path in options.prompts],
        speculative_config=speculation,
        stages=stages,
    )
    return {**settings, "host": this_host()}


def record_runs(path: Path, setup: Resolved, runs: Sequence[StrategyRun], questions: Sequence[Question]) -> list[Path]:
    """Record plain decoding's runs, a file for each temperature; the names of several end in ``-T0.6`` and so on."""
    temperatures = sorted({run.temperature for run in runs})
    files = []
    for temperature in temperatures:
        plain = [run for run in runs if run.strategy == PLAIN and run.temperature == temperature]
        params = [question.params for run in plain for question in questions if question.setting == run.setting]
        file = path if len(temperatures) == 1 else path.with_stem(f"{path.stem}-T{temperature:g}")
        record(file, setup, [output for run in plain for output in run.outputs], params)
        files.append(file)
    return files
