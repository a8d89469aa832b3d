"""All questions of a bench: prompt sets x temperatures x seeds, in an order that spreads disturbances."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import TYPE_CHECKING, Final

from penstock.bench.prompts import Turns
from penstock.config import FieldError
from penstock.core import SamplingParams

if TYPE_CHECKING:
    from penstock.engine.job import Prompt
    from penstock.engine.llm import LLM


WARM_UP: Final = 4
"""Tokens of the request that each strategy begins with and that does not count."""


@dataclass(frozen=True)
class Setting:
    """A setting that results are reported for: one prompt set at one temperature."""

    prompt_set: str
    temperature: float

    def __str__(self) -> str:
        return f"{self.prompt_set}, T = {self.temperature:g}"


@dataclass(frozen=True)
class Question:
    """One request of a bench, put to every strategy. ``number`` is the prompt's index in its set,
    ``turn`` its turn's."""

    setting: Setting
    number: int
    prompt: Prompt
    params: SamplingParams
    turn: int = 0

    @property
    def prompt_sha256(self) -> str:
        """A key by which two bench files find the same prompt: 16 hexadecimal digits of its SHA-256."""
        return hashlib.sha256(json.dumps(self.prompt).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Conversation:
    """An entry of a prompt set: the user's messages, turn by turn, and how the answers are sampled."""

    setting: Setting
    number: int
    turns: Turns
    params: SamplingParams

    def question(self, turn: int, prompt: Prompt) -> Question:
        return Question(self.setting, self.number, prompt, self.params, turn)

    @property
    def opening(self) -> Question:
        """The first turn as a text to be continued."""
        return self.question(0, self.turns[0])


def parse_temperatures(text: str) -> tuple[float, ...]:
    """The numbers in ``0,0.6,1``. Raises FieldError for anything else."""
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise FieldError("temperature", f"is {text!r}; it has to be a number, or several with commas") from None


def conversations_of(
    sets: Mapping[str, Sequence[Turns]],
    temperatures: Sequence[float],
    seeds: int,
    params: SamplingParams,
    seeds_at_zero: int,
) -> list[Conversation]:
    """One conversation per prompt, temperature and seed; at temperature 0 with ``seeds_at_zero`` seeds.

    The prompt ``number`` of a set begins with seed ``params.seed + number`` and goes on with seeds that no other prompt
    of the set has had. The outermost loop is over seeds and the innermost over temperatures, so that every setting is
    measured throughout the bench.
    """
    assert params.seed is not None
    longest = max(map(len, sets.values()))
    found = []
    for repetition, number, (name, prompts), temperature in product(
        range(seeds), range(longest), sets.items(), temperatures
    ):
        if number < len(prompts) and (temperature > 0 or repetition < seeds_at_zero):
            seed = params.seed + repetition * len(prompts) + number
            one = replace(params, temperature=temperature, seed=seed)
            found.append(Conversation(Setting(name, temperature), number, prompts[number], one))
    return found


def short(params: SamplingParams) -> SamplingParams:
    """The same request, ended after ``WARM_UP`` tokens."""
    return SamplingParams(temperature=params.temperature, seed=params.seed, max_tokens=WARM_UP, ignore_eos=True)


def settings_of(questions: Sequence[Question]) -> list[Setting]:
    return list(dict.fromkeys(question.setting for question in questions))


def check_lengths(llm: LLM, questions: Sequence[Question]) -> None:
    """Raise FieldError naming set and prompt where one would not fit, before anything is decoded."""
    for question in questions:
        if not fits(llm, question):
            raise FieldError(
                "prompts",
                f"{place_of(question)} and max_tokens "
                f"{question.params.max_tokens} exceed max_model_len {llm.setup.max_model_len}; shorten one",
            )


def fits(llm: LLM, question: Question) -> bool:
    """Whether the model can hold prompt and output."""
    return len(token_ids_of(llm, question)) + question.params.max_tokens <= llm.setup.max_model_len


def token_ids_of(llm: LLM, question: Question) -> list[int]:
    """The prompt's token ids."""
    if isinstance(question.prompt, str):
        return llm.get_tokenizer().encode(question.prompt)
    return list(question.prompt["prompt_token_ids"])


def place_of(question: Question) -> str:
    """The question's place for errors and remarks: ``prompt 3 of mt_bench, turn 2``."""
    later = f", turn {question.turn + 1}" if question.turn else ""
    return f"prompt {question.number + 1} of {question.setting.prompt_set}{later}"
