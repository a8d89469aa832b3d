"""A comparison: strategies take turns at the same prompts, and the small model answers them alone."""

from __future__ import annotations

import gc
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from penstock.cluster import draft_timing, link_timings
from penstock.core import RequestOutput, SamplingParams
from penstock.emulation.stage import ENGINE, keeping_time
from penstock.engine.build import PLAIN, answers_of, feature_bytes, learn_answers
from penstock.engine.loop import Observer
from penstock.estimates.estimates import Estimates
from penstock.lab.bench.meter import Meter, Timeline, timeline_of
from penstock.lab.bench.summary import Sample, StrategyRun, emulated_cluster, sample_of, summarise
from penstock.lab.grid import (
    Conversation,
    Named,
    Question,
    Setting,
    check_lengths,
    fits,
    settings_of,
    short,
    with_plain,
)
from penstock.speculation import SpeculativeConfig
from penstock.text.chat import ChatFormat, chat_prompt

if TYPE_CHECKING:
    from penstock.engine.completion import Prompt
    from penstock.engine.llm import LLM
    from penstock.engine.resolve import Resolved


# --------------------------------------------------------------------------------------------------------------- decode
# Decodes with a strategy that the bench chooses, on the engine's own stages and with its drafter.


def decode(
    llm: LLM, prompts: Sequence[Prompt], params: Sequence[SamplingParams], config: SpeculativeConfig | None
) -> list[RequestOutput]:
    """``LLM.generate`` with the strategy of ``config`` and the engine's own drafter; None decodes plainly.

    Plain decoding also teaches the synthetic drafter its answers.
    """
    if config is not None and config.strategy != PLAIN.strategy:
        learn_answers(llm, prompts, params)
    jobs = [llm.job(prompt, one, speculation=config or PLAIN) for prompt, one in zip(prompts, params, strict=True)]
    outputs = llm.complete(jobs)
    if config is None and (answers := answers_of(llm)) is not None:
        for job in jobs:
            answers.remember(job)
    return outputs


# ----------------------------------------------------------------------------------------------------------- comparison
# Runs strategies against each other: the same questions on the same stages, in turn.

OnProgress = Callable[[str, int, int], None]
"""Function called before each run with the strategy's label, the question's index, and the number of questions."""

OnAnswered = Callable[[Question, RequestOutput], None]
"""Function called when all strategies have answered a question, with plain decoding's output. Peers answer then."""


def measure(
    llm: LLM,
    prompts: Sequence[Prompt],
    params: Sequence[SamplingParams],
    strategies: Sequence[Named],
    observer: Observer | None = None,
    on_progress: OnProgress | None = None,
) -> list[StrategyRun]:
    """``measure_all`` for one setting, in which every prompt has its own parameters."""
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
    """Run every question alone through every strategy: one strategy after the other for each question.

    Turns spread disturbances of the host over all strategies. A different strategy begins with each question of a
    setting, because where prefixes are cached the first one reads the prompt for all. Each strategy learns from its own
    runs only, a short warm-up included that does not count. The output of plain decoding (which is added to
    ``strategies`` if it is not among them) is the reference for identity. ``observer`` watches every run, too. Returns
    an entry for each setting and strategy, in the order in which they came.
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
        llm.loop.use_estimates(estimates[named[0][0]])  # what decodes outside of any run teaches plain decoding
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
    """A context in which this thread keeps time as stage processes do, if stages stand for emulated devices."""
    return nullcontext(False) if emulated_cluster(llm) is None else keeping_time(ENGINE)


def run_alone(llm: LLM, question: Question, config: SpeculativeConfig | None, estimates: Estimates) -> RequestOutput:
    """Answer one request with the strategy's own estimates, and return when nothing is in flight."""
    llm.loop.use_estimates(estimates)
    (output,) = decode(llm, [question.prompt], [question.params], config)
    llm.loop.drain()
    return output


def run_one(
    llm: LLM, question: Question, config: SpeculativeConfig | None, estimates: Estimates
) -> tuple[Sample, Meter]:
    """Answer one request alone, watched by a meter."""
    meter = Meter(llm.setup.stages, llm.drafter, feature_bytes(llm.setup))
    with llm.observing(meter):
        output = run_alone(llm, question, config, estimates)
    meter.stop()
    emulated = emulated_cluster(llm)
    return sample_of(question, output, meter, link_timings(emulated) if emulated else None), meter


def chosen(samples: Sequence[Sample], setting: Setting) -> list[Sample]:
    """The samples of one setting."""
    return [sample for sample in samples if sample.question.setting == setting]


# ---------------------------------------------------------------------------------------------------------------- turns
# Turns the conversations of a prompt set into requests: each prompt holds the earlier turns and answers.
#
#   turns     "Write a poem."      "Make it shorter."
#   requests  [poem]               [poem] [plain decoding's answer] [shorter]
#
# The answers are those of plain decoding, so that every strategy is asked the same. They are decoded before anything is
# measured: first turns of all conversations together, then second ones.


Plainly = Callable[[list["Prompt"], list[SamplingParams]], list[RequestOutput]]
"""Function that decodes prompts plainly, each with its own parameters."""


def questions_of(
    llm: LLM, conversations: Sequence[Conversation], raw: bool, plainly: Plainly | None = None
) -> list[Question]:
    """Every turn's request, conversation after conversation.

    Only first turns have one if ``raw``, or if the model is no chat model.

    ``plainly`` answers the earlier turns, by default the engine without its strategy. Raises FieldError for a request
    that does not fit.
    """
    if not is_chat(llm, raw):
        found = [conversation.opening for conversation in conversations]
        check_lengths(llm, found)
        return found
    talks = [Talk(conversation) for conversation in conversations]
    while asking := [talk for talk in talks if talk.goes_on]:
        for talk in asking:
            talk.ask(llm)
        latest = [talk.questions[-1] for talk in asking]
        check_lengths(llm, latest)
        if going_on := [talk for talk in asking if talk.goes_on]:
            answer(going_on, plainly or partial(decode, llm, config=None))
    return [question for talk in talks for question in talk.questions]


def is_chat(llm: LLM, raw: bool) -> bool:
    """Whether prompts are conversations for a chat model."""
    return not raw and llm.get_tokenizer().is_of_chat


class Talk:
    """One conversation, and its questions so far."""

    def __init__(self, conversation: Conversation) -> None:
        self.questions: list[Question] = []
        self.messages: list[dict[str, str]] = []
        self._conversation = conversation

    @property
    def goes_on(self) -> bool:
        """Whether the user has another turn."""
        return len(self.questions) < len(self._conversation.turns)

    def ask(self, llm: LLM) -> None:
        """Add the user's next turn as a question."""
        turn = len(self.questions)
        self.messages.append({"role": "user", "content": self._conversation.turns[turn]})
        prompt = chat_prompt(llm.get_tokenizer(), self.messages, ChatFormat())
        self.questions.append(self._conversation.question(turn, prompt))


def answer(talks: Sequence[Talk], plainly: Plainly) -> None:
    """Have plain decoding answer the latest question of each conversation, all of them together."""
    asked = [talk.questions[-1] for talk in talks]
    outputs = plainly([one.prompt for one in asked], [one.params for one in asked])
    for talk, output in zip(talks, outputs, strict=True):
        talk.messages.append({"role": "assistant", "content": output.outputs[0].text})


# ---------------------------------------------------------------------------------------------------------- small model
# The small model by itself on one device, decoding plainly, as it would be used without a pipeline (PipeDec's SLM).


@dataclass(frozen=True)
class SmallModel:
    """The draft model's speed on one setting's questions. ``modelled``: whether it follows from an emulated device."""

    prompt_set: str
    temperature: float
    tokens_per_second: float
    modelled: bool

    @property
    def setting(self) -> Setting:
        """The setting of the questions."""
        return Setting(self.prompt_set, self.temperature)


def modelled_small_model(setup: Resolved, questions: Sequence[Question]) -> list[SmallModel]:
    """The modelled speed of the draft model on the cluster's drafting device, one row at a time and without a link.

    The list is empty where the cluster names no drafter, and for learned drafters, which cannot do without their
    target.
    """
    cluster = setup.cluster
    timing = draft_timing(cluster) if cluster is not None and cluster.emulated and setup.speculator is None else None
    if timing is None:
        return []
    speed = 1 / timing.seconds(1)
    return [SmallModel(s.prompt_set, s.temperature, speed, modelled=True) for s in settings_of(questions)]


def asked_once(questions: Sequence[Question]) -> list[Question]:
    """The small model's questions: each prompt of each setting, with its first seed."""
    first: dict[tuple[Setting, int, int], Question] = {}
    for question in questions:
        first.setdefault((question.setting, question.number, question.turn), question)
    return list(first.values())


def measured_small_model(llm: LLM, questions: Sequence[Question], on_progress: Callable[[], None]) -> list[SmallModel]:
    """Measure ``llm``, whose only stage is the draft model, on each question, before which ``on_progress`` is called.

    Questions that are too long for the small model are left out, and so are settings without any question left.
    """
    questions = [question for question in questions if fits(llm, question)]
    if not questions:
        return []
    decode(llm, [questions[0].prompt], [short(questions[0].params)], None)
    tokens: defaultdict[Setting, int] = defaultdict(int)
    seconds: defaultdict[Setting, float] = defaultdict(float)
    for question in questions:
        on_progress()
        (output,) = decode(llm, [question.prompt], [question.params], None)
        completion = output.outputs[0]
        tokens[question.setting] += len(completion.token_ids) - 1
        seconds[question.setting] += (completion.seconds or 0.0) - (completion.first_token_seconds or 0.0)
    return [
        SmallModel(setting.prompt_set, setting.temperature, count / seconds[setting], modelled=False)
        for setting, count in tokens.items()
        if count
    ]
