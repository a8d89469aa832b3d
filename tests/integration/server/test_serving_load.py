"""``penstock serve`` under load, in small: benchmarks/load/soak.py runs the same with ten thousand requests."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from typing import Any

import pytest

from benchmarks.load.soaking.cases import SHARED, Case, drawn_cases
from benchmarks.load.soaking.clients import KEY, Asking, Outcome, stream, twice, whole
from benchmarks.load.soaking.run import FLAGS, Soak
from penstock import AsyncLLM, SamplingParams
from penstock.lab.serving_load import run_load
from penstock.messages import Batch, Result
from penstock.pipeline.base import Pipeline, StagePlan
from penstock.pipeline.processes import ProcessExecutor
from penstock.requests.slots import BLOCK
from tests.serving import served

pytestmark = pytest.mark.processes

RATE = 15.0
TEMPLATE = (
    "{% for turn in messages %}# {{ turn.role }}:{{ turn.content }}{% endfor %}"
    "{% if add_generation_prompt %}# assistant:{% endif %}"
)
"""The demo's own says nothing of where an answer begins, so that a second turn differs from there on."""


@pytest.fixture(scope="module")
def cases() -> list[Case]:
    return drawn_cases(32, seed=1)


@pytest.mark.slow
@pytest.mark.parametrize(("requests", "warm"), [(90, 50), pytest.param(150, 50, marks=pytest.mark.whole)])
def test_whatever_clients_do_every_answer_is_right_and_nothing_is_left(
    cases: list[Case], requests: int, warm: int
) -> None:
    with served(*FLAGS, api_key=KEY) as server:
        found = Soak(server, cases, requests, RATE, warm).run()
    assert found.problems == []
    assert len(found.outcomes) == requests
    assert {"whole", "stream", "slow", "bad", "leaves amid", "leaves before", "leaves in body"} <= found.kinds.keys()
    assert found.counters["penstock:prefix_cache_hits_total"]


@pytest.mark.slow
@pytest.mark.whole  # the bursts of the test above sample it
def test_at_any_concurrency_a_request_has_the_tokens_that_it_has_alone(cases: list[Case]) -> None:
    with served("demo", "-pp", "2", "--no-web", api_key=KEY) as server:
        for concurrency in (1, 4, 16, 32):
            some = cases[: max(8, concurrency)]
            outcomes = asyncio.run(asked(server.address, some, concurrency))
            assert [one for one in outcomes if one.problem is not None or one.status != 200] == [], concurrency
            assert len(outcomes) == len(some)


async def asked(address: tuple[str, int], cases: Sequence[Case], concurrency: int) -> list[Outcome]:
    """Every case once, all at the same time as far as ``concurrency`` lets them."""
    outcomes = []

    async def one(index: int) -> None:
        client = (whole, stream, twice)[index % 3]
        asking = Asking(address, f"{concurrency}-{index}", cases[index], random.Random(index))
        outcomes.append(await client(asking))

    await run_load(one, [0.0] * len(cases), concurrency)
    return outcomes


# ------------------------------------------------------------------------------------------------------- prefix cache


class Watched:
    """A pipeline, and what has gone through it: batches as they entered, and by batch the rows of every stage."""

    def __init__(self, inner: Pipeline) -> None:
        self._inner = inner
        self.batches: list[Batch] = []
        self.rows: dict[int, list[int]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def submit(self, batch: Batch) -> None:
        self.batches.append(batch)
        self._inner.submit(batch)

    def poll(self) -> list[Result]:
        results = self._inner.poll()
        self.rows.update((result.stream, [span.rows for span in result.spans]) for result in results)
        return results

    def positions(self, request: int, below: int) -> list[int]:
        """Positions of a request's prompt that have entered, in order. Checks that every stage computed their rows."""
        found = []
        for batch in self.batches:
            entered = [
                p for owner, p in zip(batch.rows.requests, batch.rows.positions, strict=True) if owner == request
            ]
            found += (prompt := [position for position in entered if position < below])
            if prompt and prompt == batch.rows.positions:  # drafted rows may die on the way, these never do
                assert set(self.rows[batch.stream]) == {len(prompt)}
        return found


class WatchingExecutor(ProcessExecutor):
    def __init__(self) -> None:
        super().__init__()
        self.watched: dict[str, Watched] = {}

    def begin(self, plans: Sequence[StagePlan], name: str = "stage") -> Any:
        self.watched[name] = Watched(super().begin(plans, name))
        return self.watched[name]


def test_the_second_turn_of_a_chat_computes_only_what_is_new() -> None:
    """On every stage of the target, and in the drafter."""
    asyncio.run(two_turns())


async def two_turns() -> None:
    host = WatchingExecutor()
    drafts = {"method": "draft_model", "model": "demo", "strategy": "continuous"}  # auto may ask for none
    options: Any = {"pipeline_parallel_size": 3, "speculative_config": drafts}
    async with AsyncLLM("demo", host=host, **options) as llm:
        params = SamplingParams(max_tokens=48, temperature=0.0)
        llm.get_tokenizer().use_chat_template(TEMPLATE)
        chat = [{"role": "user", "content": f"{SHARED[0]}{SHARED[1]}def load(path):"}]
        turns = []
        for _ in range(2):
            prompt = llm.get_tokenizer().apply_chat_template(chat)
            answer = llm.submit({"prompt_token_ids": prompt}, params)
            (request,) = llm.numbers(answer.request_id)
            async for _ in answer:
                pass
            output = answer.output()
            turns.append((request, prompt, output))
            said = output.outputs[0]
            chat += [{"role": "assistant", "content": said.text}, {"role": "user", "content": "def area(width):"}]
    (_, before, first), (request, prompt, second) = turns
    known = [*before, *first.outputs[0].token_ids[:-1]]  # what follows the last token is never asked for
    cached = common(known, prompt) // BLOCK * BLOCK
    assert len(before) < cached < len(prompt)
    assert first.num_cached_tokens == 0
    assert second.num_cached_tokens == cached
    for watched in host.watched.values():
        assert watched.positions(turns[0][0], len(before)) == list(range(len(before)))
    assert host.watched["stage"].positions(request, len(prompt)) == list(range(cached, len(prompt)))
    # The drafter never saw the first answer's last tokens where it was behind when they came.
    drafted = host.watched["draft model"].positions(request, len(prompt))
    assert len(before) < drafted[0] <= cached
    assert drafted == list(range(drafted[0], len(prompt)))
    assert all(len(rows) == 3 for rows in host.watched["stage"].rows.values())


def common(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens both begin with."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
