"""Counters, read at any moment from another thread than the one that counts."""

from __future__ import annotations

import random
from dataclasses import asdict, replace

from penstock.core import FinishReason
from penstock.engine.loop import Observer
from penstock.engine.stats import Counters, EngineStats, following, summed
from penstock.messages import Result, Span
from penstock.requests.request import Request
from tests.histories import History

COUNTERS = (
    "prompt_tokens",
    "generation_tokens",
    "prefix_cache_queries",
    "prefix_cache_hits",
    "preemptions",
    "drafts",
    "draft_tokens",
    "accepted_tokens",
    "misses",
    "rows_entered",
    "rows_dead",
)


class Reader(Observer):
    """Reads in the middle of whatever the loop does when a request ends, and between two steps."""

    def __init__(self, counters: Counters) -> None:
        self.counters = counters
        self.last = dict.fromkeys(COUNTERS, 0)
        self.prompts: dict[int, int] = {}
        """Prompt tokens of each request that has run, by its number."""

    def admitted(self, request: Request, at: float) -> None:
        self.prompts[request.number] = len(request.prompt)

    def read(self) -> None:
        found = asdict(self.counters.stats())
        for name in COUNTERS:
            assert found[name] >= self.last[name], f"{name} went down: Prometheus would take it for a restart"
            self.last[name] = found[name]

    def waits(self) -> None:
        self.read()

    def finished(self, request: Request, reason: FinishReason, at: float) -> None:
        self.read()


def test_no_counter_ever_goes_down() -> None:
    for seed in range(20):
        history = History(random.Random(seed))
        counters = Counters(history.loop)
        reader = Reader(counters)
        history.loop.observers += [reader, counters]
        history.run()
        reader.read()
        requests = history.requests
        prompts = sum(reader.prompts.values())
        assert reader.last["prompt_tokens"] == prompts, "one that is preempted counts once"
        assert reader.last["accepted_tokens"] == sum(one.metrics.accepted for one in requests)
        assert reader.last["rows_entered"] == sum(one.metrics.rows_entered for one in requests)
        assert not counters._seen


def test_what_took_longer_than_its_model_is_an_overrun() -> None:
    counters = Counters(History(random.Random(0)).loop)
    times = ((0.1, 0.2, 3), (0.3, 0.2, 3), (0.3, 0.0, 3), (0.3, 0.2, 0))
    for stream, (computed, modelled, rows) in enumerate(times):
        span = Span(0, 0.0, 1.0, 1.0 + max(computed, modelled), computed, modelled, rows)
        counters.arrived(Result(stream=stream, picks=[], spans=[span]), at=2.0)
    stats = counters.stats()
    assert (stats.emulated_passes, stats.emulated_overruns) == (2, 1), "neither real devices' nor empty batches count"


def test_an_engine_that_follows_another_counts_on_and_several_are_summed() -> None:
    zero = dict.fromkeys((name for name in EngineStats.__dataclass_fields__ if name != "finished"), 0)
    one = EngineStats(
        **zero
        | {"running": 2, "generation_tokens": 5, "kv_slots": 64, "ended": None, "recovering": None}
        | {"stage_busy_seconds": [1.0, 2.0], "stage_heard_seconds_ago": [0.1, 0.2], "last_step_seconds_ago": 3.0}
        | {"stage_rank_bytes": [[5, 5]]}
    )
    ended = replace(one, ended="it was lost", finished={"stop": 2}, last_step_seconds_ago=1.0)
    later = following(ended, replace(one, running=1, finished={"stop": 1, "length": 4}))
    assert (later.running, later.generation_tokens, later.kv_slots, later.ended) == (1, 10, 64, None)
    assert (later.finished, later.stage_busy_seconds) == ({"stop": 3, "length": 4}, [2.0, 4.0])
    assert following(None, one) is one
    both = summed([one, ended])
    assert (both.running, both.generation_tokens, both.kv_slots, both.last_step_seconds_ago) == (4, 10, 128, 1.0)
    assert both.stage_heard_seconds_ago == [0.1, 0.2, 0.1, 0.2]
    assert both.stage_rank_bytes == [[5, 5], [5, 5]]
    assert both.ended is None
    lost = replace(one, recovering="stage 1 was lost")
    assert (summed([one, lost]).recovering, summed([ended, lost]).recovering) == (None, "stage 1 was lost")
    assert summed([ended, ended]).ended == "it was lost"
    assert summed([]).running == 0
