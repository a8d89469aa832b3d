"""``LLM`` with ``data_parallel_size``: offline calls have one engine's answers, in order, whatever happens."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any, Final

import pytest
from rich.console import Console

from penstock import LLM, ConfigError, PipelineError, RequestError, SamplingParams
from penstock.engine.completion import Completion, Job
from penstock.engine.loop import Observer
from penstock.engine.replicas.offline import ReplicatedLLM, read
from penstock.engine.replicas.replicas import Replicas
from penstock.engine.replicas.stream import MovingStream, Replica
from penstock.engine.stats import Counters
from penstock.lab.bench.engines import run_bench_engines
from penstock.lab.grid import BenchOptions
from penstock.requests.request import Request
from tests.integration.engine.test_llm import assert_same
from tests.integration.engine.test_processors import EXHAUSTED, EXHAUSTION
from tests.integration.engine.test_replicas import ASKED, ENGINE, PROMPTS, speculation
from tests.integration.engine.test_resume import params_of
from tests.replicas import lose

pytestmark = pytest.mark.processes

TEMPLATE: Final = "{% for one in messages %}{{ one.content }} {% endfor %}"
GREEDY: Final = SamplingParams(temperature=0, max_tokens=12)
LONG: Final = params_of({"max_tokens": 80, "ignore_eos": True}, 1.0)


@pytest.fixture(scope="module")
def one(target: Path) -> Iterator[LLM]:
    with LLM(str(target), speculative_config=None, **ENGINE) as llm:
        yield llm


@pytest.fixture(scope="module")
def two(target: Path, draft: Path) -> Iterator[LLM]:
    with LLM(str(target), data_parallel_size=2, speculative_config=speculation(draft), **ENGINE) as llm:
        yield llm


def engines_of(llm: LLM) -> list[Replica]:
    assert isinstance(llm, ReplicatedLLM)
    return llm._engines._replicas


def routed(llm: LLM) -> list[int]:
    return [sum(one.routed.values()) for one in engines_of(llm)]


def test_answers_of_every_parameter_are_one_engines_in_the_prompts_order_while_an_engine_is_lost(
    one: LLM, two: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts, params = [prompt for prompt, _ in ASKED], [one for _, one in ASKED]
    want = one.generate(prompts, params)
    first, before = engines_of(two)[0], routed(two)
    assert first.engine is not None
    finished, losing = Counters.finished, first.engine.llm.loop.observers

    def lost(counters: Counters, *told: Any) -> None:
        finished(counters, *told)
        if counters in losing:
            monkeypatch.setattr(Counters, "finished", finished)
            lose(first, 2)

    monkeypatch.setattr(Counters, "finished", lost)
    got = two.generate(prompts, params)
    for mine, its in zip(got, want, strict=True):
        assert (mine.prompt, mine.prompt_token_ids, mine.finished) == (its.prompt, its.prompt_token_ids, True)
        assert_same(mine.outputs, its.outputs)
    assert all(now > then for now, then in zip(routed(two), before, strict=True))
    assert first.moved > 0
    assert [one.number for one in two.replicas()] == [0, 1]  # type: ignore[attr-defined]


def test_chats_and_points_are_one_engines(one: LLM, two: LLM) -> None:
    asked = [[{"role": "user", "content": text}] for text in ("def f(x):", "Give three reasons to test.")]
    for outline in ("off", "on"):
        mine, its = (llm.chat(asked, GREEDY, chat_template=TEMPLATE, outline_decoding=outline) for llm in (two, one))
        assert [output.outputs[0].token_ids for output in mine] == [output.outputs[0].token_ids for output in its]


def test_a_stream_is_one_engines_and_ends_where_it_is_left(one: LLM, two: LLM) -> None:
    left = two.stream(PROMPTS[0], LONG)
    begun = next(left)
    with pytest.raises(ConfigError, match="data_parallel_size is 2, and 'observing' is of one engine"):
        two.observing(Observer()).__enter__()
    assert "".join(two.stream(PROMPTS[0], LONG)) == "".join(one.stream(PROMPTS[0], LONG))
    assert "".join(one.stream(PROMPTS[0], LONG)).startswith(begun)
    left.close()  # type: ignore[attr-defined]
    assert "".join(two.stream(PROMPTS[1], GREEDY)) == "".join(one.stream(PROMPTS[1], GREEDY))


def test_a_bad_prompt_is_named_by_its_place_and_a_request_that_cannot_go_on_fails_after_all(two: LLM) -> None:
    with pytest.raises(RequestError, match=r"prompts\[1\]: prompt_token_ids holds"):
        two.generate([PROMPTS[0], {"prompt_token_ids": [10**6]}], GREEDY)
    exhausted = params_of({"structured_outputs": EXHAUSTED, "max_tokens": 64}, 1.0)
    with pytest.raises(RequestError, match=EXHAUSTION):
        two.generate(list(PROMPTS), [exhausted, GREEDY])
    assert len(two.generate(PROMPTS[0], replace(GREEDY, n=2))[0].outputs) == 2


def test_ctrl_c_comes_out_of_the_call_and_the_next_one_works(one: LLM, two: LLM) -> None:
    want = one.generate(list(PROMPTS), LONG)
    started = threading.Event()
    admitted = Counters.admitted

    def noticed(counters: Counters, request: Request, at: float) -> None:
        admitted(counters, request, at)
        started.set()

    def interrupt() -> None:
        started.wait()
        os.kill(os.getpid(), signal.SIGINT)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Counters, "admitted", noticed)
        thread = threading.Thread(target=interrupt)
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            two.generate([PROMPTS[0]] * 16, LONG)
        thread.join()
    for mine, its in zip(two.generate(list(PROMPTS), LONG), want, strict=True):
        assert_same(mine.outputs, its.outputs)


def test_closing_ends_a_stream_and_every_later_call(target: Path) -> None:
    llm = LLM(str(target), data_parallel_size=2, speculative_config=None, **ENGINE)
    stream = llm.stream(PROMPTS[0], LONG)
    next(stream)
    llm.close()
    with pytest.raises(PipelineError, match="closed"):
        _ = [*stream]
    for call in (lambda: llm.generate(PROMPTS[0], GREEDY), lambda: llm.stream(PROMPTS[0], GREEDY)):
        with pytest.raises(PipelineError, match="closed"):
            call()
    llm.close()


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"colour": 1}, "colour.* is not an option of LLM"),
        ({"host": object()}, "host.* runs one engine"),
        ({"hosts": "a,b,c"}, "data_parallel_size is 2, and hosts names 3"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_starts(options: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        LLM("demo", data_parallel_size=2, **options)


def test_a_bench_over_engines_compares_strategies_and_has_one_engines_tokens(
    one: LLM, target: Path, tmp_path: Path
) -> None:
    file = tmp_path / "bench.json"
    options = BenchOptions(
        model=str(target),
        data_parallel_size=2,
        threads=1,
        strategies=("auto",),
        speculative_config={"method": "ngram"},
        max_tokens=6,
        temperature=(0.0, 0.8),
        num_prompts=3,
        json=file,
    )
    runs = run_bench_engines(options, Console(quiet=True))
    assert [(run.strategy, run.temperature) for run in runs] == [
        (name, temperature) for temperature in options.temperature for name in ("autoregressive", "auto")
    ]
    for run in runs:
        assert run.identical_to_autoregressive
        assert sum(run.by_engine) == options.num_prompts
        assert min(run.by_engine) > 0
        params = [SamplingParams(temperature=run.temperature, seed=seed, max_tokens=6) for seed in range(3)]
        want = one.generate([output.prompt or "" for output in run.outputs], params)
        assert [output.outputs[0].token_ids for output in run.outputs] == [its.outputs[0].token_ids for its in want]
    kept = json.loads(file.read_text())
    assert kept["settings"]["data_parallel_size"] == 2
    assert [run["requests"] for run in kept["engines"]] == [3] * 4


# -------------------------------------------------------------------------------------------------------- many prompts


async def queued(engines: Replicas, jobs: list[Job]) -> tuple[list[MovingStream], int]:
    """Queue jobs; returns their streams and how many functions of ``engine/replicas`` that has called."""
    calls, folder = 0, os.path.dirname(sys.modules[Replicas.__module__].__file__ or "")

    def count(frame: FrameType, event: str, _: object) -> None:
        nonlocal calls
        calls += event == "call" and frame.f_code.co_filename.startswith(folder)

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        streams = [engines.queue(job, str(job.requests[0].number)) for job in jobs]
    finally:
        sys.setprofile(before)
    return streams, calls


async def read_all(streams: list[MovingStream]) -> None:
    for stream in streams:
        await read(0, stream, None)


def test_a_prompt_costs_the_same_however_many_wait(two: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last 20 of 80 prompts are queued with as many calls as the first 20; so are those that no engine can take."""
    assert isinstance(two, ReplicatedLLM)
    two.generate(PROMPTS[0], GREEDY)
    takes, take = 0, Completion.take

    def counted(completion: Completion) -> Any:
        nonlocal takes
        takes += 1
        return take(completion)

    monkeypatch.setattr(Completion, "take", counted)
    short = replace(GREEDY, max_tokens=2, ignore_eos=True)
    for up in (True, False):
        with pytest.MonkeyPatch.context() as patch:
            if not up:
                patch.setattr(Replicas, "_up", [])
            found = [two._call(queued(two._engines, [two.job("x", short) for _ in range(20)])) for _ in range(4)]
        calls = [number for _, number in found]
        assert calls[3] <= calls[0]
        if not up:
            two._events.call_soon_threadsafe(two._engines._settle)
        two._call(read_all([stream for streams, _ in found for stream in streams]))
    # A request is looked at when it is queued, admitted and ended, and at each of its two tokens: not at each step.
    assert takes <= 160 * 5
