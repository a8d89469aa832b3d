"""``penstock bench --data-parallel-size N``: all requests of a setting at once over N engines, with each strategy.

One engine is compared request by request (``comparison.py``). With several the question is how soon they have answered
all requests together. Each strategy has engines of its own, one after the other.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from penstock.core import RequestOutput
from penstock.engine.llm import LLM
from penstock.engine.replicas.offline import ReplicatedLLM
from penstock.lab.bench.command import BenchPlan, all_settings, checked, engine_options
from penstock.lab.bench.comparison import questions_of
from penstock.lab.bench.report import IDENTICAL
from penstock.lab.bench.summary import same_tokens
from penstock.lab.grid import WARM_UP, BenchOptions, Question, Setting, is_plain, settings_of, short
from penstock.lab.report import Columns, Report, consoles, figures_table, times
from penstock.pipeline.forkserver import fork_from_here
from penstock.terminal import progress_bar


@dataclass(frozen=True)
class EnginesRun:
    """All requests of one setting over all engines, queued together, with one strategy.

    ``seconds`` pass from the queueing of the first request to the end of the last, prompts included. ``by_engine``:
    the number of requests that each engine was given. ``speed_up``: over plain decoding on as many engines.
    """

    strategy: str
    prompt_set: str
    temperature: float
    engines: int
    requests: int
    tokens: int
    seconds: float
    mean_ttft_ms: float
    mean_e2el_ms: float
    by_engine: list[int]
    speed_up: float
    identical_to_autoregressive: bool
    outputs: list[RequestOutput] = field(repr=False)

    @property
    def setting(self) -> Setting:
        """The setting that was measured."""
        return Setting(self.prompt_set, self.temperature)

    @property
    def tokens_per_second(self) -> float:
        """Tokens of all requests per second of the whole run."""
        return self.tokens / self.seconds

    def as_dict(self) -> dict[str, Any]:
        """The figures, without the outputs."""
        fields = {name: value for name, value in vars(self).items() if name != "outputs"}
        return {**fields, "tokens_per_second": self.tokens_per_second}


COLUMNS: Final[Columns[EnginesRun]] = {
    "requests": lambda run: str(run.requests),
    "on each\nengine": lambda run: " ".join(map(str, run.by_engine)),
    "tokens/s,\nof all": lambda run: f"{run.tokens_per_second:.2f}",
    "speed-up": lambda run: times(run.speed_up),
    IDENTICAL: lambda run: "yes" if run.identical_to_autoregressive else "NO",
    "first\ntoken,\ns": lambda run: f"{run.mean_ttft_ms / 1e3:.3f}",
    "latency,\ns": lambda run: f"{run.mean_e2el_ms / 1e3:.2f}",
}
"""Columns of the table, by heading."""

OnSetting = Callable[[str, Setting], None]
"""Function that is called with the strategy's label and the setting before the setting is measured."""


def run_bench_engines(options: BenchOptions, console: Console | None = None) -> list[EnginesRun]:
    """Run the bench, print its tables and write the JSON file. Raises ConfigError before anything starts."""
    plan = checked(options)
    console, out = consoles(console)
    fork_from_here()
    with progress_bar(console) as progress:
        task = progress.add_task("starting", total=None)
        runs, stages = measured(options, plan, lambda name, at: progress.update(task, description=f"{at}: {name}"))
    report_of(all_settings(options, stages), runs).deliver(out, options.json)
    return runs


def measured(options: BenchOptions, plan: BenchPlan, on_setting: OnSetting) -> tuple[list[EnginesRun], int]:
    """The runs, and the stages of each engine. Plain decoding comes first: it is the reference of the others."""
    engine = engine_options(options, plan, "")
    # On an engine of its own: the prefix caches of the measured ones must not hold earlier turns.
    with LLM(**vars(replace(engine, speculative_config=None))) as llm:
        questions = questions_of(llm, plan.conversations, options.raw, llm.generate)
    plain: dict[Setting, EnginesRun] = {}
    runs, stages = [], 0
    for name, config in plan.strategies:
        given = replace(engine, speculative_config=None if is_plain(config) else config)
        with LLM(**vars(given)) as llm:
            assert isinstance(llm, ReplicatedLLM)
            stages = llm.setup.stages
            warm_up(llm, questions[0])
            for setting in settings_of(questions):
                on_setting(name, setting)
                asked = [question for question in questions if question.setting == setting]
                run = together(llm, name, asked, plain.get(setting))
                plain.setdefault(setting, run)
                runs.append(run)
    return sorted(runs, key=lambda run: [*plain].index(run.setting)), stages


def warm_up(llm: ReplicatedLLM, question: Question) -> None:
    """Have each engine answer a request that does not count: of as many requests at once, each engine gets one."""
    count = len(llm.replicas())
    llm.generate([question.prompt] * count, [short(question.params)] * count)


def together(llm: ReplicatedLLM, name: str, asked: Sequence[Question], plain: EnginesRun | None) -> EnginesRun:
    """Have all questions answered at once. ``plain``: the run to compare with; None if this run is plain decoding."""
    before = routed(llm)
    begun = time.perf_counter()
    outputs = llm.generate([one.prompt for one in asked], [one.params for one in asked])
    seconds = time.perf_counter() - begun
    answers = [output.outputs[0] for output in outputs]
    tokens = sum(len(one.token_ids) for one in answers)
    reference = plain.outputs if plain is not None else outputs
    return EnginesRun(
        strategy=name,
        prompt_set=asked[0].setting.prompt_set,
        temperature=asked[0].setting.temperature,
        engines=len(before),
        requests=len(asked),
        tokens=tokens,
        seconds=seconds,
        mean_ttft_ms=1e3 * fmean(one.first_token_seconds or 0.0 for one in answers),
        mean_e2el_ms=1e3 * fmean(one.seconds or 0.0 for one in answers),
        by_engine=[now - then for now, then in zip(routed(llm), before, strict=True)],
        speed_up=tokens / seconds / plain.tokens_per_second if plain is not None else 1.0,
        identical_to_autoregressive=all(same_tokens(a, b) for a, b in zip(outputs, reference, strict=True)),
        outputs=outputs,
    )


def routed(llm: ReplicatedLLM) -> list[int]:
    """The number of requests that each engine has been given so far."""
    return [sum(one.routed.values()) for one in llm.replicas()]


def report_of(settings: Mapping[str, Any], runs: Sequence[EnginesRun]) -> Report:
    """A table for each setting, and all figures."""
    tables: list[Table] = []
    for setting in dict.fromkeys(run.setting for run in runs):
        named = [(run.strategy, run) for run in runs if run.setting == setting]
        title = f"{setting}, {runs[0].engines} engines"
        tables.append(figures_table("strategy", title, COLUMNS, named, always=frozenset({IDENTICAL})))
    said = (
        f"All requests of a setting were queued at once, on engines that had answered one of {WARM_UP} tokens.",
        "Strategies ran one after the other, each on engines of its own: what disturbs the host falls on one of them.",
    )
    return Report({"settings": settings, "engines": [run.as_dict() for run in runs]}, tables, said)
