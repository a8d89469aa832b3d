"""``AsyncLLM``: many requests over one engine, each with the tokens that it has alone."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest
from llguidance import LLMatcher

from penstock import LLM, AsyncLLM, PipelineError, QueueFull, RequestError, SamplingParams, StructuredOutputsParams
from penstock.core import ConfigError, FinishReason
from penstock.engine.completion import Completion, CompletionDelta
from penstock.engine.loop import EngineLoop, Observer
from penstock.engine.stats import Counters
from penstock.engine.stream import RequestStream
from penstock.messages import Batch
from penstock.requests.request import Request
from penstock.text.grammar import compile_grammar
from tests.processes import descendants, many_open_files
from tests.serving import until

pytestmark = pytest.mark.processes

PROMPTS = ["def add(a, b):\n", "class Tree:\n    def __init__(self", "import os\nimport sys\n\n", "for i in range("]
SPECULATION = {"method": "draft_model", "model": "demo"}


@pytest.fixture(scope="module")
def engine() -> Iterator[AsyncLLM]:
    llm = AsyncLLM("demo", pipeline_parallel_size=2, speculative_config=SPECULATION, max_queue=40)
    yield llm
    llm.close()


def params(number: int, tokens: int = 24) -> SamplingParams:
    return SamplingParams(max_tokens=tokens, temperature=float(number % 2), seed=number, ignore_eos=True)


async def collect(llm: AsyncLLM, prompt: str, one: SamplingParams) -> tuple[list[int], str]:
    ids: list[int] = []
    text = ""
    async for news in llm.submit(prompt, one):
        for delta in news.deltas:
            ids, text = ids + delta.token_ids, text + delta.text
    return ids, text


def test_requests_together_have_the_tokens_that_they_have_alone(engine: AsyncLLM) -> None:
    async def together() -> list[tuple[list[int], str]]:
        jobs = [collect(engine, PROMPTS[i % len(PROMPTS)], params(i)) for i in range(12)]
        return await asyncio.gather(*jobs)

    answers = asyncio.run(together())
    with LLM("demo", speculative_config=None) as llm:
        for i, (ids, text) in enumerate(answers):
            (alone,) = llm.generate(PROMPTS[i % len(PROMPTS)], params(i))
            assert (ids, text) == (alone.outputs[0].token_ids, alone.outputs[0].text), i


def test_generate_yields_all_so_far(engine: AsyncLLM) -> None:
    async def run() -> list[int]:
        lengths = []
        async for output in engine.generate(PROMPTS[0], params(0)):
            lengths.append(len(output.outputs[0].token_ids))
        assert output.finished
        assert output.outputs[0].finish_reason is FinishReason.LENGTH
        assert output.outputs[0].metrics.rows_entered > 0
        return lengths

    lengths = asyncio.run(run())
    assert lengths == sorted(lengths)
    assert lengths[-1] == 24
    assert len(lengths) > 1


def test_numbers_outlive_their_request_for_a_while(engine: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.engine.front.MOST_FINISHED", 2)

    async def run() -> None:
        numbers = {}
        for name in ("first", "second", "first", "third"):
            stream = engine.submit(PROMPTS[0], params(0, tokens=1), request_id=name)
            numbers[name] = stream.numbers
            assert engine.numbers(name) == stream.numbers
            await stream.ended()
        assert engine.numbers("second") == []
        assert engine.numbers("first") == numbers["first"], "those of the last request of that name"
        assert engine.numbers("third") == numbers["third"]

    asyncio.run(run())


def test_an_abort_ends_a_request_and_frees_its_slots(engine: AsyncLLM) -> None:
    async def run() -> FinishReason | None:
        stream = engine.submit(PROMPTS[1], params(1, tokens=2000))
        await anext(stream)
        assert stream.started
        stream.abort()
        stream.abort()
        async for _ in stream:
            pass
        await engine.drained()
        return stream.output().outputs[0].finish_reason

    assert asyncio.run(run()) is FinishReason.ABORT
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.kv_used, stats.speculative_used) == (0, 0, 0, 0)


def test_a_second_turn_computes_only_what_is_new(engine: AsyncLLM) -> None:
    class Entering(Observer):
        def __init__(self) -> None:
            self.positions: dict[int, list[int]] = defaultdict(list)

        def submitted(self, batch: Batch, at: float) -> None:
            for request, position in zip(batch.rows.requests, batch.rows.positions, strict=True):
                self.positions[request].append(position)

    entering = Entering()

    async def run() -> tuple[int, RequestStream]:
        first = engine.submit(PROMPTS[2] * 20, params(0))
        async for _ in first:
            pass
        said = first.prompt_token_ids + first.output().outputs[0].token_ids
        engine.observe(entering)
        second = engine.submit({"prompt_token_ids": [*said, *first.prompt_token_ids[:8]]}, params(0, tokens=1))
        async for _ in second:
            pass
        return len(said), second

    said, second = asyncio.run(run())
    cached, length = second.output().num_cached_tokens, len(second.prompt_token_ids)
    assert said - 16 <= cached < said
    (number,) = second.numbers
    assert sorted(one for one in entering.positions[number] if one < length) == list(range(cached, length))


def test_what_cannot_run_is_refused_at_once(engine: AsyncLLM) -> None:
    async def run() -> None:
        with pytest.raises(RequestError, match="max_model_len"):
            engine.submit("x", SamplingParams(max_tokens=100_000))
        with pytest.raises(RequestError, match="token ids are"):
            engine.submit({"prompt_token_ids": [10**6]}, SamplingParams(max_tokens=1))
        streams = [engine.submit("x", params(0, tokens=500), request_id=f"r{i}") for i in range(16)]
        with pytest.raises(RequestError, match="r3"):
            engine.submit("x", request_id="r3")
        streams += [engine.submit("x", params(0, tokens=500)) for _ in range(24)]
        with pytest.raises(QueueFull, match="40 requests wait"):
            engine.submit("x", params(0))
        with pytest.raises(RequestError, match="max_model_len"):  # what never runs is no matter of waiting
            engine.submit("x", SamplingParams(max_tokens=100_000))
        for stream in streams:
            stream.abort()
        await engine.drained()

    asyncio.run(run())
    assert engine.stats().kv_used == 0


def test_health_asks_for_a_token_however_many_ask() -> None:
    """All askers share one token, and none is computed while tokens come anyway."""
    llm = AsyncLLM("demo", speculative_config=None, max_queue=1)

    async def run() -> None:
        await asyncio.gather(*(llm.check_health() for _ in range(5)))
        assert llm.stats().generation_tokens == 1
        await llm.check_health()
        assert llm.stats().generation_tokens == 1

    try:
        asyncio.run(run())
    finally:
        llm.close()


def test_a_synthetic_drafter_is_refused() -> None:
    config = {"method": "synthetic", "accuracy": [0.5]}
    with pytest.raises(ConfigError, match="synthetic"):
        AsyncLLM("demo", speculative_config=config)


class Panic(BaseException):
    """An error that is no ``Exception``, such as libraries written in Rust raise."""


def break_at(observer: Observer, moment: str) -> list[str]:
    """Make the observer fail at one of the moments that follow a request's arrival; returns the list of failures."""
    failures: list[str] = []

    def arm(*_: object) -> None:
        setattr(observer, moment, fail)
        if moment == "queued":
            fail()

    def fail(*_: object) -> None:
        failures.append(moment)
        raise Panic("a fault of ours")

    observer.queued = arm  # type: ignore[method-assign]
    return failures


@pytest.mark.parametrize("moment", ["queued", "waits", "admitted", "advanced"])
def test_a_fault_on_the_engines_thread_leaves_nobody_waiting(moment: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A counter that fails ends the engine: health and metrics read the counters and would be wrong from then on."""

    def counters(loop: EngineLoop) -> Counters:
        made = Counters(loop)
        break_at(made, moment)
        return made

    monkeypatch.setattr("penstock.engine.async_llm.Counters", counters)

    async def run() -> None:
        async with AsyncLLM("demo", speculative_config=None) as llm:
            stream = llm.submit(PROMPTS[0], params(0, tokens=3))
            for _ in range(2):  # also who asks again is told
                with pytest.raises(PipelineError, match=r"lost .*a fault of ours"):
                    await asyncio.wait_for(read(stream), 60)
            assert "a fault of ours" in str(llm.stats().ended)
            assert llm.stats().running == llm.stats().waiting == 0

    asyncio.run(run())


def test_a_fault_in_one_requests_text_hides_no_others_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both requests end in the same step, and the first one's last text raises an error."""
    take, failed = Completion.take, []

    def faulty(completion: Completion) -> CompletionDelta | None:
        if completion.output.finish_reason is not None and not failed:
            failed.append(completion)
            raise Panic("a fault of ours")
        return take(completion)

    async def run() -> None:
        async with AsyncLLM("demo", speculative_config=None, pipeline_parallel_size=1) as llm:
            streams = [llm.submit(PROMPTS[0], params(0, tokens=8)) for _ in range(2)]
            monkeypatch.setattr(Completion, "take", faulty)
            ends = await asyncio.wait_for(asyncio.gather(*map(read, streams), return_exceptions=True), 60)
            assert failed
            assert any(isinstance(end, PipelineError) and "a fault of ours" in str(end) for end in ends)
            await asyncio.wait_for(llm.drained(), 60)

    asyncio.run(run())


@pytest.mark.parametrize("moment", ["queued", "waits", "admitted", "advanced", "finished"])
def test_an_observer_that_fails_is_dropped_and_the_engine_goes_on(
    engine: AsyncLLM, moment: str, caplog: pytest.LogCaptureFixture
) -> None:
    class Ends(Observer):
        """An observer after the failing one: it must hear of the end, too."""

        def __init__(self) -> None:
            self.reasons: list[FinishReason] = []

        def finished(self, request: Request, reason: FinishReason, at: float) -> None:
            self.reasons.append(reason)

    failing, ends = Observer(), Ends()
    failures = break_at(failing, moment)

    async def run() -> list[tuple[list[int], str]]:
        engine.observe(failing)
        engine.observe(ends)
        return [await collect(engine, PROMPTS[0], params(3)) for _ in range(2)]

    with caplog.at_level(logging.ERROR):
        first, second = asyncio.run(run())
    assert first == second
    assert len(first[0]) == 24
    assert failures == [moment]
    assert ends.reasons == [FinishReason.LENGTH] * 2
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert "an observer, Observer, has failed" in caplog.text
    assert "a fault of ours" in caplog.text
    assert engine.stats().ended is None


def test_one_event_loop_after_another(engine: AsyncLLM) -> None:
    """A request that outlives its event loop does not disturb the next loop, which takes its results."""

    async def leave() -> RequestStream:
        """Leave a running request and a pending ``drained`` behind: nobody aborts the one or awaits the other."""
        waiting = asyncio.ensure_future(engine.drained())
        stream = engine.submit(PROMPTS[1], params(1, tokens=64))
        await anext(stream)
        assert not waiting.done()
        return stream

    async def wait() -> RequestStream:
        stream = engine.submit(PROMPTS[1], params(1, tokens=20))
        await asyncio.wait_for(engine.drained(), 60)
        return stream

    for _ in range(2):
        left = asyncio.run(leave())
        assert not left.finished
        until(lambda: engine.stats().running == 0)
        assert not left.finished, "there is no event loop that could have told it"
        other = asyncio.run(wait())
        assert left.finished
        assert len(left.output().outputs[0].token_ids) == 64
        assert other.finished


async def read(stream: RequestStream) -> None:
    async for _ in stream:
        pass


def test_a_request_without_a_name_gets_one_that_nobody_has(engine: AsyncLLM) -> None:
    async def run() -> None:
        first = engine.submit("x", params(0, tokens=1))
        await read(first)
        number = int(first.request_id.removeprefix("request-"))
        taken = engine.submit("x", params(0, tokens=500), request_id=f"request-{number + 1}")
        other = engine.submit("x", params(0, tokens=1))
        assert other.request_id != taken.request_id
        taken.abort()
        await asyncio.gather(read(taken), read(other))

    asyncio.run(run())


def test_no_grammar_is_compiled_in_the_engines_process(engine: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = []

    def compiling(*arguments: Any) -> LLMatcher:
        compiled.append(threading.get_ident())
        return compile_grammar(*arguments)

    monkeypatch.setattr("penstock.text.grammar.compile_grammar", compiling)
    choice = SamplingParams(max_tokens=8, structured_outputs=StructuredOutputsParams(choice=["seldom", "seen"]))

    async def run() -> None:
        outputs = [output async for output in engine.generate(PROMPTS[0], choice)]
        assert outputs[-1].outputs[0].text in ("seldom", "seen")

    asyncio.run(run())
    assert compiled == []


NO_RECOVERY: dict[str, Any] = {"stage_timeout": 5.0, "recovery_timeout": 0.0}


@pytest.mark.parametrize(
    ("lose", "why"),
    [
        (psutil.Process.kill, "SIGKILL"),
        # The same but for its reason, which the next test waits for as well.
        pytest.param(psutil.Process.suspend, "no sign of life for 5 s", marks=pytest.mark.whole),
    ],
)
def test_a_lost_stage_ends_every_request_and_says_why(lose: Callable[[psutil.Process], None], why: str) -> None:
    async def run() -> None:
        llm = AsyncLLM(
            "demo", pipeline_parallel_size=2, speculative_config=None, stage_timeout=5.0, recovery_timeout=0.0
        )
        try:
            streams = [llm.submit(prompt, params(0, tokens=1000)) for prompt in PROMPTS]
            await anext(streams[0])
            lose(descendants(os.getpid())[-1])  # a stage: nothing has been started after it
            for stream in streams:
                with pytest.raises(PipelineError, match=rf"stage 1 \(layers .*\) was lost: .*{why}"):
                    async for _ in stream:
                        pass
            with pytest.raises(PipelineError, match="no more requests"):
                llm.submit(PROMPTS[0])
            with pytest.raises(PipelineError, match="no more requests"):
                await llm.check_health()
            assert llm.stats().ended
        finally:
            llm.close()

    asyncio.run(run())


def test_an_idle_engine_misses_a_stopped_stage_too() -> None:
    async def run() -> None:
        llm = AsyncLLM(
            "demo", pipeline_parallel_size=2, speculative_config=None, stage_timeout=5.0, recovery_timeout=0.0
        )
        try:
            await collect(llm, PROMPTS[0], params(0))
            descendants(os.getpid())[-1].suspend()
            await asyncio.to_thread(until, lambda: llm.stats().ended)
            with pytest.raises(PipelineError, match="no sign of life for 5 s"):
                await llm.check_health()
        finally:
            llm.close()

    asyncio.run(run())


def test_an_engine_of_a_process_with_more_than_a_thousand_open_files(engine: AsyncLLM) -> None:
    right = asyncio.run(collect(engine, PROMPTS[0], params(0)))
    with many_open_files():
        llm = AsyncLLM("demo", pipeline_parallel_size=2, speculative_config=SPECULATION)
        try:
            assert asyncio.run(collect(llm, PROMPTS[0], params(0))) == right
        finally:
            llm.close()


def test_an_error_of_a_rebalance_is_its_callers_alone(engine: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(loop: EngineLoop) -> bool:
        raise KeyError("10.0.0.7:7700")

    async def run() -> None:
        expected = await collect(engine, PROMPTS[0], params(0))
        with monkeypatch.context() as patched:
            patched.setattr(EngineLoop, "rebalance", fails)
            beside = asyncio.create_task(collect(engine, PROMPTS[0], params(0)))
            with pytest.raises(KeyError, match="7700"):
                await asyncio.wait_for(engine.rebalance(), 30)
            assert await beside == expected
        assert await engine.rebalance() is False

    asyncio.run(run())


def test_a_rebalance_that_nobody_waits_for_any_more_ends_nothing(engine: AsyncLLM) -> None:
    async def run() -> None:
        expected = await collect(engine, PROMPTS[0], params(0))
        held, going_on = threading.Event(), threading.Event()

        def hold() -> None:
            held.set()
            going_on.wait(30)

        engine._command(hold)
        await asyncio.to_thread(held.wait, 30)
        asked = asyncio.create_task(engine.rebalance())
        await asyncio.sleep(0)  # it has asked now, and the engine's thread has not looked
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked
        going_on.set()
        assert await collect(engine, PROMPTS[0], params(0)) == expected
        assert await engine.rebalance() is False

    asyncio.run(run())
