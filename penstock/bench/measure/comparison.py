"""Runs strategies against each other: the same questions on the same stages, interleaved."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING

from penstock.bench.entries import Named, with_plain
from penstock.bench.grid import Question, Setting, settings_of, short
from penstock.bench.measure.decode import decode
from penstock.bench.measure.meter import Meter
from penstock.bench.measure.sample import Sample, sample_of
from penstock.bench.measure.summary import StrategyRun, emulated_cluster, summarise
from penstock.bench.measure.timeline import Timeline, timeline_of
from penstock.cluster import link_timings
from penstock.core import RequestOutput, SamplingParams
from penstock.emulation.priority import ENGINE, keeping_time
from penstock.engine.answers import learn_answers
from penstock.engine.build import feature_bytes
from penstock.engine.loop import Observer
from penstock.estimates.estimates import Estimates
from penstock.speculation import SpeculativeConfig

if TYPE_CHECKING:
    from penstock.engine.job import Prompt
    from penstock.engine.llm import LLM


OnProgress = Callable[[str, int, int], None]
"""Called before each run with the strategy's label, the question's index, and the number of questions."""

OnAnswered = Callable[[Question, RequestOutput], None]
"""Called after all strategies have answered a question, with plain decoding's output. Peers then take their turn."""


def measure(
    llm: LLM,
    prompts: Sequence[Prompt],
    params: Sequence[SamplingParams],
    strategies: Sequence[Named],
    observer: Observer | None = None,
    on_progress: OnProgress | None = None,
) -> list[StrategyRun]:
    """``measure_all`` for one setting: every prompt with its own parameters."""
    setting = Setting("", params[0].temperature)
    questions = [Question(setting, i, prompt, one) for i, (prompt, one) in enumerate(zip(prompts, params, strict=True))]
    return measure_all(llm, questions, strategies, observer, on_progress)


def measure_all(
    llm: LLM,
    questions: Sequence[Question],
    strategies: Sequence[Named],
    observer: Observer | None = None,
    on_progress: OnProgress | None = None,
    on_answered: OnAnswered | None = None,
) -> list[StrategyRun]:
    """Run every question alone through every strategy, strategy after strategy within each question.

    Interleaving spreads disturbances of the host over all strategies. A different strategy begins with each question of
    a setting, because where prefixes are cached the first one reads the prompt for all. Each strategy learns from its
    own runs only, including a short warm-up that does not count. The outputs of the autoregressive run (added where
    ``strategies`` lacks it) are the reference for identity. ``observer`` watches every run, too. Returns one entry per
    setting and strategy, in the order in which they came.
    """
    gc.collect()
    gc.freeze()  # else a collection, as long as dozens of tokens, would hit one of the strategies
    named = with_plain(strategies)
    estimates = {name: llm.loop.estimates.anew() for name, _ in named}
    for name, config in named:
        run_alone(llm, replace(questions[0], params=short(questions[0].params)), config, estimates[name])
    samples: dict[str, list[Sample]] = {name: [] for name, _ in named}
    timelines: dict[str, Timeline] = {}
    turns: Counter[Setting] = Counter()
    for i, question in enumerate(questions):
        llm.loop.use_estimates(estimates[named[0][0]])  # decoding outside of any run counts for plain decoding
        learn_answers(llm, [question.prompt], [question.params])
        with llm.observing(observer or Observer()):
            for name, config in rotated(named, turns[question.setting]):
                if on_progress is not None:
                    on_progress(name, i, len(questions))
                sample, meter = run_one(llm, question, config, estimates[name])
                samples[name].append(sample)
                if i == 0:
                    timelines[name] = timeline_of(meter)
        turns[question.setting] += 1
        if on_answered is not None:
            on_answered(question, samples[named[0][0]][-1].output)
    runs = []
    for setting in settings_of(questions):
        plain = chosen(samples[named[0][0]], setting)
        runs += [summarise(llm, name, config, chosen(samples[name], setting), plain) for name, config in named]
    for run in runs[: len(named)]:
        run.timeline = timelines[run.strategy]
    return runs


def rotated(named: Sequence[Named], i: int) -> list[Named]:
    """The strategies from index ``i`` on, followed by those before it."""
    first = i % len(named)
    return [*named[first:], *named[:first]]


def on_time(llm: LLM) -> AbstractContextManager[bool]:
    """Keep time in this thread as stage processes do where they stand for emulated devices."""
    return nullcontext(False) if emulated_cluster(llm) is None else keeping_time(ENGINE)


def run_alone(llm: LLM, question: Question, config: SpeculativeConfig | None, estimates: Estimates) -> RequestOutput:
    """Answer one request with the strategy's own estimates, and wait until nothing is in flight."""
    llm.loop.use_estimates(estimates)
    (output,) = decode(llm, [question.prompt], [question.params], config)
    llm.loop.drain()
    return output


def run_one(
    llm: LLM, question: Question, config: SpeculativeConfig | None, estimates: Estimates
) -> tuple[Sample, Meter]:
    """Answer one request alone while a meter watches."""
    meter = Meter(llm.setup.stages, llm.drafter, feature_bytes(llm.setup))
    with llm.observing(meter):
        output = run_alone(llm, question, config, estimates)
    meter.stop()
    emulated = emulated_cluster(llm)
    return sample_of(question, output, meter, link_timings(emulated) if emulated else None), meter


def chosen(samples: Sequence[Sample], setting: Setting) -> list[Sample]:
    return [sample for sample in samples if sample.question.setting == setting]
