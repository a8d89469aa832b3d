"""The centralised executor: every hop through the engine's process, and still the tokens of plain decoding."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.papers import relay
from benchmarks.papers.relay import RelayExecutor, receiver
from penstock import LLM, PipelineError, SamplingParams
from penstock.messages import Batch, Delivery, Message, Ready, Span
from tests.integration.pipeline.test_processes import batch, pipeline_of, start

pytestmark = pytest.mark.processes

PROMPTS = [{"prompt_token_ids": [40, 50, 60, 70]}, {"prompt_token_ids": list(range(100, 130))}]
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True),
    SamplingParams(temperature=1.0, seed=7, max_tokens=24, ignore_eos=True),
]
STAGES = 3


def tokens(llm: LLM) -> list[list[int]]:
    outputs = [output for params in PARAMS for output in llm.generate(PROMPTS, params)]
    return [output.outputs[0].token_ids for output in outputs]


@pytest.fixture(scope="module")
def expected(target: Path) -> list[list[int]]:
    with start(target, STAGES) as llm:
        return tokens(llm)


# Hops know of no strategy: one that fills the pipeline is the sample of those that speculate.
@pytest.mark.parametrize(
    "strategy",
    [
        pytest.param("", id="plain"),
        pytest.param("pipedec", id="pipedec"),
        pytest.param("auto", id="auto", marks=pytest.mark.whole),
    ],
)
def test_relayed_hops_give_the_tokens_of_plain_decoding(
    target: Path, draft: Path, expected: list[list[int]], strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    passed: list[tuple[type[Message], int]] = []

    def watched(message: Message, stages: int) -> int | None:
        stage = receiver(message, stages)
        if stage is not None:
            passed.append((type(message), stage))
        return stage

    monkeypatch.setattr(relay, "receiver", watched)
    speculation = {"method": "draft_model", "model": str(draft), "strategy": strategy} if strategy else None
    with start(target, STAGES, host=RelayExecutor(), speculative_config=speculation) as llm:
        assert tokens(llm) == expected
        llm.loop.drain()
        batches = llm.loop.builder.next_stream
    for stage in range(STAGES):
        assert passed.count((Batch, stage)) == (batches if stage > 0 else 0)
        assert passed.count((Ready, stage)) >= (batches if stage < STAGES - 1 else 0)


def test_a_batch_past_the_last_stage_ends_the_pipeline(target: Path) -> None:
    with start(target, 2, host=RelayExecutor()) as llm:
        pipeline = pipeline_of(llm)
        assert pipeline._on_message(Delivery(message=batch(0, spans=[span(0), span(1)])), [])
        with pytest.raises(PipelineError, match="unexpected Batch"):
            llm.generate(PROMPTS, PARAMS[0])


def span(stage: int) -> Span:
    return Span(stage, 0.0, 0.0, 0.0, 0.0, 0.0, 1)
