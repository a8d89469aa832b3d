"""Answers that are read from replicas, while these are lost at any moment, without Ray."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core import (
    FinishReason,
    PipelineError,
    QueueFull,
    RequestError,
    SamplingParams,
    SpeculationMetrics,
    StructuredOutputsParams,
)
from penstock.engine.completion import CompletionDelta
from penstock.engine.options import EngineOptions
from penstock.engine.recovery import MOST_LOSSES
from penstock.engine.resolve import Resolved, resolve_options
from penstock.ray_serve.remote import (
    Accepted,
    Ended,
    Failed,
    Message,
    News,
    Refused,
    RemoteCall,
    RemoteEngine,
    RemoteStream,
    ReplicaLost,
)
from penstock.ray_serve.routing import Reports
from penstock.ray_serve.settings import front_options

Script = list[list[int]]
"""The tokens that each completion has in the end. A token's text is its own character."""


def text_of(tokens: list[int]) -> str:
    return "".join(chr(97 + token) for token in tokens)


def messages_of(script: Script, call: RemoteCall, sizes: Iterator[int]) -> Iterator[Message]:
    """A replica's whole answer: completions take turns, each with the next few tokens behind those that came."""
    came = call.came or [[] for _ in script]
    assert all(whole[: len(ids)] == ids for whole, ids in zip(script, came, strict=True))
    yield Accepted([text_of(ids) for ids in came], "exact")
    yield News([], 3)
    places = [len(ids) for ids in came]
    told: set[int] = set()
    while len(told) < len(script):
        for index, whole in enumerate(script):
            if index in told:
                continue
            new = whole[places[index] : places[index] + next(sizes)]
            places[index] += len(new)
            ended = places[index] == len(whole)
            reason = FinishReason.LENGTH if ended else None
            figures = {index: Ended(SpeculationMetrics(drafts=1), 1.0, None)} if ended else {}
            yield News([CompletionDelta(index, new, text_of(new), None, reason)], 3, figures)
            told |= {index} if ended else set()


@dataclass
class Fake:
    """Replicas of which the n-th to be asked is lost behind so many of its messages; later ones live."""

    script: Script
    sizes: Iterator[int]
    lives: list[int]
    as_message: bool = False
    calls: list[RemoteCall] = field(default_factory=list)
    cancelled: int = 0

    def send(self, call: RemoteCall) -> FakeAnswer:
        self.calls.append(call)
        life = self.lives.pop(0) if self.lives else 10**9
        return FakeAnswer(self, messages_of(self.script, call, self.sizes), life)

    async def check_health(self) -> None:
        raise NotImplementedError

    async def rebalance(self) -> bool:
        raise NotImplementedError


@dataclass
class FakeAnswer:
    replicas: Fake
    messages: Iterator[Message]
    left: int

    async def __anext__(self) -> Message:
        await asyncio.sleep(0)
        self.left -= 1
        if self.left < 0:
            if self.replicas.as_message:
                return Failed("its engine has ended")
            raise ReplicaLost("killed")
        try:
            return next(self.messages)
        except StopIteration:
            raise StopAsyncIteration from None

    def cancel(self) -> None:
        self.replicas.cancelled += 1


def forever(sizes: list[int]) -> Iterator[int]:
    while True:
        yield from sizes


def call_of(script: Script, came: Script | None = None) -> RemoteCall:
    return RemoteCall("name", "prompt", [1, 2], SamplingParams(n=len(script), seed=5), came or [])


async def read(stream: RemoteStream) -> tuple[list[list[int]], list[str], list[bool]]:
    """Tokens and text of all deltas, and whether each was the last one."""
    count = len(stream.output().outputs)
    tokens: list[list[int]] = [[] for _ in range(count)]
    texts, lasts = [""] * count, []
    async for new in stream:
        for delta in new.deltas:
            tokens[delta.index] += delta.token_ids
            texts[delta.index] += delta.text
        lasts.append(new.finished)
    return tokens, texts, lasts


SCRIPTS = st.lists(st.lists(st.integers(0, 25), min_size=1, max_size=9), min_size=1, max_size=3)


@given(
    SCRIPTS,
    st.lists(st.integers(1, 3), min_size=1, max_size=5),
    st.lists(st.integers(6, 14), max_size=6),
    st.booleans(),
)
def test_nothing_is_told_twice_or_left_out(script: Script, sizes: list[int], lives: list[int], by_word: bool) -> None:
    """Each replica tells at least one token before it is lost."""
    replicas, ended = Fake(script, forever(sizes), lives, by_word), []

    async def run() -> None:
        stream = RemoteStream(call_of(script), replicas, ended.append)
        tokens, texts, lasts = await read(stream)
        assert tokens == script
        assert texts == [text_of(whole) for whole in script]
        assert lasts == [False] * (len(lasts) - 1) + [True]
        output = stream.output()
        assert [one.token_ids for one in output.outputs] == script
        assert [one.text for one in output.outputs] == texts
        assert [one.resumed for one in output.outputs] == [0] * len(script)
        assert [one.metrics.drafts for one in output.outputs] == [1] * len(script)
        assert output.finished
        assert output.num_cached_tokens == 3
        assert ended == [stream]

    asyncio.run(run())
    assert {call.params.seed for call in replicas.calls} == {5}


@given(SCRIPTS, st.data())
def test_an_answer_that_a_client_goes_on_with_goes_on_again(script: Script, data: st.DataObject) -> None:
    came = [whole[: data.draw(st.integers(0, len(whole) - 1))] for whole in script]
    replicas = Fake(script, forever([1]), data.draw(st.lists(st.integers(0, 6), max_size=2)))

    async def run() -> None:
        stream = RemoteStream(call_of(script, came), replicas, lambda _: None)
        await stream.accepted()
        assert [one.text for one in stream.output().outputs] == [text_of(ids) for ids in came]
        tokens, _, _ = await read(stream)
        assert [[*ids, *new] for ids, new in zip(came, tokens, strict=True)] == script
        assert [one.text for one in stream.output().outputs] == [text_of(whole) for whole in script]
        assert [one.resumed for one in stream.output().outputs] == [len(ids) for ids in came]

    asyncio.run(run())


@pytest.mark.parametrize(
    ("lives", "error"), [([2] * 9, RequestError), ([1] * 9, PipelineError), ([2, 1, 2], PipelineError)]
)
def test_a_request_that_every_replica_is_lost_with_ends_by_its_own_fault_if_it_ran_on_all(
    lives: list[int], error: type[Exception]
) -> None:
    """The second message of a replica says that its engine has admitted the request."""
    replicas = Fake([[1, 2, 3]], forever([1]), lives)

    async def run() -> None:
        with pytest.raises(error, match=f"{MOST_LOSSES} times in a row a replica was lost .*: killed"):
            await read(RemoteStream(call_of([[1, 2, 3]]), replicas, lambda _: None))

    asyncio.run(run())
    assert len(replicas.calls) == MOST_LOSSES
    assert replicas.cancelled == MOST_LOSSES


def test_an_answer_that_ends_early_goes_on_elsewhere() -> None:
    class Short(Fake):
        def send(self, call: RemoteCall) -> FakeAnswer:
            answer = super().send(call)
            if len(self.calls) == 1:
                answer.messages = iter([next(answer.messages) for _ in range(4)])
            return answer

    replicas = Short([[1, 2, 3]], forever([1]), [])

    async def run() -> None:
        assert (await read(RemoteStream(call_of([[1, 2, 3]]), replicas, lambda _: None)))[0] == [[1, 2, 3]]

    asyncio.run(run())
    assert [call.came for call in replicas.calls] == [[], [[1, 2]]]


def test_a_refusal_is_the_requests_own() -> None:
    class Refusing(Fake):
        def send(self, call: RemoteCall) -> FakeAnswer:
            return FakeAnswer(self, iter([Refused("stop is 7")]), 9)

    async def run() -> None:
        with pytest.raises(RequestError, match=r"^stop is 7$"):
            await RemoteStream(call_of([[1]]), Refusing([[1]], forever([1]), []), lambda _: None).accepted()

    asyncio.run(run())


def test_the_last_tokens_of_a_request_at_fault_come_before_its_error() -> None:
    class Failing(Fake):
        def send(self, call: RemoteCall) -> FakeAnswer:
            last = CompletionDelta(0, [7], "h", None, FinishReason.ERROR)
            return FakeAnswer(self, iter([Accepted([""], "exact"), News([last], 0), Refused("stop is 7")]), 9)

    async def run() -> None:
        stream = RemoteStream(call_of([[7]]), Failing([[7]], forever([1]), []), lambda _: None)
        assert [delta.token_ids for delta in (await anext(stream)).deltas] == [[7]]
        with pytest.raises(RequestError, match=r"^stop is 7$"):
            await anext(stream)

    asyncio.run(run())


def test_an_abort_ends_reading_with_a_last_delta() -> None:
    replicas, ended = Fake([[1, 2, 3]], forever([1]), []), []

    async def run() -> None:
        stream = RemoteStream(call_of([[1, 2, 3]]), replicas, ended.append)
        assert (await anext(stream)).deltas[0].token_ids == [1]
        stream.abort()
        stream.abort()
        last = await anext(stream)
        assert (last.finished, last.deltas[0].finish_reason) == (True, FinishReason.ABORT)
        with pytest.raises(StopAsyncIteration):
            await anext(stream)

    asyncio.run(run())
    assert replicas.cancelled == 1
    assert len(replicas.calls) == 1


@pytest.fixture(scope="module")
def setup() -> Resolved:
    return resolve_options(front_options(EngineOptions()))


def test_an_engine_of_replicas_draws_seeds_and_bounds_its_queue(setup: Resolved) -> None:
    replicas = Fake([[1, 2]], forever([1]), [])
    engine = RemoteEngine(setup, replicas, Reports(), max_queue=2)

    async def run() -> None:
        streams = [engine.submit("def f(", SamplingParams(max_tokens=2)) for _ in range(2)]
        assert streams[0].seed != streams[1].seed
        with pytest.raises(QueueFull, match=r"^2 requests wait already"):
            engine.submit("def f(")
        assert engine.stats().waiting == 2
        assert engine.numerics == "fast"
        await read(streams[0])
        assert engine.numerics == "exact"
        third = engine.submit("def f(", SamplingParams(temperature=0), request_id="mine")
        assert third.seed == 0
        streams[1].abort()
        with pytest.raises(RequestError, match=r"^request_id 'mine' is that of a request under way"):
            engine.submit("def f(", request_id="mine")
        third.abort()
        assert engine.stats().waiting == 0
        with pytest.raises(RequestError, match=r"^structured_outputs"):
            await engine.prepare(SamplingParams(structured_outputs=StructuredOutputsParams(regex="(")))

    asyncio.run(run())
    assert replicas.calls[0].token_ids == engine.get_tokenizer().encode("def f(")


def test_an_engine_without_replicas_is_well_and_idle(setup: Resolved) -> None:
    engine = RemoteEngine(setup, Fake([[1]], forever([1]), []), Reports())
    asyncio.run(engine.check_health())
    assert engine.stats().resting
