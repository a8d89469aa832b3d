"""Stages compute with as many threads as they are told to, and give the same tokens with any."""

from __future__ import annotations

import pytest

from penstock import LLM, SamplingParams
from penstock.pipeline.forkserver import shared_fork_server
from tests.processes import descendants

pytestmark = pytest.mark.processes

PROMPTS = [{"prompt_token_ids": list(range(40, 40 + length))} for length in (5, 64, 17)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)


def generated(threads: int) -> tuple[list[list[int]], list[int]]:
    """Return the tokens, and the number of threads of each stage's process."""
    with LLM("demo", pipeline_parallel_size=2, speculative_config=None, threads=threads) as llm:
        outputs = llm.generate(PROMPTS, GREEDY)
        stages = descendants(shared_fork_server()._process.pid)
        return [output.outputs[0].token_ids for output in outputs], [stage.num_threads() for stage in stages]


def test_threads_of_every_stage() -> None:
    alone, few = generated(1)
    shared, many = generated(3)
    assert shared == alone
    assert len(few) == 2
    assert all(more >= one + 2 for one, more in zip(few, many, strict=True))
