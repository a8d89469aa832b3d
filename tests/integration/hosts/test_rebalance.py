"""Stages move back to a host that has returned, amid faults: the same tokens, and nothing hangs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Final

import pytest

from penstock import LLM, AsyncLLM, SamplingParams
from tests.workers import WarmWorker, Worker, workers

pytestmark = pytest.mark.processes

PROMPT: Final = "def f(x):"
PARAMS: Final = SamplingParams(temperature=0.8, seed=3, max_tokens=120, ignore_eos=True)
PATIENCE_S: Final = 60.0


@pytest.fixture(scope="module")
def expected(target: Path) -> list[int]:
    with LLM(target, max_model_len=256) as llm:
        return llm.generate(PROMPT, PARAMS)[0].outputs[0].token_ids


async def tokens(llm: AsyncLLM) -> list[int]:
    outputs = [output async for output in llm.generate(PROMPT, PARAMS)]
    return outputs[-1].outputs[0].token_ids


async def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)


@asynccontextmanager
async def answers(llm: AsyncLLM, expected: list[int]) -> AsyncIterator[None]:
    """Have one answer follow the other for the length of the block: all of them have the same tokens."""
    stopped = asyncio.Event()

    async def run() -> None:
        while not stopped.is_set():
            assert await asyncio.wait_for(tokens(llm), PATIENCE_S) == expected

    running = asyncio.create_task(run())
    try:
        yield
    finally:
        stopped.set()
        await running


async def moving(llm: AsyncLLM) -> None:
    """Ask for a rebalance until stages move: they do so by themselves between two answers."""
    deadline = time.monotonic() + PATIENCE_S
    while not await asyncio.wait_for(llm.rebalance(), PATIENCE_S) and llm.stats().recovering is None:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)


# Stages move back to a host in the short suite, too: test_a_server_outlives_all_its_hosts, unit tests of rebalances.
@pytest.mark.whole
def test_a_rebalance_amid_faults_changes_no_token(
    target: Path, keys: Path, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.hosts.remote.TRY_AGAIN_S", 0.3)

    async def run(first: Worker, other: Worker, there: ExitStack) -> None:
        def returned() -> Worker:
            worker = WarmWorker(other.host, "--keys", str(keys))
            there.callback(worker.close)
            return worker

        names = f"{first.host},{other.host}"
        options = {"max_model_len": 256, "hosts": names, "keys": str(keys), "recovery_timeout": PATIENCE_S}
        async with AsyncLLM(target, **options) as llm, answers(llm, expected):
            other.kill()
            assert not await asyncio.wait_for(llm.rebalance(), PATIENCE_S), "the host is not there"
            await until(lambda: llm.stats().recoveries == 1 and len(first.stages()) == 2)

            # The host dies once more as stages are about to move to it.
            again = await asyncio.to_thread(returned)
            await moving(llm)
            again.kill()
            assert not await asyncio.wait_for(llm.rebalance(), PATIENCE_S), "stages move or are replaced already"
            await until(lambda: llm.stats().recovering is None and len(first.stages()) == 2)

            # A stage that stays is killed amid the move.
            once_more = await asyncio.to_thread(returned)
            await moving(llm)
            first.stages()[0].kill()
            await asyncio.gather(*(asyncio.wait_for(llm.rebalance(), PATIENCE_S) for _ in range(3)))
            await until(lambda: llm.stats().recovering is None and len(once_more.stages()) == 1)
            assert await asyncio.wait_for(tokens(llm), PATIENCE_S) == expected
            assert len(first.stages()) == 1

    with workers(2, keys) as found, ExitStack() as there:
        asyncio.run(run(*found, there))
