"""The small model alone: what it is asked, and its modelled and measured speed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from penstock.cluster import load_cluster
from penstock.core import CompletionOutput, RequestOutput, SamplingParams
from penstock.lab.bench.comparison import asked_once, measured_small_model, modelled_small_model
from penstock.lab.grid import Question, Setting
from penstock.speculation import SpeculativeConfig

COLD, WARM = Setting("chat", 0.0), Setting("chat", 1.0)
QUESTIONS = [
    Question(setting, number, "ab"[number] * (number + 1), SamplingParams(seed=seed, max_tokens=8))
    for seed in (1, 2)
    for number in (0, 1)
    for setting in (COLD, WARM)
]


class FakeLLM:
    """An engine that makes five tokens per request, the first after one second, the others in two."""

    def __init__(self, max_model_len: int) -> None:
        self.setup = SimpleNamespace(max_model_len=max_model_len)
        self.drafter = None
        self.asked: list[str] = []

    def get_tokenizer(self) -> Any:
        return SimpleNamespace(encode=list)

    def job(self, prompt: str, params: SamplingParams, *, speculation: SpeculativeConfig) -> str:
        self.asked.append(prompt)
        assert speculation.strategy == "autoregressive"
        return prompt

    def complete(self, jobs: list[str]) -> list[RequestOutput]:
        completion = CompletionOutput(0, [1, 2, 3, 4, 5], first_token_seconds=1.0, seconds=3.0)
        return [RequestOutput("0", jobs[0], [1], [completion], finished=True)]


def test_each_prompt_is_asked_once_per_setting() -> None:
    once = asked_once(QUESTIONS)
    assert [(one.setting, one.number) for one in once] == [(COLD, 0), (WARM, 0), (COLD, 1), (WARM, 1)]
    assert {one.params.seed for one in once} == {1}


def test_a_modelled_one_takes_its_devices_time_per_token() -> None:
    """The demo cluster's comment: a pass takes 38.0 ms and 2 ms overhead."""
    setup: Any = SimpleNamespace(cluster=load_cluster("demo"), speculator=None)
    small = modelled_small_model(setup, QUESTIONS)
    assert [one.setting for one in small] == [COLD, WARM]
    assert small[0].modelled
    assert 1 / small[0].tokens_per_second == pytest.approx(0.040, rel=0.01)


def test_there_is_none_without_a_device_or_with_a_learned_drafter() -> None:
    unpriced: Any = SimpleNamespace(cluster=load_cluster("local-2"), speculator=None)
    learned: Any = SimpleNamespace(cluster=load_cluster("demo"), speculator=object())
    assert modelled_small_model(unpriced, QUESTIONS) == modelled_small_model(learned, QUESTIONS) == []


def test_a_measured_one_counts_from_the_first_token() -> None:
    llm: Any = FakeLLM(max_model_len=100)
    begun: list[None] = []
    small = measured_small_model(llm, asked_once(QUESTIONS), lambda: begun.append(None))
    assert [(one.setting, one.tokens_per_second, one.modelled) for one in small] == [
        (COLD, 2.0, False),
        (WARM, 2.0, False),
    ]
    assert len(begun) == 4
    assert len(llm.asked) == 5, "and once to warm up"


def test_what_the_small_model_cannot_hold_is_left_out() -> None:
    short: Any = FakeLLM(max_model_len=9)
    measured_small_model(short, asked_once(QUESTIONS), lambda: None)
    assert short.asked == ["a", "a", "a"]
    shorter: Any = FakeLLM(max_model_len=8)
    assert measured_small_model(shorter, asked_once(QUESTIONS), lambda: None) == []
