"""Stages say that they live, idle or busy; one that is stopped falls silent, and no other does."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from penstock import LLM, PipelineError, SamplingParams
from penstock.cluster import load_cluster, stage_timings
from penstock.cluster.drawn import uniform_cluster
from penstock.messages import Delivery, Heartbeat, HeartbeatAck, encode
from penstock.pipeline.base import Pipeline
from penstock.pipeline.worker import HEARTBEAT
from penstock.transport.addresses import FRAME, IPC, token_of
from tests.happening import AfterResults
from tests.integration.pipeline.test_processes import (
    GREEDY,
    PROMPT,
    alive,
    lost_by_now,
    pipeline_of,
    stage_processes,
    start,
    until,
)

pytestmark = pytest.mark.processes

PATIENCE = 20.0
"""Seconds: a deadline for some heartbeats, on a machine that does other things too."""


def listen(llm: LLM, pipeline: Pipeline, stages: list[int], beats: int) -> None:
    """Wait like an idle engine, until this many further heartbeats have come from each of these stages."""
    deadline = time.monotonic() + PATIENCE
    for _ in range(beats):
        before = pipeline.last_heartbeat
        while any(pipeline.last_heartbeat[stage] == before[stage] for stage in stages):
            assert time.monotonic() < deadline
            llm.loop.clock.wait(time.monotonic() + HEARTBEAT / 10)


@contextmanager
def suspended(process: psutil.Process) -> Iterator[None]:
    process.suspend()
    try:
        yield
    finally:
        process.resume()


def test_a_stopped_stage_falls_silent_alone_and_goes_on_with_the_right_tokens(target: Path) -> None:
    with start(target, 3) as llm:
        expected = llm.generate(PROMPT, GREEDY)[0].outputs[0].token_ids
        pipeline = pipeline_of(llm)
        listen(llm, pipeline, [0, 1, 2], beats=1)
        with suspended(stage_processes()[1]):
            listen(llm, pipeline, [0, 2], beats=1)
            silent_since = pipeline.last_heartbeat[1]
            listen(llm, pipeline, [0, 2], beats=2)  # for a heartbeat that was on its way there was time enough
            assert pipeline.last_heartbeat[1] == silent_since
        listen(llm, pipeline, [1], beats=2)
        assert llm.generate(PROMPT, GREEDY)[0].outputs[0].token_ids == expected


def test_an_engine_that_waits_for_a_stopped_stage_still_hears_the_others(target: Path) -> None:
    with start(target, 3, speculative_config={"method": "ngram"}) as llm:
        expected = llm.generate(PROMPT, GREEDY)[0].outputs[0].token_ids
        pipeline, stage = pipeline_of(llm), stage_processes()[2]
        found: list[list[int]] = []

        def generate() -> None:
            with llm.observing(AfterResults(5, stage.suspend)):
                found.append(llm.generate(PROMPT, GREEDY)[0].outputs[0].token_ids)

        engine = threading.Thread(target=generate, daemon=True)
        engine.start()
        deadline = time.monotonic() + PATIENCE
        while min(pipeline.last_heartbeat[:2]) < pipeline.last_heartbeat[2] + 2 * HEARTBEAT:
            assert time.monotonic() < deadline
            time.sleep(HEARTBEAT / 10)
        stage.resume()
        engine.join(PATIENCE)
        assert found == [expected]


def test_a_stage_is_heard_while_it_waits_for_its_modelled_device(target: Path) -> None:
    cluster = uniform_cluster(load_cluster("demo", time_scale=60.0), 1)
    with start(target, 1, cluster=cluster) as llm:
        assert stage_timings(cluster)[0].seconds(4) > 3 * HEARTBEAT
        pipeline = pipeline_of(llm)
        heard: set[float] = set()
        engine = threading.Thread(target=lambda: llm.generate(PROMPT, SamplingParams(max_tokens=1)), daemon=True)
        engine.start()
        while engine.is_alive():
            heard.update(pipeline.last_heartbeat)
            engine.join(HEARTBEAT / 10)
        assert len(heard) >= 4, "before, when it took the batch, and two heartbeats"


def test_a_drafter_is_heard_too(target: Path, draft: Path) -> None:
    with start(target, 2, speculative_config={"method": "draft_model", "model": str(draft)}) as llm:
        pipeline = llm.drafter.pipeline  # type: ignore[union-attr]
        listen(llm, pipeline, [0], beats=2)


def test_an_engine_that_takes_nothing_in_has_one_heartbeat_of_each_stage_waiting(target: Path) -> None:
    with start(target, 2) as llm:
        host, pipeline = llm.loop.clock, pipeline_of(llm)
        inbox = host.inbox  # type: ignore[attr-defined]
        waiting: list[list[bytes]] = []
        deadline = time.monotonic() + PATIENCE
        while len(waiting) < 2:
            assert time.monotonic() < deadline
            inbox.wait(deadline)
            waiting += inbox.take()
        time.sleep(3 * HEARTBEAT)  # what would pile up has had the time to
        waiting += inbox.take()
        assert sorted(waiting) == sorted([encode(Heartbeat(stage=stage), pipeline._session)] for stage in (0, 1))


def test_a_heartbeat_does_not_end_the_engines_wait(target: Path) -> None:
    with start(target, 2) as llm:
        pipeline, heard = pipeline_of(llm), pipeline_of(llm).last_heartbeat
        deadline = time.monotonic() + PATIENCE
        while any(now == before for now, before in zip(pipeline.last_heartbeat, heard, strict=True)):
            assert time.monotonic() < deadline
            until = time.monotonic() + 3 * HEARTBEAT
            llm.loop.clock.wait(until)
            assert time.monotonic() >= until


def test_half_a_message_does_not_end_the_engines_wait(target: Path) -> None:
    with start(target, 2) as llm, socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stranger:
        host = llm.loop.clock
        stranger.connect(host.inbox.address.removeprefix(IPC))  # type: ignore[attr-defined]
        stranger.sendall(token_of(pipeline_of(llm)._session) + FRAME.pack(5, False) + b"half")
        until = time.monotonic() + HEARTBEAT / 2
        host.wait(until)
        assert time.monotonic() >= until


@pytest.mark.parametrize("message", [Heartbeat(stage=2), Heartbeat(stage=-1), HeartbeatAck()])
def test_a_heartbeat_of_nobody_ends_the_pipeline(target: Path, message: Heartbeat | HeartbeatAck) -> None:
    with start(target, 2) as llm:
        pipeline = pipeline_of(llm)
        assert pipeline._on_message(Delivery(message=message), [])
        assert lost_by_now(pipeline)


@pytest.mark.whole  # as in test_async_llm.py
def test_a_stage_that_stays_stopped_ends_the_requests_with_its_name(target: Path) -> None:
    with start(target, 2, stage_timeout=5.0) as llm:
        llm.generate(PROMPT, GREEDY)
        stage = stage_processes()[1]
        stage.suspend()
        with pytest.raises(PipelineError, match=r"stage 1 \(layers .*no sign of life for 5 s"):
            llm.generate(PROMPT, GREEDY)
    until(lambda: not alive(stage))
