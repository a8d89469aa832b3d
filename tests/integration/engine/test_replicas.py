"""Several engines behind one front end: a request has one engine's tokens, whatever happens to the engines."""

from __future__ import annotations

import asyncio
import math
import random
import shutil
import signal
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any, Final

import pytest

from penstock import (
    LLM,
    AsyncLLM,
    CompletionOutput,
    ConfigError,
    FinishReason,
    PipelineError,
    Replicas,
    RequestError,
    SamplingParams,
)
from penstock.engine.stats import Counters, ReplicaState
from penstock.engine.stream import Stream
from penstock.requests.request import Request
from tests.integration.engine.test_llm import assert_same
from tests.integration.engine.test_processors import EXHAUSTED, EXHAUSTION
from tests.integration.engine.test_resume import CASES, params_of
from tests.replicas import all_up, lose, signal_stage, until

pytestmark = pytest.mark.processes

PROMPTS: Final = ("def f(x):", "import os, ")
TOKENS: Final = 48
ENGINE: Final[dict[str, Any]] = {"pipeline_parallel_size": 2, "max_model_len": 96, "kv_slots": 1600, "threads": 1}
ASKED: Final = [
    (prompt, params_of({**case, "max_tokens": case.get("max_tokens", TOKENS)}, temperature))
    for temperature in (0.0, 1.0)
    for prompt, case in zip(cycle(PROMPTS), CASES.values(), strict=False)
]
"""Every field of SamplingParams, greedy and sampled, with one prompt and the other in turn."""


def speculation(draft: Path | None) -> dict[str, Any] | None:
    return None if draft is None else {"method": "draft_model", "model": str(draft), "width": 4, "children": 3}


def replicas_of(target: Path, draft: Path | None = None, **options: Any) -> Replicas:
    return Replicas(str(target), data_parallel_size=2, speculative_config=speculation(draft), **ENGINE | options)


async def read(stream: Stream, on_news: Callable[[], None] = lambda: None) -> list[CompletionOutput]:
    """Read a stream to its end, and compare what was told with what it says that it told."""
    told = [CompletionOutput(one.index, logprobs=one.logprobs and []) for one in stream.output().outputs]
    async for news in stream:
        for delta in news.deltas:
            assert delta.finish_reason not in (FinishReason.ABORT, FinishReason.ERROR)
            delta.add_to(told[delta.index])
        on_news()
    assert [(one.token_ids, one.text) for one in told] == [(one.token_ids, one.text) for one in stream.output().outputs]
    return stream.output().outputs


# ------------------------------------------------------------------------------------------------- losses under load


class Chaos:
    """Does each of some deeds once, the next one after a random number of news, once every replica is up again."""

    def __init__(self, engine: Replicas, deeds: list[Callable[[Replicas], Awaitable[None]]], seed: int) -> None:
        self._engine, self._deeds, self._random = engine, deeds, random.Random(seed)
        self._left = self._random.randrange(10, 60)
        self._task: asyncio.Task[None] | None = None

    def heard(self) -> None:
        self._left -= 1
        if self._left <= 0 and self._deeds and (self._task is None or self._task.done()) and all_up(self._engine):
            self._left = self._random.randrange(10, 60)
            self._task = asyncio.ensure_future(self._deeds.pop(0)(self._engine))  # type: ignore[arg-type]

    @property
    def done(self) -> bool:
        return not self._deeds and self._task is not None and self._task.done()

    async def end(self) -> None:
        assert self._task is not None
        await self._task


async def kill_one(engine: Replicas) -> None:
    lose(engine._replicas[0], 1)


async def kill_all_of_one(engine: Replicas) -> None:
    lose(engine._replicas[1], 2)


async def kill_both(engine: Replicas) -> None:
    for replica in engine._replicas:
        lose(replica, 2)


async def drain(engine: Replicas) -> None:
    await engine.drain(0)
    assert engine.replicas()[0].state is ReplicaState.DRAINING
    await engine.restart(0)


async def roll(engine: Replicas) -> None:
    await engine.roll()


@pytest.mark.parametrize(
    ("drafts", "deeds", "restarts"),
    [
        pytest.param(False, [kill_one, drain, kill_both], [1, 0], id="plain"),
        # An engine of two that speculate is lost in test_offline_replicas.py, too.
        pytest.param(True, [kill_all_of_one, roll], [1, 1], id="speculating", marks=pytest.mark.whole),
    ],
)
def test_every_answer_is_one_engines_while_replicas_are_killed_drained_and_rolled(
    target: Path, draft: Path, drafts: bool, deeds: list[Callable[[Replicas], Awaitable[None]]], restarts: list[int]
) -> None:
    with LLM(str(target), speculative_config=None, max_model_len=96) as llm:
        want = [one.outputs for one in llm.generate([prompt for prompt, _ in ASKED], [one for _, one in ASKED])]

    async def run(engine: Replicas) -> None:
        chaos = Chaos(engine, list(deeds), seed=drafts)
        order = list(range(len(ASKED)))
        random.Random(drafts).shuffle(order)
        numbers, asked = cycle(order), 0

        async def ask() -> None:
            nonlocal asked
            while asked < len(ASKED) or not chaos.done:
                asked += 1
                number = next(numbers)
                prompt, params = ASKED[number]
                assert_same(await read(engine.submit(prompt, params), chaos.heard), want[number])

        await asyncio.gather(*(ask() for _ in range(12)))
        await chaos.end()
        await until(lambda: all_up(engine))
        await engine.check_health()
        await engine.drained()
        told = engine.replicas()
        assert sum(one.moved for one in told) > 0
        assert [one.restarts for one in told] == restarts
        assert engine.stats().running == engine.stats().waiting == 0
        assert engine.stats().generation_tokens > 0

    with_params = replicas_of(target, draft if drafts else None)
    try:
        asyncio.run(run(with_params))
    finally:
        with_params.close()


# ------------------------------------------------------------------------------------------------------ one by one


@pytest.fixture(scope="module")
def shared(target: Path) -> Iterator[Replicas]:
    engine = replicas_of(target, max_queue=100)
    yield engine
    engine.close()


@pytest.fixture
def engine(shared: Replicas) -> Iterator[Replicas]:
    yield shared
    assert not shared._streams
    assert not shared._waiting
    assert not any(one.streams for one in shared._replicas)


def test_requests_that_begin_alike_meet_and_others_spread(engine: Replicas) -> None:
    async def run() -> None:
        before = [one.routed for one in engine.replicas()]
        ids = [*range(40, 80)]
        for turn in range(3):
            await read(engine.submit({"prompt_token_ids": ids}, SamplingParams(temperature=0, max_tokens=17)))
            ids += [*range(50 + turn, 60)]
        after = [one.routed for one in engine.replicas()]
        by_prefix = [now.get("prefix", 0) - then.get("prefix", 0) for now, then in zip(after, before, strict=True)]
        assert sorted(by_prefix) == [0, 2]
        apart = [engine.submit({"prompt_token_ids": [*range(n, n + 30)]}, params_of({}, 1.0)) for n in (3, 90)]
        assert [len(one.streams) for one in engine._replicas] == [1, 1]
        await asyncio.gather(*map(read, apart))

    asyncio.run(run())


def test_one_event_loop_after_another_and_generate_and_chat_are_one_engines(engine: Replicas) -> None:
    async def text(params: SamplingParams) -> str:
        return [output.outputs[0].text async for output in engine.generate("def f(x):", params)][-1]

    params = params_of({}, 1.0)
    assert asyncio.run(text(params)) == asyncio.run(text(params))
    assert asyncio.run(text(replace(params, seed=None)))


def test_an_abort_tells_its_reader_and_a_name_can_be_had_once(engine: Replicas) -> None:
    async def run() -> None:
        stream = engine.submit(PROMPTS[0], params_of({"max_tokens": 80, "ignore_eos": True}, 1.0), request_id="mine")
        with pytest.raises(RequestError, match="'mine' is that of a request under way"):
            engine.submit(PROMPTS[0], request_id="mine")
        await anext(stream)
        engine.abort("mine")
        last = [news async for news in stream][-1]
        assert last.finished
        assert stream.output().outputs[0].finish_reason is FinishReason.ABORT
        await engine.drained()

    asyncio.run(run())


def test_a_request_resumed_by_its_client_says_what_it_was_resumed_with(engine: Replicas) -> None:
    async def run() -> None:
        params = params_of({"n": 2}, 1.0)
        whole = await read(engine.submit(PROMPTS[0], params))
        stream = await engine.resume(PROMPTS[0], params, resumed=[one.token_ids[:4] for one in whole])
        async for _ in stream:
            pass
        again = stream.output().outputs
        assert [(one.token_ids, one.text, one.resumed) for one in again] == [
            (one.token_ids, one.text, 4) for one in whole
        ]
        with pytest.raises(RequestError, match="seed is not given"):
            await engine.resume(PROMPTS[0], replace(params, seed=None), resumed=[[5], []])

    asyncio.run(run())


def test_a_request_that_is_its_own_fault_is_not_tried_elsewhere(engine: Replicas) -> None:
    async def run() -> None:
        moved = [one.moved for one in engine.replicas()]
        stream = engine.submit(PROMPTS[0], params_of({"structured_outputs": EXHAUSTED, "max_tokens": 64}, 1.0))
        with pytest.raises(RequestError, match=EXHAUSTION):
            _ = [news async for news in stream]
        assert stream.output().outputs[0].finish_reason is FinishReason.ERROR
        assert [one.moved for one in engine.replicas()] == moved

    asyncio.run(run())


def test_a_stream_that_nobody_reads_moves_too_and_loses_nothing(engine: Replicas) -> None:
    async def run() -> None:
        params = params_of({"max_tokens": 80, "ignore_eos": True, "logprobs": 1}, 1.0)
        want = await read(engine.submit(PROMPTS[0], params))
        stream = engine.submit(PROMPTS[0], params)
        (home,) = [one for one in engine._replicas if stream in one.streams]
        await anext(stream)
        await engine.drain(home.number)
        with pytest.raises(RequestError, match="cannot be drained: no other is up"):
            await engine.drain(1 - home.number)
        await engine.restart(home.number)
        async for _ in stream:
            pass
        assert_same(stream.output().outputs, want)

    asyncio.run(run())


def test_requests_leave_a_replica_with_a_stopped_stage_which_may_come_back(target: Path, draft: Path) -> None:
    """No stage is ever lost here: ``stage_timeout`` is infinite."""

    async def run() -> None:
        params = params_of({"max_tokens": 80, "ignore_eos": True, "logprobs": 1, "n": 2}, 1.0)
        want = await read(engine.submit(PROMPTS[0], params))
        streams = [engine.submit(PROMPTS[0], params) for _ in range(4)]
        for stream in streams:
            await anext(stream)
        home = next(one for one in engine._replicas if streams[0] in one.streams)
        left = len(home.streams)
        signal_stage(home, 1, signal.SIGSTOP)
        try:
            for stream in streams:
                _ = [news async for news in stream]
                assert_same(stream.output().outputs, want)
            assert (home.state, home.moved) == (ReplicaState.SILENT, left)
            assert "no result for" in str(home.trouble)
            assert_same(await read(engine.submit(PROMPTS[0], params)), want)  # elsewhere
            other = engine._replicas[1 - home.number]
            assert sum(other.routed.values()) >= left + 1
        finally:
            signal_stage(home, 1, signal.SIGCONT)
        await until(lambda: all_up(engine))
        again = [engine.submit(PROMPTS[0], params) for _ in range(4)]
        assert home.streams
        for outputs in await asyncio.gather(*map(read, again)):
            assert_same(outputs, want)
        assert [one.restarts for one in engine.replicas()] == [0, 0]
        assert engine.stats().recoveries == 0

    engine = replicas_of(target, draft, move_after=1.0, stage_timeout=math.inf)
    try:
        asyncio.run(run())
    finally:
        engine.close()


def test_one_that_ends_its_replica_again_and_again_ends_itself_and_no_other(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A certain prompt kills the stages of whatever replica admits it."""
    poison = {"prompt_token_ids": [33] * 40}

    def admitted(counters: Counters, request: Request, at: float) -> None:
        if request.prompt == poison["prompt_token_ids"]:
            loops = [(one, one.engine.llm.loop) for one in engine._replicas if one.engine is not None]
            lose(next(one for one, loop in loops if counters in loop.observers), 2)

    async def run() -> None:
        params = params_of({"max_tokens": TOKENS, "ignore_eos": True}, 1.0)
        want = await read(engine.submit(PROMPTS[0], params))
        monkeypatch.setattr(Counters, "admitted", admitted)
        streams = [engine.submit(PROMPTS[0], params) for _ in range(4)]
        bad = engine.submit(poison, params)
        others = asyncio.gather(*map(read, streams))
        with pytest.raises(RequestError, match="3 times in a row a replica was lost before its next token"):
            await read(bad)
        for outputs in await others:
            assert_same(outputs, want)
        await until(lambda: all_up(engine))

    engine = replicas_of(target)
    try:
        asyncio.run(run())
    finally:
        engine.close()


def test_a_replica_that_has_ended_is_made_again_but_not_of_other_files(target: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(target, folder)

    async def run() -> None:
        params = params_of({"max_tokens": 80, "ignore_eos": True}, 1.0)
        want = await read(engine.submit(PROMPTS[0], params))
        stream = engine.submit(PROMPTS[0], params)
        (home,) = [one for one in engine._replicas if stream in one.streams]
        lose(home, 1)
        assert_same(await read(stream), want)
        await until(lambda: home.restarts == 1 and all_up(engine))
        (folder / "model.safetensors").touch()
        with pytest.raises(PipelineError, match=f"replica {home.number} could not be started: model: .* changed"):
            await engine.restart(home.number)
        assert_same(await read(engine.submit(PROMPTS[0], params)), want)
        assert home.state in (ReplicaState.DOWN, ReplicaState.STARTING)
        assert "changed" in str(engine.replicas()[home.number].problem)
        other = engine._replicas[1 - home.number]
        lose(other, 1)  # without recovery none is left, and nothing waits for one
        await until(lambda: other.has_ended)
        with pytest.raises(PipelineError, match=r"no replica is up: replica 0: .*; replica 1: "):
            engine.submit(PROMPTS[0], params)

    engine = replicas_of(folder, recovery_timeout=0.0)
    try:
        asyncio.run(run())
    finally:
        engine.close()


REFUSED: Final[list[tuple[dict[str, Any], str]]] = [
    ({"data_parallel_size": 0}, "data_parallel_size is 0; it has to be a whole number, at least 1"),
    ({"move_after": 0}, "move_after is 0.0; it has to be a number of seconds above 0"),
    ({"move_after": 1.0, "data_parallel_size": 1}, "move_after is 1.0; it has to be left out with one engine"),
    ({"hosts": "a,b,c"}, "data_parallel_size is 2, and hosts names 3; that has to be a multiple of it"),
    ({"hosts": "join://h:7700", "pipeline_parallel_size": 2}, "data_parallel_size is 2, and hosts 'join://h:7700' has"),
    ({"hosts": "ray", "pipeline_parallel_size": 2}, "data_parallel_size is 2, and hosts 'ray' has"),
    ({"device": "cuda"}, "data_parallel_size is 2, and device cuda spreads one engine over all GPUs"),
    ({"pipeline_parallel_size": 40}, "pipeline_parallel_size is 40; the model has 16 layers"),
    ({"colour": 1}, "colour"),
]


@pytest.mark.parametrize(("options", "complaint"), REFUSED)
def test_combinations_that_cannot_work_are_refused_before_anything_starts(
    options: dict[str, Any], complaint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.engine.replicas.replicas.shared_fork_server", pytest.fail)
    with pytest.raises((ConfigError, TypeError), match=complaint):
        Replicas("demo", **{"data_parallel_size": 2} | options)


def test_one_engine_is_not_several() -> None:
    with pytest.raises(ConfigError, match=r"data_parallel_size is 2, and this is one engine: use penstock\.Replicas"):
        AsyncLLM("demo", data_parallel_size=2)


def test_hosts_and_cores_are_divided() -> None:
    from penstock.engine.options import EngineOptions, options_of_replicas
    from penstock.engine.resolve import resolve_options

    options = EngineOptions(model="demo", data_parallel_size=2, hosts="a,b,c,d")
    assert [(one.hosts, one.data_parallel_size) for one in options_of_replicas(options)] == [("a,b", 1), ("c,d", 1)]
    (first, _) = options_of_replicas(EngineOptions(model="demo", data_parallel_size=2, pipeline_parallel_size=2))
    alone = resolve_options(replace(first, engines_here=1)).threads
    assert all(
        shared <= max(1, whole // 2) for shared, whole in zip(resolve_options(first).threads, alone, strict=True)
    )
