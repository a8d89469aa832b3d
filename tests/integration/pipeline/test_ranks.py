"""Stages of several ranks, as processes: the tokens of one, also where a rank is killed, and nothing that is left."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, Final

import psutil
import pytest

from penstock import LLM, SamplingParams, StructuredOutputsParams
from penstock.config import FieldError
from penstock.engine.loop import Observer
from penstock.models.linear import works
from penstock.pipeline.forkserver import shared_fork_server
from tests.processes import alive, descendants
from tests.serving import until

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(not works(), reason="this processor lacks what compiled products need"),
]

TEXTS: Final = ["def read_lines(path):", "class Stack:", "import os\n"]
PARAMS: Final = [
    SamplingParams(temperature=0.0, max_tokens=40, logprobs=2),
    SamplingParams(temperature=0.8, seed=3, max_tokens=40, repetition_penalty=1.2),
    SamplingParams(temperature=0.0, max_tokens=24, structured_outputs=StructuredOutputsParams(regex=r"[a-z ]{8,20}")),
]
RUNS: Final = [
    (1, "auto", None, "none"),
    pytest.param(2, "pipedec", {"method": "draft_model"}, "int8", marks=pytest.mark.whole),
    pytest.param(1, "flowspec", {"method": "draft_model"}, "int4", marks=pytest.mark.whole),
    (2, "continuous", {"method": "eagle3"}, "int8"),
]
"""The samples: one stage as it is by default, and two whose states a learned drafter reads."""


def answers(llm: LLM) -> list[Any]:
    return [(one.outputs[0].token_ids, one.outputs[0].logprobs) for one in llm.generate(TEXTS, PARAMS)]


@cache
def expected(quantization: str) -> list[Any]:
    with LLM("demo", quantization=quantization, speculative_config=None) as llm:
        return answers(llm)


def forked() -> list[psutil.Process]:
    return list(filter(alive, descendants(shared_fork_server()._process.pid)))


@pytest.mark.parametrize(("stages", "strategy", "drafter", "quantization"), RUNS)
def test_tokens_and_log_probabilities_are_those_of_one_rank(
    stages: int, strategy: str, drafter: dict[str, Any] | None, quantization: str
) -> None:
    config = {"strategy": strategy, **(drafter or {})}
    alone = expected(quantization)
    with LLM(
        "demo",
        pipeline_parallel_size=stages,
        tensor_parallel_size=2,
        quantization=quantization,
        speculative_config=config,
    ) as llm:
        for _ in range(2):  # the second time with what the prefix cache holds
            assert answers(llm) == alone
    until(lambda: not forked())  # what compiles grammars ends when its stage has


class Killing(Observer):
    """Kills a process once so many results have come."""

    def __init__(self, victim: psutil.Process, results: int) -> None:
        self.victim, self.results = victim, results

    def arrived(self, *told: Any) -> None:
        self.results -= 1
        if self.results == 0:
            self.victim.kill()


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.whole), 1])
def test_a_rank_that_is_killed_amid_an_answer_is_replaced(rank: int) -> None:
    alone = expected("int8")
    with LLM("demo", tensor_parallel_size=2, quantization="int8", speculative_config=None) as llm:
        ranks = forked()[:2]  # the oldest first: a rank is older than what compiles grammars
        with llm.observing(Killing(ranks[rank], 15)):
            assert answers(llm) == alone
        # Nobody is left, not even as a zombie that the system's first process would have to wait for.
        until(lambda: not any(psutil.pid_exists(one.pid) for one in ranks))
    until(lambda: not forked())


def refusals() -> Sequence[tuple[dict[str, Any], str]]:
    return [
        ({"tensor_parallel_size": 3}, "its layers have 2 groups of keys and values; use pipeline_parallel_size"),
        ({"tensor_parallel_size": 2, "device": "cuda"}, "and device is 'cuda'"),
        ({"tensor_parallel_size": 2, "numerics": "fast"}, "and numerics is 'fast'"),
        ({"tensor_parallel_size": 2, "cluster": "demo"}, "left out with a cluster: its stages say which"),
        ({"tensor_parallel_size": 2, "layer_split": "auto"}, "and layer_split is 'auto'"),
        ({"tensor_parallel_size": 0}, "a whole number, at least 1"),
    ]


@pytest.mark.parametrize(("options", "said"), refusals())
def test_what_ranks_cannot_do_is_refused_before_anything_starts(options: dict[str, Any], said: str) -> None:
    with pytest.raises(FieldError, match=said) as refused:
        LLM("demo", **options)
    assert refused.value.field == "tensor_parallel_size"
    assert not forked()
