"""The small model alone on one device, decoding plainly, as one would use it without a pipeline (PipeDec's SLM)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.bench.grid import Question, Setting, fits, settings_of, short
from penstock.bench.measure.decode import decode
from penstock.cluster import draft_timing

if TYPE_CHECKING:
    from penstock.engine.llm import LLM
    from penstock.engine.resolve import Resolved


@dataclass(frozen=True)
class SmallModel:
    """The draft model's speed over one setting's questions; ``modelled`` where its device is emulated."""

    prompt_set: str
    temperature: float
    tokens_per_second: float
    modelled: bool

    @property
    def setting(self) -> Setting:
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
    """The questions for the small model: each prompt of each setting with its first seed."""
    first: dict[tuple[Setting, int, int], Question] = {}
    for question in questions:
        first.setdefault((question.setting, question.number, question.turn), question)
    return list(first.values())


def measured_small_model(llm: LLM, questions: Sequence[Question], on_progress: Callable[[], None]) -> list[SmallModel]:
    """Measure ``llm``, which has the draft model as its only stage, on each question; ``on_progress`` is called before
    each.

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
