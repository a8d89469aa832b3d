"""Conversations of a prompt set become requests: a later turn's prompt holds plain decoding's answers before it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from penstock.config import FieldError
from penstock.core import CompletionOutput, RequestOutput, SamplingParams
from penstock.lab.bench.comparison import questions_of
from penstock.lab.grid import Conversation, Setting
from penstock.speculation import SpeculativeConfig
from penstock.text.tokenizer import Tokenizer
from tests.unit.text.conftest import byte_level

TEMPLATE = "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}|{% endfor %}"
PARAMS = SamplingParams(temperature=0, seed=0, max_tokens=8)
TALKS = [
    Conversation(Setting("chat", 0.0), 0, ("one", "two", "three"), PARAMS),
    Conversation(Setting("code", 0.0), 0, ("alone",), PARAMS),
    Conversation(Setting("chat", 0.0), 1, ("four", "five"), PARAMS),
]


class Echo:
    """Answers with what came last, in capitals. ``together`` is how many requests came at a time."""

    def __init__(self, tokenizer: Tokenizer, max_model_len: int = 100) -> None:
        self.setup = SimpleNamespace(max_model_len=max_model_len)
        self.drafter = None
        self.together: list[int] = []
        self._tokenizer = tokenizer

    def get_tokenizer(self) -> Tokenizer:
        return self._tokenizer

    def job(self, prompt: dict[str, Any], params: SamplingParams, *, speculation: SpeculativeConfig) -> str:
        assert speculation.strategy == "autoregressive"
        assert params is PARAMS
        return str(prompt["prompt"])

    def complete(self, jobs: list[str]) -> list[RequestOutput]:
        self.together.append(len(jobs))
        said = [job.rstrip("|").rpartition(":")[2].upper() for job in jobs]
        return [RequestOutput("0", "", [1], [CompletionOutput(0, [1], text)], finished=True) for text in said]


def chat() -> Tokenizer:
    tokenizer = byte_level()
    tokenizer.use_chat_template(TEMPLATE)
    return tokenizer


def test_turns_follow_the_answers_to_those_before() -> None:
    llm: Any = Echo(chat())
    questions = questions_of(llm, TALKS, raw=False)
    assert [(str(one.setting), one.number, one.turn, one.prompt["prompt"]) for one in questions] == [  # type: ignore[index]
        ("chat, T = 0", 0, 0, "u:one|"),
        ("chat, T = 0", 0, 1, "u:one|a:ONE|u:two|"),
        ("chat, T = 0", 0, 2, "u:one|a:ONE|u:two|a:TWO|u:three|"),
        ("code, T = 0", 0, 0, "u:alone|"),
        ("chat, T = 0", 1, 0, "u:four|"),
        ("chat, T = 0", 1, 1, "u:four|a:FOUR|u:five|"),
    ]
    assert llm.together == [2, 1], "last turns are answered when they are measured"


@pytest.mark.parametrize(("tokenizer", "raw"), [(chat(), True), (byte_level(), False)])
def test_as_they_stand_the_first_turns_alone_are_asked(tokenizer: Tokenizer, raw: bool) -> None:
    llm: Any = Echo(tokenizer)
    assert [one.prompt for one in questions_of(llm, TALKS, raw)] == ["one", "alone", "four"]
    assert llm.together == []


def test_a_turn_that_does_not_fit_is_named() -> None:
    llm: Any = Echo(chat(), max_model_len=20)
    with pytest.raises(FieldError, match="prompt 1 of chat, turn 2 and max_tokens 8 exceed max_model_len 20"):
        questions_of(llm, TALKS, raw=False)
