"""Answers that are cut off and resumed: the rest is what the uninterrupted answer has, for every sampling parameter."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from itertools import cycle
from pathlib import Path
from typing import Any, Final

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock import LLM, AsyncLLM, CompletionOutput, RequestError, SamplingParams, StructuredOutputsParams
from penstock.engine.completion import Job
from penstock.engine.resolve import DEMO_DRAFTERS
from penstock.speculation import SpeculativeConfig
from penstock.strategies.base import STRATEGIES
from tests.integration.engine.test_llm import assert_idle, assert_same

pytestmark = pytest.mark.processes

PROMPT = "def f(x):"
TOKENS = 14
WORD = StructuredOutputsParams(regex="[a-z]{5,9}[0-9]é;")
CASES: Final[dict[str, dict[str, Any]]] = {
    "max_tokens": {"max_tokens": 5},
    "temperature": {"temperature": 0.7},
    "top_p": {"top_p": 0.8},
    "top_k": {"top_k": 20},
    "min_p": {"min_p": 0.01},
    "seed": {"seed": 2**63 - 1},
    "n": {"n": 3},
    "stop": {"stop": ["e", "\u00e9", "xy"], "n": 2},
    "include_stop_str_in_output": {"stop": ["e", "t"], "include_stop_str_in_output": True},
    "stop_token_ids": {"stop_token_ids": [*range(40, 60)]},
    "min_tokens": {"stop_token_ids": [*range(3, 60)], "stop": ["e"], "min_tokens": 6},
    "ignore_eos": {"ignore_eos": True, "logit_bias": {1: 4.0}},
    "logprobs": {"logprobs": 3, "n": 2},
    "skip_special_tokens": {"skip_special_tokens": False, "ignore_eos": True, "logit_bias": {1: 4.0}},
    "presence_penalty": {"presence_penalty": 2.0, "top_k": 8},
    "frequency_penalty": {"frequency_penalty": 2.0, "top_k": 8},
    "repetition_penalty": {"repetition_penalty": 3.0, "top_k": 8},
    "logit_bias": {"logit_bias": {70: 3.0, 71: 3.0}},
    "allowed_token_ids": {"allowed_token_ids": [1, *range(60, 90)]},
    "structured_outputs": {"structured_outputs": WORD},
}
"""Every field of SamplingParams, with a value that changes the answer or its end."""


SHIPPED: Final = sorted(folder.parent.name for folder in DEMO_DRAFTERS.glob("*/config.json"))


def params_of(case: dict[str, Any], temperature: float) -> SamplingParams:
    return SamplingParams(**{"max_tokens": TOKENS, "seed": 3, "temperature": temperature} | case)


@pytest.fixture(scope="module")
def shared(target: Path, draft: Path) -> Iterator[LLM]:
    speculation = {"method": "draft_model", "model": str(draft), "width": 4, "children": 3}
    options: dict[str, Any] = {"max_model_len": 96, "kv_slots": 400, "prefill_chunk": 16}
    with LLM(str(target), pipeline_parallel_size=2, speculative_config=speculation, **options) as llm:
        yield llm


@pytest.fixture
def llm(shared: LLM) -> Iterator[LLM]:
    yield shared
    assert_idle(shared)


STRATEGY: Final = cycle(STRATEGIES)


def speculation() -> SpeculativeConfig:
    """Another strategy at each call, for the engine's own drafter."""
    return SpeculativeConfig(strategy=next(STRATEGY))


def cut(llm: LLM, prompt: str, params: SamplingParams, whole: Sequence[CompletionOutput], cuts: Sequence[int]) -> Job:
    """A job that begins with the first tokens of each completion."""
    resumed = [one.token_ids[:place] for one, place in zip(whole, cuts, strict=True)]
    return llm.job(prompt, params, speculation=speculation(), resumed=resumed)


def check(
    llm: LLM, prompt: str, params: SamplingParams, places: Sequence[Sequence[int]] | None = None, step: int = 1
) -> None:
    """Compare answers that are resumed at these places, by default at every one, with the uninterrupted answer."""
    (answer,) = llm.generate(prompt, params)
    whole = answer.outputs
    longest = max(len(one.token_ids) for one in whole)
    if places is None:
        places = [[min(place, len(one.token_ids)) for one in whole] for place in range(longest, -1, -step)]
    jobs = [cut(llm, prompt, params, whole, cuts) for cuts in places]
    told = [[completion.output.text for completion in job.completions] for job in jobs]
    for job, cuts, texts, output in zip(jobs, places, told, llm.complete(jobs), strict=True):
        rests = [replace(one, logprobs=one.logprobs and one.logprobs[at:]) for one, at in zip(whole, cuts, strict=True)]
        assert_same(output.outputs, rests)
        for completion, one, at, before in zip(job.completions, whole, cuts, texts, strict=True):
            delta = completion.take()
            assert delta is not None
            assert (delta.token_ids, before + delta.text) == (one.token_ids[at:], one.text)
            assert (delta.finish_reason, delta.stop_reason) == (one.finish_reason, one.stop_reason)
            assert completion.take() is None


def test_every_sampling_parameter_has_a_case() -> None:
    assert {field.name for field in fields(SamplingParams)} == set(CASES)


# Sampled answers depend on more than greedy ones: on noise and on the place of each token. The whole matrices have
# every place, and not every second one.
@pytest.mark.parametrize(
    ("temperature", "step"), [*(pytest.param(one, 1, marks=pytest.mark.whole) for one in (0.0, 1.0)), (1.0, 2)]
)
@pytest.mark.parametrize("name", CASES)
def test_an_answer_resumed_anywhere_ends_as_the_uninterrupted_one(
    llm: LLM, name: str, temperature: float, step: int
) -> None:
    check(llm, PROMPT, params_of(CASES[name], temperature), step=step)


@settings(max_examples=12)
@given(st.data())
def test_so_does_one_with_any_parameters_together(shared: LLM, data: st.DataObject) -> None:
    names = data.draw(st.lists(st.sampled_from(list(CASES)), min_size=2, max_size=5, unique=True))
    fields_of = {key: value for name in names for key, value in CASES[name].items()}
    if "structured_outputs" in fields_of:
        fields_of.pop("allowed_token_ids", None)
    fields_of["max_tokens"] = TOKENS  # min_tokens may not be more
    params = params_of(fields_of, data.draw(st.sampled_from([0.0, 0.6, 1.2])))
    (answer,) = shared.generate(PROMPT, params)
    places = [[data.draw(st.integers(0, len(one.token_ids))) for one in answer.outputs] for _ in range(2)]
    check(shared, PROMPT, params, places)
    assert_idle(shared)


# A draft model goes on in the tests above. A drafter that reads states is the sample: they are computed anew.
@pytest.mark.parametrize(
    "method",
    [pytest.param(one, marks=[pytest.mark.whole] * (one != "eagle3")) for one in ("draft_model", "ngram", *SHIPPED)],
)
def test_every_drafter_goes_on(method: str) -> None:
    params = SamplingParams(max_tokens=24, seed=5, temperature=0.8, frequency_penalty=0.5, n=2, stop=["return"])
    with LLM("demo", pipeline_parallel_size=2, speculative_config={"method": method}) as llm:
        for one in (params, replace(params, temperature=0.0)):
            check(llm, "def main():\n", one, [[place, place // 2] for place in range(0, 16, 5)])


BAD: Final[list[tuple[Any, dict[str, Any], str]]] = [
    ([[259]], {}, r"resumed\[0\] holds 259; the model's token ids are 0 to 258"),
    ([[5], [-1]], {"n": 2}, r"resumed\[1\] holds -1"),
    ([[5]], {"n": 2}, r"resumed has 1 lists of token ids for n = 2"),
    ([5], {}, r"resumed\[0\] is 5; it has to be a list"),
    ("ab", {}, "resumed is 'ab'"),
    ([["a"]], {}, r"resumed\[0\]: a token id is 'a'"),
    ([[5] * 15], {}, r"resumed\[0\] holds 15 tokens; max_tokens is 14"),
    ([[5, 6]], {"allowed_token_ids": [5]}, r"resumed\[0\] holds 6, which is not among allowed_token_ids"),
    ([[0]], {"allowed_token_ids": [5]}, r"resumed\[0\] holds 0, which"),
    ([[1, 5]], {}, r"resumed\[0\] goes on after token 1 at place 0"),
    ([[5, 40, 41]], {"stop_token_ids": [40]}, r"resumed\[0\] goes on after token 40 at place 1"),
    ([[70, 71, 72]], {"stop": ["de"]}, r"resumed\[0\] goes on after a stop string, which ends the output at place 1"),
    ([[40]], {"structured_outputs": WORD}, r"resumed\[0\] is not what structured_outputs allows: token 40 at place 0"),
    ([[1]], {"structured_outputs": WORD}, "it ends too early"),
    ([[1, 70]], {"structured_outputs": WORD, "ignore_eos": True}, "it goes on after its end"),
    ([[5]], {"seed": None}, "seed is not given"),
]


@pytest.mark.parametrize(("resumed", "case", "complaint"), BAD)
def test_tokens_that_cannot_have_come_are_refused(llm: LLM, resumed: Any, case: dict[str, Any], complaint: str) -> None:
    with pytest.raises(RequestError, match=complaint):
        llm.job(PROMPT, params_of(case, 1.0), resumed=resumed)


def test_a_stream_goes_on_where_its_reader_was_left(target: Path) -> None:
    """Read some of a stream, leave it, and go on from the tokens and the text that it had told."""
    cases: list[dict[str, Any]] = [
        {"n": 2},
        {"stop": ["e", "xyz"]},
        {"top_k": 9, "logprobs": 1},
        {"structured_outputs": WORD},
    ]

    async def left(engine: AsyncLLM, params: SamplingParams, reads: int) -> list[CompletionOutput]:
        stream = engine.submit(PROMPT, params)
        outputs = [CompletionOutput(index) for index in range(params.n)]
        for _ in range(reads):
            if not stream.finished:
                for delta in (await anext(stream)).deltas:
                    delta.add_to(outputs[delta.index])
        stream.abort()
        return outputs

    async def run(engine: AsyncLLM) -> None:
        for number, case in enumerate(cases):
            params = params_of(case, float(number % 2))
            (whole,) = [output async for output in engine.generate(PROMPT, params) if output.finished]
            for reads in range(4):
                outputs = await left(engine, params, reads)
                stream = await engine.resume(PROMPT, params, resumed=[one.token_ids for one in outputs])
                async for news in stream:
                    for delta in news.deltas:
                        delta.add_to(outputs[delta.index])
                assert_same(outputs, whole.outputs)
                assert_same(
                    [replace(one, logprobs=None) for one in stream.output().outputs],
                    [replace(one, logprobs=None) for one in whole.outputs],
                )
        await engine.drained()

    with_lookup = {"method": "ngram", "strategy": "continuous"}
    engine = AsyncLLM(str(target), pipeline_parallel_size=2, speculative_config=with_lookup, max_model_len=96)
    try:
        asyncio.run(run(engine))
    finally:
        engine.close()
