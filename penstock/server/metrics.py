"""``/metrics`` for Prometheus: the engine's current counters, and histograms of requests. Names mirror ``vllm:*``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from http import HTTPMethod
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from penstock.engine.front import AsyncEngine
from penstock.engine.stats import EngineStats, ReplicaState, ReplicaStats
from penstock.server.http.middleware import Record
from penstock.server.openai.generation import Summary

SECONDS: Final = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250, 500)
"""Upper bounds of histograms of requests' times, in seconds. They are a series of 1, 2.5 and 5."""
TOKEN_SECONDS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
"""Upper bounds of the histogram of times per token, in seconds. They are a series of 1, 2.5 and 5."""
TOKENS: Final = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)
"""Upper bounds of histograms of requests' tokens. They are a series of 1, 2 and 5, as vLLM's."""

GAUGES: Final = {
    "num_requests_running": ("running", "Requests that run; one with n completions counts as n."),
    "num_requests_waiting": ("waiting", "Requests that wait to be admitted; one with n completions counts as n."),
    "kv_slots": ("kv_slots", "Tokens for which every stage has room."),
    "kv_slots_used": ("kv_used", "Tokens of running requests, among kv_slots."),
    "kv_slots_cached": ("kv_cached", "Tokens that only the prefix cache keeps, among kv_slots."),
    "speculative_slots": ("speculative_slots", "Drafted tokens for which every stage has room, beside kv_slots."),
    "speculative_slots_used": ("speculative_used", "Drafted tokens that take such room now."),
    "batches_in_flight": ("batches_in_flight", "Batches that have entered the pipeline and are not out yet."),
    "rows_in_flight": ("rows_in_flight", "Rows, one for each token, of the batches in flight."),
}
"""Name of a gauge -> the field of ``EngineStats`` that it shows, and its help text."""
COUNTERS: Final = {
    "prompt_tokens": ("prompt_tokens", "Prompt tokens of admitted requests."),
    "generation_tokens": ("generation_tokens", "Generated tokens."),
    "prefix_cache_queries": ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache."),
    "prefix_cache_hits": ("prefix_cache_hits", "Prompt tokens that the prefix cache had."),
    "num_preemptions": ("preemptions", "Requests that gave their slots up and were computed again."),
    "recoveries": ("recoveries", "Times that requests waited for the replacement of a lost stage, and went on."),
    "recovery_seconds": ("recovery_seconds", "Seconds for which requests waited for replacements of lost stages."),
    "drafter_losses": ("drafter_losses", "Times that the drafter was lost while requests went on."),
    "spec_decode_num_drafts": ("drafts", "Trees that were drafted."),
    "spec_decode_num_draft_tokens": ("draft_tokens", "Tokens that the drafter proposed."),
    "spec_decode_num_accepted_tokens": ("accepted_tokens", "Drafted tokens that became part of a text."),
    "spec_decode_num_misses": ("misses", "Tokens of the target that had not been drafted."),
    "rows_entered": ("rows_entered", "Rows, one for each token, that entered the pipeline."),
    "rows_cancelled": ("rows_dead", "Rows that were found wrong, and pruned, in flight."),
    "emulated_passes": ("emulated_passes", "Batches that emulated stages have computed."),
    "emulated_overruns": (
        "emulated_overruns",
        "Batches of emulated stages that took longer than on the modelled device.",
    ),
}
"""Name of a counter -> the field of ``EngineStats`` that it shows, and its help text."""


class ServerMetrics:
    """The metrics of one server, in a registry of their own."""

    def __init__(self, llm: AsyncEngine, model: str) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(EngineCollector(llm, model))
        ProcessCollector(registry=self.registry)
        self._model = model
        self._responses = Counter(
            "penstock:http_responses", "HTTP responses.", ["method", "route", "status"], registry=self.registry
        )
        self._first_token = self._histogram(
            "time_to_first_token_seconds", "Seconds from a request's arrival to its first token.", SECONDS
        )
        self._per_token = self._histogram(
            "request_time_per_output_token_seconds", "Seconds per token after a request's first.", TOKEN_SECONDS
        )
        self._seconds = self._histogram(
            "e2e_request_latency_seconds", "Seconds from a request's arrival to its last token.", SECONDS
        )
        self._prompt = self._histogram("request_prompt_tokens", "Prompt tokens of a request.", TOKENS)
        outlines = Counter(
            "penstock:outline_answers",
            "Answers that were asked for with outline_decoding, by how they came about: in points, or plain.",
            ["model_name", "decoded"],
            registry=self.registry,
        )
        self._outlines = {used: outlines.labels(model, "points" if used else "plain") for used in (True, False)}
        text = "Points of answers, decoded side by side."
        self._points = Counter("penstock:outline_points", text, ["model_name"], registry=self.registry).labels(model)
        self._generation = self._histogram("request_generation_tokens", "Generated tokens of a request.", TOKENS)

    def responded(self, record: Record) -> None:
        """Count a response."""
        method = record.method if record.method in HTTPMethod.__members__ else "other"  # else clients could name series
        self._responses.labels(method, record.route, str(record.status)).inc()

    def generated(self, summary: Summary) -> None:
        """Count a generation that has ended, early or not."""
        self._prompt.observe(summary.prompt_tokens)
        self._generation.observe(summary.generated_tokens)
        if summary.outline is not None:
            self._outlines[summary.outline.used].inc()
            self._points.inc(len(summary.outline.points))
        if summary.first_token_seconds is None or summary.last_token_seconds is None:
            return
        self._first_token.observe(summary.first_token_seconds)
        self._seconds.observe(summary.last_token_seconds)
        if summary.generated_tokens > 1:
            self._per_token.observe(summary.decoding_seconds / (summary.generated_tokens - 1))

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        """A histogram of requests, with the model's name for a label."""
        made = Histogram(f"penstock:{name}", text, ["model_name"], buckets=buckets, registry=self.registry)
        return made.labels(self._model)


Series = Sequence[tuple[Sequence[str], float]]
"""The values of a metric, each with its labels after the model's name."""


class EngineCollector(Collector):
    """A collector that reads the counters of every engine whenever Prometheus asks."""

    def __init__(self, llm: AsyncEngine, model: str) -> None:
        self._llm = llm
        self._model = model

    def collect(self) -> Iterator[Metric]:
        replicas = self._llm.replicas()
        engines = {str(one.number): one.stats for one in replicas if one.stats is not None}
        for name, (field, text) in GAUGES.items():
            yield self._gauge(name, text, of_each(engines, field))
        used = [((engine,), share_used(stats)) for engine, stats in engines.items()]
        yield self._gauge("kv_cache_usage_perc", "Share, 0 to 1, of the KV slots that is in use.", used)
        yield from self._states(replicas, engines)
        for name, (field, text) in COUNTERS.items():
            yield self._counter(name, text, of_each(engines, field))
        ended = [
            ((engine, reason), count) for engine, stats in engines.items() for reason, count in stats.finished.items()
        ]
        yield self._counter("request_success", "Completions that have ended, by reason.", ended, ["finished_reason"])
        busy = per_stage({engine: stats.stage_busy_seconds for engine, stats in engines.items()})
        yield self._counter("stage_busy_seconds", "Seconds for which a stage has computed.", busy, ["stage"])
        heard = per_stage({engine: stats.stage_heard_seconds_ago for engine, stats in engines.items()})
        yield self._gauge("stage_heartbeat_age_seconds", "Seconds since a stage was last heard of.", heard, ["stage"])
        text = "Bytes of weights, keys and values that a rank holds, of stages with several ranks."
        yield self._gauge("stage_rank_bytes", text, per_rank(engines), ["stage", "rank"])

    def _states(self, replicas: Sequence[ReplicaStats], engines: Mapping[str, EngineStats]) -> Iterator[Metric]:
        """The states of the engines, and how requests were spread over them."""
        up = [((str(one.number),), float(one.state is not ReplicaState.DOWN)) for one in replicas]
        yield self._gauge("engine_up", "1 while the engine is there, 0 once it has ended.", up)
        recovering = [((engine,), float(stats.recovering is not None)) for engine, stats in engines.items()]
        yield self._gauge("engine_recovering", "1 while a lost stage is being replaced.", recovering)
        resting = [((engine,), float(stats.resting)) for engine, stats in engines.items()]
        yield self._gauge(
            "engine_resting", "1 while the weights are freed until a request comes (--idle-timeout).", resting
        )
        states = [((str(one.number), state), float(one.state is state)) for one in replicas for state in ReplicaState]
        yield self._gauge("engine_state", "1 for the state that the engine is in.", states, ["state"])
        ages = [
            ((engine,), stats.last_step_seconds_ago)
            for engine, stats in engines.items()
            if stats.last_step_seconds_ago is not None
        ]
        if ages:
            yield self._gauge("last_step_age_seconds", "Seconds since the engine's last result.", ages)
        restarts = [((str(one.number),), float(one.restarts)) for one in replicas]
        yield self._counter("engine_restarts", "Times that the engine was made again.", restarts)
        moved = [((str(one.number),), float(one.moved)) for one in replicas]
        yield self._counter("requests_moved", "Requests that left the engine and went on on another one.", moved)
        routed = [
            ((str(one.number), reason), float(one.routed.get(reason, 0)))
            for one in replicas
            for reason in ("prefix", "load")
        ]
        text = "Requests sent to the engine because it had more of their prompt (prefix) or less to do (load)."
        yield self._counter("requests_routed", text, routed, ["reason"])

    def _gauge(self, name: str, text: str, series: Series, labels: Sequence[str] = ()) -> Metric:
        """A gauge with these values."""
        gauge = GaugeMetricFamily(f"penstock:{name}", text, labels=["model_name", "engine", *labels])
        for values, value in series:
            gauge.add_metric([self._model, *values], value)
        return gauge

    def _counter(self, name: str, text: str, series: Series, labels: Sequence[str] = ()) -> Metric:
        """A counter with these values."""
        counter = CounterMetricFamily(f"penstock:{name}", text, labels=["model_name", "engine", *labels])
        for values, value in series:
            counter.add_metric([self._model, *values], value)
        return counter


def of_each(engines: Mapping[str, EngineStats], field: str) -> Series:
    """A field of each engine's statistics."""
    return [((engine,), getattr(stats, field)) for engine, stats in engines.items()]


def per_stage(values: Mapping[str, Sequence[float]]) -> Series:
    """Values of each engine's stages, by the engine's number."""
    return [((engine, str(stage)), value) for engine, found in values.items() for stage, value in enumerate(found)]


def per_rank(engines: Mapping[str, EngineStats]) -> Series:
    """Bytes that each rank of each stage holds."""
    return [
        ((engine, str(stage), str(rank)), count)
        for engine, stats in engines.items()
        for stage, ranks in enumerate(stats.stage_rank_bytes)
        for rank, count in enumerate(ranks)
    ]


def share_used(stats: EngineStats) -> float:
    """The share of the KV slots that is in use, from 0 to 1."""
    return stats.kv_used / stats.kv_slots if stats.kv_slots else 0.0
