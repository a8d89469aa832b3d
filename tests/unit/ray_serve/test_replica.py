"""The messages of a replica about an answer, however it ends, without Ray and without stages."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, cast

import pytest

from penstock.core import CompletionOutput, FinishReason, PipelineError, RequestError, RequestOutput
from penstock.engine.completion import CompletionDelta
from penstock.engine.stream import RequestDelta, RequestStream
from penstock.ray_serve.application import told
from penstock.ray_serve.remote import Failed, Message, News, Refused


class Scripted:
    """A stream that gives these deltas one after the other, and then raises."""

    started = True

    def __init__(self, steps: Sequence[list[CompletionDelta]], end: Exception) -> None:
        self._steps = list(steps)
        self._end = end
        self._outputs = [CompletionOutput(index) for index in range(2)]

    def output(self) -> RequestOutput:
        return RequestOutput("name", None, [1], self._outputs, False, 4)

    async def __anext__(self) -> RequestDelta:
        if not self._steps:
            raise self._end
        return RequestDelta(self._steps.pop(0), False)


def delta(index: int, token: int, reason: FinishReason | None = None) -> CompletionDelta:
    return CompletionDelta(index, [token], "?", None, reason)


def messages(steps: Sequence[list[CompletionDelta]], end: Exception) -> list[Message]:
    async def run() -> list[Message]:
        return [message async for message in told(cast(RequestStream, Scripted(steps, end)))]

    return asyncio.run(run())


def tokens_of(found: list[Message]) -> list[tuple[int, int]]:
    return [(one.index, one.token_ids[0]) for news in found if isinstance(news, News) for one in news.deltas]


def test_an_answer_is_told_to_its_end() -> None:
    steps = [[delta(0, 1)], [delta(0, 2, FinishReason.STOP), delta(1, 3)], [delta(1, 4, FinishReason.LENGTH)]]
    found = messages(steps, StopAsyncIteration())
    assert found[0] == News([], 4), "that it is admitted"
    assert tokens_of(found) == [(0, 1), (0, 2), (1, 3), (1, 4)]
    assert [sorted(news.ended) for news in found if isinstance(news, News)] == [[], [], [0], [1]]


@pytest.mark.parametrize("reason", [FinishReason.ERROR, FinishReason.ABORT])
def test_the_end_of_what_was_cut_off_is_not_told(reason: FinishReason) -> None:
    """The other completion's tokens of the same step are: another replica goes on behind them."""
    end: Exception = PipelineError("a stage is lost") if reason is FinishReason.ERROR else StopAsyncIteration()
    found = messages([[delta(0, 1)], [delta(0, 2, reason), delta(1, 3)]], end)
    assert tokens_of(found) == [(0, 1), (1, 3)]
    assert isinstance(found[-1], Failed)


def test_a_request_at_fault_is_told_to_its_last_token() -> None:
    found = messages([[delta(0, 1)], [delta(0, 2, FinishReason.ERROR)]], RequestError("structured_outputs: no way on"))
    assert tokens_of(found) == [(0, 1), (0, 2)]
    assert found[-1] == Refused("structured_outputs: no way on")


def test_a_request_that_waits_is_told_as_admitted_later() -> None:
    class Waiting(Scripted):
        started = False

        async def __anext__(self) -> Any:
            await asyncio.sleep(0)
            self.started = True
            return await super().__anext__()

    async def run() -> list[Message]:
        stream = Waiting([[delta(0, 1)]], StopAsyncIteration())
        return [message async for message in told(cast(RequestStream, stream))]

    assert tokens_of(asyncio.run(run())) == [(0, 1)]
