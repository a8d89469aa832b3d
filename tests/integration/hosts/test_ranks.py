"""Stages whose ranks are on several hosts: the tokens of one, also where a rank's host is killed amid an answer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from penstock import LLM, SamplingParams
from penstock.models.quantized.linear import works
from tests.happening import AfterResults
from tests.workers import Worker, ended, workers

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(not works(), reason="this processor lacks what compiled products need"),
]

TEXTS: Final = ["def read_lines(path):", "class Stack:", "import os\n"]
PARAMS: Final = [
    SamplingParams(temperature=0.0, max_tokens=32, logprobs=2),
    SamplingParams(temperature=0.8, seed=3, max_tokens=32, repetition_penalty=1.2),
    SamplingParams(temperature=0.0, max_tokens=24),
]
GONE_S: Final = 10.0


def answers(llm: LLM) -> list[Any]:
    return [(one.outputs[0].token_ids, one.outputs[0].logprobs) for one in llm.generate(TEXTS, PARAMS)]


@pytest.fixture(scope="module")
def expected() -> list[Any]:
    with LLM("demo", quantization="int8", speculative_config=None) as llm:
        return answers(llm)


@pytest.fixture(scope="module")
def four(keys: Path) -> Iterator[list[Worker]]:
    with workers(4, keys) as found:
        yield found


def over(found: list[Worker], keys: Path, **options: Any) -> LLM:
    hosts = ",".join(worker.host for worker in found)
    return LLM("demo", quantization="int8", hosts=hosts, keys=str(keys), **options)


@pytest.mark.parametrize(("count", "stages", "strategy"), [(2, 1, None), (4, 2, "pipedec"), (3, 2, "continuous")])
def test_tokens_and_log_probabilities_are_those_of_one_rank(
    expected: list[Any], four: list[Worker], keys: Path, count: int, stages: int, strategy: str | None
) -> None:
    """With three hosts the first stage's ranks share one."""
    speculation = strategy and {"strategy": strategy, "method": "draft_model"}
    with over(
        four[:count], keys, pipeline_parallel_size=stages, tensor_parallel_size=2, speculative_config=speculation
    ) as llm:
        for _ in range(2):  # the second time with what the prefix cache holds
            assert answers(llm) == expected
        started = [stage for worker in four[:count] for stage in worker.stages()]
    assert ended(started, GONE_S)
    assert [worker.stages() for worker in four] == [[]] * 4
