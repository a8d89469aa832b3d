"""Who calls an engine, and how: threads, forked children, event loops, signals. Each has one stated behaviour."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import pytest

from penstock import LLM, AsyncLLM, PipelineError, SamplingParams
from penstock.core import RequestOutput

pytestmark = pytest.mark.processes

GREEDY: Final = SamplingParams(temperature=0, max_tokens=12)
LONG: Final = SamplingParams(temperature=0, max_tokens=160, ignore_eos=True)
PROMPTS: Final = ["def f(", "import ", "class Stack:", "for i in "]
CHAT: Final = [{"role": "user", "content": "def g("}]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("demo", pipeline_parallel_size=2, max_model_len=256, speculative_config={"method": "ngram"}) as llm:
        yield llm


def assert_idle(llm: LLM) -> None:
    llm.loop.audit()
    assert not llm.loop.busy


def ids(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def test_threads_wait_their_turn(llm: LLM) -> None:
    """Whole answers, conversations and streams of eight threads at once: the tokens of each alone."""
    expected = [ids(llm.generate(prompt, GREEDY)) for prompt in PROMPTS]
    chat, texts = ids(llm.chat(CHAT, GREEDY)), ["".join(llm.stream(prompt, GREEDY)) for prompt in PROMPTS]
    began = threading.Barrier(8)

    def one(number: int) -> None:
        which = number % len(PROMPTS)
        began.wait()
        assert ids(llm.generate(PROMPTS[which], GREEDY)) == expected[which]
        assert "".join(llm.stream(PROMPTS[which], GREEDY)) == texts[which]
        assert ids(llm.chat(CHAT, GREEDY)) == chat

    with ThreadPoolExecutor(8) as threads:
        for done in [threads.submit(one, number) for number in range(8)]:
            done.result(timeout=120)
    assert_idle(llm)


@pytest.mark.parametrize("begun", [0, 1])
def test_a_stream_that_is_left_is_aborted(llm: LLM, begun: int) -> None:
    stream = llm.stream(PROMPTS[0], LONG)
    for _ in range(begun):
        next(stream)
    assert llm.loop.busy
    del stream
    assert_idle(llm)


def test_close_waits_for_the_call_of_another_thread() -> None:
    llm = LLM("demo", max_model_len=256, speculative_config=None)
    with ThreadPoolExecutor(1) as thread:
        answer = thread.submit(llm.generate, PROMPTS[0], LONG)
        while not llm.loop.busy:
            assert not answer.done()
        llm.close()
        assert len(answer.result(timeout=60)[0].outputs[0].token_ids) == LONG.max_tokens
    calls: list[Callable[[], Any]] = [
        lambda: llm.generate(PROMPTS[0], GREEDY),
        lambda: llm.chat(CHAT, GREEDY),
        lambda: llm.stream(PROMPTS[0], GREEDY),
    ]
    for call in calls:
        with pytest.raises(PipelineError, match="it was closed"):
            call()


def test_within_a_running_event_loop_a_call_works(llm: LLM) -> None:
    async def main() -> list[RequestOutput]:
        return llm.generate(PROMPTS, GREEDY)

    assert ids(asyncio.run(main())) == ids(llm.generate(PROMPTS, GREEDY))


def in_fork(work: Callable[[], None]) -> None:
    """Call a function in a forked child; fails with the error that it raised there."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        try:
            work()
        except BaseException as error:
            os.write(write, repr(error).encode())
            os._exit(1)
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as said:
        problem = said.read()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, problem


CALLS: Final[dict[str, Callable[[LLM], Any]]] = {
    "generate": lambda llm: llm.generate(PROMPTS, GREEDY),
    "chat": lambda llm: llm.chat(CHAT, GREEDY),
    "stream": lambda llm: llm.stream(PROMPTS[0], GREEDY),
    "observing": lambda llm: llm.observing(None).__enter__(),  # type: ignore[arg-type]
    "outlines": lambda llm: llm.chat(CHAT, GREEDY, outline_decoding="on"),
    "close": lambda llm: llm.close(),
}


def test_in_a_forked_child_every_call_is_refused_and_the_parent_is_unharmed(llm: LLM) -> None:
    expected = ids(llm.generate(PROMPTS, GREEDY))
    stream = llm.stream(PROMPTS[0], GREEDY)
    begun = next(stream)

    def child() -> None:
        for name, call in CALLS.items():
            with pytest.raises(PipelineError, match="is a fork"):
                print(name, call(llm))
        with pytest.raises(PipelineError, match="is a fork"):
            next(stream)
        stream.close()

    in_fork(child)
    assert begun + "".join(stream) == "".join(llm.stream(PROMPTS[0], GREEDY))
    assert ids(llm.generate(PROMPTS, GREEDY)) == expected


def test_an_engine_for_asyncio_refuses_forks_and_a_second_running_loop() -> None:
    engine = AsyncLLM("demo", max_model_len=256, speculative_config=None)

    async def answer() -> list[int]:
        outputs = [output async for output in engine.generate(PROMPTS[0], GREEDY)]
        return outputs[-1].outputs[0].token_ids

    async def refused(says: str) -> None:
        with pytest.raises(PipelineError, match=says):
            await answer()
        for call in (engine.check_health, engine.drained):
            with pytest.raises(PipelineError, match=says):
                await call()

    def child() -> None:
        asyncio.run(refused("is a fork"))
        with pytest.raises(PipelineError, match="is a fork"):
            asyncio.run(engine.rebalance())
        with pytest.raises(PipelineError, match="is a fork"):
            engine.close()

    expected = asyncio.run(answer())
    in_fork(child)

    async def beside() -> None:
        assert await answer() == expected
        await asyncio.to_thread(asyncio.run, refused("another thread"))
        assert await answer() == expected

    asyncio.run(beside())
    assert asyncio.run(answer()) == expected, "another loop may follow"
    engine.close()


class Came(Exception):
    pass


def call_for_ever(llm: LLM, timer: threading.Timer, streams: bool) -> None:
    """Until the timer, started here, ends it."""
    timer.start()
    while True:
        list(llm.stream(PROMPTS[0], LONG)) if streams else llm.generate(PROMPTS[:2], LONG)


# Python calls handlers of all signals alike; Ctrl-C is the one that everybody has.
@pytest.mark.parametrize(
    "number",
    [
        signal.SIGINT,
        *(pytest.param(one, marks=pytest.mark.whole) for one in (signal.SIGTERM, signal.SIGALRM, signal.SIGUSR1)),
    ],
)
def test_whatever_a_handler_raises_comes_at_the_end_of_a_step(llm: LLM, number: signal.Signals) -> None:
    """Fifty interrupts at any moment, by whole answers and streams in turn: the next call works after each."""

    def handler(*_: object) -> None:
        raise Came

    rng, expected = random.Random(number), ids(llm.generate(PROMPTS, GREEDY))
    before = signal.signal(number, handler)
    try:
        for attempt in range(50):
            timer = threading.Timer(rng.uniform(0, 0.05), os.kill, (os.getpid(), number))
            with pytest.raises(Came):
                call_for_ever(llm, timer, streams=attempt % 2 == 0)
            timer.join()
            assert signal.getsignal(number) is handler
            assert_idle(llm)
            if attempt % 10 == 9:
                assert ids(llm.generate(PROMPTS, GREEDY)) == expected
    finally:
        signal.signal(number, before)
    assert llm.loop.ended is None


def test_a_signal_during_close_is_taken_once_it_is_closed() -> None:
    llm = LLM("demo", max_model_len=256, speculative_config=None)
    close = llm._executor.close

    def interrupted() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        close()

    llm._executor.close = interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        llm.close()
    assert llm._executor._closed  # type: ignore[attr-defined]
